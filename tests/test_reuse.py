"""Ops that write over operands: only over what they alone read, and with the same results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from autopar.codegen.reuse import write_over_operands
from autopar.core.einsum import contract

aten = torch.ops.aten


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*map_aggregate(args, _value))
    return node


def _value(arg: Any) -> Any:
    return arg.meta["val"].clone() if isinstance(arg, fx.Node) else arg


def _inputs(graph: fx.Graph, *shapes: tuple[int, ...]) -> list[fx.Node]:
    nodes = [graph.placeholder(f"x{i}") for i, _ in enumerate(shapes)]
    for node, shape in zip(nodes, shapes, strict=True):
        node.meta["val"] = torch.randn(shape)
    return nodes


def _run(graph: fx.Graph) -> tuple[Tensor, ...]:
    inputs = [n.meta["val"].clone() for n in graph.nodes if n.op == "placeholder"]
    before = [x.clone() for x in inputs]
    found = fx.GraphModule(torch.nn.Module(), graph)(*inputs)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    return tuple(x.clone() for x in found)


def test_a_sum_of_products_is_added_up_in_place() -> None:
    graph = fx.Graph()
    x, w = _inputs(graph, (4, 3), (5, 3))
    first = _call(graph, contract, "bk,nk->bn", x, w)
    second = _call(graph, contract, "bk,nk->bn", x, w)
    total = _call(graph, aten.add.Tensor, first, second)
    graph.output((_call(graph, aten.mul.Tensor, total, 3.0),))
    plain = _run(graph)
    write_over_operands(graph)
    targets = [node.target for node in graph.nodes]
    assert aten.add_.Tensor in targets and aten.mul_.Tensor in targets
    assert torch.equal(_run(graph)[0], plain[0])


def test_what_is_read_again_or_given_or_wider_is_not_written_to() -> None:
    graph = fx.Graph()
    x, row = _inputs(graph, (4, 3), (3,))
    _call(graph, aten.add.Tensor, x, x)  # twice the same, and a caller's
    read_again = _call(graph, aten.add.Tensor, x, row)
    doubled = _call(graph, aten.add.Tensor, read_again, read_again)
    one = _call(graph, aten.mul.Tensor, read_again, 2.0)
    view = _call(graph, aten.view.default, _call(graph, aten.cat.default, [x, x]), [2, 4, 3])
    viewed = _call(graph, aten.add.Tensor, view, row)
    narrow = _call(graph, aten.sum.dim_IntList, x, [0])
    wide = _call(graph, aten.add.Tensor, narrow, x)
    graph.output((doubled, one, viewed, wide))
    plain = _run(graph)
    write_over_operands(graph)
    assert aten.add_.Tensor not in [node.target for node in graph.nodes]
    assert aten.mul_.Tensor not in [node.target for node in graph.nodes]
    for found, expected in zip(_run(graph), plain, strict=True):
        assert torch.equal(found, expected)


def test_the_second_operand_takes_a_sum_but_not_a_difference() -> None:
    graph = fx.Graph()
    x, y = _inputs(graph, (4, 3), (4, 3))
    fresh = _call(graph, aten.neg.default, y)
    total = _call(graph, aten.add.Tensor, x, fresh)
    other = _call(graph, aten.neg.default, x)
    graph.output((total, _call(graph, aten.sub.Tensor, y, other)))
    plain = _run(graph)
    write_over_operands(graph)
    targets = [node.target for node in graph.nodes]
    assert aten.add_.Tensor in targets and aten.sub_.Tensor not in targets
    for found, expected in zip(_run(graph), plain, strict=True):
        assert torch.equal(found, expected)


def test_an_operand_of_another_layout_is_left_alone() -> None:
    """The sum has the layout of its first operand; kernels behind it rely on that."""
    graph = fx.Graph()
    x, y = _inputs(graph, (4, 3), (3, 4))
    fresh = _call(graph, aten.mul.Tensor, x, 2.0)
    turned = _call(graph, aten.permute.default, y, [1, 0])
    total = _call(graph, aten.add.Tensor, turned, fresh)
    graph.output((total,))
    assert total.meta["val"].stride() != fresh.meta["val"].stride()
    write_over_operands(graph)
    assert total.target is aten.add.Tensor
    assert _run(graph)[0].shape == (4, 3)
