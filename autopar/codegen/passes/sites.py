"""Where a program could multiply and communicate at once: a collective next to matmuls.

Two forms are looked for, as `Builder` writes them. A *gather* is an all-gather of an activation
that einsums read, directly or through aliases. A *reduction* is a reduce-scatter or an all-reduce
of an einsum, or of a sum of einsums::

    x → [1, *x] → all-gather → [ranks, *x] → (permuted) → X          y = einsum(…, X, …)
    Y = einsum(…) + … → (permuted) → [ranks, *y] → reduce-scatter → y

Left out are gathers of parameters, which are prefetched, and reductions of what leaves the step,
for whose result nobody waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from autopar.codegen.passes.bucket import is_gather_of_storage
from autopar.codegen.passes.order import is_packing
from autopar.codegen.passes.sends import is_start, is_wait
from autopar.core.einsum import Equation, flops, parse_equation
from autopar.core.graph import value_of

__all__ = [
    "Gather",
    "Key",
    "Reduction",
    "Site",
    "equation_of",
    "find_sites",
    "key_of",
    "letter",
    "original",
    "shape",
    "split_dim",
]

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
EINSUM = torch.ops.autopar.einsum.default
# as emitted, and as `in_place` leaves them in a program that sites are looked for in
_ALL_REDUCES = (c10d.all_reduce.default, c10d.all_reduce_.default)

Key = tuple[str, int, str]
"""Names a collective of a program: its origin, mesh axis and kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """An all-gather of an activation and the products that read it.

    Attributes:
        start: the collective.
        value: the gathered tensor, in order.
        dim: that is gathered.
        split: runs of `dim` that a rank has.
        products: einsums in the collective's phase that read `value`.
        body: from the packing of what is gathered to the aliases that products read.
    """

    start: fx.Node
    value: fx.Node
    dim: int
    split: int
    products: tuple[fx.Node, ...]
    body: tuple[fx.Node, ...]

    @property
    def source(self) -> fx.Node:
        """What is gathered, before it is packed."""
        return _operand(self.body[0])

    @property
    def ranks(self) -> int:
        return int(self.start.args[1])  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A reduce-scatter or all-reduce of a sum of products.

    Attributes:
        start: the collective.
        value: the sum on this rank, before it is packed.
        result: what comes out, unpacked.
        dim: that is scattered; None for an all-reduce.
        split: runs of `dim` that a rank gets.
        products: einsums in the sum.
        sums: nodes that add them up, the root included; empty where there is one product.
        body: the nodes from `value`, excluded, to `result`.
    """

    start: fx.Node
    value: fx.Node
    result: fx.Node
    dim: int | None
    split: int
    products: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]
    body: tuple[fx.Node, ...]

    @property
    def ranks(self) -> int:
        return 1 if self.dim is None else int(self.start.args[2])  # type: ignore[arg-type]


Site = Gather | Reduction


def find_sites(graph: fx.Graph, alone: bool = False) -> list[Site]:
    """Collectives that could run beside the products that need or make what they send, in order.

    Args:
        graph: with fake values.
        alone: True for a graph cut out of a program, whose inputs are no parameters and whose
            outputs do not leave the step.
    """
    found: list[Site] = []
    for node in graph.nodes:
        if not is_start(node) or len(node.users) != 1 or "piece" in node.meta:
            continue
        site: Site | None = None
        if node.target is c10d.all_gather_into_tensor.default:
            site = _gather(node) if alone or not is_gather_of_storage(node) else None
        elif node.target is c10d.reduce_scatter_tensor.default:
            site = _scatter(node)
        elif node.target in _ALL_REDUCES and node.args[1] == "sum":
            site = _all_reduce(node)
        if isinstance(site, Reduction) and not alone and _leaves(site.result):
            continue
        if site is not None:
            found.append(site)
    return found


def key_of(start: fx.Node) -> Key:
    """The name of a collective."""
    kind, axis, _, _ = start.meta["collective"]
    return str(start.meta.get("origin", "")), axis, kind


def equation_of(product: fx.Node) -> Equation:
    """Of an einsum node."""
    return parse_equation(str(product.args[0]))


def split_dim(site: Site, count: int) -> tuple[int, tuple[fx.Node, ...]] | None:
    """The dim to cut into `count` pieces, and the products that are then cut; None for no dim.

    Most work first; then dims that `count` divides, then those that the collective leaves alone,
    as pieces of its own dim have to be put in order, then the outermost.
    """
    best: tuple[tuple[float, bool, bool, int], tuple[fx.Node, ...]] | None = None
    for dim, size in enumerate(shape(site.value)):
        if dim == site.dim and site.split > 1:
            continue
        size //= site.ranks if dim == site.dim else 1
        cut = tuple(p for p in site.products if letter(site, p, dim) in equation_of(p).out)
        if size < count or not cut:
            continue
        rank = (sum(map(_flops, cut)), size % count == 0, dim != site.dim, -dim)
        if best is None or rank > best[0]:
            best = rank, cut
    return None if best is None else (-best[0][3], best[1])


def letter(site: Site, product: fx.Node, dim: int) -> str:
    """The letter of a dim of the site's value in the equation of a product."""
    equation = equation_of(product)
    if isinstance(site, Reduction):
        return equation.out[dim]
    return (equation.a if original(product.args[1]) is site.value else equation.b)[dim]


def shape(node: fx.Node) -> tuple[int, ...]:
    """Of a node's value."""
    return tuple(value_of(node).shape)


def _flops(product: fx.Node) -> float:
    _, a, b = product.args
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return float(flops(str(product.args[0]), shape(a), shape(b)))


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _operand(node: fx.Node) -> fx.Node:
    (source,) = node.all_input_nodes
    return source


def original(node: object) -> object:
    """What an alias, or an alias of one, stands for."""
    while isinstance(node, fx.Node) and node.target is aten.alias.default:
        node = node.args[0]
    return node


def _phase(node: fx.Node) -> object:
    return node.meta.get("phase")


def _is_product(node: object, phase: object) -> bool:
    # a bias in the call would be added once a piece, to each row once: only plain ones are written
    if not isinstance(node, fx.Node) or node.target is not EINSUM or _phase(node) != phase:
        return False
    return len(node.args) == 3 and not node.kwargs and len(node.all_input_nodes) == 2


def _leaves(node: fx.Node) -> bool:
    """True if a value is only packed, sent and put out."""
    return all(
        user.op == "output"
        or ((is_packing(user) or is_wait(user) or is_start(user)) and _leaves(user))
        for user in node.users
    )


# --- gathers


def _gather(start: fx.Node) -> Gather | None:
    wait = _only_user(start)
    packed = start.args[0]
    assert isinstance(packed, fx.Node)
    if wait is None or not is_wait(wait) or packed.target is not aten.reshape.default:
        return None
    source = _operand(packed)
    local = shape(packed)[1:]
    body = [packed, start, wait]
    if shape(source) != local:
        return None
    if source.target is aten.clone.default and _only_user(source) is packed:
        body.insert(0, source)
    unpacked = _unpacked(wait, local)
    if unpacked is None:
        return None
    chain, dim, split = unpacked
    value = chain[-1]
    aliases, readers = _readers(value)
    products = tuple(
        n
        for n in readers
        if _is_product(n, _phase(start))
        and (original(n.args[1]), original(n.args[2])).count(value) == 1
    )
    if not products:
        return None
    return Gather(
        start=start,
        value=value,
        dim=dim,
        split=split,
        products=products,
        body=(*body, *chain, *aliases),
    )


def _unpacked(wait: fx.Node, local: tuple[int, ...]) -> tuple[list[fx.Node], int, int] | None:
    """From `[ranks, *local]` to the gathered tensor: the nodes, its dim, and the runs of a rank."""
    first = _only_user(wait)
    ranks = shape(wait)[0]
    if first is None or first.target is not aten.reshape.default:
        return None
    if shape(first) == (ranks * local[0], *local[1:]):
        return [first], 0, 1
    second = _only_user(first)
    third = None if second is None else _only_user(second)
    if second is None or third is None or third.target is not aten.reshape.default:
        return None
    if second.target is not aten.permute.default:
        return None
    dim = list(second.args[1]).index(0) - 1  # type: ignore[arg-type]
    split = shape(first)[dim + 1]
    run = local[dim] // split
    expected = (ranks, *local[:dim], split, run, *local[dim + 1 :])
    order = [*range(1, dim + 2), 0, *range(dim + 2, len(expected))]
    whole = (*local[:dim], ranks * local[dim], *local[dim + 1 :])
    if shape(first) != expected or list(second.args[1]) != order or shape(third) != whole:  # type: ignore[arg-type]
        return None
    return [first, second, third], dim, split


def _readers(value: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Aliases of a value, and what reads it or one of them, in the order of the graph."""
    aliases: list[fx.Node] = []
    readers: dict[fx.Node, None] = {}
    stack = [value]
    while stack:
        for user in stack.pop().users:
            if user.target is aten.alias.default:
                aliases.append(user)
                stack.append(user)
            else:
                readers[user] = None
    return aliases, sorted(readers)


# --- reductions


def _scatter(start: fx.Node) -> Reduction | None:
    """Its operand is `[ranks, …]`, from a reshape, a permute and a reshape of the sum."""
    wait = _only_user(start)
    result = None if wait is None else _only_user(wait)
    packed = start.args[0]
    assert isinstance(packed, fx.Node)
    body = [start]
    if packed.target is aten.clone.default and _only_user(packed) is start:
        body.insert(0, packed)
        packed = _operand(packed)
    if wait is None or result is None or result.target is not aten.reshape.default:
        return None
    if packed.target is not aten.reshape.default or len(packed.users) != 1:
        return None
    moved = _operand(packed)
    if moved.target is not aten.permute.default or len(moved.users) != 1:
        return None
    parts = _operand(moved)
    if parts.target is not aten.reshape.default or len(parts.users) != 1:
        return None
    value, order = _operand(parts), list(moved.args[1])  # type: ignore[arg-type]
    dim = order[0] - 1
    ranks, split = int(start.args[2]), shape(parts)[dim]  # type: ignore[arg-type]
    given = shape(value)
    run = given[dim] // (split * ranks)
    expected = (*given[:dim], split, ranks, run, *given[dim + 1 :])
    wanted = [dim + 1, *range(dim + 1), *range(dim + 2, len(expected))]
    local = (*given[:dim], split * run, *given[dim + 1 :])
    if shape(parts) != expected or order != wanted or shape(result) != local:
        return None
    return _summed(start, value, result, dim, split, (parts, moved, packed, *body, wait, result))


def _all_reduce(start: fx.Node) -> Reduction | None:
    wait = _only_user(start)
    value = start.args[0]
    assert isinstance(value, fx.Node)
    body = [start]
    if value.target is aten.clone.default and _only_user(value) is start:
        body.insert(0, value)
        value = _operand(value)
    if wait is None:
        return None
    return _summed(start, value, wait, None, 1, (*body, wait))


def _summed(
    start: fx.Node,
    value: fx.Node,
    result: fx.Node,
    dim: int | None,
    split: int,
    body: tuple[fx.Node, ...],
) -> Reduction | None:
    products: list[fx.Node] = []
    sums: list[fx.Node] = []
    for node in _terms(value, value, _phase(start)):
        (products if node.target is EINSUM else sums).append(node)
    if not products or any(math.prod(shape(n)) == 0 for n in products):
        return None
    return Reduction(
        start=start,
        value=value,
        result=result,
        dim=dim,
        split=split,
        products=tuple(products),
        sums=tuple(sums),
        body=body,
    )


def _terms(node: object, root: fx.Node, phase: object) -> Iterator[fx.Node]:
    """Sums and products that make up `root`, operands first; nothing else reads those inside."""
    if not isinstance(node, fx.Node) or _phase(node) != phase:
        return
    if node is not root and len(node.users) != 1:
        return
    if _is_product(node, phase):
        yield node
    elif node.target is aten.alias.default:
        yield from _terms(node.args[0], root, phase)
        yield node
    elif node.target is aten.add.Tensor and not node.kwargs:
        if all(isinstance(a, fx.Node) and shape(a) == shape(node) for a in node.args):
            for term in node.args:
                yield from _terms(term, root, phase)
            yield node
