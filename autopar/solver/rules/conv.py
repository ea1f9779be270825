"""Convolution, pooling, resampling and padding: batch and channels shard, space does not.

A convolution is a contraction over the input channels: ``n c …, o c … -> n o …``. Grouped, it
splits by whole groups (variant "groups").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.core.placement import Partial, Placement, Replicate, Shard
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.labels import by_labels, linear_rows, replicated
from autopar.solver.rules.registry import combination, rule

aten = torch.ops.aten
_R = Replicate()


def _where_kept(mask: Sequence[bool], placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Placements of the outputs; one that `output_mask` leaves out is an empty constant."""
    return tuple(p if keep else _R for p, keep in zip(placements, mask, strict=True))


def _groups(call: OpCall) -> int:
    return int(call.args[9 if call.target is aten.convolution_backward.default else 8])


@combination(aten.convolution.default, aten.convolution_backward.default)
def whole_groups(call: OpCall, rows: Sequence[AxisStrategy], mesh: Sequence[int]) -> bool:
    """Axes that split the channels divide the number of groups, so that none is cut."""
    split = zip(rows, mesh, strict=True)
    return _groups(call) % math.prod(size for row, size in split if row.variant == "groups") == 0


@rule(aten.convolution.default)
def convolution_rule(call: OpCall) -> list[AxisStrategy]:
    """(x, w, b?) -> y; w is (out, in / groups, …), or (in, out / groups, …) if transposed.

    Each summand over the input channels takes a share of the bias (variant "share").
    """
    transposed, groups = bool(call.args[6]), _groups(call)
    bias = len(call.operands) - 2
    out_dim, in_dim = (Shard(1), Shard(0)) if transposed else (Shard(0), Shard(1))
    rows = [
        replicated(call),
        AxisStrategy((Shard(0), _R, *[_R] * bias), (Shard(0),)),
    ]
    if groups == 1:
        rows.append(AxisStrategy((_R, out_dim, *[Shard(0)] * bias), (Shard(1),)))
        variant = "share" if bias else ""
        rows.append(AxisStrategy((Shard(1), in_dim, *[_R] * bias), (Partial(),), variant))
    elif groups % call.axis_size == 0:
        rows.append(AxisStrategy((Shard(1), Shard(0), *[Shard(0)] * bias), (Shard(1),), "groups"))
    return rows if bias else rows + linear_rows(call, [(0,), (1,)])


@rule(aten.convolution_backward.default)
def convolution_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(dy, x, w) -> (dx, dw, db)."""
    transposed, groups, mask = bool(call.args[7]), _groups(call), call.args[10]
    out_dim, in_dim = (Shard(1), Shard(0)) if transposed else (Shard(0), Shard(1))

    def row(
        inputs: tuple[Placement, ...], outputs: tuple[Placement, ...], variant: str = ""
    ) -> AxisStrategy:
        return AxisStrategy(inputs, _where_kept(mask, outputs), variant)

    sum_ = Partial()
    rows = [replicated(call), row((Shard(0), Shard(0), _R), (Shard(0), sum_, sum_))]
    if groups == 1:
        rows.append(row((Shard(1), _R, out_dim), (sum_, out_dim, Shard(0))))
        rows.append(row((_R, Shard(1), in_dim), (Shard(1), in_dim, _R)))
    elif groups % call.axis_size == 0:
        inputs = (Shard(1), Shard(1), Shard(0))
        rows.append(row(inputs, (Shard(1), Shard(0), Shard(0)), "groups"))
    rows.append(row((sum_, _R, _R), (sum_, sum_, sum_)))
    return rows


def _overloads(names: str) -> list[Any]:
    """The ops that this torch has, of `name` or `name.overload` separated by blanks."""
    found = []
    for name in names.split():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        if op is not None:
            found.append(op)
    return found


def _space(call: OpCall) -> int:
    """Number of spatial dims, from the op's name (`…2d…`)."""
    name = str(call.target)
    return next(int(d) for d in "123" if f"{d}d" in name)


def _leading(call: OpCall) -> list[AxisStrategy]:
    """Batch and channels sharded in every operand and output, the spatial dims whole."""
    space = _space(call)

    def labels(shape: tuple[int, ...]) -> list[str | None]:
        lead = len(shape) - space
        return [f"d{i}" if i < lead else None for i in range(len(shape))]

    return by_labels(
        call, [labels(s.shape) for s in call.operands], [labels(s.shape) for s in call.outputs]
    )


_UPSAMPLE = [
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_trilinear3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
]
_PADS = [
    f"{kind}_pad{dims}d{suffix}"
    for kind in ("reflection", "replication")
    for dims in (1, 2, 3)
    for suffix in ("", "_backward")
]
_SELECTING = (
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d"
)
_LINEAR = (
    "avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d",
    " ".join(_UPSAMPLE),
    " ".join(f"{name}.vec" for name in _UPSAMPLE),
    " ".join(f"{name}_backward" for name in _UPSAMPLE),
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
    "adaptive_max_pool2d_backward adaptive_max_pool3d_backward",
    "avg_pool2d_backward avg_pool3d_backward",
    "max_unpool2d max_unpool3d",
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward",
    " ".join(_PADS),
)


@rule(*_overloads(_SELECTING))
def max_pool_rule(call: OpCall) -> list[AxisStrategy]:
    """An index of a maximum counts inside its own channel."""
    return _leading(call)


@rule(*_overloads(" ".join(_LINEAR)))
def resample_rule(call: OpCall) -> list[AxisStrategy]:
    """Each channel by itself, and linear in the first operand."""
    return _leading(call) + linear_rows(call, [(0,)])


@rule(*_overloads("col2im"))
def col2im_rule(call: OpCall) -> list[AxisStrategy]:
    """(…, C k², L) -> (…, C, H, W): a run of channels stays one."""
    lead: list[str | None] = [f"d{i}" for i in range(len(call.operands[0].shape) - 1)]
    return by_labels(call, [[*lead, None]], [[*lead, None, None]]) + linear_rows(call, [(0,)])


@rule(*_overloads("pixel_shuffle pixel_unshuffle channel_shuffle"))
def pixel_shuffle_rule(call: OpCall) -> list[AxisStrategy]:
    """(…, C r², H, W) <-> (…, C, H r, W r): a shard of C is a run of channels on both sides."""
    lead = len(call.operands[0].shape) - 2
    dims: list[str | None] = [f"d{i}" for i in range(lead)]
    if call.target not in _overloads("pixel_shuffle pixel_unshuffle"):
        dims[-1] = None
    labels = [*dims, None, None]
    return by_labels(call, [labels], [labels]) + linear_rows(call, [(0,)])


@rule(*_overloads("grid_sampler_2d grid_sampler_3d"))
def grid_sampler_rule(call: OpCall) -> list[AxisStrategy]:
    """(x, grid) -> y; the grid holds places in space, one set per sample."""
    return [
        replicated(call),
        AxisStrategy((Shard(0), Shard(0)), (Shard(0),)),
        AxisStrategy((Shard(1), _R), (Shard(1),)),
        *linear_rows(call, [(0,)]),
    ]


@rule(*_overloads("grid_sampler_2d_backward grid_sampler_3d_backward"))
def grid_sampler_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(dy, x, grid) -> (dx, d grid); dx is None where `output_mask` says so."""
    mask = (call.args[6][0], True)
    batch, channel, sum_ = Shard(0), Shard(1), Partial()
    return [
        replicated(call),
        AxisStrategy((batch, batch, batch), _where_kept(mask, (batch, batch))),
        AxisStrategy((channel, channel, _R), _where_kept(mask, (channel, sum_))),
        AxisStrategy((sum_, _R, _R), _where_kept(mask, (sum_, sum_))),
    ]
