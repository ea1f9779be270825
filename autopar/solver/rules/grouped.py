"""Grouped matmul: rows sorted by group, each times the matrix of its group (mixture of experts).

``y[s] = x[s] W[g(s)]`` with ``x (S, K)``, ``W (G, K, N)``, and ``offs (G,)`` the row behind the
last of each group. A shard of N shards y, a shard of K leaves a partial sum. With the variant
"expert" a rank holds some of the groups, and yields 0 for the rows of the others: also a partial
sum (expert parallelism with gathered tokens; Lepikhin et al. 2020, arXiv 2006.16668, send them).
"""

from __future__ import annotations

import torch

from autopar.core.placement import Partial, Replicate, Shard
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.labels import by_labels, linear_rows, replicated
from autopar.solver.rules.registry import rule


@rule("transformers.grouped_mm_fallback.default")
def grouped_mm_rule(call: OpCall) -> list[AxisStrategy]:
    """(x, W, offs) -> y."""
    rows = by_labels(call, [[None, "k"], [None, "k", "n"], [None]], [[None, "n"]], summed="k")
    inputs = (Replicate(), Shard(0), Replicate())
    rows.append(AxisStrategy(inputs, (Partial(),), "expert", copied=(0, ~0)))
    return rows + linear_rows(call, [(0,), (1,)])


@rule("transformers.grouped_mm_fallback_backward.default")
def grouped_mm_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(x, W, offs, dy) -> (dx, dW); dx is linear in (W, dy), dW in (x, dy)."""
    inputs: list[list[str | None]] = [[None, "k"], [None, "k", "n"], [None], [None, "n"]]
    rows = by_labels(call, inputs, [[None, "k"], [None, "k", "n"]], summed="n")
    whole = Replicate()
    placed, made = (whole, Shard(0), whole, whole), (Partial(), Shard(0))
    rows.append(AxisStrategy(placed, made, "expert", copied=(0, 3, ~0)))
    return rows + linear_rows(call, [(3,)])


_ALIGNMENT = 128  # bytes: the kernel wants 16, also where several axes split a dim


@rule(torch.ops.aten._grouped_mm.default)
def native_grouped_mm_rule(call: OpCall) -> list[AxisStrategy]:
    """torch's own: (x (S, K), W (G, K, N), offs) -> y (S, N), or (a (K, S), b (S, N), offs) ->
    (G, K, N), the gradient of W, whose groups are blocks of S."""
    if len(call.operands) != 3 or len(call.operands[0].shape) != 2:
        return [replicated(call)]
    whole = Replicate()
    if len(call.operands[1].shape) == 3:
        rows = by_labels(call, [[None, "k"], [None, "k", "n"], [None]], [[None, "n"]], summed="k")
        placed = (whole, Shard(0), whole)
        # rows of other groups are set to 0 before these are rolled back
        rows.append(AxisStrategy(placed, (Partial(),), "expert", copied=(0, ~0, ~0)))
    else:
        rows = by_labels(call, [["k", None], [None, "n"], [None]], [[None, "k", "n"]])
        placed = (whole, whole, whole)
        rows.append(AxisStrategy(placed, (Shard(0),), "expert", copied=(0, 1)))
    return [row for row in rows if _is_aligned(call, row)]


def _is_aligned(call: OpCall, row: AxisStrategy) -> bool:
    pairs = zip((*row.inputs, *row.outputs), (*call.operands, *call.outputs), strict=True)
    return all(
        not placement.is_shard
        or (placement.dim == 0 and len(spec.shape) == 3)
        or spec.shape[placement.dim] // call.axis_size * spec.dtype.itemsize % _ALIGNMENT == 0
        for placement, spec in pairs
    )
