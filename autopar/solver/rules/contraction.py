"""Dense contractions: the einsum equation is the rule."""

from __future__ import annotations

import torch

from autopar.core.einsum import parse_equation
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.labels import by_labels
from autopar.solver.rules.registry import rule

aten = torch.ops.aten


def _contraction(call: OpCall, equation: str) -> list[AxisStrategy]:
    eq = parse_equation(equation)
    return by_labels(call, [eq.a, eq.b], [eq.out], summed=eq.contracted)


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
