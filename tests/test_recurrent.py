"""Recurrent layers: one op each and direction, of padded batches and of packed ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pad_packed_sequence,
)
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.core.recurrent import RECURRENT, RECURRENT_BACKWARD
from autopar.errors import AutoparError, TraceError
from autopar.tracer.trace import trace
from tests.test_handwritten import plan_for


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out.square().mean()


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() if x.sum() > 0 else x


def _lstm(**options: Any) -> Recurrent:
    torch.manual_seed(0)
    return Recurrent(nn.LSTM(8, 16, batch_first=True, **options))


def _gru(**options: Any) -> Recurrent:
    torch.manual_seed(0)
    return Recurrent(nn.GRU(8, 16, batch_first=True, **options))


def _x(device: str = "cpu") -> Tensor:
    return torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("make", [_lstm, _gru])
@pytest.mark.parametrize("constraints", [{"data": 2}, {"tensor": {"mode": "1d", "size": 2}}])
def test_equals_the_plain_module_in_float32(make: Any, constraints: Any) -> None:
    model, x = make(bidirectional=True), _x()
    plan = plan_for(model, (x,), (2,), constraints)
    result = autopar.verify(plan, model, (x,))
    assert set(result.gradients) == {n for n, _ in model.named_parameters()}
    assert result.worst[1] < 1e-5, result.worst


@pytest.mark.parametrize(
    ("device", "training", "precision"),
    [("cpu", True, None), ("meta", True, None), ("cpu", False, None), ("meta", True, "bf16")],
)
def test_no_op_of_one_backend_is_in_the_graph(
    device: str, training: bool, precision: str | None
) -> None:
    model = _lstm(num_layers=2, dropout=0.1).to(device).train(training)
    graph = trace(model, (_x(device),), training=training, precision=precision).graph
    named = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    assert not [n for n in named if "mkldnn" in n or "onednn" in n]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_setting_of_the_caller_stays(enabled: bool) -> None:
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = enabled
    try:
        trace(_lstm(), (_x(),))
        assert torch.backends.mkldnn.enabled == enabled
        with pytest.raises(TraceError):
            trace(Branching(), (_x(),))
        assert torch.backends.mkldnn.enabled == enabled
    finally:
        torch.backends.mkldnn.enabled = before


def test_a_graph_does_not_grow_with_the_steps() -> None:
    counts = {
        len(trace(_lstm(bidirectional=True), (torch.randn(8, steps, 8),)).graph.nodes)
        for steps in (2, 40)
    }
    assert len(counts) == 1


_LENGTHS = torch.tensor([2, 5, 1, 4])
_CELLS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}


@pytest.mark.parametrize("lengths", [None, _LENGTHS])
@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize(
    ("cell", "options"),
    [("lstm", {}), ("lstm", {"proj_size": 3}), ("gru", {"bias": False}), ("rnn_tanh", {})],
)
def test_the_op_is_a_direction_of_torchs_layer(
    cell: str, options: dict[str, Any], direction: int, lengths: Tensor | None
) -> None:
    torch.manual_seed(0)
    layer = _CELLS[cell](6, 8, bidirectional=direction > 0, **options).double()
    width = options.get("proj_size", 8)
    states = [torch.randn(direction + 1, 4, n).double() for n in (width, 8)]
    x, h, c = (t.requires_grad_() for t in (torch.randn(5, 4, 6).double(), *states))
    rows: Any = x
    if lengths is not None:
        rows = pack_padded_sequence(x, lengths, enforce_sorted=False)
    out, last = layer(rows, (h, c) if cell == "lstm" else h)
    if lengths is not None:
        out = pad_packed_sequence(out)[0]
    named = {n.partition("_l0")[0]: p for n, p in layer.named_parameters()
             if n.endswith("_reverse") == bool(direction)}  # fmt: skip
    order = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    weights = [named.get(name) for name in order]
    state = c[direction] if cell == "lstm" else None
    operands = (cell, x, h[direction], state, *weights, lengths, bool(direction))
    found = [y for y in RECURRENT(*operands) if y.numel()]
    wanted = [out[..., -width:], *(s[-1] for s in (last if cell == "lstm" else (last,)))]
    torch.testing.assert_close(found, wanted)
    grads = [torch.randn_like(y) for y in wanted]
    leaves = [x, h, *([c] if cell == "lstm" else []), *named.values()]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, grads), torch.autograd.grad(wanted, leaves, grads)
    )


def test_the_backward_runs_where_autograd_is_switched_off() -> None:
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    x, h = torch.randn(3, 4, 6), torch.randn(4, 8)
    rest = (torch.randn(24, 6), torch.randn(24, 8), *[None] * 4, False)
    given = (torch.randn(3, 4, 8), h, None, "gru", x, h, None, *rest)
    wanted = RECURRENT_BACKWARD(*given)
    with Passing(), torch.no_grad():
        torch.testing.assert_close(RECURRENT_BACKWARD(*given), wanted)


class Packed(nn.Module):
    """A classifier of sequences as it is mostly written, in both directions."""

    def __init__(self, layer: Any, ordered: bool, whole: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.layer = layer(6, 8, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 5)
        self.ordered, self.whole = ordered, whole

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        x = pack_padded_sequence(
            self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=self.ordered
        )
        out, last = self.layer(x)
        last = last[0] if isinstance(last, tuple) else last
        rows, counts = pad_packed_sequence(
            out, True, total_length=ids.shape[1] if self.whole else None
        )
        pooled = rows.sum(1) / counts.unsqueeze(1).to(rows)
        return {
            "loss": F.cross_entropy(self.out(torch.cat([last[-2], last[-1]], -1) + pooled), labels)
        }


def _sequences(ordered: bool, longest: int = 7) -> dict[str, Tensor]:
    lengths = [7, 7, 6, 5, 5, 3, 2, 1] if ordered else [3, 7, 1, 5, 7, 2, 6, 4]
    torch.manual_seed(1)
    return {
        "ids": torch.randint(0, 20, (8, 7)),
        "lengths": torch.tensor(lengths).clamp(max=longest),
        "labels": torch.randint(0, 5, (8,)),
    }


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(("ordered", "whole"), [(False, False), (False, True), (True, False)])
def test_packed_sequences_in_a_forward(layer: Any, ordered: bool, whole: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Packed(layer, ordered, whole).double(), _sequences(ordered)
    for constraints in ({"data": 2}, {"pipeline": {"size": 2, "microbatches": 2}}):
        plan = plan_for(model, inputs, (2,), constraints)
        result = autopar.verify(plan, model, inputs)
        assert result.worst[1] < 1e-9, result.worst


def test_steps_behind_the_longest_sequence_would_be_of_another_shape() -> None:
    model, inputs = Packed(nn.GRU, False, False).double(), _sequences(False)
    plan = plan_for(model, inputs, (2,), {"data": 2})
    with pytest.raises(AutoparError, match=r"at most 6 steps.*batch of 7.*total_length=7"):
        autopar.verify(plan, model, _sequences(False, longest=6))


class Padded(nn.Module):
    """Packs and pads more than once, with another value, longer, and without a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(6, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        first, _ = pad_packed_sequence(pack_padded_sequence(x, lengths, enforce_sorted=False))
        packed = pack_padded_sequence(first, lengths, enforce_sorted=False)
        assert isinstance(packed, PackedSequence)
        out = self.layer(packed, torch.ones(1, 4, 8, dtype=x.dtype))[0]
        rows, _ = pad_packed_sequence(out, padding_value=-5.0, total_length=9)
        return (rows.cumsum(0) * first.sum()).square().mean()


def test_a_batch_is_packed_and_padded_again() -> None:
    torch.manual_seed(0)
    model, inputs = Padded().double(), (torch.randn(5, 4, 6).double(), _LENGTHS)
    plan = plan_for(model, inputs, (2,), {"data": 2})
    result = autopar.verify(plan, model, inputs)
    assert result.worst[1] < 1e-9, result.worst


class Captions(nn.Module):
    """Predicts the next word from rows that are packed, with the lengths given or fixed."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.layer = nn.LSTM(6, 8, batch_first=True)
        self.above = nn.GRU(8, 8)
        self.out = nn.Linear(8, 20)
        self.fixed = fixed

    def forward(self, image: Tensor, ids: Tensor, lengths: Any) -> Tensor:
        if self.fixed:
            lengths = [7, 6, 6, 5, 4, 3, 2, 2]
        x = torch.cat([image.unsqueeze(1), self.embed(ids)], 1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.fixed)
        hidden = self.layer(packed)[0]
        hidden = PackedSequence(hidden.data.relu(), *hidden[1:])
        hidden = self.above(hidden)[0]
        words = pack_padded_sequence(ids, lengths, batch_first=True, enforce_sorted=self.fixed)[0]
        rows, _ = pad_packed_sequence(hidden._replace(data=hidden.data.exp()), total_length=9)
        return F.cross_entropy(self.out(hidden[0]), words) + rows.square().mean()


@pytest.mark.parametrize("fixed", [False, True])
def test_rows_of_packed_sequences_are_rows_that_a_mask_picks(fixed: bool) -> None:
    torch.manual_seed(0)
    model, batch = Captions(fixed).double(), _sequences(False)
    inputs = (torch.randn(8, 6).double(), batch["ids"], batch["lengths"])
    plan = plan_for(model, inputs, (2,), {"data": 2})
    result = autopar.verify(plan, model, inputs)
    assert result.worst[1] < 1e-9, result.worst


class Cells(nn.Module):
    """Cells of each kind in a loop over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(
            [
                nn.LSTMCell(6, 8),
                nn.GRUCell(8, 8, bias=False),
                nn.RNNCell(8, 8),
                nn.RNNCell(8, 8, nonlinearity="relu"),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        states: list[Any] = [None] * len(self.cells)
        outs = []
        for step in x.unbind(1):
            for i, cell in enumerate(self.cells):
                states[i] = cell(step, states[i])
                step = states[i][0] if isinstance(states[i], tuple) else states[i]
            outs.append(step)
        return (torch.stack(outs).square().mean() + states[0][1].sum()) * 0.5


def test_cells_in_a_loop_are_an_op_each() -> None:
    torch.manual_seed(0)
    model, inputs = Cells().double(), (torch.randn(8, 3, 6).double(),)
    for constraints in ({"data": 2}, {"data": 2, "zero": 3}):
        plan = plan_for(model, inputs, (2,), constraints)
        result = autopar.verify(plan, model, inputs)
        assert result.worst[1] < 1e-9, result.worst
    targets = [n.target for n in trace(model, inputs).graph.nodes]
    assert targets.count(RECURRENT) == targets.count(RECURRENT_BACKWARD) == 3 * 4


class Started(nn.Module):
    """Makes its first states in float32, whatever its parameters are cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(1, len(x), 8), torch.zeros(1, len(x), 8)
        out: Tensor = self.layer(x, state)[0]
        return out.square().mean()


def test_states_of_another_dtype_are_refused_with_what_to_do() -> None:
    with pytest.raises(TraceError, match=r"first state of torch\.float32: .*state\.to") as caught:
        trace(Started(), (_x(),), precision="bf16")
    assert "test_recurrent.py" in str(caught.value)


class Rows(nn.Module):
    """Reads the rows of packed sequences in the ways that torch's functions take them."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(
            nn.LSTM(6, 8, batch_first=True), "weight_hh_l0"
        )
        self.other = nn.GRU(6, 8, batch_first=True)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.read = read

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.read(self.layer(packed)[0], self.other(packed)[0], self.weight)


_READS = {
    "tuple": lambda a, b, w: torch.cat((a.data, b.data), -1).square().mean(),
    "list": lambda a, b, w: torch.stack([a.data, b.data * 2]).square().mean(),
    "keyword": lambda a, b, w: F.linear(input=a.data, weight=w).square().mean(),
    "count": lambda a, b, w: (a.data @ w).square().sum() / a.batch_sizes.sum() + b.data.mean(),
}


@pytest.mark.parametrize("read", _READS)
def test_rows_are_read_as_they_are(read: str) -> None:
    torch.manual_seed(0)
    model = Rows(_READS[read]).double()
    inputs = torch.randn(4, 5, 6).double(), _LENGTHS
    plan = plan_for(model, inputs, (2,), {"data": 2})
    result = autopar.verify(plan, model, inputs)
    assert result.worst[1] < 1e-9, result.worst


def test_a_packed_layer_runs_in_low_precision() -> None:
    torch.manual_seed(0)
    model, inputs = Packed(nn.LSTM, False, True), _sequences(False)
    plan = plan_for(model, inputs, (2,), {"data": 2}, precision="bf16")
    assert autopar.verify(plan, model, inputs).worst[1] < 0.1


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda a, b, w: a, "returns a packed sequence"),
        (lambda a, b, w: (a.data, b.data), "returns a packed sequence"),
        (
            lambda a, b, w: pad_packed_sequence(PackedSequence(a.data * 2, a.batch_sizes + 0))[0],
            "batch sizes that pack_padded_sequence did not make",
        ),
    ],
)
def test_packed_sequences_that_no_graph_can_hold_are_refused(read: Any, said: str) -> None:
    inputs = torch.randn(4, 5, 6), _LENGTHS
    with pytest.raises(TraceError, match=said):
        trace(Rows(read), inputs, training=False)
