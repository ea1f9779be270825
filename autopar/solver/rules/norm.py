"""Normalisation: leading dims shard freely; the normalised dim too, at the price of its statistics.

Layer norm is y = (x − μ) / √(σ² + ε) · w + b (Ba et al. 2016, arXiv 1607.06450), RMS norm is
y = x / √(mean(x²) + ε) · w (Zhang and Sennrich 2019, arXiv 1910.07467). The variant "hidden"
shards the normalised dim and all-reduces Σx and then Σ(x − μ)², one number per row each.
Group norm (Wu and He 2018, arXiv 1803.08494) shards whole groups of channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.core.placement import Partial, Placement, Replicate, Shard
from autopar.core.strategy import AxisStrategy, Communication, OpCall
from autopar.solver.rules.labels import replicated
from autopar.solver.rules.registry import rule

aten = torch.ops.aten


def _where_kept(mask: Sequence[bool], placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Placements of the outputs; one that `output_mask` leaves out is an empty constant."""
    return tuple(p if keep else Replicate() for p, keep in zip(placements, mask, strict=True))


def _stats_comm(call: OpCall, stats: int, times: Sequence[float]) -> tuple[Communication, ...]:
    """All-reduces of buffers `times` as long as tensor `stats`, in at least float32."""
    spec = call.operands[stats] if stats >= 0 else call.outputs[~stats]
    width = max(4, spec.dtype.itemsize, call.operands[0].dtype.itemsize) / spec.dtype.itemsize
    return tuple(Communication("all_reduce", stats, width * count) for count in times)


def _forward(
    call: OpCall, normalized: int, num_stats: int, sums: Sequence[float]
) -> list[AxisStrategy]:
    """Rows of (x, *parameters) -> (y, *stats); `sums` sizes the all-reduces of "hidden"."""
    rank, parameters = len(call.operands[0].shape), len(call.operands) - 1
    rows = [replicated(call)]
    for dim in range(rank - normalized):
        shard = Shard(dim)
        rows.append(
            AxisStrategy((shard, *[Replicate()] * parameters), (shard, *[shard] * num_stats))
        )
    if normalized == 1:
        last = Shard(rank - 1)
        rows.append(
            AxisStrategy(
                (last, *[Shard(0)] * parameters),
                (last, *[Replicate()] * num_stats),
                "hidden",
                _stats_comm(call, ~1, sums),
            )
        )
    return rows


def _backward(
    call: OpCall, normalized: int, num_stats: int, mask: Sequence[bool], total: float
) -> list[AxisStrategy]:
    """Rows of (dy, x, *stats, *parameters) -> (dx, *d parameters)."""
    rank, grads = len(call.operands[0].shape), len(call.outputs) - 1
    parameters = len(call.operands) - 2 - num_stats
    rows = [replicated(call)]
    for dim in range(rank - normalized):
        shard = Shard(dim)
        inputs = (*[shard] * (2 + num_stats), *[Replicate()] * parameters)
        rows.append(AxisStrategy(inputs, _where_kept(mask, (shard, *[Partial()] * grads))))
    linear = (Partial(), *[Replicate()] * (len(call.operands) - 1))
    rows.append(AxisStrategy(linear, _where_kept(mask, [Partial()] * (grads + 1))))
    if normalized == 1:
        last = Shard(rank - 1)
        rows.append(
            AxisStrategy(
                (last, last, *[Replicate()] * num_stats, *[Shard(0)] * parameters),
                _where_kept(mask, (last, *[Shard(0)] * grads)),
                "hidden",
                _stats_comm(call, 2, (total,)) if mask[0] else (),
            )
        )
    return rows


@rule(aten.native_layer_norm.default)
def layer_norm_rule(call: OpCall) -> list[AxisStrategy]:
    return _forward(call, len(call.args[1]), 2, (1, 1))


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward_rule(call: OpCall) -> list[AxisStrategy]:
    return _backward(call, len(call.args[2]), 2, call.args[7], 2)


@rule(aten._fused_rms_norm.default)
def rms_norm_rule(call: OpCall) -> list[AxisStrategy]:
    return _forward(call, len(call.args[1]), 1, (1,))


@rule(aten._fused_rms_norm_backward.default)
def rms_norm_backward_rule(call: OpCall) -> list[AxisStrategy]:
    return _backward(call, len(call.args[2]), 1, call.args[5], 1)


@rule(aten.native_group_norm.default)
def group_norm_rule(call: OpCall) -> list[AxisStrategy]:
    """(x, w?, b?) -> (y, mean, rstd), the stats of shape (N, groups): an even shard of them is
    one of whole groups."""
    batch, channel = Shard(0), Shard(1)
    parameters = len(call.operands) - 1
    return [
        replicated(call),
        AxisStrategy((batch, *[Replicate()] * parameters), (batch, batch, batch)),
        AxisStrategy((channel, *[Shard(0)] * parameters), (channel, channel, channel)),
    ]


@rule(aten.native_group_norm_backward.default)
def group_norm_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(dy, x, mean, rstd, w?) -> (dx, dw, db)."""
    batch, channel, mask = Shard(0), Shard(1), call.args[9]
    parameters = len(call.operands) - 4
    return [
        replicated(call),
        AxisStrategy(
            (*[batch] * 4, *[Replicate()] * parameters),
            _where_kept(mask, (batch, Partial(), Partial())),
        ),
        AxisStrategy(
            (*[channel] * 4, *[Shard(0)] * parameters),
            _where_kept(mask, (channel, Shard(0), Shard(0))),
        ),
        AxisStrategy(
            (Partial(), *[Replicate()] * (3 + parameters)), _where_kept(mask, [Partial()] * 3)
        ),
    ]
