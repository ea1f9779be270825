"""Products and parts of picked rows (`picked`), as experts with stacked weights take them."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from autopar.tracer.picked import Picks, Rows, args_of, value_of
from autopar.tracer.picked_rows import again, first_rows, swapped

__all__ = ["einsum", "parts", "product"]


def product(picks: Picks, node: fx.Node) -> Rows | None:
    """Matrices whose rows, columns or batch are picked, and not what is summed over."""
    operands = args_of(node)[:2]
    found = [picks.found(n) for n in operands]
    rows = [f for f in found if isinstance(f, Rows)]
    ranks = [value_of(n).dim() for n in operands]
    behind = {value_of(r.node).dim() - r.dim for r in rows}
    same = len({r.pick.key for r in rows}) == len(behind) == 1
    if not same or len(rows) + found.count(None) < 2 or ranks[0] < 2:
        return None
    (place,) = behind
    batch = place > 2 and (len(rows) == 2 or min(ranks) <= 2)
    first = found[1] is None and place == 2
    last = found[0] is None and place == 1 and ranks[1] > 1
    if not (batch or first or last):
        return None
    return again(picks, node, value_of(node).dim() + (ranks[1] == 1) - place, rows[0].pick)


def parts(picks: Picks, node: fx.Node) -> list[Rows] | None:
    """A chunk or a split of a dim that is not that of the rows."""
    rows = first_rows(picks, node)
    if rows is None:
        return None
    given = dict(zip(("x", "parts", "dim"), args_of(node), strict=False))
    dim: Any = given.get("dim", node.kwargs.get("dim", 0))
    if dim % value_of(rows.node).dim() == rows.dim:
        return None
    args, kwargs = swapped(picks, (args_of(node), dict(node.kwargs)))
    made = picks.call(node.target, *args, **kwargs)
    count = range(len(value_of(made)))
    nodes = [picks.call(operator.getitem, made, i) for i in count]
    return [Rows(node=n, dim=rows.dim, pick=rows.pick) for n in nodes]


def einsum(picks: Picks, node: fx.Node) -> Rows | None:
    """Rows of one pick that stand at a letter of the result."""
    equation, operands = args_of(node)[:2]
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    found = [picks.found(n) for n in operands]
    rows = [
        (term[f.dim], f.pick) for term, f in zip(terms, found, strict=True) if isinstance(f, Rows)
    ]
    if (
        "." in equation
        or len(rows) + found.count(None) < len(found)
        or len({(letter, pick.key) for letter, pick in rows}) != 1
    ):
        return None
    ((letter, pick), *_) = rows
    alone = all(term.count(letter) <= 1 for term in terms)
    if len(rows) < sum(letter in term for term in terms) or not alone or letter not in output:
        return None
    return again(picks, node, output.index(letter), pick)
