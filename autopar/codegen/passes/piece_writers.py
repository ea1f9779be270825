"""Writes a matmul and the collective next to it in pieces, in place (`decompose.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.codegen.passes.order import call_like, erase
from autopar.codegen.passes.sites import (
    Gather,
    Reduction,
    Site,
    equation_of,
    letter,
    shape,
    split_dim,
)

__all__ = ["write_pieces"]

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

_STEP = 2.0**-16  # of keys: what is made for one site stays within one position


def write_pieces(site: Site, count: int, keys: dict[fx.Node, float]) -> list[fx.Node]:
    """Cut one site, in place, as far as its sizes allow.

    Args:
        site: from `find_sites`, with the products that may be cut.
        count: of pieces.
        keys: positions of all nodes, to sort them by; those of new nodes are added.

    Returns:
        The new nodes, in no order; none where the site stays whole.
    """
    choice = split_dim(site, count)
    if choice is None:
        return []
    dim, products = choice
    size = shape(site.value)[dim] // (site.ranks if dim == site.dim else 1)
    bounds = [size * piece // count for piece in range(count + 1)]
    kind = _GatherWriter if isinstance(site, Gather) else _ReductionWriter
    num_bytes = site.start.meta["collective"][2]
    writer = kind(site, dim, bounds, keys)
    writer.write(products)
    sent = sum(node.meta["collective"][2] for node in writer.made if "collective" in node.meta)
    assert sent == num_bytes, f"{sent} bytes in pieces, {num_bytes} in one"
    return writer.made


class _Writer:
    """Writes the pieces of one site.

    Args:
        site: with the products that may be cut.
        dim: that is cut.
        bounds: of the pieces on it; of each rank's part where it is the collective's dim.
        keys: where new nodes get theirs.
    """

    def __init__(
        self, site: Any, dim: int, bounds: Sequence[int], keys: dict[fx.Node, float]
    ) -> None:
        self.graph = site.start.graph
        self.site = site
        self.dim = dim
        self.bounds = list(itertools.pairwise(bounds))
        self.groups = site.ranks if dim == site.dim else 1
        self.keys = keys
        self.made: list[fx.Node] = []

    def call(self, like: fx.Node, at: float, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call that goes to position `at`, behind what was made for there before."""
        node = call_like(like, target, *args, **kwargs)
        self.keys[node] = at + len(self.made) * _STEP
        self.made.append(node)
        return node

    def reshape(self, like: fx.Node, at: float, x: fx.Node, to: Sequence[int]) -> fx.Node:
        if shape(x) == tuple(to):
            return x
        return self.call(like, at, aten.reshape.default, x, list(to))

    def dense(self, like: fx.Node, at: float, x: fx.Node) -> fx.Node:
        if x.meta["val"].is_contiguous():
            return x
        return self.call(like, at, aten.clone.default, x, memory_format=torch.contiguous_format)

    def take(self, like: fx.Node, at: float, x: fx.Node, dim: int, piece: int) -> fx.Node:
        """One piece of a tensor whose `dim` is the one that is cut, in each of its groups."""
        first, last = self.bounds[piece]
        if self.groups == 1:
            return self.call(like, at, aten.slice.Tensor, x, dim, first, last)
        given = shape(x)
        run = given[dim] // self.groups
        parts = [*given[:dim], self.groups, run, *given[dim + 1 :]]
        grouped = self.reshape(like, at, x, parts)
        cut = self.call(like, at, aten.slice.Tensor, grouped, dim + 1, first, last)
        rows = self.groups * (last - first)
        return self.reshape(like, at, cut, [*given[:dim], rows, *given[dim + 1 :]])

    def join(self, like: fx.Node, at: float, parts: Sequence[fx.Node], dim: int) -> fx.Node:
        """The whole of what `take` has cut, in its order."""
        if self.groups == 1:
            return self.call(like, at, aten.cat.default, list(parts), dim)
        whole = list(shape(parts[0]))
        grouped = []
        for part, (first, last) in zip(parts, self.bounds, strict=True):
            given = shape(part)
            to = [*given[:dim], self.groups, last - first, *given[dim + 1 :]]
            grouped.append(self.reshape(like, at, part, to))
        whole[dim] = sum(shape(part)[dim] for part in parts)
        joined = self.call(like, at, aten.cat.default, grouped, dim + 1)
        return self.reshape(like, at, joined, whole)

    def send(self, at: float, operand: fx.Node, num_bytes: int, piece: int) -> fx.Node:
        """The collective of one piece."""
        start = self.site.start
        made = self.call(start, at, start.target, operand, *start.args[1:])
        kind, axis, _, times = start.meta["collective"]
        made.meta["collective"] = (kind, axis, num_bytes, times)
        made.meta["piece"] = (piece, len(self.bounds))
        return made

    def multiply(
        self, product: fx.Node, at: float, piece: int, given: Mapping[fx.Node, fx.Node]
    ) -> fx.Node:
        """One piece of a product; `given` are pieces of operands that are there already."""
        equation, mark = equation_of(product), letter(self.site, product, self.dim)
        operands = []
        for term, node in zip((equation.a, equation.b), product.args[1:], strict=True):
            assert isinstance(node, fx.Node)
            if node in given:
                operands.append(given[node])
            elif mark in term:
                operands.append(self.take(product, at, node, term.index(mark), piece))
            else:
                operands.append(node)
        return self.call(product, at, product.target, product.args[0], *operands)


class _GatherWriter(_Writer):
    site: Gather

    def write(self, products: Sequence[fx.Node]) -> None:
        """Issue one piece ahead, so that two are held at a time."""
        site, count = self.site, len(self.bounds)
        at = min(self.keys[p] for p in products) - 0.5
        sinks = {p: _with_bias(p, letter(site, p, self.dim)) for p in products}
        outs: dict[fx.Node, list[fx.Node]] = {p: [] for p in products}
        wholes: list[fx.Node] = []
        operands = {n for p in products for n in _aliases_of(p, site.value)}
        with self.graph.inserting_before(site.start):
            flying = [self._issue(self.keys[site.start], 0)]
            for piece in range(count):
                flat = self.call(site.start, at, c10d.wait_tensor.default, flying[piece])
                if piece + 1 < count:
                    flying.append(self._issue(at, piece + 1))
                wholes.append(self._unpack(flat, at))
                given = dict.fromkeys(operands, wholes[piece])
                for product in products:
                    made = self.multiply(product, at, piece, given)
                    if sinks[product] is not product:
                        bias = _other(sinks[product], product)
                        made = self.call(sinks[product], at, aten.add.Tensor, made, bias)
                    outs[product].append(made)
            for product, sink in sinks.items():
                where = equation_of(product).out.index(letter(site, product, self.dim))
                sink.replace_all_uses_with(self.join(sink, at, outs[product], where))
            erase([*sinks.values(), *products, *reversed(site.body)])
            if site.value.users:  # somebody else needs it whole
                site.value.replace_all_uses_with(self.join(site.start, at, wholes, self.dim))
                erase([*reversed(site.body)])

    def _issue(self, at: float, piece: int) -> fx.Node:
        site = self.site
        first, last = self.bounds[piece]
        # a rank cuts what it has, which is one run of the gathered dim
        cut = self.call(site.start, at, aten.slice.Tensor, site.source, self.dim, first, last)
        dense = self.dense(site.start, at, cut)
        packed = self.reshape(site.start, at, dense, [1, *shape(dense)])
        num_bytes = dense.meta["val"].numel() * dense.meta["val"].element_size() * site.ranks
        return self.send(at, packed, num_bytes, piece)

    def _unpack(self, flat: fx.Node, at: float) -> fx.Node:
        """As `Builder.all_gather` does it."""
        site, like = self.site, self.site.start
        ranks, *local = shape(flat)
        dim, split = site.dim, site.split
        full = [*local[:dim], ranks * local[dim], *local[dim + 1 :]]
        if dim == 0 and split == 1:
            return self.reshape(like, at, flat, full)
        run = local[dim] // split
        parts = self.reshape(like, at, flat, [ranks, *local[:dim], split, run, *local[dim + 1 :]])
        order = [*range(1, dim + 2), 0, *range(dim + 2, len(local) + 2)]
        moved = self.call(like, at, aten.permute.default, parts, order)
        return self.reshape(like, at, moved, full)


class _ReductionWriter(_Writer):
    site: Reduction

    def write(self, products: Sequence[fx.Node]) -> None:
        """Wait for a piece when two more are computed, so that two are held at a time."""
        site, count = self.site, len(self.bounds)
        at = self.keys[site.value] - 0.5
        readers = [user for user in site.result.users if user in self.keys]
        end = min((self.keys[user] for user in readers), default=self.keys[site.result]) - 0.5
        body = set(site.body)
        whole = any(user not in body for user in site.value.users)
        flying: list[fx.Node] = []
        values: list[fx.Node] = []
        results: list[fx.Node] = []
        with self.graph.inserting_before(site.start):
            for piece in range(count):
                value = self._term(site.value, at, piece)
                values.append(value)
                if piece > 1:
                    results.append(self._wait(flying[piece - 2], at))
                flying.append(self._issue(value, at, piece))
            for piece in range(max(0, count - 2), count):
                results.append(self._wait(flying[piece], end))
            joined = self.call(site.result, end, aten.cat.default, results, self.dim)
            joined.meta = {**site.result.meta, "val": joined.meta["val"]}
            site.result.replace_all_uses_with(joined)
            if whole:
                assembled = self.join(site.value, at, values, self.dim)
                for user in list(site.value.users):
                    if user not in body:
                        user.replace_input_with(site.value, assembled)
        erase([*reversed(site.body), *reversed(site.sums), *products])

    def _term(self, node: fx.Node, at: float, piece: int) -> fx.Node:
        """A piece of a sum."""
        site = self.site
        if node in site.products:
            return self.multiply(node, at, piece, {})
        if node not in site.sums:
            return self.take(node, at, node, self.dim, piece)
        terms = [self._term(a, at, piece) for a in node.args if isinstance(a, fx.Node)]
        return self.call(node, at, node.target, *terms)

    def _issue(self, value: fx.Node, at: float, piece: int) -> fx.Node:
        """As `Builder.reduce_scatter` and `Builder.all_reduce` do it."""
        site, like = self.site, self.site.start
        if site.dim is not None:
            given, dim = shape(value), site.dim
            run = given[dim] // (site.split * site.ranks)
            parts = self.reshape(
                like, at, value, [*given[:dim], site.split, site.ranks, run, *given[dim + 1 :]]
            )
            order = [dim + 1, *range(dim + 1), *range(dim + 2, len(given) + 2)]
            moved = self.call(like, at, aten.permute.default, parts, order)
            to = [site.ranks, *given[:dim], site.split * run, *given[dim + 1 :]]
            value = self.reshape(like, at, moved, to)
        value = self.dense(like, at, value)
        num_bytes = value.meta["val"].numel() * value.meta["val"].element_size()
        return self.send(at, value, num_bytes, piece)

    def _wait(self, start: fx.Node, at: float) -> fx.Node:
        done = self.call(self.site.start, at, c10d.wait_tensor.default, start)
        if self.site.dim is None:
            return done
        return self.reshape(self.site.start, at, done, shape(done)[1:])


def _with_bias(product: fx.Node, mark: str) -> fx.Node:
    """The sum of a product and a bias, where nothing else reads the product; else the product.

    A piece of it gets the same bias, so that the two stay one call.
    """
    user = next(iter(product.users)) if len(product.users) == 1 else product
    if user.target is not aten.add.Tensor or len(user.args) != 2 or user.kwargs:
        return product
    bias = _other(user, product)
    if not isinstance(bias, fx.Node) or bias is product or shape(user) != shape(product):
        return product
    if user.meta.get("phase") != product.meta.get("phase"):
        return product
    dim = equation_of(product).out.index(mark) - len(shape(product)) + len(shape(bias))
    return user if dim < 0 or shape(bias)[dim] == 1 else product


def _other(total: fx.Node, term: fx.Node) -> Any:
    a, b = total.args
    return b if a is term else a


def _aliases_of(product: fx.Node, value: fx.Node) -> list[fx.Node]:
    """The operands of a product that stand for `value`."""
    found = []
    for operand in product.all_input_nodes:
        node: Any = operand
        while node is not value and node.target is aten.alias.default:
            node = node.args[0]
        if node is value:
            found.append(operand)
    return found
