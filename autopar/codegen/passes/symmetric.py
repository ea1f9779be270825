"""Symmetric memory: a collective and the matmuls next to it become one call.

Where X = gather(x), and where a product is reduce-scattered, torch has ops that copy the part of
one rank while that of another is multiplied, from the memory of one device to that of another
(`core/overlapped.py`)::

    x → all-gather → X → X W, X V, …   becomes   X W, X V, … = gather_matmul(x, [W, V, …])
    X W → reduce-scatter → y           becomes   y = matmul_reduce_scatter(X, W)

What else reads X gets it from the call. Sites are those of `sites.py`. A call is possible where the
gathered or scattered dim is one run of a rank's, free in the products (not contracted, and not in
the other operand), and these are products of matrices, of one floating dtype; of a reduction, where
nothing but the collective reads the product, and it is no sum of several. Others stay as they are.

Which sites pay is not decided here: a plan says it (`Plan.symmetric_calls`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.codegen.passes.budget import within_budget
from autopar.codegen.passes.order import call_like, copied, erase, reorder, show_anew
from autopar.codegen.passes.sites import (
    Gather,
    Key,
    Reduction,
    Site,
    find_sites,
    key_of,
    original,
    shape,
)
from autopar.core import overlapped
from autopar.core.einsum import flops, parse_equation
from autopar.core.overlapped import GATHER_MATMUL, MATMUL_REDUCE_SCATTER, may_be_rows

__all__ = ["can_be_called", "in_one_call", "symmetric_memory"]

_ALIAS = torch.ops.aten.alias.default


def symmetric_memory(
    graph: fx.Graph,
    keys: Collection[Key],
    budget: int,
    resident: Mapping[str, int] | None = None,
) -> fx.Graph:
    """Put one call in place of collectives and the products beside them.

    Args:
        graph: joint program, which is left as it is.
        keys: origin, axis and kind of the collectives.
        budget: what may be live; sites at work where that is exceeded stay as they are.
        resident: bytes that live beside the graph's own, by phase.

    Returns:
        The new graph, or `graph` itself where nothing is replaced.
    """
    if not keys:
        return graph
    return within_budget(graph, lambda trial, left: _replaced(trial, keys, left), budget, resident)


def _replaced(
    graph: fx.Graph, keys: Collection[Key], left: Collection[int]
) -> dict[int, list[fx.Node]]:
    """Replace the sites of some collectives, in place; the new nodes of each, in order."""
    place = {node: float(i) for i, node in enumerate(graph.nodes)}
    made: dict[int, list[fx.Node]] = {}
    taken: set[fx.Node] = set()
    for index, site in enumerate(find_sites(graph)):
        if key_of(site.start) not in keys or index in left or not taken.isdisjoint(site.products):
            continue
        if nodes := _written(site, place):
            made[index] = nodes
            taken.update(site.products)
    reorder(graph, place)
    graph.lint()
    show_anew(graph, (node for nodes in made.values() for node in nodes))
    return made


def can_be_called(site: Site) -> bool:
    """True if one call can stand for a site."""
    return _plan_of(site) is not None


def in_one_call(graph: fx.Graph) -> fx.Graph | None:
    """The program of one site (`alone.cut_out`) with its call; None where there can be none."""
    trial = copied(graph)
    place = {node: float(i) for i, node in enumerate(trial.nodes)}
    (site,) = find_sites(trial, alone=True)
    made = _written(site, place)
    reorder(trial, place)
    show_anew(trial, made)
    return trial if made else None


@dataclass(frozen=True, slots=True)
class _Product:
    """A product whose first operand has the gathered or scattered dim."""

    node: fx.Node
    equation: str
    a: fx.Node
    b: fx.Node


def _plan_of(site: Site, place: Mapping[fx.Node, float] | None = None) -> list[_Product] | None:
    """The products of a site's call; None where there can be none.

    Args:
        site: of a graph.
        place: positions of its nodes, where others have been replaced; default: as they stand.
    """
    value = site.value.meta["val"]
    if site.split != 1 or site.dim is None or not value.dtype.is_floating_point:
        return None
    if isinstance(site, Reduction):
        inside = {*site.body, *site.sums}
        alone = all(n.target is _ALIAS for n in site.sums) and len(site.products) == 1
        if not alone or any(u not in inside for n in (site.value, *site.sums) for u in n.users):
            return None
    fitting = [p for node in site.products if _fits(p := _oriented(site, node), site)]
    if isinstance(site, Gather):
        fitting = _contracting_alike([p for p in fitting if not _follows(p.b, site, place)])
    return fitting or None


def _oriented(site: Site, node: fx.Node) -> _Product:
    """A product with the operand first that has the gathered or scattered dim."""
    _, a, b = node.args
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node) and site.dim is not None
    form = parse_equation(str(node.args[0]))
    gathers = isinstance(site, Gather)
    first = original(a) is site.value if gathers else form.out[site.dim] in form.a
    if first:
        return _Product(node, str(node.args[0]), a, b)
    return _Product(node, f"{form.b},{form.a}->{form.out}", b, a)


def _fits(product: _Product, site: Site) -> bool:
    form = parse_equation(product.equation)
    assert site.dim is not None
    mark = form.out[site.dim] if isinstance(site, Reduction) else form.a[site.dim]
    same = product.a.meta["val"].dtype == product.b.meta["val"].dtype
    filled = all(n.meta["val"].numel() for n in (product.a, product.b))
    return may_be_rows(form, mark) and same and filled


def _contracting_alike(products: Sequence[_Product]) -> list[_Product]:
    """Those of the products that contract the same dims of the gathered tensor; most work wins."""
    alike: dict[tuple[int, ...], list[_Product]] = {}
    for product in products:
        form = parse_equation(product.equation)
        dims = tuple(form.a.index(c) for c in form.contracted)
        alike.setdefault(dims, []).append(product)
    return max(alike.values(), key=lambda found: sum(map(_flops, found)), default=[])


def _flops(product: _Product) -> int:
    return flops(product.equation, shape(product.a), shape(product.b))


def _follows(node: fx.Node, site: Site, place: Mapping[fx.Node, float] | None) -> bool:
    """True if a node is made of what a site gathers or multiplies."""
    start, inside = site.start, {site.start, *site.products}

    def is_behind(other: fx.Node) -> bool:
        return other >= start if place is None else place[other] >= place[start]

    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        here = stack.pop()
        if here in inside:
            return True
        if here not in seen:
            seen.add(here)
            stack += filter(is_behind, here.all_input_nodes)
    return False


# --- the call


def _written(site: Site, place: dict[fx.Node, float]) -> list[fx.Node]:
    """Put the call of a site in its place; the new nodes, in order, and none if there is none."""
    products = _plan_of(site, place)
    if products is None:
        return []
    known = {"overlapped": site.start.meta["collective"], "scratch": _scratch(site, products)}
    with site.start.graph.inserting_before(site.start):
        if isinstance(site, Gather):
            made = _gather_call(site, products, place)
        else:
            made = _reduction_call(site, products[0], place)
    made[0].meta.update(known)
    return made


def _gather_call(
    site: Gather, products: Sequence[_Product], place: dict[fx.Node, float]
) -> list[fx.Node]:
    at = min(place[p.node] for p in products) - 0.5
    start, keep = site.start, _is_kept(site, products)
    call = call_like(
        start,
        GATHER_MATMUL,
        site.source,
        [p.b for p in products],
        [p.equation for p in products],
        site.dim,
        keep,
        site.ranks,
        start.args[2],
    )
    made = [call]
    for index, product in enumerate(products):
        made.append(call_like(product.node, operator.getitem, call, index))
        product.node.replace_all_uses_with(made[-1])
    if keep:
        made.append(call_like(start, operator.getitem, call, len(products)))
        site.value.replace_all_uses_with(made[-1])
    erase([*(p.node for p in products), *reversed(site.body)])
    place.update((node, at + index * 2.0**-16) for index, node in enumerate(made))
    return made


def _is_kept(site: Gather, products: Sequence[_Product]) -> bool:
    """True if something else reads what is gathered."""
    inside = {*site.body, *(p.node for p in products)}
    readers = (user for node in (site.value, *site.body) for user in node.users)
    return any(user not in inside for user in readers)


def _reduction_call(
    site: Reduction, product: _Product, place: dict[fx.Node, float]
) -> list[fx.Node]:
    start = site.start
    call = call_like(
        start,
        MATMUL_REDUCE_SCATTER,
        product.a,
        product.b,
        product.equation,
        site.dim,
        start.args[2],
        start.args[3],
    )
    place[call] = place[site.value]
    site.result.replace_all_uses_with(call)
    erase([*reversed(site.body), *reversed(site.sums), product.node])
    return [call]


def _scratch(site: Site, products: Sequence[_Product]) -> int:
    """Bytes that a call needs beside its operands and results.

    These are what it gathers or is to reduce, the buffers that other ranks read, and what is copied
    into another order.
    """
    whole = _bytes(site.value)
    gathers = isinstance(site, Gather)
    found = whole + (1 if gathers else 2) * whole // site.ranks
    for index, product in enumerate(products):
        form = parse_equation(product.equation)
        assert site.dim is not None
        dim = site.dim if gathers else form.a.index(form.out[site.dim])
        shapes = shape(product.a), shape(product.b)
        left, right, out = overlapped.copied(product.equation, dim, *shapes)
        if not index and left:  # all products have the first operand in common
            found += whole // site.ranks if gathers else _bytes(product.a)
        elif not index and isinstance(site, Gather) and _is_kept(site, products):
            found -= whole  # which is a result as it is
        found += right * _bytes(product.b)
        found += out * (_bytes(product.node) if gathers else whole // site.ranks)
    return found


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())
