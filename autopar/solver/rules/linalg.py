"""Matrices by themselves: the last two dims whole, all before them a batch; vectors, distances."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.core.placement import Partial, Replicate, Shard
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.dims import one_dim
from autopar.solver.rules.labels import Labels, by_labels, linear_rows, replicated
from autopar.solver.rules.pointwise import broadcast_labels
from autopar.solver.rules.registry import rule

__all__ = ["MATRICES"]

aten = torch.ops.aten


_FACTORED = (
    aten.linalg_cholesky_ex.default,
    aten.linalg_inv_ex.default,
    aten.linalg_matrix_exp.default,
    aten._linalg_eigh.default,
    aten._linalg_svd.default,
    aten.linalg_qr.default,
    aten.linalg_lu_factor_ex.default,
)
# where the right-hand side stands among the operands
_SOLVES = {
    aten.linalg_lu_solve.default: 2,
    aten.linalg_solve_triangular.default: 1,
    aten._linalg_solve_ex.default: 1,
    aten.cholesky_solve.default: 0,
}
MATRICES = (*_FACTORED, *_SOLVES)


@rule(*_FACTORED)
def matrices_rule(call: OpCall) -> list[AxisStrategy]:
    """Each matrix by itself; operands that broadcast over a batch are left whole."""
    lead = call.operands[0].shape[:-2]
    batch: list[str | None] = [f"d{i}" for i in range(len(lead))]
    tensors = (*call.operands, *call.outputs)
    # pivots are whole numbers, one for each row
    same = all(len(s.shape) == len(lead) + 2 for s in call.operands if s.dtype != torch.int32)
    if not same or any(spec.shape[: len(lead)] != lead for spec in tensors):
        return [replicated(call)]
    names: list[list[str | None]] = [
        [*batch, *[None] * (len(spec.shape) - len(lead))] for spec in tensors
    ]
    count = len(call.operands)
    return by_labels(call, names[:count], names[count:])


@rule(*_SOLVES)
def solve_rule(call: OpCall) -> list[AxisStrategy]:
    """A⁻¹ B (or B A⁻¹): beside the batch, columns (rows) of B are apart; linear in B.

    Other outputs than the first are of A alone.
    """
    right = _SOLVES[call.target]
    if call.target is aten._linalg_solve_ex.default and _of_vectors(call):
        return _vectors_rule(call)
    sides = call.operands[right].shape, call.outputs[0].shape
    if sides[0] != sides[1] or len(sides[0]) < 2:
        return matrices_rule(call)
    columns = Shard(len(sides[0]) - (1 if call.kwargs.get("left", True) else 2))
    rows = matrices_rule(call)
    for placement in (columns, Partial()):
        inputs = [placement if i == right else Replicate() for i in range(len(call.operands))]
        others = [Replicate() for _ in call.outputs[1:]]
        rows.append(AxisStrategy(tuple(inputs), (placement, *others)))
    return rows


def _of_vectors(call: OpCall) -> bool:
    """True where the right-hand side has one vector for each matrix, as torch tells it."""
    matrix, right = (spec.shape for spec in call.operands)
    return len(right) == 1 or right == matrix[:-1]


def _vectors_rule(call: OpCall) -> list[AxisStrategy]:
    """A (…, n, n), b (…, n) -> x (…, n), and parts of A; linear in b."""
    matrix, right = (spec.shape for spec in call.operands)
    if right != matrix[:-1]:
        return [replicated(call)]
    batch: list[str | None] = [f"d{i}" for i in range(len(matrix) - 2)]
    names = [
        [*batch, *[None] * (len(spec.shape) - len(batch))]
        for spec in (*call.operands, *call.outputs)
    ]
    others = [Replicate() for _ in call.outputs[1:]]
    linear = AxisStrategy((Replicate(), Partial()), (Partial(), *others))
    return [*by_labels(call, names[:2], names[2:]), linear]


@rule(aten.linalg_cross.default)
def cross_rule(call: OpCall) -> list[AxisStrategy]:
    """Vectors along one dim, which is whole; linear in either of them."""
    crossed = f"d{one_dim(call.kwargs.get('dim', -1), len(call.outputs[0].shape))}"
    inputs, outputs = (
        [[None if name == crossed else name for name in names] for names in labels]
        for labels in broadcast_labels(call)
    )
    return by_labels(call, inputs, outputs) + linear_rows(call, [(0,), (1,)])


def _points(shape: Sequence[int], table: Sequence[int], name: str) -> Labels:
    """Labels of points (…, P, F) whose leading dims broadcast to those of a table (…, P, R)."""
    lead, given = table[:-2], shape[:-2]
    behind = range(len(lead) - len(given), len(lead))
    names = [f"d{i}" if size == lead[i] else None for i, size in zip(behind, given, strict=True)]
    return [*names, name, None]


@rule(aten._cdist_forward.default, aten._euclidean_dist.default)
def distances_rule(call: OpCall) -> list[AxisStrategy]:
    """x (…, P, F), y (…, R, F) -> (…, P, R); leading dims broadcast."""
    (x, y), (table,) = call.operands, call.outputs
    lead = [f"d{i}" for i in range(len(table.shape) - 2)]
    points = [_points(s.shape, table.shape, name) for s, name in ((x, "p"), (y, "r"))]
    return by_labels(call, points, [[*lead, "p", "r"]])


@rule(aten._cdist_backward.default)
def distances_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(dy (…, P, R), x, y, distances) -> dx, a sum over R, with all leading dims; linear in dy."""
    shape = call.operands[0].shape
    lead = [f"d{i}" for i in range(len(shape) - 2)]
    table: Labels = [*lead, "p", "r"]
    x, y = (_points(call.operands[i].shape, shape, name) for i, name in ((1, "p"), (2, "r")))
    rows = by_labels(call, [table, x, y, table], [[*lead, "p", None]], summed=["r"])
    return rows + linear_rows(call, [(0,)])
