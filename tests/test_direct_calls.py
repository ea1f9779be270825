"""Bindings that code calls in the place of ops: the same results, and graphs stay as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.core.direct_calls import _BINDINGS
from autopar.core.late_module import late_module

aten = torch.ops.aten


def tensor(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) + 0.5


X, ROW = tensor(3, 4, 5), tensor(5)
CALLS: dict[Any, list[tuple[Any, ...]]] = {
    aten.add.Tensor: [(X, ROW), (X, 2), (X.int(), 1.5)],
    aten.add_.Tensor: [(X, ROW), (X, 2)],
    aten.cat.default: [([X, X],), ([X, X], -1), ([X, X.int()], 1)],
    aten.div.Scalar: [(X, 3), (X.int(), 2)],
    aten.div.Tensor: [(X, ROW), (X.int(), ROW), (X, 256)],
    aten.div_.Tensor: [(X, ROW), (X, 256)],
    aten.expand.default: [(ROW, [2, 5]), (X[:, :1], [3, 4, -1])],
    aten.mul.Scalar: [(X, -0.5), (X.int(), 1.5)],
    aten.mul.Tensor: [(X, ROW), (X, 2.0), (X.half(), X)],
    aten.mul_.Tensor: [(X, ROW), (X, 2.0)],
    aten.native_layer_norm.default: [(X, [5], ROW, ROW, 1e-5), (X, [4, 5], None, None, 1e-12)],
    aten.neg.default: [(X,)],
    aten.permute.default: [(X, [2, 0, 1])],
    aten.pow.Tensor_Scalar: [(X, 2), (X, -0.5)],
    aten.reshape.default: [(X, [12, -1]), (X.transpose(0, 1), [12, 5])],
    aten.rsqrt.default: [(X,)],
    aten.select.int: [(X, 1, -1)],
    aten.sub.Tensor: [(X, ROW), (X, 2)],
    aten.sum.dim_IntList: [(X, [0, 1]), (X, [2], True), (X, [])],
    aten.transpose.int: [(X, 0, -1)],
    aten.unsqueeze.default: [(X, -1)],
}


@pytest.mark.parametrize("op", _BINDINGS, ids=str)
def test_a_binding_is_the_op(op: Any) -> None:
    """Bit for bit, with strides and dtype, and what shares or writes to an operand's memory."""
    for args in CALLS[op]:
        given, other = copy.deepcopy(args), copy.deepcopy(args)
        expected, found = op(*given), _BINDINGS[op](*other)
        for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert torch.equal(a, b)
            assert _shares(a, other) == _shares(b, given)
        for a, b in zip(pytree.tree_leaves(other), pytree.tree_leaves(given), strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def _shares(value: Tensor, args: Any) -> bool:
    operands = (x for x in pytree.tree_leaves(args) if isinstance(x, Tensor))
    return any(x.untyped_storage()._cdata == value.untyped_storage()._cdata for x in operands)


def test_code_calls_bindings_and_the_graph_keeps_its_ops() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    flat = graph.call_function(aten.reshape.default, (x, [-1]))
    twice = graph.call_function(aten.add.Tensor, (flat, flat), {"alpha": 2})
    graph.output(twice)
    module = late_module(graph)
    assert torch.equal(module(X), 3 * X.reshape(-1))
    assert "torch.reshape(x, [-1])" in module.code
    assert "aten.add.Tensor" in module.code  # with options it is called as it is
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert targets == [aten.reshape.default, aten.add.Tensor]
