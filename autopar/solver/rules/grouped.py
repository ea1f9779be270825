"""Grouped matmul: rows sorted by group, each times the matrix of its group (mixture of experts).

``y[s] = x[s] W[g(s)]`` with ``x (S, K)``, ``W (G, K, N)``, and ``offs (G,)`` the row behind the
last of each group. A shard of N shards y, a shard of K leaves a partial sum. With the variant
"expert" a rank holds some of the groups, and yields 0 for the rows of the others: also a partial
sum (expert parallelism with gathered tokens; Lepikhin et al. 2020, arXiv 2006.16668, send them).
"""

from __future__ import annotations

from autopar.core.placement import Partial, Replicate, Shard
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.labels import by_labels, linear_rows
from autopar.solver.rules.registry import rule


@rule("transformers.grouped_mm_fallback.default")
def grouped_mm_rule(call: OpCall) -> list[AxisStrategy]:
    """(x, W, offs) -> y."""
    rows = by_labels(call, [[None, "k"], [None, "k", "n"], [None]], [[None, "n"]], summed="k")
    rows.append(AxisStrategy((Replicate(), Shard(0), Replicate()), (Partial(),), "expert"))
    return rows + linear_rows(call, [(0,), (1,)])


@rule("transformers.grouped_mm_fallback_backward.default")
def grouped_mm_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(x, W, offs, dy) -> (dx, dW); dx is linear in (W, dy), dW in (x, dy)."""
    inputs: list[list[str | None]] = [[None, "k"], [None, "k", "n"], [None], [None, "n"]]
    rows = by_labels(call, inputs, [[None, "k"], [None, "k", "n"]], summed="n")
    whole = Replicate()
    rows.append(AxisStrategy((whole, Shard(0), whole, whole), (Partial(), Shard(0)), "expert"))
    return rows + linear_rows(call, [(3,)])
