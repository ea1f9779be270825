"""Rows that a mask picks, expressed by all rows and the mask.

    picked = logits[mask]                      # as many rows as the mask has trues: (u, C)
    loss = cross_entropy(picked, labels[mask])

has no single graph, as u depends on values. An equal program keeps all n = mask.numel() rows and
lets those that were not picked count for nothing where rows are combined: in a loss, sum or mean,
or where they are written back to their places. `say_picked` rewrites an exported graph in this way,
op by op, if the ops in between treat each row on its own (`picked_rows`). What cannot be rewritten
is refused later.

Rows that were not picked are computed too, from numbers that stay finite (`picked_finite`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autopar.tracer.constants import is_repeatable

__all__ = [
    "Count",
    "Grid",
    "Pick",
    "Picks",
    "Rows",
    "Said",
    "args_of",
    "argument",
    "base_of",
    "extents",
    "is_write",
    "name_of",
    "schema_of",
    "value_of",
]

aten = torch.ops.aten
PICKING = ("index", "masked_select", "nonzero", "where")
_SAME_ORDER = (
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.contiguous.default,
)
_OF_VALUE = ("val", "tensor_meta", "unbacked_bindings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """What a mask picks.

    Args:
        mask: node of the mask, in the shape that it was given.
        flat: node of the same as one dim (n,).
        key: equal for masks that have the same values in the same order.
    """

    mask: fx.Node
    flat: fx.Node
    key: Hashable

    @property
    def rows(self) -> int:
        return int(self.flat.meta["val"].shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A value with all rows in place of the picked ones.

    Args:
        node: the value with n rows.
        dim: where rows are counted.
        pick: which of them are picked.
        places: rows are their own places in the mask: "all" as columns of a matrix (n, dims of the
            mask), a number for one of the columns alone, None for any other values. "order" is how
            many are picked before a row.
    """

    node: fx.Node
    dim: int
    pick: Pick
    places: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Picked rows as a matrix (B, rows / B, ...), as many in each row of a mask (B, S)."""

    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A number computed from how many rows are picked, as a tensor without dims.

    Args:
        node: that tensor.
        pick: where the number is how many rows it picks.
    """

    node: fx.Node
    pick: Pick | None = None


Said = Rows | Grid | Count | list[Rows]
"""What is known of a node whose shape or value depends on how many rows are picked."""


@dataclass(slots=True)
class Picks:
    """Says one graph; holds what is known of its nodes."""

    graph: fx.Graph
    zero_of_none: bool = False
    known: dict[fx.Node, Said] = field(default_factory=dict)
    sums: dict[fx.Node, Pick] = field(default_factory=dict)
    picks: dict[tuple[int, tuple[int, ...]], Pick] = field(default_factory=dict)
    wholes: dict[Hashable, Pick] = field(default_factory=dict)
    keys: dict[fx.Node, int] = field(default_factory=dict)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    written: frozenset[fx.Node] = frozenset()
    at: fx.Node | None = None
    mode: Any = None

    def __post_init__(self) -> None:
        values = (n.meta.get("val") for n in self.graph.nodes)
        self.mode = next(v.fake_mode for v in values if isinstance(v, FakeTensor))
        bases = {base_of(n.args[0]) for n in self.graph.nodes if is_write(n)}
        self.written = frozenset(n for n in self.graph.nodes if base_of(n) in bases)
        for node in self.graph.nodes:  # in order, so that none waits for what it is made of
            self.key(node)

    def found(self, value: Any) -> Said | None:
        """What is known of an argument."""
        return self.known.get(value) if isinstance(value, fx.Node) else None

    def pick_of(self, mask: fx.Node) -> Pick | None:
        """The pick of a mask that depends on no other pick; None for one that is written to."""
        shape = mask.meta["val"].shape
        if free_unbacked_symbols(mask.meta["val"]) or mask in self.written:
            return None
        key = self.order_key(mask)
        if (key, tuple(shape)) not in self.picks:
            flat = mask
            if len(shape) != 1:
                flat = self.call(aten.reshape.default, mask, [shape.numel()])
            self.picks[key, tuple(shape)] = Pick(mask=mask, flat=flat, key=key)
        return self.picks[key, tuple(shape)]

    def order_key(self, mask: fx.Node) -> int:
        """Equal for masks that have the same values in the same order, in any shape."""
        while mask.target in _SAME_ORDER and mask not in self.written:
            mask = args_of(mask)[0]
        return self.key(mask)

    def key(self, node: fx.Node) -> int:
        """Equal for nodes that have the same values: the same ops of the same inputs."""
        if node not in self.keys:
            said: Hashable = node
            plain = node.op == "call_function" and is_repeatable(node.target)
            # what reads memory that is written to may find other values there each time
            if plain and not self.written.intersection((node, *node.all_input_nodes)):
                said = (node.target, self._said(node.args), self._said(tuple(node.kwargs.items())))
            self.keys[node] = self.numbers.setdefault(said, len(self.numbers))
        return self.keys[node]

    def _said(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return ("node", self.key(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._said(part) for part in value)
        return (type(value), value) if isinstance(value, Hashable) else repr(value)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node in front of the one that is looked at, with its value and its line."""
        assert self.at is not None
        value = self.value(target, args, kwargs)
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update({k: v for k, v in self.at.meta.items() if k not in _OF_VALUE})
        node.meta["val"] = value
        self.key(node)
        return node

    def value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What an op gives, without values."""
        fakes: Any = fx.map_arg((args, kwargs), value_of)
        with self.mode, torch.no_grad():
            return target(*fakes[0], **fakes[1])

    def spread(self, rows: Rows) -> fx.Node:
        """The mask over the dims of a value, 1 in all but that of its rows."""
        shape = [1] * rows.node.meta["val"].dim()
        shape[rows.dim] = rows.pick.rows
        if len(shape) == 1:
            return rows.pick.flat
        return self.call(aten.reshape.default, rows.pick.flat, shape)

    def only_picked(self, rows: Rows, value: Any) -> fx.Node:
        """The value with a number in the rows that are not picked."""
        given = rows.node.meta["val"]
        off = self.call(aten.logical_not.default, self.spread(rows))
        if given.dtype is torch.bool:
            value = bool(value)
        return self.call(aten.masked_fill.Scalar, rows.node, off, value)

    def count(self, pick: Pick) -> fx.Node:
        """How many rows are picked."""
        return self.call(aten.sum.default, pick.flat)

    def put_together(self, value: fx.Node, pick: Pick, of_none: float = 0) -> fx.Node:
        """What is made of all picked rows; 0, if it is not anyway, of none where the model asks."""
        if self.zero_of_none and of_none != 0:
            value = self.or_else(value, pick, 0)
        self.sums[value] = pick
        return value

    def or_else(self, value: fx.Node, pick: Pick, number: int) -> fx.Node:
        """The value, or a number where no rows are picked."""
        none = self.call(aten.logical_not.default, self.call(aten.any.default, pick.flat))
        return self.call(aten.masked_fill.Scalar, value, none, number)


def value_of(node: Any) -> Any:
    """What a node gives, without values."""
    return node.meta["val"]


def args_of(node: fx.Node) -> Any:
    """Its positional arguments, of whatever types its op takes."""
    return node.args


def schema_of(node: fx.Node) -> Any:
    """The schema of the op that a node calls."""
    return node.target._schema  # type: ignore[union-attr]


def argument(node: fx.Node, name: str) -> Any:
    """An argument of an op by its name, or its default."""
    for place, given in enumerate(schema_of(node).arguments):
        if given.name == name:
            if place < len(args_of(node)) and not given.kwarg_only:
                return args_of(node)[place]
            return node.kwargs.get(name, given.default_value)
    return None


def extents(value: Tensor) -> list[Any]:
    """The shape: numbers, and expressions where it depends on values."""
    return [size if isinstance(size, int) else size.node.expr for size in value.shape]


def base_of(node: Any) -> Any:
    """The node whose memory a view, or what is returned by a write, is in."""
    while isinstance(node, fx.Node) and isinstance(node.target, torch._ops.OpOverload):
        first = node.target._schema.arguments[:1]
        if not first or first[0].alias_info is None or not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    return node


def is_write(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def name_of(target: Any) -> str:
    """The name of an op without its overload."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return getattr(target, "__name__", str(target))


def same_rows(graph: fx.Graph, one: Any, other: Any) -> bool:
    """True if two numbers of an exported graph are how many rows masks of equal values pick."""
    masks = [picking_mask(node) for node in (one, other)]
    if any(mask is None for mask in masks):
        return False
    picks = Picks(graph=graph)
    keys = {picks.order_key(mask) for mask in masks if mask not in picks.written}
    return len(keys) == 1 and picks.written.isdisjoint(masks)


def picking_mask(node: Any) -> Any:
    """The mask whose picked rows a node counts."""
    if not isinstance(node, fx.Node) or node.target is not aten.sym_size.int:
        return None
    picked = args_of(node)[0]
    if name_of(picked.target) == "getitem":
        picked = args_of(picked)[0]
    if name_of(picked.target) not in PICKING or len(args_of(picked)) > 2:
        return None  # `where` of three picks one of two values for each element
    if name_of(picked.target) != "index":
        return args_of(picked)[-1]
    (index,) = [i for i in args_of(picked)[1] if i is not None] or [None]
    return index if index is not None and value_of(index).dtype is torch.bool else None
