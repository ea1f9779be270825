"""Dense contractions: the einsum equation is the rule.

Each is linear in either operand, so a Partial could pass through beside a replicated one. That row
is offered where it is what keeps the batch split: to the gradients of a product of parameters, or
of one with a constant (a weight of low rank, a weight or a filter that a network makes), which are
contractions of a sum over the batch with the other factor; and to those of inverses and
decompositions of parameters. `note_factors` finds those factors; elsewhere the row would only cost
planning time.
"""

from __future__ import annotations

import itertools
import operator

import torch
from torch import fx

from autopar.core.einsum import parse_equation
from autopar.core.graph import TracedModel, dependents
from autopar.core.placement import Partial, Replicate, Shard
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.dims import runs_of
from autopar.solver.rules.labels import by_labels, linear_rows
from autopar.solver.rules.linalg import MATRICES
from autopar.solver.rules.registry import facts, rule

__all__ = ["note_factors"]

aten = torch.ops.aten


_CONTRACTIONS = (torch.ops.autopar.einsum.default, aten.mm.default, aten.bmm.default)
_VIEWS = (
    aten.alias.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten._conj.default,
    operator.getitem,
)
_KEY = "factor"


def note_factors(traced: TracedModel) -> None:
    """Write into the meta of nodes that they are factors beside parameters in a product.

    Args:
        traced: a traced step; done before it is copied, so that recomputed values have it too.
    """
    weighted = dependents(traced, "parameter")
    fed = dependents(traced, "input", "received", "seed", "tangent")
    alone = [n for n in traced.graph.nodes if n.name in weighted and n.name not in fed]
    factors: set[fx.Node] = set()
    for node in alone:
        operands = node.all_input_nodes
        if node.target in MATRICES:
            factors.update((node, *map(_viewed, operands)))
        elif node.target in _CONTRACTIONS:
            beside = [[o for o in operands if o is not x] or [x] for x in operands]
            reached = [any(o.name in weighted for o in others) for others in beside]
            factors.update(map(_viewed, itertools.compress(operands, reached)))
    for node in traced.graph.nodes if factors else ():
        if _viewed(node) in factors:
            node.meta[_KEY] = True


def _viewed(node: fx.Node) -> fx.Node:
    while node.target in _VIEWS:
        (node,) = node.all_input_nodes
    return node


@facts(*_CONTRACTIONS, aten.addmm.default)
def _facts(call: OpCall) -> tuple[tuple[int, ...], tuple[tuple[int, bool], ...]]:
    """What factors and joined rows are known by."""
    flat = call.target in (aten.mm.default, aten.addmm.default)
    runs = tuple((runs_of(node), node.target is aten.t.default) for node in call.nodes if flat)
    return _factors(call), runs


def _factors(call: OpCall) -> tuple[int, ...]:
    """Operands that are factors in a product of parameters."""
    return tuple(i for i, node in enumerate(call.nodes) if _KEY in node.meta)


def _contraction(call: OpCall, equation: str) -> list[AxisStrategy]:
    eq = parse_equation(equation)
    rows = by_labels(call, [eq.a, eq.b], [eq.out], summed=eq.contracted)
    factors = _factors(call)
    return rows + linear_rows(call, [(1 - factors[0],)] if len(factors) == 1 else [])


@rule(torch.ops.autopar.einsum.default)
def einsum_rule(call: OpCall) -> list[AxisStrategy]:
    return _contraction(call, call.args[0])


@rule(aten.mm.default)
def mm_rule(call: OpCall) -> list[AxisStrategy]:
    """Rows that were (sequence, batch), as in a recurrent layer, may be split by batch."""
    rows = _contraction(call, "mk,kn->mn")
    left, right = (runs_of(node) for node in call.nodes)
    if left > 1 and call.nodes[0].target is not aten.t.default:
        rows.append(AxisStrategy((Shard(0, left), Replicate()), (Shard(0, left),)))
    elif left > 1 and left == right and call.nodes[1].target is not aten.t.default:
        rows.append(AxisStrategy((Shard(1, left), Shard(0, left)), (Partial(),)))
    return rows


@rule(aten.bmm.default)
def bmm_rule(call: OpCall) -> list[AxisStrategy]:
    return _contraction(call, "bmk,bkn->bmn")


@rule(aten.mv.default)
def mv_rule(call: OpCall) -> list[AxisStrategy]:
    return by_labels(call, ["mk", "k"], ["m"], summed="k")


@rule(aten.dot.default)
def dot_rule(call: OpCall) -> list[AxisStrategy]:
    return by_labels(call, ["k", "k"], [""], summed="k")


@rule(aten.addmm.default)
def addmm_rule(call: OpCall) -> list[AxisStrategy]:
    """The bias joins one summand only, so the contracted dim is left to einsum plus add."""
    bias = "mn"[2 - len(call.operands[0].shape) :]
    shape = call.outputs[0].shape[2 - len(bias) :]
    labels = [
        c if size == full else None
        for c, size, full in zip(bias, call.operands[0].shape, shape, strict=True)
    ]
    rows = by_labels(call, [labels, "mk", "kn"], ["mn"])
    runs = runs_of(call.nodes[1])
    if runs > 1 and len(bias) == 1 and call.nodes[1].target is not aten.t.default:
        split = Shard(0, runs)
        rows.append(AxisStrategy((Replicate(), split, Replicate()), (split,)))
    return rows


@rule(aten.baddbmm.default)
def baddbmm_rule(call: OpCall) -> list[AxisStrategy]:
    shape, full = call.operands[0].shape, call.outputs[0].shape
    labels = [
        c if size == whole else None for c, size, whole in zip("bmn", shape, full, strict=True)
    ]
    return by_labels(call, [labels, "bmk", "bkn"], ["bmn"])
