"""Calls that torch.export cannot capture as they are: the numbers of one device, or a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar._compat import leaving_transforms
from autopar.errors import TraceError
from autopar.tracer.trace import trace
from autopar.verification import _replay, whole_inputs


def _verified(model: nn.Module, inputs: Any) -> autopar.Verification:
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints={"data": 2})
    return autopar.verify(plan, model, inputs)


class Counting(nn.Module):
    """Rows summed by key, over how many there are of each; `bins` of them are asked for."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.weighted = weighted

    def forward(self, x: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        rows = self.inner(x)
        sums = rows.new_zeros(5, 8).index_add(0, keys, rows)
        if self.weighted:
            counts = torch.bincount(keys, weights, minlength=5)
        else:
            counts = keys.bincount(minlength=5).clamp(min=1)
        return (sums / counts.unsqueeze(1)).square().mean()


def _counted() -> tuple[Tensor, ...]:
    keys = torch.tensor([0, 1, 1, 2, 2, 3, 4, 4])
    return torch.randn(8, 8).double(), keys, torch.rand(8).double() + 0.1


@pytest.mark.parametrize("weighted", [False, True])
def test_counts_of_keys(weighted: bool) -> None:
    torch.manual_seed(0)
    assert _verified(Counting(weighted).double(), _counted()).worst[1] < 1e-9


def test_a_key_beyond_the_counts_is_an_error() -> None:
    torch.manual_seed(0)
    model, (x, keys, weights) = Counting(False).double(), _counted()
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, (x, keys, weights), constraints={"data": 2})
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        autopar.verify(plan, model, (x, keys + 1, weights))


class Codebook(nn.Module):
    """Vectors replaced by the nearest of a table, which follows them through `.data`."""

    table: Tensor
    count: Tensor

    def __init__(self, size: int = 7, width: int = 8) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, width), nn.Linear(width, 8)
        self.register_buffer("table", torch.randn(size, width))
        self.register_buffer("count", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x).flatten(0, -2)
        nearest = torch.cdist(z.detach(), self.table).argmin(1)
        hot = F.one_hot(nearest, len(self.table)).to(z.dtype)
        found = hot @ self.table
        if self.training:
            self.count.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.table.data.mul_(0.9).add_(hot.t() @ z.detach(), alpha=0.1)
        out = self.outer(z + (found - z).detach())
        return F.mse_loss(out, x.flatten(0, -2)) + (z - found.detach()).square().mean()


def test_buffers_written_through_data() -> None:
    torch.manual_seed(0)
    found = _verified(Codebook().double(), (torch.randn(4, 6, 8).double(),))
    assert set(found.buffers) == {"table", "count"}
    assert found.worst[1] < 1e-9


class Covaried(nn.Module):
    def __init__(self, correction: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.correction = correction

    def forward(self, x: Tensor) -> Tensor:
        return torch.cov(self.inner(x).t(), correction=self.correction).square().sum()


@pytest.mark.parametrize("correction", [0, 1])
def test_covariances(correction: int) -> None:
    torch.manual_seed(0)
    assert _verified(Covaried(correction).double(), (torch.randn(6, 8).double(),)).worst[1] < 1e-9


class Helped(nn.Module):
    """Its forward leaves the work to a function: the error names the line in there."""

    def __init__(self, head: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(8, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self, self.inner(x))


def _masked(model: Helped, x: Tensor) -> Tensor:
    return x[x.sum(1) > 0].median()


def _mapped(model: Helped, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: (model.inner(row) * row).sum())(x).mean()


def _mapped_twice(model: Helped, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.vmap(lambda v: v * 2), in_dims=1)(model.inner(x)).mean()


def _routed(model: Helped, x: Tensor) -> Tensor:
    weights, chosen = model.gate(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for i, expert in enumerate(model.experts):
        rows, place = torch.where(chosen == i)
        out[rows] += expert(x[rows]) * weights[rows, place, None]
    return out.square().mean()


def _turned(model: Helped, x: Tensor) -> Tensor:
    _, chosen = model.gate(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for i, expert in enumerate(model.experts):
        rows, _ = torch.where(chosen.flip(1) == i)  # of which there might be two in a row
        out[rows] += expert(x[rows])
    return out.square().mean()


def test_experts_as_they_are_often_written() -> None:
    found = _verified(Helped(_routed).double(), (torch.randn(8, 8).double(),))
    assert found.worst[1] < 1e-9, found.worst


@pytest.mark.parametrize(
    ("head", "remedy"),
    [
        (_masked, r"torch.where\(mask"),
        (_mapped, "torch.vmap hides"),
        (_mapped_twice, "torch.vmap hides"),
        (_turned, r"expert\(x\) \* \(weights"),
    ],
)
def test_what_cannot_be_captured_says_where_and_what_instead(
    head: Callable[..., Tensor], remedy: str
) -> None:
    with pytest.raises(TraceError, match=remedy) as caught:
        _verified(Helped(head), (torch.randn(8, 8),))
    assert f" in {head.__name__}: " in str(caught.value).splitlines()[0]


def _forward_mode(model: Helped, x: Tensor) -> Tensor:
    _, tangent = torch.func.jvp(model.inner, (x,), (x,))
    return tangent.square().mean()


def _jacobian(model: Helped, x: Tensor) -> Tensor:
    return torch.func.jacfwd(lambda v: model.inner(v).sum(0))(x).square().mean()


def _unsure(model: Helped, x: Tensor) -> Tensor:
    inside = torch.func.grad(lambda v: model.inner(v).sum() * (1 if v.sum() > 0 else 2))
    return inside(x).square().mean()


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (_forward_mode, "takes a derivative"),
        (_jacobian, "takes a derivative"),
        (_unsure, "decides what runs"),
        (_mapped, "torch.vmap hides"),
    ],
)
def test_what_fails_inside_a_transform_leaves_nothing_behind(
    head: Callable[..., Tensor], reason: str
) -> None:
    x = torch.randn(8, 8)
    with pytest.raises(TraceError, match=reason):
        _verified(Helped(head), (x,))
    assert torch.func.grad(torch.sum)(x).equal(torch.ones_like(x))
    assert _verified(nn.Linear(8, 8), (x,)).worst[1] < 1e-5


def test_levels_of_a_graph_that_fails_halfway_are_left() -> None:
    def halfway() -> None:
        torch._C._enter_dual_level()
        torch._C._functorch._jvp_increment_nesting()
        raise ValueError

    with pytest.raises(ValueError), leaving_transforms():
        halfway()
    assert torch.func.jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))[1] == 1


def _weighed(model: Helped, x: Tensor) -> Tensor:
    weights = torch.vmap(lambda row: (row * row).sum(-1))(x.detach())
    return (weights * model.inner(x).sum(-1)).mean()


def test_vmap_of_what_has_no_gradient() -> None:
    torch.manual_seed(0)
    found = _verified(Helped(_weighed).double(), (torch.randn(8, 8).double(),))
    assert found.worst[1] < 1e-9, found.worst


def _as_the_remedy_says(model: Helped, x: Tensor) -> Tensor:
    weights, chosen = model.gate(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for i, expert in enumerate(model.experts):
        out = out + expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)
    mask = x.sum(1) > 0
    kept = torch.where(mask[:, None], x, 0)
    return out.square().mean() + (kept.square().sum(1) * mask).sum() / mask.sum()


def test_what_the_errors_tell_to_write() -> None:
    torch.manual_seed(0)
    model, x = Helped(_as_the_remedy_says).double(), torch.randn(8, 8).double()
    found = _verified(model, (x,))
    assert len(found.gradients) == 10
    assert found.worst[1] < 1e-9, found.worst
    model.head = lambda model, x: _routed(model, x)
    expected = model(x)
    model.head = lambda model, x: (
        _as_the_remedy_says(model, x) - (x[x.sum(1) > 0].square().sum(1).mean())
    )
    torch.testing.assert_close(model(x), expected)


class Masked(nn.Module):
    """Layers of torch with a mask, made in the forward or given, and no hint that it is causal."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)
        self.given = given

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask if self.given else nn.Transformer.generate_square_subsequent_mask(6).to(x)
        return self.inner(x, x * 2, src_mask=mask, tgt_mask=mask).pow(3).mean()


@pytest.mark.parametrize("given", [False, True])
def test_masks_of_torchs_own_transformer(given: bool) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(4, 6, 8).double(), torch.randn(6, 6).double()
    found = _verified(Masked(given).double(), (x, mask))
    assert found.worst[1] < 1e-9, found.worst


class Contrasted(nn.Module):
    """Similarities of rows to others (SimCLR; Chen et al. 2020, arXiv 2002.05709)."""

    def __init__(self, columns: int, wrap: bool) -> None:
        super().__init__()
        self.inner, self.columns, self.wrap = nn.Linear(8, 8), columns, wrap

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.inner(x), dim=-1)
        scores = z @ z[: self.columns].T
        scores.fill_diagonal_(-9.0, wrap=self.wrap)
        return F.cross_entropy(scores, torch.arange(len(x)) % self.columns) + scores.square().mean()


@pytest.mark.parametrize(("columns", "wrap"), [(8, False), (3, False), (3, True)])
def test_a_diagonal_is_filled(columns: int, wrap: bool) -> None:
    torch.manual_seed(0)
    found = _verified(Contrasted(columns, wrap).double(), (torch.randn(8, 8).double(),))
    assert found.worst[1] < 1e-9, found.worst


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(8, 8)

    def forward(self, x: Any) -> Tensor:
        return self.inner(x)[0].data.square().mean()


def test_a_packed_input_is_refused_with_what_to_do_instead() -> None:
    x = nn.utils.rnn.pack_padded_sequence(torch.randn(6, 3, 8), [6, 4, 3])
    with pytest.raises(TraceError, match="input 0 is packed") as caught:
        autopar.plan(Packed(), autopar.Cluster.from_profile("cpu-gloo"), (x,))
    assert "pack_padded_sequence in the forward" in str(caught.value)


class Averaged(nn.Module):
    """A teacher whose weights, or a running mean, are written by way of `.data`."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.student, self.what = nn.Linear(8, 8), what
        self.teacher = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "parameter":
            self.teacher.weight.data = self.teacher.weight.data * 0.9 + self.student.weight * 0.1
        elif self.what == "shape":
            self.mean.data = x
        elif self.what == "dtype":  # as it is already
            data = self.student.weight.data
            self.student.weight.data = data if data.dtype is x.dtype else data.to(x.dtype)
        else:
            self.mean.data = self.mean.data * 0.9 + x.detach().mean(0) * 0.1
        return (self.student(x) - self.teacher(x - self.mean)).square().mean()


def test_a_buffer_that_is_written_by_its_data() -> None:
    torch.manual_seed(0)
    found = _verified(Averaged("buffer").double(), (torch.randn(8, 8).double(),))
    assert found.worst[1] < 1e-9 and "mean" in found.buffers


def test_data_that_stays_what_it_is() -> None:
    torch.manual_seed(0)
    found = _verified(Averaged("dtype").double(), (torch.randn(8, 8).double(),))
    assert found.worst[1] < 1e-9 and set(found.gradients) == {"student.weight", "student.bias"}


@pytest.mark.parametrize(
    ("what", "text"),
    [("parameter", r"changes its parameter teacher\.weight"), ("shape", r"\(8,\).*\(4, 8\)")],
)
def test_data_that_cannot_be_written_is_refused(what: str, text: str) -> None:
    with pytest.raises(TraceError, match=text):
        trace(Averaged(what), (torch.randn(4, 8),))


class Taught(nn.Module):
    """A part that does not train while it is looked at."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.student, self.teacher = (nn.Linear(8, 8) for _ in range(3))
        self.how = how

    @torch.inference_mode()
    def looked_up(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        with torch.inference_mode(mode=False):
            assert torch.is_grad_enabled()
        assert not torch.is_grad_enabled()
        return self.teacher(x)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.how == "inference":
            target = self.looked_up(h).clone()
        elif self.how == "frozen":
            self.teacher.requires_grad_(False)
            target = self.teacher(h)
        else:
            self.teacher.weight.requires_grad = False
            target = self.teacher(h)
        return (self.student(h) - target).square().mean()


def test_what_runs_in_inference_mode_gets_no_gradient() -> None:
    torch.manual_seed(0)
    found = _verified(Taught("inference").double(), (torch.randn(8, 8).double(),))
    assert found.worst[1] < 1e-9
    assert set(found.gradients) == {
        f"{module}.{name}" for module in ("first", "student") for name in ("weight", "bias")
    }


@pytest.mark.parametrize("how", ["frozen", "assigned"])
def test_a_parameter_that_the_forward_freezes_is_refused(how: str) -> None:
    with pytest.raises(TraceError, match=r"requires_grad.*Set it before"):
        trace(Taught(how), (torch.randn(4, 8),))


class Counted(nn.Module):
    """A norm whose running statistics are those of all batches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)).pow(3).mean()


def test_a_batch_norm_without_momentum() -> None:
    torch.manual_seed(0)
    model, x = Counted().double(), torch.randn(8, 8).double()
    for _ in range(2):  # from the third batch on, a share is neither one nor a half
        model(torch.randn(8, 8).double())
    found = _verified(model, (x,))
    assert found.worst[1] < 1e-9
    assert set(found.buffers) == {name for name, _ in model.named_buffers()}


class Said(nn.Module):
    """A function of what a layer makes."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(8, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x)).square().mean()


def test_correlations() -> None:
    torch.manual_seed(0)
    model = Said(lambda h: torch.corrcoef(h.t()) + h.t().corrcoef() ** 2).double()
    assert _verified(model, (torch.randn(8, 8).double(),)).worst[1] < 1e-9


def test_variance_of_one_row_and_covariances_by_the_method() -> None:
    torch.manual_seed(0)

    def covaried(h: Tensor) -> Tensor:
        one = torch.cov(input=h[:, 0], correction=0, fweights=None)
        return one + h.t().cov()

    assert _verified(Said(covaried).double(), (torch.randn(8, 8).double(),)).worst[1] < 1e-9


def test_combinations_are_as_many_as_the_length_says() -> None:
    torch.manual_seed(0)

    def pairs(h: Tensor) -> Tensor:
        fields = torch.combinations(torch.arange(h.shape[1]))
        products = h[:, fields].prod(-1)
        own = torch.combinations(input=h[0], r=3, with_replacement=True)
        return products.sum() + own.sum() + torch.combinations(h[0], r=5).sum()

    assert _verified(Said(pairs).double(), (torch.randn(8, 8).double(),)).worst[1] < 1e-9


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="not in this version of torch")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_loss_in_chunks_is_a_product_and_a_loss(reduction: str) -> None:
    torch.manual_seed(0)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    weight = nn.Parameter(torch.randn(6, 4).double())

    def loss(h: Tensor) -> Tensor:
        labels = torch.arange(8) % 6
        return F.linear_cross_entropy(h, weight, labels, reduction=reduction, options=options)

    model = Said(loss).double()
    model.register_parameter("weight", weight)
    inputs = (torch.randn(8, 8).double(),)
    assert _verified(model, inputs).worst[1] < 1e-9
    names = {str(node.target) for node in trace(model, inputs).graph.nodes}
    assert "autopar.token_nll.default" in names and not any("chunk" in name for name in names)


def test_normal_numbers_of_a_size() -> None:
    torch.manual_seed(0)
    given = (torch.randn(8, 8).double(),)
    model = Said(lambda h: h + torch.normal(2.0, 0.5, h.shape).to(h.dtype)).double()
    assert _verified(model, given).worst[1] < 1e-9
    large = Said(lambda h: h * 0 + torch.normal(mean=3.0, std=0.5, size=(8, 4096)).mean()).double()
    traced = trace(large, given)
    found = _replay(traced, whole_inputs(traced, large, given, 0))
    assert abs(float(found["output", "0"]) - 9.0) < 0.1  # the square of the mean


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda h: h * torch.rand(4, generator=torch.Generator()), "generator of its own"),
        (lambda h: h * float(h.detach().numpy().max()), "outside the model, and pass the result"),
        (lambda h: torch.heaviside(h, h.new_zeros(())), "backward of Said.*\n.*heaviside"),
    ],
)
def test_what_cannot_be_said_is_refused_with_what_to_do(function: Any, text: str) -> None:
    with pytest.raises(TraceError, match=text):
        trace(Said(function), (torch.randn(8, 8),))


class Sampled(nn.Module):
    """Draws as libraries do that pass a generator on where they were given one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=None, dtype=x.dtype, layout=torch.strided)
        kept = torch.bernoulli(torch.full_like(x, 0.5), generator=None)
        return (self.inner(x) + noise * kept).square().mean()


def test_no_generator_is_torchs_own() -> None:
    torch.manual_seed(0)
    assert _verified(Sampled().double(), (torch.randn(8, 8).double(),)).worst[1] < 1e-9


class Moving(nn.Module):
    """Moves parts of itself to where its input is, and to no other place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.cell = nn.GRU(8, 8, batch_first=True)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        self.to(x.device)
        for layer in self.inner:
            x = layer.to(x.device, x.dtype)(x)
        return self.cell.to(x)(x)[0].mul(self.scale).square().mean()


def test_a_module_that_is_moved_to_where_it_is() -> None:
    torch.manual_seed(0)
    model = Moving().double()
    found = _verified(model, torch.randn(4, 3, 8).double())
    assert set(found.gradients) == set(dict(model.named_parameters()))
    assert found.worst[1] < 1e-9


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.double()(x.double()).square().mean()


def test_a_module_that_is_cast_in_the_forward_is_refused() -> None:
    with pytest.raises(TraceError, match=r"test_spelled\.py:\d+ in forward: .*double\(\)"):
        trace(Casting(), torch.randn(4, 8), training=True)


class Applying(nn.Module):
    """Applies a function to its parameters that changes some, or looks at them."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        self.inner._apply(self.fn)
        return self.inner(x).square().mean()


@pytest.mark.parametrize("fn", [lambda t: t * 2 if t.dim() == 2 else t, lambda t: t])
def test_another_function_of_a_modules_tensors_is_refused(fn: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match=r"test_spelled\.py:\d+ in forward: .*_apply"):
        trace(Applying(fn), torch.randn(4, 8), training=True)


class Swapped(nn.Module):
    """Computes with other values for a while, by way of `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        before = self.scale.data
        self.scale.data = self.scale * 2
        y = self.inner(x) * self.scale
        self.scale.data = before
        return (y * self.scale).square().mean()


def test_data_put_back_is_refused() -> None:
    with pytest.raises(TraceError, match=r"test_spelled\.py:\d+ .*\n.*before another assignment"):
        trace(Swapped(), torch.randn(4, 8), training=True)


class Identical(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if torch.equal(x, x.clone()) is True:
            return self.inner(x).sum()
        return self.inner(x).cos().sum()


def test_a_truth_that_is_compared_with_true_is_no_tensor() -> None:
    with pytest.raises(TraceError, match=r"test_spelled\.py:\d+ in forward: if torch\.equal"):
        trace(Identical(), torch.randn(4, 8), training=True)
