"""Finds what one generated kernel can compute: maximal pointwise and row-reduction chains.

The ops of a group share one space of shape (…, C). A value in it is whole, or has a last dim of 1:
what a reduction over the last dim yields. Groups are grown in the order of the graph. An op joins
when all that it reads is in the group, or was emitted before it, or can join too; so a group is one
call with its operands before and its readers behind, and no collective is passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from autopar.codegen.fusion.expressions import (
    DROPOUT,
    EXPRESSIONS,
    IDENTITIES,
    LOGICAL,
    REDUCTIONS,
    ROW_OPS,
    power,
    triton_type,
)
from autopar.codegen.fusion.matching import value_of

__all__ = ["Group", "find_groups", "source_of"]

aten = torch.ops.aten
Shape = tuple[int, ...]
WINDOW = 64  # how far ahead of its place an op may be computed, in ops
MAX_COLUMNS = 16384  # of a row that is reduced, which a program holds in registers
MAX_OPERANDS = 24
_HOISTED = IDENTITIES | {
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.reshape.default,
    aten.transpose.int, aten.permute.default, aten.slice.Tensor, aten.select.int,
}  # fmt: skip


@dataclass(slots=True)
class Group:
    """Ops of one kernel.

    Attributes:
        space: shape that they share.
        members: in the order of the graph.
        before: views that are emitted first.
    """

    space: Shape
    members: dict[fx.Node, None] = field(default_factory=dict)
    before: dict[fx.Node, None] = field(default_factory=dict)

    @property
    def reduces(self) -> bool:
        return any(n.target in REDUCTIONS or n.target in ROW_OPS for n in self.members)


def source_of(node: fx.Node) -> fx.Node:
    """What a view that only repeats values reads."""
    while node.target in IDENTITIES:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if value_of(source).dim() != value_of(node).dim():
            break
        node = source
    return node


def _row(shape: Shape) -> Shape:
    return (*shape[:-1], 1)


def _over_last(node: fx.Node) -> bool:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    rank = value_of(source).dim()
    if node.target in ROW_OPS:
        dim = node.args[1] if node.target is aten._softmax.default else node.args[2]
        return dim in (-1, rank - 1)
    dims = node.args[1] if len(node.args) > 1 else None
    return isinstance(dims, (list, tuple)) and list(dims) in ([-1], [rank - 1])


def _keeps_dim(node: fx.Node) -> bool:
    return len(node.args) > 2 and node.args[2] is True


def space_of(node: fx.Node) -> Shape | None:
    """Shape of the space that an op works on, or None for one that no kernel is written for."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return None
    value = value_of(node)
    operands = [value_of(n) if isinstance(n.meta.get("val"), Tensor) else None
                for n in node.all_input_nodes]  # fmt: skip
    if not operands or any(x is None or triton_type(x.dtype) is None for x in operands):
        return None
    if triton_type(value.dtype) is None or not value.dim() or not value.numel():
        return None
    if any(x is not None and x.device != value.device for x in operands):
        return None
    if node.target in REDUCTIONS or node.target in ROW_OPS:
        source = operands[0]
        assert source is not None
        fine = source.is_floating_point() and not node.kwargs and _over_last(node)
        fine = fine and source.shape[-1] <= MAX_COLUMNS and source.dtype == value.dtype
        if node.target in REDUCTIONS:
            fine = fine and _keeps_dim(node)
        return tuple(source.shape) if fine else None
    return tuple(value.shape) if _is_pointwise(node) else None


def _is_pointwise(node: fx.Node) -> bool:
    value = value_of(node)
    if node.target in DROPOUT:
        p, shape = node.args[1], value.shape
        return isinstance(p, float) and p < 1.0 and len(shape) <= 4
    if node.target not in EXPRESSIONS:
        return False
    if node.target is aten._to_copy.default:
        return node.kwargs.keys() <= {"dtype", "layout", "device"}
    if node.target in (aten.gelu.default, aten.gelu_backward.default):
        return node.kwargs.keys() <= {"approximate"}
    if node.target is aten.clone.default:
        return node.kwargs.get("memory_format") is torch.contiguous_format
    if node.kwargs or not all(isinstance(a, (fx.Node, int, float)) for a in node.args):
        return False
    if node.target in LOGICAL:
        return all(value_of(n).dtype == torch.bool for n in node.all_input_nodes)
    if node.target is aten.pow.Tensor_Scalar:
        return power(node.args[1]) is not None and value.is_floating_point()
    # float64 takes no part in float32's arithmetic, nor floats in that of integers
    return True


def find_groups(graph: fx.Graph) -> tuple[list[fx.Node | Group], dict[fx.Node, Group]]:
    """The graph's nodes in a new order with groups in place of their members.

    Returns:
        Nodes and groups in order, and the group of each member. Groups have at least two ops.
    """
    order = list(graph.nodes)
    finder = _Finder(order)
    result: list[fx.Node | Group] = []
    owner: dict[fx.Node, Group] = {}
    for node in order:
        if node in finder.done:
            continue
        space = space_of(node)
        group = finder.grow(node, space) if space is not None else None
        if group is None:
            result.append(node)
            finder.done.add(node)
            continue
        result += [*group.before, group]
        finder.done |= group.before.keys() | group.members.keys()
        owner.update(dict.fromkeys(group.members, group))
    return result, owner


class _Finder:
    """State of the search: what is emitted by now."""

    def __init__(self, order: list[fx.Node]) -> None:
        self.position = {node: index for index, node in enumerate(order)}
        self.done: set[fx.Node] = set()

    def grow(self, seed: fx.Node, space: Shape) -> Group | None:
        """The group that begins with `seed`, or None where it would be alone."""
        group = Group(space, {seed: None})
        limit = self.position[seed] + WINDOW
        queue = [seed]
        while queue:
            node = queue.pop(0)
            for user in sorted(self._readers(node), key=self.position.__getitem__):
                if user not in group.members and self.position[user] <= limit:
                    grown = self._with(group, user, limit, 8)
                    if grown is not None and self._operands(grown) <= MAX_OPERANDS:
                        queue += [n for n in grown.members if n not in group.members]
                        group = grown
        if len(group.members) < 2:
            return None
        ordered = sorted(group.members, key=self.position.__getitem__)
        first = sorted(group.before, key=self.position.__getitem__)
        return Group(group.space, dict.fromkeys(ordered), dict.fromkeys(first))

    def _readers(self, node: fx.Node) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for user in node.users:
            found |= self._readers(user) if user.target in IDENTITIES else {user}
        return found

    def _operands(self, group: Group) -> int:
        return len({s for n in group.members for s in n.all_input_nodes} - group.members.keys())

    def _with(self, group: Group, node: fx.Node, limit: int, depth: int) -> Group | None:
        """The group with `node` and what it still needs, or None."""
        if node in self.done or self.position.get(node, limit + 1) > limit or not depth:
            return None
        seed = next(iter(group.members))
        if node.meta.get("phase") != seed.meta.get("phase"):
            return None
        space = space_of(node)
        space = None if space is None else _joined(group, node, space)
        if space is None:
            return None
        grown = Group(space, {**group.members, node: None}, dict(group.before))
        for source in node.all_input_nodes:
            base = source_of(source)
            if base in grown.members or source in self.done:
                continue
            if base in self.done or self._hoistable(base, limit):
                if self._hoist(source, grown, limit):
                    continue
            wider = self._with(grown, base, limit, depth - 1)
            if wider is None:
                return None
            grown = wider
        return grown

    def _hoistable(self, node: fx.Node, limit: int) -> bool:
        return node.target in _HOISTED and self.position[node] <= limit

    def _hoist(self, node: fx.Node, group: Group, limit: int) -> bool:
        """Emit a view and those that it reads before the group, if nothing else is needed."""
        found: dict[fx.Node, None] = {}
        stack = [node]
        while stack:
            view = stack.pop()
            if view in self.done or view in group.before:
                continue
            if view in group.members or not self._hoistable(view, limit):
                return False
            found[view] = None
            stack.extend(view.all_input_nodes)
        group.before.update(found)
        return True


def _joined(group: Group, node: fx.Node, space: Shape) -> Shape | None:
    """The common space of a group and an op, or None."""
    shape = group.space
    value = tuple(value_of(node).shape)
    if space == shape or (
        space == _row(shape) and value == space and node.target not in REDUCTIONS
    ):
        joined = shape
    elif shape == _row(space) and not group.reduces:
        joined = space
    else:
        return None
    if group.reduces or node.target in REDUCTIONS or node.target in ROW_OPS:
        if joined[-1] > MAX_COLUMNS:
            return None
    if any(n.target in DROPOUT and tuple(value_of(n).shape) != joined
           for n in (*group.members, node)):  # fmt: skip
        return None
    return joined
