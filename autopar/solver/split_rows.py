"""Seconds of norms and losses whose rows are split over ranks.

Where ranks have a part of each row, its statistics are sums over ranks, and the one kernel that a
norm or a loss is elsewhere becomes a row of ops (`codegen/lowerings/norm.py`, `loss.py`), each of
which reads and writes what a rank has. Fused kernels leave a few of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from autopar.core.placement import local_shape
from autopar.core.strategy import OpCall
from autopar.cost_model import DeviceProfile
from autopar.solver.local_work import LocalWork

if TYPE_CHECKING:
    from autopar.solver.candidates import Candidate

__all__ = ["row_seconds", "splits_rows"]

aten = torch.ops.aten
autopar = torch.ops.autopar

_VARIANTS = ("hidden", "vocab")
_WIDE = 4  # bytes of what is computed in, at least


class _Fused(NamedTuple):
    """Kernels that are left of these ops.

    Attributes:
        moved: parts that each of them reads and writes, in the dtype of the op's tensors.
        cast: the same where that dtype has two bytes, and what is in between has four.
        short: kernels on one number a row, or on a weight, without casts and with them.
        own: the op's own kernel is one of them.
    """

    moved: tuple[int, ...]
    cast: tuple[int, ...]
    short: tuple[int, int]
    own: bool = False


class _Ops(NamedTuple):
    """Ops on whole parts of rows.

    Attributes:
        moved: wide parts that pointwise ops read and write, one number for each op.
        exponentials: of a part.
        reductions: sums of rows, or their maxima.
        casts: from the dtype of the op's tensors to a wide one, or back.
        short: ops on one number a row, or on a weight, without casts and with them.
        fused: what fusion leaves of them.
    """

    moved: tuple[int, ...]
    reductions: int
    casts: int
    short: tuple[int, int]
    fused: _Fused
    exponentials: int = 0


_OPS = {
    aten.native_layer_norm.default: _Ops(
        (2, 2, 2, 2, 2), 2, 2, (5, 8), _Fused((1, 2, 2), (3, 4, 4, 3), (0, 2))
    ),
    aten._fused_rms_norm.default: _Ops((2, 2, 2), 1, 2, (3, 3), _Fused((1, 2), (3, 4, 3), (0, 1))),
    aten.native_layer_norm_backward.default: _Ops(
        (2, 2, 2, 3, 2, 2, 3, 2, 3), 4, 3, (2, 6), _Fused((5, 3, 1, 1), (8, 6, 5, 2, 2), (2, 5))
    ),
    aten._fused_rms_norm_backward.default: _Ops(
        (2, 2, 3, 2, 3, 2, 3), 2, 3, (1, 3), _Fused((5, 3, 1), (8, 6, 5, 2), (0, 2))
    ),
    autopar.token_nll.default: _Ops(
        (2,), 2, 1, (17, 17), _Fused((), (), (5, 5), own=True), exponentials=1
    ),
    autopar.token_nll_backward.default: _Ops(
        (2, 2, 2), 0, 2, (11, 12), _Fused((), (), (0, 0), own=True), exponentials=1
    ),
}


def splits_rows(call: OpCall, candidate: Candidate, mesh: tuple[int, ...]) -> bool:
    """True for a norm or a loss of whose rows ranks have parts."""
    if call.target not in _OPS:
        return False
    return any(v in _VARIANTS and n > 1 for v, n in zip(candidate.variants, mesh, strict=True))


def row_seconds(
    device: DeviceProfile,
    call: OpCall,
    candidate: Candidate,
    mesh: tuple[int, ...],
    *,
    dtype: str,
    own_s: float,
    fuses: bool,
) -> float:
    """Seconds of the local compute.

    Args:
        device: that runs it.
        call, candidate, mesh: as for `splits_rows`, which is True.
        dtype: that it computes in.
        own_s: seconds of the op's own kernel on what a rank has.
        fuses: elementwise ops that follow each other are one kernel.
    """
    # the largest operand has all rows
    given = zip(call.operands, candidate.inputs, strict=True)
    shapes = [local_shape(spec.shape, layout, mesh) for spec, layout in given]
    shape, spec = max(zip(shapes, call.operands, strict=True), key=lambda each: math.prod(each[0]))
    part = float(math.prod(shape) * spec.dtype.itemsize)
    wide = float(math.prod(shape) * max(_WIDE, spec.dtype.itemsize))
    ops, row = _OPS[call.target], wide / shape[-1]
    works = _kernels(ops.fused, part, wide, row) if fuses else _ops(ops, part, wide, row)
    return own_s * (fuses and ops.fused.own) + sum(w.seconds(device, dtype) for w in works)


def _kernels(fused: _Fused, part: float, wide: float, row: float) -> Iterator[LocalWork]:
    for parts in fused.cast if wide > part else fused.moved:
        yield LocalWork("pointwise", 1, parts * part)
    yield LocalWork("pointwise", fused.short[wide > part], 2 * row)


def _ops(ops: _Ops, part: float, wide: float, row: float) -> Iterator[LocalWork]:
    for parts in ops.moved:
        yield LocalWork("pointwise", 1, parts * wide)
    yield LocalWork("special_exp", ops.exponentials, 2 * wide)
    yield LocalWork("reduction", ops.reductions, wide)
    yield LocalWork("pointwise", ops.casts * (wide > part), wide + part)
    yield LocalWork("pointwise", ops.short[wide > part], 2 * row)
