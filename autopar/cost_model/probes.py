"""The ops that a device is measured with: per class, shapes over a range of work.

Several ops stand for a class. They are the calls that emitted programs make, autopar's own ops
included, so that the host's share of each is in what is measured. Ops that go by bytes take turns
through as many operands as do not fit a cache, for in a step few ops find their own there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.core import ops as _ops  # noqa: F401  (registers the autopar ops)
from autopar.core.recurrent import CELLS, RECURRENT, RECURRENT_BACKWARD
from autopar.core.work import conv_variant

__all__ = [
    "Probe",
    "attention_probes",
    "batched_probes",
    "byte_probes",
    "convolution_probes",
    "geometric_mean",
    "held_out_probes",
    "matmul_probes",
    "probes",
    "recurrent_probes",
    "update_probe",
]

aten = torch.ops.aten
autopar_ops = torch.ops.autopar

_COLUMNS = 512
_COLD_BYTES = 64 << 20  # more than the caches of most CPUs
# beyond 32 MiB a CPU's allocator maps fresh pages for each result: the last is a rate of its own
_ELEMENTS = {
    "cpu": tuple(2**k for k in (8, 12, 14, 16, 18, 20, 22, 23)),
    "cuda": tuple(2**k for k in (8, 12, 14, 16, 18, 20, 22, 24)),
}
_SIDES = {"cpu": (8, 32, 64, 128, 256, 512, 1024), "cuda": (64, 256, 512, 1024, 2048, 4096, 8192)}
_HEADS = {  # batch, heads, sequence, head dim
    "cpu": ((1, 2, 16, 32), (1, 4, 32, 32), (2, 4, 64, 32), (2, 4, 128, 64), (4, 4, 128, 64),
            (4, 8, 256, 64), (2, 8, 512, 64)),
    "cuda": ((1, 2, 64, 64), (2, 8, 256, 64), (4, 16, 512, 64), (4, 16, 2048, 128)),
}  # fmt: skip
_CONVOLUTIONS = {  # by class: batch, channels in, height, channels out, kernel, stride, groups
    "cpu": (
        ((2, 16, 16, 16, 3, 1, 1), (4, 24, 16, 48, 3, 1, 1), (4, 64, 32, 64, 3, 2, 1),
         (4, 32, 32, 64, 3, 1, 1), (8, 64, 32, 64, 3, 1, 1)),
        ((2, 16, 16, 16, 1, 1, 1), (4, 32, 32, 64, 1, 1, 1), (4, 64, 32, 256, 1, 2, 1),
         (8, 128, 16, 256, 1, 1, 1)),
        ((2, 16, 16, 16, 3, 1, 16), (4, 64, 32, 64, 3, 1, 64), (8, 256, 16, 256, 3, 1, 256)),
        ((2, 3, 32, 16, 3, 1, 1), (4, 3, 64, 64, 16, 16, 1), (4, 3, 64, 192, 8, 8, 1),
         (4, 3, 64, 64, 7, 2, 1)),
    ),
    "cuda": (
        ((8, 16, 32, 32, 3, 1, 1), (32, 64, 56, 128, 3, 1, 1), (64, 128, 56, 128, 3, 1, 1)),
        ((8, 64, 28, 64, 1, 1, 1), (64, 256, 28, 512, 1, 1, 1)),
        ((8, 64, 32, 64, 3, 1, 64), (64, 256, 56, 256, 3, 1, 256)),
        ((8, 3, 64, 32, 3, 1, 1), (32, 3, 224, 768, 16, 16, 1), (64, 3, 224, 64, 7, 2, 1)),
    ),
}  # fmt: skip
_RECURRENT = {  # batch, width of the input and of the state
    "cpu": ((4, 32), (4, 128), (8, 256), (16, 384), (32, 512)),
    "cuda": ((8, 128), (32, 256), (64, 512), (64, 1024), (128, 2048)),
}
_STEPS = 16


@dataclass(frozen=True, slots=True)
class Probe:
    """One op on real tensors.

    Attributes:
        op_class, dtype: the curve that it belongs to.
        unit: "flops" or "bytes".
        group: probes of one class and group make one point of the curve.
        work: of the unit, in each step.
        num_bytes: read plus written in each step.
        run: calls the op.
        label: op and shape, for tables.
        steps: equal parts of the op, which run one after the other.
    """

    op_class: str
    dtype: str
    unit: str
    group: int
    work: float
    num_bytes: int
    run: Callable[[], object]
    label: str
    steps: int = 1


def probes(device: str, dtype: str, *, plain: bool = False, largest: int = 99) -> Iterator[Probe]:
    """The probes that curves are made of.

    Args:
        device: "cpu" or "cuda".
        dtype: dtype name.
        plain: only matmul, attention, pointwise and memory.
        largest: index of the largest shape.
    """
    kind = torch.device(device).type
    for group, side in enumerate(_SIDES[kind][: largest + 1]):
        yield from matmul_probes(
            device, dtype, group, [(side, side, side), (2 * side, side, side // 2)]
        )
    for group, shape in enumerate(_HEADS[kind][: largest + 1]):
        yield from attention_probes(device, dtype, group, shape, masked=not plain)
        if not plain:
            yield from batched_probes(device, dtype, group, shape)
    for group, count in enumerate(_ELEMENTS[kind][: largest + 1]):
        chosen = "plain" if plain else "measured"
        yield from byte_probes(device, dtype, group, count, _COLUMNS, chosen)
        if not plain:
            yield update_probe(device, dtype, group, count)
    if not plain:
        for group, layer in enumerate(_RECURRENT[kind][: largest + 1]):
            yield from recurrent_probes(device, dtype, group, *layer)
        for images in _CONVOLUTIONS[kind]:
            for group, image in enumerate(images[: largest + 1]):
                yield from convolution_probes(device, dtype, group, image)


def held_out_probes(device: str, dtype: str) -> Iterator[Probe]:
    """Other shapes and other ops of the same classes: what predictions are checked on."""
    scale = 1 if torch.device(device).type == "cpu" else 4
    shapes = [(96, 80, 112), (200, 300, 400), (768, 384, 192), (64, 1536, 384), (640, 640, 320)]
    for group, shape in enumerate(shapes):
        yield from matmul_probes(device, dtype, group, [tuple(scale * n for n in shape)])
    for group, heads in enumerate([(2, 3, 96, 48), (3, 6, 192, 64), (2, 4, 384, 32)]):
        yield from attention_probes(device, dtype, group, heads)
    for group, (rows, columns) in enumerate([(24, 384), (300, 768), (1500, 320), (2000, 1000)]):
        yield from byte_probes(device, dtype, group, rows * columns * scale, columns, "held out")
    for group, image in enumerate([(2, 3, 48, 96, 8, 8, 1), (4, 24, 24, 48, 3, 1, 1)]):
        yield from convolution_probes(device, dtype, group, image)
    for group, layer in enumerate([(6, 96), (12, 320)]):
        yield from recurrent_probes(device, dtype, group, *layer)


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _random(device: str, dtype: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(getattr(torch, dtype))


def matmul_probes(
    device: str, dtype: str, group: int, shapes: Sequence[tuple[int, ...]]
) -> Iterator[Probe]:
    """A linear layer and the gradients of its input and weight."""
    for rows, out, inner in shapes:
        x, w, g = (_random(device, dtype, *s) for s in ((rows, inner), (out, inner), (rows, out)))
        for equation, a, b in (("mk,nk->mn", x, w), ("mn,nk->mk", g, w), ("mn,mk->nk", g, x)):

            def run(equation: str = equation, a: Tensor = a, b: Tensor = b) -> Tensor:
                return autopar_ops.einsum.default(equation, a, b)

            yield Probe(
                "matmul", dtype, "flops", group, 2.0 * rows * out * inner, _bytes(x, w, g), run,
                f"{equation} {rows}x{out}x{inner}",
            )  # fmt: skip


def attention_probes(
    device: str, dtype: str, group: int, shape: tuple[int, ...], *, masked: bool = False
) -> Iterator[Probe]:
    """Attention of `shape` (batch, heads, sequence, head dim), causal or not, forward and backward.

    With `masked` under a mask per batch and head, too.
    """
    batch, heads, length, dim = shape
    q, k, v, grad = (_random(device, dtype, *shape) for _ in range(4))
    scale = dim**-0.5
    kinds: list[tuple[str, bool, Tensor | None]] = [("", False, None), ("_causal", True, None)]
    if masked:
        kinds.append(("_masked", False, _random(device, dtype, batch, heads, length, length)))
    for suffix, causal, mask in kinds:
        flops = 4.0 * batch * heads * length * length * dim * (0.5 if causal else 1.0)
        out, lse = autopar_ops.attention.default(q, k, v, mask, causal, scale)
        held = _bytes(mask) if mask is not None else 0
        tail = (mask, causal, scale)

        def forward(tail: tuple[Any, ...] = tail) -> object:
            return autopar_ops.attention.default(q, k, v, *tail)

        def backward(tail: tuple[Any, ...] = tail, out: Tensor = out, lse: Tensor = lse) -> object:
            mask, *flags = tail
            return autopar_ops.attention_backward.default(grad, q, k, v, mask, out, lse, *flags)

        where = f"{'x'.join(map(str, shape))}{suffix.replace('_', ' ')}"
        yield Probe(
            f"attention{suffix}", dtype, "flops", group, flops, 4 * _bytes(q) + held, forward,
            f"attention {where}",
        )  # fmt: skip
        yield Probe(
            f"attention_backward{suffix}", dtype, "flops", group, 2.5 * flops,
            8 * _bytes(q) + held, backward, f"attention backward {where}",
        )  # fmt: skip


def batched_probes(device: str, dtype: str, group: int, shape: tuple[int, ...]) -> Iterator[Probe]:
    """The products of attention that is written out, on heads as a linear layer leaves them."""
    batch, heads, length, dim = shape
    q, k = (_random(device, dtype, batch, length, heads, dim).transpose(1, 2) for _ in range(2))
    scores = _random(device, dtype, batch, heads, length, length)
    flops = 2.0 * batch * heads * length * length * dim
    moved = _bytes(q, k, scores)
    for equation, a, b in (("abyz,abkz->abyk", q, k), ("abyk,abkz->abyz", scores, k)):

        def run(equation: str = equation, a: Tensor = a, b: Tensor = b) -> Tensor:
            return autopar_ops.einsum.default(equation, a, b)

        yield Probe(
            "matmul_batched", dtype, "flops", group, flops, moved, run,
            f"{equation} {'x'.join(map(str, shape))}",
        )  # fmt: skip


def convolution_probes(
    device: str, dtype: str, group: int, image: tuple[int, ...]
) -> Iterator[Probe]:
    """A convolution and its gradients.

    `image` is batch, channels, side, channels out, kernel, stride, groups.
    """
    batch, channels, side, out_channels, kernel, stride, groups = image
    x = _random(device, dtype, batch, channels, side, side)
    w = _random(device, dtype, out_channels, channels // groups, kernel, kernel)
    pad = kernel // 2 if stride < kernel else 0
    tail = ([stride, stride], [pad, pad], [1, 1], False, [0, 0], groups)
    y = aten.convolution.default(x, w, None, *tail)
    flops = 2.0 * y.numel() * w[0].numel()

    def forward() -> object:
        return aten.convolution.default(x, w, None, *tail)

    def backward() -> object:
        return aten.convolution_backward.default(y, x, w, None, *tail, [True, True, False])

    where = "x".join(map(str, image if groups > 1 else image[:-1]))
    kind = conv_variant(w.shape, groups)
    yield Probe(
        f"conv{kind}", dtype, "flops", group, flops, _bytes(x, w, y), forward, f"conv {where}"
    )
    yield Probe(
        f"conv_backward{kind}", dtype, "flops", group, 2 * flops, 2 * _bytes(x, w, y), backward,
        f"conv backward {where}",
    )  # fmt: skip


def recurrent_probes(
    device: str, dtype: str, group: int, batch: int, width: int
) -> Iterator[Probe]:
    """A layer of an LSTM and one of a GRU, and their gradients."""
    for cell in ("lstm", "gru"):
        rows = CELLS[cell] * width
        x = _random(device, dtype, _STEPS, batch, width)
        h, c = (_random(device, dtype, batch, width) for _ in range(2))
        weights = [_random(device, dtype, rows, width) / math.sqrt(width) for _ in range(2)]
        biases = [_random(device, dtype, rows) for _ in range(2)]
        tail = (x, h, c if cell == "lstm" else None, *weights, *biases, None, None, False)
        tensors = [t for t in tail if isinstance(t, Tensor)]
        out, _, last = RECURRENT(cell, *tail)
        grads = (x, h, c if cell == "lstm" else None)

        def forward(cell: str = cell, tail: tuple[Any, ...] = tail) -> object:
            return RECURRENT(cell, *tail)

        def backward(
            cell: str = cell, tail: tuple[Any, ...] = tail, grads: tuple[Any, ...] = grads
        ) -> object:
            return RECURRENT_BACKWARD(*grads, cell, *tail)

        flops = 2.0 * batch * rows * 2 * width
        moved = _bytes(*tensors, out, h, last)
        where = f"{cell} {_STEPS}x{batch}x{width}"
        kind = "recurrent" + ("_lstm" if cell == "lstm" else "")
        for passes, run, more, suffix in (
            (1, forward, 0, ""),
            (3, backward, _bytes(out, h, last), "backward"),
        ):
            steps = passes * _STEPS
            each = (moved + more + (steps - 1) * _bytes(weights[1])) // steps
            op_class = f"{kind}_{suffix}".rstrip("_")
            name = f"{where} {suffix}".rstrip()
            yield Probe(op_class, dtype, "flops", group, flops, each, run, name, steps)


def byte_probes(
    device: str, dtype: str, group: int, count: int, columns: int, chosen: str
) -> Iterator[Probe]:
    """Ops whose seconds go by the bytes they read and write.

    Args:
        device: "cpu" or "cuda".
        dtype: dtype name.
        group: see `Probe`.
        count: elements, a multiple of `columns`.
        columns: length of the rows; less where there would be but one row.
        chosen: ops that curves are made of, "measured", or of their two common classes, "plain";
            "held out" ones of the same classes; or "all".
    """
    size = count * getattr(torch, dtype).itemsize
    turns = max(1, min(64, _COLD_BYTES // size))
    width = min(count // 2, columns)  # of one row nothing is added up
    made = (torch.rand(count, device=device).to(getattr(torch, dtype)) for _ in range(2))
    x, y = (m.view(-1, width) for m in made)
    calls = [_calls(x.clone(), y.clone(), chosen) for _ in range(turns)]
    for index, (op_class, op, units, _) in enumerate(calls[0]):
        if chosen == "plain" and op_class not in ("memory", "pointwise"):
            continue
        if op_class == "random" and count > 1 << 20:
            continue  # seconds each, where it is slow
        yield Probe(
            op_class, dtype, "bytes", group, units * size, int(units * size),
            _in_turns([call[index][3] for call in calls]), f"{op} {count // width}x{width}",
        )  # fmt: skip


def update_probe(device: str, dtype: str, group: int, count: int) -> Probe:
    """AdamW of `count` elements in one pass and in place, which no op of a program is."""
    size = count * getattr(torch, dtype).itemsize
    turns = max(1, min(16, _COLD_BYTES // (4 * size)))
    update: Any = torch._fused_adamw_

    def made() -> Callable[[], object]:
        parameter, gradient = _random(device, dtype, count), _random(device, dtype, count)
        states = torch.zeros_like(parameter), torch.zeros_like(parameter)
        lists = [[x] for x in (parameter, gradient, *states)]
        step = torch.ones((), device=device)
        options: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01}
        options |= {"eps": 1e-8, "amsgrad": False, "maximize": False}
        return lambda: update(*lists, [], [step], **options)

    run = _in_turns([made() for _ in range(turns)])
    return Probe("update", dtype, "bytes", group, 7.0 * size, 7 * size, run, f"adamw {count}")


def _in_turns(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Calls one after the other; a result is let go when the next one is there."""
    turns = itertools.cycle(calls)
    kept: list[object] = [None]

    def run() -> None:
        kept[0] = next(turns)()

    return run


_Call = tuple[str, str, float, Callable[[], object]]  # class, name, bytes in units of `x`, call


def _calls(x: Tensor, y: Tensor, chosen: str) -> list[_Call]:
    """Those that `byte_probes` is asked for."""
    gelu: _Call = ("special_gelu", "gelu", 2.0, lambda: aten.gelu.default(x))
    if chosen == "held out":
        return [*_common_calls(x, y), gelu, *_held_out_calls(x, y)]
    others = _held_out_calls(x, y) if chosen == "all" else []
    return [*_common_calls(x, y), gelu, *_measured_calls(x, y), *others]


def _common_calls(x: Tensor, y: Tensor) -> list[_Call]:
    """Of classes with one op, which curves are made of and checked on."""
    rows, width = x.shape
    seed = torch.zeros((), dtype=torch.int64, device=x.device)
    weight = y[0].contiguous()
    ids = torch.arange(rows, device=x.device).flip(0)
    labels = torch.zeros(rows, dtype=torch.int64, device=x.device)
    nll, lse = autopar_ops.token_nll.default(x, labels, -100)
    return [
        ("lookup", "embedding", 2.0, lambda: aten.embedding.default(x, ids)),
        ("tanh", "tanh", 2.0, lambda: aten.tanh.default(x)),
        ("random", "dropout", 2.0,
         lambda: autopar_ops.dropout.default(x, 0.1, seed, 1, [rows, width], [0, 0])),
        ("loss", "token nll", 1.0, lambda: autopar_ops.token_nll.default(x, labels, -100)),
        ("loss_backward", "token nll backward", 2.0,
         lambda: autopar_ops.token_nll_backward.default(nll, x, labels, lse, -100)),
        ("memory", "clone", 2.0, lambda: aten.clone.default(x)),
        ("norm", "layer norm", 2.0,
         lambda: aten.native_layer_norm.default(x, [width], weight, weight, 1e-5)),
        ("transpose", "transpose", 2.0,
         lambda: aten.clone.default(x.t(), memory_format=torch.contiguous_format)),
    ]  # fmt: skip


def _measured_calls(x: Tensor, y: Tensor) -> list[_Call]:
    """What only curves are made of."""
    width = x.shape[1]
    weight = y[0].contiguous()
    _, mean, rstd = aten.native_layer_norm.default(x, [width], weight, weight, 1e-5)
    backward_norm = [mean, rstd, weight, weight, [True, True, True]]
    soft = aten._softmax.default(x, -1, False)
    gelu_tanh = {"approximate": "tanh"}
    # runs, as masks have: where it is random, a processor takes most of the time to guess wrong
    chosen_half = (torch.arange(width, device=x.device) < width // 2).repeat(x.shape[0], 1)
    return [
        ("pointwise", "add", 3.0, lambda: aten.add.Tensor(x, y)),
        ("pointwise", "mul", 3.0, lambda: aten.mul.Tensor(x, y)),
        ("pointwise", "relu", 2.0, lambda: aten.relu.default(x)),
        ("select", "where", 3.25, lambda: aten.where.self(chosen_half, x, y)),
        ("special", "sin", 2.0, lambda: aten.sin.default(x)),
        ("special", "erf", 2.0, lambda: aten.erf.default(x)),
        ("special_exp", "exp", 2.0, lambda: aten.exp.default(x)),
        ("special_exp", "log", 2.0, lambda: aten.log.default(x)),
        ("special_sigmoid", "silu", 2.0, lambda: aten.silu.default(x)),
        ("special_sigmoid", "silu backward", 3.0, lambda: aten.silu_backward.default(x, y)),
        ("special_gelu", "gelu backward", 3.0, lambda: aten.gelu_backward.default(x, y)),
        ("special_gelu_tanh", "gelu tanh", 2.0, lambda: aten.gelu.default(x, **gelu_tanh)),
        ("special_gelu_tanh_backward", "gelu tanh backward", 3.0,
         lambda: aten.gelu_backward.default(x, y, **gelu_tanh)),
        ("reduction", "sum rows", 1.0, lambda: aten.sum.dim_IntList(x, [1])),
        ("reduction_leading", "sum columns", 1.0, lambda: aten.sum.dim_IntList(x, [0])),
        ("softmax", "softmax", 2.0, lambda: aten._softmax.default(x, -1, False)),
        ("softmax_backward", "softmax backward", 3.0,
         lambda: aten._softmax_backward_data.default(x, soft, -1, x.dtype)),
        ("norm_backward", "layer norm backward", 3.0,
         lambda: aten.native_layer_norm_backward.default(y, x, [width], *backward_norm)),
    ]  # fmt: skip


def _held_out_calls(x: Tensor, y: Tensor) -> list[_Call]:
    """What curves are only checked on."""
    return [
        ("pointwise", "sub", 3.0, lambda: aten.sub.Tensor(x, y)),
        ("pointwise", "div", 3.0, lambda: aten.div.Tensor(x, y)),
        ("special_sigmoid", "sigmoid", 2.0, lambda: aten.sigmoid.default(x)),
        ("reduction", "mean rows", 1.0, lambda: aten.mean.dim(x, [1])),
        ("softmax", "log_softmax", 2.0, lambda: aten._log_softmax.default(x, -1, False)),
    ]


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(sum(math.log(v) for v in values) / len(values))
