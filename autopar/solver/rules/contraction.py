"""Dense contractions: the einsum equation is the rule.

Each is linear in either operand, so a Partial could pass through beside a replicated one. That row
is offered where it is what keeps the batch split: to the gradients of a product of parameters (a
weight of low rank, a weight that a network makes), which are contractions of a sum over the batch
with the other factor. `note_factors` finds those factors; elsewhere the row would only cost
planning time.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.core.einsum import parse_equation
from autopar.core.graph import TracedModel, dependents
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.labels import by_labels, linear_rows
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
)
_KEY = "factor"


def note_factors(traced: TracedModel) -> None:
    """Write into the meta of nodes that they are factors in a product of parameters.

    Args:
        traced: a traced step; done before it is copied, so that recomputed values have it too.
    """
    weighted = dependents(traced, "parameter")
    fed = dependents(traced, "input", "received", "seed", "tangent")
    factors = {
        _viewed(operand)
        for node in traced.graph.nodes
        if node.target in _CONTRACTIONS and node.name not in fed
        if all(operand.name in weighted for operand in node.all_input_nodes)
        for operand in node.all_input_nodes
    }
    for node in traced.graph.nodes if factors else ():
        if _viewed(node) in factors:
            node.meta[_KEY] = True


def _viewed(node: fx.Node) -> fx.Node:
    while node.target in _VIEWS:
        (node,) = node.all_input_nodes
    return node


@facts(*_CONTRACTIONS)
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
    return _contraction(call, "mk,kn->mn")


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
    return by_labels(call, [labels, "mk", "kn"], ["mn"])


@rule(aten.baddbmm.default)
def baddbmm_rule(call: OpCall) -> list[AxisStrategy]:
    shape, full = call.operands[0].shape, call.outputs[0].shape
    labels = [
        c if size == whole else None for c, size, whole in zip("bmn", shape, full, strict=True)
    ]
    return by_labels(call, [labels, "bmk", "bkn"], ["bmn"])
