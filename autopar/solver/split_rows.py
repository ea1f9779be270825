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


class _Ops(NamedTuple):
    """Ops on whole parts of rows.

    Attributes:
        moved: wide parts that pointwise ops read and write, one number for each op.
        exponentials: of a part.
        reductions: sums of rows, or their maxima.
        casts: from the dtype of the op's tensors to a wide one, or back.
        short: ops on one number a row, or of a weight; and how many more where something is cast.
        fused: what each kernel reads and writes in place of all of these: parts, and wide ones;
            None where the op's own price holds.
    """

    moved: tuple[int, ...]
    reductions: int
    casts: int
    short: tuple[int, int]
    fused: tuple[tuple[int, int], ...] | None
    exponentials: int = 0


_OPS = {
    aten.native_layer_norm.default: _Ops(
        (2, 2, 2, 2, 2), 2, 2, (5, 3), ((1, 1), (0, 2), (0, 2), (1, 1))
    ),
    aten._fused_rms_norm.default: _Ops((2, 2, 2), 1, 2, (3, 0), ((1, 1), (1, 1))),
    aten.native_layer_norm_backward.default: _Ops(
        (2, 2, 2, 3, 2, 2, 3, 2, 3), 4, 3, (2, 4), ((2, 3), (0, 3), (1, 2), (0, 1), (0, 1))
    ),
    aten._fused_rms_norm_backward.default: _Ops(
        (2, 2, 3, 2, 3, 2, 3), 2, 3, (1, 2), ((2, 3), (0, 3), (1, 2), (0, 1))
    ),
    autopar.token_nll.default: _Ops((2,), 2, 1, (17, 0), None, exponentials=1),
    autopar.token_nll_backward.default: _Ops((2, 2, 2), 0, 2, (11, 1), None, exponentials=1),
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
    fuses: bool,
) -> float | None:
    """Seconds of the local compute; None where the op's own price holds.

    Arguments as of `key_blocks.block_seconds`.
    """
    ops = _OPS[call.target]
    if fuses and ops.fused is None:
        return None
    return sum(w.seconds(device, dtype) for w in _works(ops, call, candidate, mesh, fuses))


def _works(
    ops: _Ops, call: OpCall, candidate: Candidate, mesh: tuple[int, ...], fuses: bool
) -> Iterator[LocalWork]:
    # the largest operand has all rows
    sizes = [
        (math.prod(local_shape(spec.shape, layout, mesh)), spec)
        for spec, layout in zip(call.operands, candidate.inputs, strict=True)
    ]
    count, spec = max(sizes, key=lambda size: size[0])
    part = float(count * spec.dtype.itemsize)
    wide = float(count * max(_WIDE, spec.dtype.itemsize))
    rows = wide / local_shape(spec.shape, candidate.inputs[call.operands.index(spec)], mesh)[-1]
    if fuses and ops.fused is not None:
        for parts, wide_parts in ops.fused:
            yield LocalWork("pointwise", 1, parts * part + wide_parts * wide)
        return
    for parts in ops.moved:
        yield LocalWork("pointwise", 1, parts * wide)
    yield LocalWork("special_exp", ops.exponentials, 2 * wide)
    yield LocalWork("reduction", ops.reductions, wide)
    casts = int(wide > part)
    yield LocalWork("pointwise", ops.casts * casts, wide + part)
    yield LocalWork("pointwise", ops.short[0] + ops.short[1] * casts, 2 * rows)
