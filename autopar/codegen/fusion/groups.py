"""Finds what one generated kernel can compute: maximal pointwise and row-reduction chains.

The ops of a group share one space of shape (…, C). A value in it is whole, or has a last dim of 1:
what a reduction over the last dim yields. Groups are grown in the order of the graph. An op joins
when all that it reads is in the group, or was emitted before it, or can join too; so a group is one
call with its operands before and its readers behind, and no collective is passed.

What is read by ops that only wait for something small, such as a sum over ranks of a batch norm's
statistics, is put off until they can join it: to write it and read it again takes longer than it
would hide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

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
from autopar.core.graph import value_of

__all__ = ["Group", "find_groups", "source_of"]

aten = torch.ops.aten
Shape = tuple[int, ...]
WINDOW = 64  # how far ahead of its place an op may be computed, in ops
MAX_COLUMNS = 16384  # of a row that is reduced, which a program holds in registers
MAX_OPERANDS = 24
_SMALL = 1 / 64  # of the bytes of a value that is put off
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


def _maps_elements(node: fx.Node) -> bool:
    """True for a pointwise op that a kernel may be written for."""
    return space_of(node) is not None and _is_pointwise(node) and node.target not in IDENTITIES


def _num_bytes(node: fx.Node) -> int:
    """Of all that a node yields."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return sum(v.nbytes for v in values if isinstance(v, Tensor))


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
        group = finder.grow(node)
        if group is not None and finder.may_put_off(group):
            finder.put_off.update(dict.fromkeys(group.members, group))
            continue
        for each in finder.in_order(group or Group((), {node: None})):
            if len(each.members) < 2:
                result += each.members
                continue
            result += [*each.before, each]
            owner.update(dict.fromkeys(each.members, each))
    return result, owner


class _Finder:
    """State of the search: what is emitted by now."""

    def __init__(self, order: list[fx.Node]) -> None:
        self.position = {node: index for index, node in enumerate(order)}
        self.done: set[fx.Node] = set()
        self.put_off: dict[fx.Node, Group] = {}

    def in_order(self, group: Group) -> Iterator[Group]:
        """A group behind what it reads that was put off; each counts as emitted."""
        inside = [*group.before, *group.members]
        for source in {s: None for node in inside for s in node.all_input_nodes}:
            if self._waits(source) and source not in inside:
                yield from self.in_order(self.put_off[source])
        yield replace(group, before={n: None for n in group.before if n not in self.done})
        self.done.update(inside)

    def _waits(self, node: fx.Node) -> bool:
        return node in self.put_off and node not in self.done

    def may_put_off(self, group: Group) -> bool:
        """True for pointwise ops whose readers are such, too, and still wait for small values."""
        members = list(group.members)
        outside = {u: n for n in members for u in n.users if u not in members}
        if len(set(outside.values())) != 1 or not all(map(_maps_elements, members)):
            return False
        made = value_of(next(iter(outside.values())))
        space = tuple(made.shape)
        readers = sorted(outside, key=self.position.__getitem__)
        phase = members[0].meta.get("phase")
        if any(not _maps_elements(u) or tuple(value_of(u).shape) != space for u in readers):
            return False
        if any(u.meta.get("phase") != phase for u in readers):
            return False
        if self.position[readers[0]] > self.position[members[0]] + WINDOW:
            return False
        waited = self._waited_for(readers[0], members)
        return bool(waited) and all(_num_bytes(n) <= _SMALL * made.nbytes for n in waited)

    def _waited_for(self, reader: fx.Node, members: Sequence[fx.Node]) -> set[fx.Node]:
        """What stands between some ops and a reader of theirs, and is emitted first."""
        found: set[fx.Node] = set()
        stack = [reader]
        while stack:
            for source in stack.pop().all_input_nodes:
                known = source in self.done or source in self.put_off or source in members
                if not known and source not in found:
                    found.add(source)
                    stack.append(source)
        return found

    def grow(self, seed: fx.Node) -> Group | None:
        """The group that begins with `seed` and what it reads that was put off.

        None for an op that no kernel is written for; the group may have no other op.
        """
        space = space_of(seed)
        if space is None:
            return None
        limit = self.position[seed] + WINDOW
        group = Group(space, {seed: None})
        for source in seed.all_input_nodes:
            if self._waits(source) and source not in group.members:
                wider = self._with(group, source, limit, 8)
                if wider is not None and self._operands(wider) <= MAX_OPERANDS:
                    group = wider
        queue = list(group.members)
        while queue:
            node = queue.pop(0)
            for user in sorted(self._readers(node), key=self.position.__getitem__):
                if user not in group.members and self.position[user] <= limit:
                    grown = self._with(group, user, limit, 8)
                    if grown is not None and self._operands(grown) <= MAX_OPERANDS:
                        queue += [n for n in grown.members if n not in group.members]
                        group = grown
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
        known = self.put_off.get(node)
        space = space_of(node) if known is None else known.space
        space = None if space is None else _joined(group, node, space)
        if space is None:
            return None
        if known is not None:
            return Group(space, group.members | known.members, group.before | known.before)
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
