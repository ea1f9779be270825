"""The ops that a device is measured with: per class, shapes over a range of work.

Several ops stand for a class. They are the calls that emitted programs make, autopar's own ops
included, so that the host's share of each is in what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.core import ops as _ops  # noqa: F401  (registers the autopar ops)
from autopar.core.recurrent import CELLS, RECURRENT, RECURRENT_BACKWARD
from autopar.core.work import conv_variant
from autopar.cost_model.byte_probes import byte_probes, update_probe
from autopar.cost_model.probe import Probe, normal, size_of

__all__ = [
    "attention_probes",
    "batched_probes",
    "convolution_probes",
    "geometric_mean",
    "held_out_probes",
    "matmul_probes",
    "probes",
    "recurrent_probes",
]

aten = torch.ops.aten
autopar_ops = torch.ops.autopar

_COLUMNS = 512
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


def matmul_probes(
    device: str, dtype: str, group: int, shapes: Sequence[tuple[int, ...]]
) -> Iterator[Probe]:
    """A linear layer and the gradients of its input and weight."""
    for rows, out, inner in shapes:
        x, w, g = (normal(device, dtype, *s) for s in ((rows, inner), (out, inner), (rows, out)))
        for equation, a, b in (("mk,nk->mn", x, w), ("mn,nk->mk", g, w), ("mn,mk->nk", g, x)):

            def run(equation: str = equation, a: Tensor = a, b: Tensor = b) -> Tensor:
                return autopar_ops.einsum.default(equation, a, b)

            yield Probe(
                "matmul", dtype, "flops", group, 2.0 * rows * out * inner, size_of(x, w, g), run,
                f"{equation} {rows}x{out}x{inner}",
            )  # fmt: skip


def attention_probes(
    device: str, dtype: str, group: int, shape: tuple[int, ...], *, masked: bool = False
) -> Iterator[Probe]:
    """Attention of `shape` (batch, heads, sequence, head dim), causal or not, forward and backward.

    With `masked` under a mask per batch and head, too.
    """
    batch, heads, length, dim = shape
    q, k, v, grad = (normal(device, dtype, *shape) for _ in range(4))
    scale = dim**-0.5
    kinds: list[tuple[str, bool, Tensor | None]] = [("", False, None), ("_causal", True, None)]
    if masked:
        kinds.append(("_masked", False, normal(device, dtype, batch, heads, length, length)))
    for suffix, causal, mask in kinds:
        flops = 4.0 * batch * heads * length * length * dim * (0.5 if causal else 1.0)
        out, lse = autopar_ops.attention.default(q, k, v, mask, causal, scale)
        held = size_of(mask) if mask is not None else 0
        tail = (mask, causal, scale)

        def forward(tail: tuple[Any, ...] = tail) -> object:
            return autopar_ops.attention.default(q, k, v, *tail)

        def backward(tail: tuple[Any, ...] = tail, out: Tensor = out, lse: Tensor = lse) -> object:
            mask, *flags = tail
            return autopar_ops.attention_backward.default(grad, q, k, v, mask, out, lse, *flags)

        where = f"{'x'.join(map(str, shape))}{suffix.replace('_', ' ')}"
        yield Probe(
            f"attention{suffix}", dtype, "flops", group, flops, 4 * size_of(q) + held, forward,
            f"attention {where}",
        )  # fmt: skip
        yield Probe(
            f"attention_backward{suffix}", dtype, "flops", group, 2.5 * flops,
            8 * size_of(q) + held, backward, f"attention backward {where}",
        )  # fmt: skip


def batched_probes(device: str, dtype: str, group: int, shape: tuple[int, ...]) -> Iterator[Probe]:
    """The products of attention that is written out, on heads as a linear layer leaves them."""
    batch, heads, length, dim = shape
    q, k = (normal(device, dtype, batch, length, heads, dim).transpose(1, 2) for _ in range(2))
    scores = normal(device, dtype, batch, heads, length, length)
    flops = 2.0 * batch * heads * length * length * dim
    moved = size_of(q, k, scores)
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
    x = normal(device, dtype, batch, channels, side, side)
    w = normal(device, dtype, out_channels, channels // groups, kernel, kernel)
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
        f"conv{kind}", dtype, "flops", group, flops, size_of(x, w, y), forward, f"conv {where}"
    )
    yield Probe(
        f"conv_backward{kind}", dtype, "flops", group, 2 * flops, 2 * size_of(x, w, y), backward,
        f"conv backward {where}",
    )  # fmt: skip


def recurrent_probes(
    device: str, dtype: str, group: int, batch: int, width: int
) -> Iterator[Probe]:
    """A layer of an LSTM and one of a GRU, and their gradients."""
    for cell in ("lstm", "gru"):
        rows = CELLS[cell] * width
        x = normal(device, dtype, _STEPS, batch, width)
        h, c = (normal(device, dtype, batch, width) for _ in range(2))
        weights = [normal(device, dtype, rows, width) / math.sqrt(width) for _ in range(2)]
        biases = [normal(device, dtype, rows) for _ in range(2)]
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
        moved = size_of(*tensors, out, h, last)
        where = f"{cell} {_STEPS}x{batch}x{width}"
        kind = "recurrent" + ("_lstm" if cell == "lstm" else "")
        for passes, run, more, suffix in (
            (1, forward, 0, ""),
            (3, backward, size_of(out, h, last), "backward"),
        ):
            steps = passes * _STEPS
            each = (moved + more + (steps - 1) * size_of(weights[1])) // steps
            op_class = f"{kind}_{suffix}".rstrip("_")
            name = f"{where} {suffix}".rstrip()
            yield Probe(op_class, dtype, "flops", group, flops, each, run, name, steps)


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(sum(math.log(v) for v in values) / len(values))
