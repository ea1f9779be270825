"""Ops that write their result over an operand that nothing reads afterwards.

    y = f(x, …), x read by f alone    →    f writes to x

saves one tensor to allocate. It is done last, on a part of a program that is to be run: the joint
graph stays free of writes. Only results of ops that are known to make a tensor of their own are
written to, so what comes from a caller, or is a view of it, is left as it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from autopar.core.work import is_fresh_call

__all__ = ["is_fresh", "write_over_operands"]

aten = torch.ops.aten

# op -> its form that writes to the first operand, and whether it may be the second's turn
_FORMS: dict[Any, tuple[Any, bool]] = {
    aten.add.Tensor: (aten.add_.Tensor, True),
    aten.mul.Tensor: (aten.mul_.Tensor, True),
    aten.sub.Tensor: (aten.sub_.Tensor, False),
    aten.div.Tensor: (aten.div_.Tensor, False),
    aten.neg.default: (aten.neg_.default, False),
}
_WRITING = {form for form, _ in _FORMS.values()}  # to what was fresh itself


def write_over_operands(graph: fx.Graph) -> None:
    """Let ops write over operands that die with them, in place.

    Args:
        graph: of a part that is run, with fake values; its outputs count as readers.
    """
    for node in graph.nodes:
        form, commutes = _FORMS.get(node.target, (None, False))
        if form is None or node.kwargs:
            continue
        for position in range(2 if commutes else 1):
            operand = node.args[position]
            if _may_be_written(operand, node):
                others = [arg for i, arg in enumerate(node.args) if i != position]
                node.target, node.args = form, (operand, *others)
                break


def _may_be_written(operand: Any, reader: fx.Node) -> bool:
    if not isinstance(operand, fx.Node) or len(operand.users) != 1:
        return False
    if sum(arg is operand for arg in reader.args) != 1 or not is_fresh(operand):
        return False
    given, made = operand.meta.get("val"), reader.meta.get("val")
    return (
        isinstance(given, Tensor)
        and isinstance(made, Tensor)
        and (given.shape, given.dtype) == (made.shape, made.dtype)
        and given.stride() == made.stride()  # what follows reads them as the fake says
    )


def is_fresh(node: fx.Node) -> bool:
    """True for a tensor that its op has made, and that no other node stands for."""
    if node.target is not operator.getitem:
        return _makes_own(node)
    source, index = node.args
    assert isinstance(source, fx.Node)
    same = [user for user in source.users if user.args == (source, index)]
    return _makes_own(source) and len(same) == 1


def _makes_own(node: fx.Node) -> bool:
    return node.target in _WRITING or is_fresh_call(node.target)
