"""What a forward may do besides computing: write, stop gradients, take numbers, put on hooks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.tracer import picked_places
from autopar.tracer.formulas import rrelu
from autopar.tracer.functional import remove_mutations
from autopar.tracer.trace import trace
from tests import handwritten as hw
from tests.test_handwritten import plan_for


def double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }


def verified(model: nn.Module, inputs: dict[str, Any], constraints: Any = None) -> Any:
    """`verify` of a float64 form on two ranks."""
    model, inputs = model.double(), double(inputs)
    plan = plan_for(model, inputs, (2,), constraints or {"data": 2})
    return autopar.verify(plan, model, inputs)


class Averaging(nn.Module):
    """Updates buffers under no_grad and reads them, as a codebook with moving averages does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("book", torch.ones(4, 16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.inner(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * hidden.mean(0))
            self.book[1] = hidden[0]
            self.steps += 1
            target = hidden.exp()  # has no gradient, unlike the outer hidden
        squares = (hidden - self.mean).square().mean()
        return squares + (target * hidden).mean() + self.book.sum() * hidden.mean()


def test_no_grad_holds_where_buffers_are_written() -> None:
    model = Averaging()
    before = {name: b.clone() for name, b in model.double().named_buffers()}
    result = verified(model, hw.vectors())
    assert result.worst[1] < 1e-9, result.worst
    assert set(result.buffers) == set(before)
    for name, buffer in model.named_buffers():  # comparing changes nothing
        assert torch.equal(buffer, before[name])


class Balanced(nn.Module):
    """Picks rows by a mask, and updates buffers that nothing reads, one of them by rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        for name in ("bias", "centre", "spread"):
            self.register_buffer(name, torch.zeros(16))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        picked = self.inner(x[labels > 0])
        with torch.no_grad():
            self.bias += x.mean(0)
            self.centre += (x - x.mean(0)).mean(0)
        self.spread.add_(x.detach().var(0))
        return picked.square().sum()


def test_what_only_updates_a_buffer_is_not_dead() -> None:
    result = verified(Balanced().double(), hw.vectors())
    assert result.worst[1] < 1e-9, result.worst
    assert set(result.buffers) == {"bias", "centre", "spread"}


class Normed(nn.Module):
    """Normalises samples on their own, and keeps statistics of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.norm = nn.InstanceNorm1d(4, momentum=0.3, affine=True, track_running_stats=True)
        for name in ("mean", "var", "third", "fourth"):
            self.register_buffer(name, torch.ones(4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.inner(x).unflatten(1, (4, 4))
        again = F.instance_norm(x.sin(), self.mean, self.var)
        stats = (self.third, self.fourth)
        third = torch.instance_norm(x.cos(), None, None, *stats, True, 0.2, 1e-5, False)
        return (self.norm(x) * again * third).tanh().square().sum()


@pytest.mark.parametrize("training", [True, False])
def test_instance_norms_keep_statistics(training: bool) -> None:
    result = verified(Normed().train(training), hw.vectors())
    assert result.worst[1] < 1e-9, result.worst
    kept = {"mean", "var", "third", "fourth"} | (
        {"norm.running_mean", "norm.running_var"} if training else set()
    )
    assert {n for n in result.buffers if "num_batches" not in n} == kept


def test_verify_misses_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that loses the update is told from one that has it."""
    model = Balanced().double()
    monkeypatch.setattr(picked_places, "drop_dead", lambda gm: gm.graph.eliminate_dead_code())
    assert verified(model, hw.vectors()).buffers["bias"] > 0.5
    model.bias.fill_(float("inf"))  # which the update turns into nan
    inputs = hw.vectors()
    inputs["x"][0] = -float("inf")
    assert verified(model, inputs).buffers["bias"] == float("inf")


def test_spectral_norm_iterates_in_its_buffers() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)))
    for _ in range(2):
        x = double(hw.vectors())["x"]
        plan = plan_for(model.double(), (x,), (2,), {"data": 2})
        result = autopar.verify(plan, model, (x,))
        assert result.worst[1] < 1e-9, result.worst
        assert len(result.buffers) == 2


class Silenced(hw.Mlp):
    """Writes under no_grad to what has a gradient: autograd passes the gradient by the write."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.layers[0](x)
        with torch.no_grad():
            written = hidden.t()[0] if self.what == "activation" else self.head.weight
            written.clamp_(-0.1, 0.1)  # the line with the write
        return super().forward(hidden, labels)


@pytest.mark.parametrize("what", ["activation", "parameter"])
def test_a_hidden_write_to_what_has_a_gradient_is_refused(what: str) -> None:
    with pytest.raises(autopar.TraceError, match="under no_grad") as caught:
        trace(Silenced(what), hw.vectors())
    assert "the line with the write" in str(caught.value)


class Stepping(hw.Mlp):
    """Changes a frozen parameter."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        self.head.bias.mul_(0.5)
        return super().forward(x, labels)


def test_a_write_to_a_parameter_is_refused() -> None:
    model = Stepping()
    model.head.bias.requires_grad_(False)
    with pytest.raises(autopar.TraceError, match=r"parameter head\.bias in place"):
        trace(model, hw.vectors())


class Numbered(nn.Module):
    """Numbers, flags, a string and None stand before and between its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)

    def forward(
        self,
        scale: float,
        x: Tensor,
        mode: str,
        unused: Tensor | None,
        mask: Tensor | None,
        keep: Tensor,
        flag: bool,
        labels: Tensor,
    ) -> Tensor:
        logits = self.inner(x) * scale
        if flag and mode == "twice":
            logits = logits + logits
        return F.cross_entropy(torch.where(keep, logits, logits.new_zeros(())), labels)


def test_inputs_that_are_no_tensors_keep_their_places() -> None:
    batch = hw.vectors()
    inputs = {
        "scale": 0.5,
        "x": batch["x"],
        "mode": "twice",
        "unused": torch.randn(3),
        "mask": None,
        "keep": torch.rand(8, 4) > 0.5,
        "flag": True,
        "labels": batch["labels"],
    }
    assert verified(Numbered(), inputs).worst[1] < 1e-9
    by_position = tuple(double(inputs).values())
    model = Numbered().double()
    plan = plan_for(model, by_position, (2,), {"data": 2})
    assert autopar.verify(plan, model, by_position).worst[1] < 1e-9


class Recomputed(nn.Module):
    """Torch's own recomputation, of either kind."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = checkpoint(self.second, self.first(x).relu(), use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(hidden), labels)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_keep_their_gradients(reentrant: bool) -> None:
    result = verified(Recomputed(reentrant), hw.vectors())
    assert len(result.gradients) == 6
    assert result.worst[1] < 1e-9, result.worst


class Cut(Recomputed):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(self.second(hidden)), labels)


def test_a_reentrant_checkpoint_of_inputs_alone_has_no_gradients() -> None:
    """As in torch, which warns of it."""
    with pytest.warns(UserWarning, match=r"checkpoint.*\n.*use_reentrant=False"):
        result = verified(Cut(reentrant=True), hw.vectors())
    assert set(result.gradients) == {
        f"{n}.{k}" for n in ("second", "head") for k in ("weight", "bias")
    }
    assert result.worst[1] < 1e-9, result.worst
    assert len(verified(Cut(reentrant=False), hw.vectors()).gradients) == 6


class _RunsCode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, code: Any, x: Tensor) -> Tensor:
        ctx.code = code
        return code(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


class Running(hw.Mlp):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(_RunsCode.apply(self.layers[0], x), labels)


def test_a_function_that_takes_code_is_refused() -> None:
    with pytest.raises(autopar.TraceError, match=r"in forward: .*_RunsCode(.|\n)*takes code"):
        trace(Running(), hw.vectors())


class Hooked(hw.Mlp):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.layers[0](x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: 2 * grad)  # the line with the hook
        return super().forward(hidden, labels)


def test_gradient_hooks_are_refused() -> None:
    with pytest.raises(autopar.TraceError, match="gradient hook") as caught:
        trace(Hooked(), hw.vectors())
    assert "the line with the hook" in str(caught.value)
    model = hw.Mlp()
    model.head.weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(autopar.TraceError, match=r"parameter head\.weight has a gradient hook"):
        trace(model, hw.vectors())
    model = hw.Mlp()
    model.head.register_full_backward_hook(lambda module, grads, outs: None)
    with pytest.raises(autopar.TraceError, match="module Linear 'head' has a backward hook"):
        trace(model, hw.vectors())
    trace(model, hw.vectors(), training=False)  # nothing waits for a gradient


def test_verify_misses_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that finds too few gradients is noticed."""
    model, inputs = hw.Mlp().double(), double(hw.vectors())
    model.head.bias.requires_grad_(False)
    plan = plan_for(model, inputs, (2,), {"data": 2})
    traced = trace(model, inputs)
    model.head.bias.requires_grad_(True)
    assert autopar.verify(plan, model, inputs, traced=traced).gradients["head.bias"] == 1.0


class Positioned(nn.Module):
    """A table of positions goes through a linear of its own: that product has no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.randn(1, 5, 3))
        self.position = nn.Linear(3, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = x[:, None] + self.position(self.places).relu()
        return F.cross_entropy(self.head(hidden.mean(1)), labels)


def test_data_parallel_leaves_alone_what_has_no_batch() -> None:
    result = verified(Positioned(), hw.vectors(), {"data": 2, "zero": 0})
    assert result.worst[1] < 1e-9, result.worst


def test_a_gru_of_two_directions() -> None:
    """ATen's derivative of it transposes in place."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(8, 8, bidirectional=True, batch_first=True)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.gru(x.unflatten(1, (2, 8)))[0].square().mean()

    assert verified(Model(), hw.vectors()).worst[1] < 1e-9


def _without_writes(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        traced = make_fx(function)(*map(mode.from_tensor, inputs))
    remove_mutations(traced.graph)
    traced.recompile()
    for node in traced.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable
    return traced


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    x = x.clone()
    rows, columns, flat, diagonal = x[1:3], x.t(), x.view(-1), x.diagonal()
    first, second = x.split(2)
    rows.mul_(2.0)
    diagonal.add_(flat[:4])
    columns[0].add_(1)
    turned = x.permute(1, 0)
    turned.unsqueeze(0)[0, 1].mul_(columns[2])
    flat.clamp_(max=1.0)
    total = x.sum(0)
    x.select(0, 1).zero_()
    rows.add_(1)
    return x, rows, columns, flat, diagonal, first, second, turned, total


def test_writes_through_views_reach_every_view() -> None:
    x = torch.randn(4, 4)
    traced = _without_writes(_parts, x)
    for got, expected in zip(traced(x), _parts(x), strict=True):
        assert torch.equal(got, expected)


def _given_results(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    rows, values = torch.zeros(3, 4), torch.zeros(2, 4)
    places, whole = torch.empty(4, dtype=torch.long), torch.empty(0)
    torch.mul(x, y, out=rows[1])
    total = rows.sum()
    torch.max(torch.stack([x, y]), 0, out=(values[0], places))
    torch.add(x, 1, out=whole)
    torch.sub(whole, y, out=whole)
    wide = torch.empty(4, dtype=torch.float64)
    torch.exp(x, out=wide)
    return rows, total, values, places, whole, wide


def test_results_that_an_op_is_given_are_written() -> None:
    x, y = torch.randn(4), torch.randn(4)
    traced = _without_writes(_given_results, x, y)
    for got, expected in zip(traced(x, y), _given_results(x, y), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_write_that_has_no_other_form_is_refused() -> None:
    def doubled(x: Tensor) -> Tensor:
        parts = [x.clone(), x.clone()]
        torch._foreach_mul_(parts, 2.0)
        return parts[0]

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        traced = make_fx(doubled)(mode.from_tensor(torch.randn(4)))
    with pytest.raises(autopar.TraceError, match=r"_foreach_mul_.*no form that returns its result"):
        remove_mutations(traced.graph)


def _powers(x: Tensor, exponent: Tensor) -> tuple[Tensor, ...]:
    number, tensor, wide, shifted = (x.abs() + i for i in range(4))
    number.pow_(3.0)
    tensor.pow_(exponent)
    wide.double().float_power_(2.0)
    shifted.ldexp_(exponent)
    return number, tensor, wide, shifted


def test_writes_whose_functional_form_has_another_name() -> None:
    x, exponent = torch.randn(4), torch.arange(4)
    traced = _without_writes(_powers, x, exponent)
    for got, expected in zip(traced(x, exponent), _powers(x, exponent), strict=True):
        assert torch.equal(got, expected)


def test_a_write_to_one_part_of_a_split_is_refused_where_the_whole_is_read() -> None:
    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone()
        x.split(2)[0].add_(1)
        return x, x

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        traced = make_fx(split)(mode.from_tensor(torch.randn(4, 4)))
    with pytest.raises(autopar.TraceError, match="another view"):
        remove_mutations(traced.graph)


class Spectral(nn.Module):
    """ATen's derivatives of these write through slices and diagonals."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(9, 2))
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.inner(x)) * torch.view_as_complex(self.filter)
        y = torch.fft.irfft(spectrum, n=16)
        gram = y.t() @ y + torch.eye(16, dtype=y.dtype)
        return torch.linalg.solve(gram, y.t()).square().mean() + torch.logdet(gram)


def test_spectra_and_linear_algebra() -> None:
    assert verified(Spectral(), hw.vectors()).worst[1] < 1e-9


class Noisy(nn.Module):
    """Draws in place, as routers with jitter and Gumbel softmax do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x * torch.empty_like(x).uniform_(0.9, 1.1) + torch.empty_like(x).normal_(0.0, 0.1)
        hidden = F.gumbel_softmax(self.inner(x), dim=-1)
        hidden = hidden + torch.randint(0, 3, hidden.shape) + torch.randint(2, (16,))
        return F.cross_entropy(self.head(hidden), labels)


def test_numbers_drawn_in_place_do_not_depend_on_the_plan() -> None:
    model, inputs = Noisy().double(), double(hw.vectors())
    for mesh, constraints in (((2,), {"data": 2}), ((2,), {"tensor": "1d"})):
        plan = plan_for(model, inputs, mesh, constraints)
        result = autopar.verify(plan, model, inputs)
        assert result.worst[1] < 1e-9, result.worst
    nodes = trace(model, inputs).graph.nodes
    drawn = [n.meta["val"] for n in nodes if n.target is torch.ops.autopar.uniform.default]
    assert len(drawn) == 6


class Leaky(nn.Module):
    """A slope that is drawn for each negative number, and the mean of the slopes."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.slope = nn.RReLU(inplace=inplace)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.slope(self.inner(x)) + F.rrelu(x, 0.2, 0.4, training=False)
        return F.soft_margin_loss(hidden, torch.where(labels > 1, 1.0, -1.0)[:, None])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("inplace", [False, True])
def test_slopes_that_are_drawn(inplace: bool, training: bool) -> None:
    model, inputs = Leaky(inplace).double().train(training), double(hw.vectors())
    for mesh, constraints in (((2,), {"data": 2}), ((2,), {"tensor": "1d"})):
        plan = plan_for(model, inputs, mesh, constraints)
        result = autopar.verify(plan, model, inputs)
        assert result.worst[1] < 1e-9, result.worst
    nodes = trace(model, inputs).graph.nodes
    assert sum(n.target is torch.ops.autopar.uniform.default for n in nodes) == training


def test_drawn_slopes_are_between_their_ends() -> None:
    class Half:
        def uniform(self, shape: Any, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, 0.25, dtype=dtype)

    x = torch.tensor([-2.0, -1.0, 0.0, 3.0])
    assert rrelu(Half(), x, 0.0, 0.4, True).tolist() == pytest.approx([-0.2, -0.1, 0.0, 3.0])
    assert torch.equal(rrelu(Half(), x, 0.2, 0.4), F.rrelu(x, 0.2, 0.4))


class Recurrent(nn.Module):
    """Dropout between the layers of an LSTM, which is one call of ATen."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=p, batch_first=True)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.lstm(x.unflatten(1, (2, 8)))[0].square().mean()


def test_dropout_between_recurrent_layers() -> None:
    model, inputs = Recurrent(0.5).double(), double(hw.vectors())
    plan = plan_for(model, inputs, (2,), {"data": 2})
    for seed in (0, 1):
        result = autopar.verify(plan, model, inputs, seed=seed)
        assert result.worst[1] < 1e-9, result.worst
    nodes = trace(model, inputs).graph.nodes
    assert [n.target for n in nodes].count(
        torch.ops.autopar.dropout.default
    ) == 2  # in both directions


class Shuffled(hw.Mlp):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        order = torch.randperm(8, device=x.device)
        return super().forward(x[order], labels)


def test_an_order_that_is_drawn() -> None:
    model, inputs = Shuffled().double(), double(hw.vectors())
    plan = plan_for(model, inputs, (2,), {"data": 2})
    for seed in (0, 1):
        result = autopar.verify(plan, model, inputs, seed=seed)
        assert result.worst[1] < 1e-9, result.worst


class Sampled(hw.Mlp):
    """Draws a feature of each sample by what the others say, and samples that may come twice."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        chosen = torch.multinomial(x.softmax(-1), 1)
        some = torch.multinomial(torch.ones(len(x)), len(x), replacement=True)
        return super().forward(x[some] * x.gather(1, chosen), labels)


def test_places_that_are_drawn() -> None:
    for constraints in ({"data": 2}, {"pipeline": {"size": 1, "microbatches": 2}}):
        found = verified(Sampled(), hw.vectors(), constraints)
        assert found.worst[1] < 1e-9, found.worst


class Drawing(hw.Mlp):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().forward(self.drawn(x), labels)

    def drawn(self, x: Tensor) -> Tensor:
        return x + torch.poisson(x.abs())  # the line that draws


def test_numbers_that_ranks_would_not_share_are_refused() -> None:
    with pytest.raises(autopar.TraceError, match="poisson") as caught:
        trace(Drawing(), hw.vectors())
    line = next(
        i
        for i, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.endswith("# the line that draws")
    )
    assert f"test_forward_semantics.py:{line}" in str(caught.value)


class Builtin(nn.Module):
    """Takes arguments that are called as Python's functions are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, input: Tensor, input_: Tensor, type: Tensor, id: int = 2) -> Tensor:
        return (self.inner(input) * input_ * id - type).square().mean()


def test_arguments_may_be_called_as_builtins_are() -> None:
    torch.manual_seed(0)
    inputs = {name: torch.rand(8, 16) for name in ("input", "input_", "type")} | {"id": 3}
    for constraints in ({"data": 2}, {"pipeline": {"size": 1, "microbatches": 2}, "data": 2}):
        result = verified(Builtin(), dict(inputs), constraints)
        assert result.worst[1] < 1e-9, result.worst


@pytest.mark.parametrize("inside", [False, True])
def test_a_trace_in_inference_mode_makes_plain_tensors(inside: bool) -> None:
    class Scaled(hw.Mlp):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            assert not torch.is_grad_enabled()
            return super().forward(x * torch.tensor([2.0]).expand(16), labels)

    model, inputs = Scaled().eval(), hw.vectors()
    with torch.inference_mode():
        traced = trace(model, hw.vectors() if inside else inputs, training=False)
    assert not any(value.is_inference() for value in traced.state_values.values())


class NamedAsOps(nn.Module):
    """Takes arguments that are called as its own ops are in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, mean: Tensor, gt: Tensor, mul: Tensor, add_1: Tensor) -> Tensor:
        rows = self.inner(mean) * mul + add_1 + 1
        return torch.where(rows > gt, rows - rows.mean(-1, keepdim=True), rows * 2).square().mean()


def test_arguments_may_be_called_as_ops_are() -> None:
    torch.manual_seed(0)
    inputs = {name: torch.rand(8, 16) for name in ("mean", "gt", "mul", "add_1")}
    for constraints in ({"data": 2}, {"pipeline": {"size": 1, "microbatches": 2}, "data": 2}):
        result = verified(NamedAsOps(), dict(inputs), constraints)
        assert result.worst[1] < 1e-9, result.worst


class MaskByVmap(nn.Module):
    """Makes its mask from a function of three positions, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])

        def seen(row: Tensor, first: Tensor, second: Tensor) -> Tensor:
            return (first >= second) | (row > first)

        mapped = torch.vmap(torch.vmap(seen, (None, None, 0)), (None, 0, None))
        mask = torch.vmap(mapped, (0, None, None))(torch.arange(x.shape[0]), places, places)
        scores = self.linear(x) @ x.mT
        return scores.masked_fill(~mask, 0.0).square().mean()


def test_a_mask_made_by_vmap() -> None:
    torch.manual_seed(0)
    model, x = MaskByVmap().double(), torch.randn(4, 6, 8, dtype=torch.float64)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, x, constraints={"data": 2}, cache=False)
    assert autopar.verify(plan, model, x).worst[1] < 1e-9


class Labelled(hw.Mlp):
    """Returns a loss beside what is no tensor."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        loss = super().forward(x, labels)
        return {"loss": loss, "kind": "mlp", "dtype": loss.dtype, "sizes": [loss.dim(), 1.5, None]}


def test_results_that_are_no_tensors_are_what_they_were() -> None:
    traced = trace(Labelled().double(), double(hw.vectors()))
    assert [o.constant for o in traced.outputs if o.kind == "output"] == [
        *(None, "mlp", torch.float64, 0, 1.5, None)
    ]


class Dropping(hw.Mlp):
    """Skips modules at random, if asked to."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if not self.training or torch.rand(1) > self.rate:
            x = x + 1.0
        if torch.rand(1).item() <= self.rate:
            x = x * 3.0
        drawn = torch.rand([])
        if drawn < self.rate:
            x = x * 2.0
        drawn += 1.0
        return super().forward(x * torch.where(drawn >= 1.0, 1.0, 0.0), labels)


@pytest.mark.filterwarnings("error::autopar.errors.UncheckedWarning")
def test_a_rate_of_zero_drops_nothing() -> None:
    found = verified(Dropping(0.0), hw.vectors())
    assert found.worst[1] < 1e-9, found.worst
    told = r"random number at .*torch\.rand\(1\) > self\.rate.*, set the rate .* to 0"
    with pytest.raises(autopar.TraceError, match=told):
        verified(Dropping(0.5), hw.vectors())


class Zeroing(hw.Mlp):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        spare = torch.ones_like(x)
        spare[:, 0] = x[:, 1]
        return super().forward(x + spare.zero_(), labels)


@pytest.mark.filterwarnings("error::autopar.UnsupportedOpWarning")
def test_zeroed_tensors_have_a_rule() -> None:
    assert verified(Zeroing(), hw.vectors()).worst[1] < 1e-9


class Repeating(hw.Mlp):
    """Repeats rows by numbers, and lets what reads them say how many there are."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        features = torch.arange(8.0).repeat_interleave(torch.tensor([3, 1, 0, 4, 2, 2, 1, 3]))
        return super().forward(x * features, labels)


def test_rows_are_repeated_by_numbers() -> None:
    assert verified(Repeating(), hw.vectors()).worst[1] < 1e-9


def test_a_step_is_traced_in_anomaly_mode() -> None:
    with torch.autograd.detect_anomaly():
        assert verified(hw.Mlp(), hw.vectors()).worst[1] < 1e-9
        assert torch.is_anomaly_enabled()


class DroppedWeights(nn.Module):
    """Drops weights, the same ones for all samples, in a layer and in a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weight = F.dropout(self.head.weight, 0.3) * torch.rand(4, 16, dtype=x.dtype)
        hidden = F.dropout(self.second(self.first(x)), 0.2)
        loss = F.cross_entropy(F.linear(hidden, weight, self.head.bias), labels)
        return loss + F.dropout(self.second.weight, 0.5).square().sum()


def test_weights_are_dropped_alike_in_all_microbatches() -> None:
    for pipeline in ({"size": 1, "microbatches": 4}, {"size": 2, "microbatches": 2}):
        found = verified(DroppedWeights(), hw.vectors(), {"pipeline": pipeline})
        assert found.worst[1] < 1e-9, found.worst


class Branch(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 16), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)).relu()


class Branches(nn.Module):
    """Both update the running mean of one batch norm, as the heads of a detector may."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16)
        self.first, self.second = Branch(norm), Branch(norm)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.first(x) - self.second(x)), labels)


def test_a_batch_norm_that_stands_in_two_places() -> None:
    torch.manual_seed(0)
    found = verified(Branches(), hw.vectors())
    assert found.worst[1] < 1e-9, found.worst
    assert set(found.buffers) == {
        f"first.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
