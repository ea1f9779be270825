"""Simplifications of the joint graph that shorten what autograd writes out, without changing a bit.

- `conjugate_numbers`: ``conj(1j)``, which autograd asks for in ``x * 1j``, is ``-1j``.
- `drop_neutral`: ``x ** 1``, ``x * 1``, ``x / 1``, ``x + 0`` and ``x - 0`` are ``x``.
- `compute_before_expanding`: ``f(expand(x))`` is ``expand(f(x))`` for an elementwise ``f``.
- `scale_the_smaller`: ``expand(c) * (x * 2ⁿ)`` is ``expand(c * 2ⁿ) * x`` for n > 0, which rounds
  alike where neither overflows.
- `join_slices`: a sum of slices put back into zeros, which together fill the whole, is their `cat`.

Each saves passes over memory on any backend: in the gradients of root mean square norms, of rotary
embeddings and of whatever else reads its input in slices.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopar.core.graph import NodeInfo, value_of

__all__ = ["simplify"]

aten = torch.ops.aten

_TIMES = (aten.mul.Tensor, aten.mul.Scalar)
_BY_NUMBER = (*_TIMES, aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar)
_CONJUGATES = (aten._conj.default, aten._conj_physical.default)
_PLUS_NUMBER = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)
_OF_ONE = (*_BY_NUMBER, aten.neg.default, aten._to_copy.default)


def simplify(graph: fx.Graph, info: dict[str, NodeInfo]) -> None:
    """Run all of them on a joint graph, in place.

    Args:
        graph: with fake values.
        info: origin of every node, by name; new nodes are added to it.
    """
    conjugate_numbers(graph)
    drop_neutral(graph)
    compute_before_expanding(graph, info)
    scale_the_smaller(graph, info)
    join_slices(graph, info)
    graph.eliminate_dead_code()


def conjugate_numbers(graph: fx.Graph) -> None:
    """Let what reads the conjugate of a number read that number: no rank has a tensor of it."""
    for node in list(graph.nodes):
        if node.target not in _CONJUGATES or isinstance(node.args[0], fx.Node):
            continue
        node.replace_all_uses_with(node.args[0].conjugate())
        graph.erase_node(node)


def drop_neutral(graph: fx.Graph) -> None:
    """Let what reads ``x ** 1``, ``x * 1``, ``x / 1``, ``x + 0`` or ``x - 0`` read x."""
    for node in list(graph.nodes):
        neutral = 1 if node.target in _BY_NUMBER else 0 if node.target in _PLUS_NUMBER else None
        if neutral is None or node.kwargs or _number(node) != neutral:
            continue
        source = node.args[0]
        if isinstance(source, fx.Node) and _alike(value_of(source), value_of(node)):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def compute_before_expanding(graph: fx.Graph, info: dict[str, NodeInfo]) -> None:
    """Move elementwise ops of one tensor in front of the expansion that they read."""
    for node in list(graph.nodes):
        if node.target not in _OF_ONE or not _reads_one(node) or set(node.kwargs) - {"dtype"}:
            continue
        wide = node.args[0]
        if not isinstance(wide, fx.Node) or wide.target is not aten.expand.default:
            continue
        source = wide.all_input_nodes[0]
        value = value_of(source).new_empty(value_of(source).shape, dtype=value_of(node).dtype)
        with graph.inserting_before(node):
            made = _call(graph, node.target, (source, *node.args[1:]), node.kwargs)
            _note(made, node, value, info)
            again = _call(graph, wide.target, (made, *wide.args[1:]), wide.kwargs)
            _note(again, node, value_of(node), info)
        node.replace_all_uses_with(again)
        graph.erase_node(node)


def scale_the_smaller(graph: fx.Graph, info: dict[str, NodeInfo]) -> None:
    """Let a power of two above one scale the factor that is expanded, and not the whole.

    One below could take bits of a factor that is tiny already.
    """
    for node in list(graph.nodes):
        if node.target is not aten.mul.Tensor or len(node.all_input_nodes) != 2:
            continue
        for wide, scaled in (node.args, node.args[::-1]):
            if _is_expansion(wide, node) and _is_scaled(scaled, node):
                assert isinstance(wide, fx.Node) and isinstance(scaled, fx.Node)
                source = wide.all_input_nodes[0]
                with graph.inserting_before(node):
                    less = _call(graph, aten.mul.Scalar, (source, _number(scaled)))
                    _note(less, node, value_of(source), info)
                    again = _call(graph, wide.target, (less, *wide.args[1:]))
                    _note(again, node, value_of(wide), info)
                node.args = (again, scaled.args[0])
                break


def _is_expansion(node: Any, reader: fx.Node) -> bool:
    """True for a floating-point tensor that is smaller than what its reader makes."""
    if not isinstance(node, fx.Node) or node.target is not aten.expand.default or node.kwargs:
        return False
    source = value_of(node.all_input_nodes[0])
    return source.numel() < value_of(reader).numel() and source.dtype == value_of(reader).dtype


def _is_scaled(node: Any, reader: fx.Node) -> bool:
    """True for a floating-point tensor times a power of two above one that nothing else reads."""
    if not isinstance(node, fx.Node) or node.target not in _TIMES or len(node.users) != 1:
        return False
    number, value = _number(node), value_of(node)
    if number is None or not value.is_floating_point() or not _alike(value, value_of(reader)):
        return False
    return number > 1 and math.frexp(number)[0] == 0.5 and _reads_one(node)


# --- slices put back ----------------------------------------------------------------------------
class _Slice(NamedTuple):
    """What `slice_backward` puts at `start` to `end` of a dim of zeros."""

    node: fx.Node
    dim: int
    start: int
    end: int


def join_slices(graph: fx.Graph, info: dict[str, NodeInfo]) -> None:
    """Join the slices in a sum that fill a whole, with one other term at most: in any order of
    adding, each element is what one slice has there, plus that term.
    """
    for node in reversed(list(graph.nodes)):
        if not _is_sum(node) or node._erased:
            continue
        sums, slices, others = _terms(node)
        if len(others) > 1 or len(slices) < 2 or not _fill(slices, value_of(node)):
            continue
        parts = [s.node.args[0] for s in sorted(slices, key=lambda s: s.start)]
        with graph.inserting_before(node):
            total = _call(graph, aten.cat.default, (parts, slices[0].dim))
            _note(total, node, value_of(node), info)
            for other in others:
                total = _call(graph, aten.add.Tensor, (total, other))
                _note(total, node, value_of(node), info)
        node.replace_all_uses_with(total)
        for dead in sums:
            graph.erase_node(dead)


def _is_sum(node: Any) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.target is aten.add.Tensor
        and not node.kwargs
        and len(node.all_input_nodes) == 2
    )


def _terms(root: fx.Node) -> tuple[list[fx.Node], list[_Slice], list[fx.Node]]:
    """The sums that a sum is made of, users first, and what they add: slices, and at most two
    others, for the search ends there.
    """
    sums, slices, others = [root], list[_Slice](), list[fx.Node]()
    for node in sums:  # which grows
        for term in node.all_input_nodes:
            if _is_sum(term) and len(term.users) == 1 and _alike(value_of(term), value_of(root)):
                sums.append(term)
            elif (found := _slice_of(term)) is not None:
                slices.append(found)
            else:
                others.append(term)
        if len(others) > 1:
            break
    return sums, slices, others


def _slice_of(node: fx.Node) -> _Slice | None:
    if node.target is not aten.slice_backward.default or len(node.users) != 1 or node.kwargs:
        return None
    args: Any = node.args
    _, sizes, dim, start, end, step = args
    if step != 1:
        return None
    low, high, _ = slice(start, end).indices(sizes[dim])
    return _Slice(node, dim % len(sizes), low, high)


def _fill(slices: list[_Slice], whole: Tensor) -> bool:
    """True where the slices follow each other from one end of the whole to the other."""
    if len({s.dim for s in slices}) > 1 or not all(_alike(value_of(s.node), whole) for s in slices):
        return False
    ends = [0, *sorted(s.end for s in slices)]
    starts = [*sorted(s.start for s in slices), whole.shape[slices[0].dim]]
    return ends == starts


# --- nodes --------------------------------------------------------------------------------------
def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _reads_one(node: fx.Node) -> bool:
    """True if the first argument is a node, and no other one is."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return len(found) == 1 and node.args[0] is found[0]


def _number(node: fx.Node) -> float | None:
    """The number that a tensor is multiplied with, divided by or raised to."""
    number = node.args[1] if len(node.args) == 2 else None
    return number if isinstance(number, (int, float)) and not isinstance(number, bool) else None


def _call(graph: fx.Graph, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
    return graph.call_function(target, args, kwargs)


def _note(made: fx.Node, like: fx.Node, value: Tensor, info: dict[str, NodeInfo]) -> None:
    """Meta and origin of a new node, which stands for another."""
    made.meta = {**like.meta, "val": value}
    if like.name in info:
        info[made.name] = info[like.name]
