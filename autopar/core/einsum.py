"""Two-operand contractions in einsum notation: parsing, gradients, and lowering to mm/bmm.

An equation such as ``bsk,nk->bsn`` names every dim by one letter. Letters fall in four roles:
batch (both operands and output), contracted (both operands only), free of `a`, free of `b`.
No letter repeats inside a term and none is summed in one operand alone, so the gradient of an
operand is again such a contraction: d/da of ``a,b->o`` is ``o,b->a``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Equation",
    "contract",
    "flops",
    "gradient_equations",
    "is_dense",
    "output_shape",
    "parse_equation",
    "takes_bias",
]


class Equation(NamedTuple):
    """The letters of each term, and the letters of each role in the order of the terms."""

    a: str
    b: str
    out: str
    batch: str
    contracted: str
    free_a: str
    free_b: str


@lru_cache(maxsize=4096)
def parse_equation(equation: str) -> Equation:
    """Split an equation into terms and roles; a letter outside the four roles is a ValueError."""
    operands, out = equation.split("->")
    a, b = operands.split(",")
    batch = "".join(c for c in a if c in b and c in out)
    contracted = "".join(c for c in a if c in b and c not in out)
    free_a = "".join(c for c in a if c not in b)
    free_b = "".join(c for c in b if c not in a)
    if any(len(set(term)) != len(term) for term in (a, b, out)) or set(out) != set(
        batch + free_a + free_b
    ):
        raise ValueError(f"{equation!r} is not a plain two-operand contraction")
    return Equation(a, b, out, batch, contracted, free_a, free_b)


def gradient_equations(equation: str) -> tuple[str, str]:
    """Equations `(grad, b) -> grad_a` and `(grad, a) -> grad_b`."""
    eq = parse_equation(equation)
    return f"{eq.out},{eq.b}->{eq.a}", f"{eq.out},{eq.a}->{eq.b}"


def _sizes(eq: Equation, a_shape: Sequence[int], b_shape: Sequence[int]) -> dict[str, int]:
    sizes = dict(zip(eq.a, a_shape, strict=True))
    for letter, size in zip(eq.b, b_shape, strict=True):
        if sizes.setdefault(letter, size) != size:
            raise ValueError(f"size of {letter!r} differs: {sizes[letter]} and {size}")
    return sizes


def output_shape(equation: str, a_shape: Sequence[int], b_shape: Sequence[int]) -> list[int]:
    """Shape of the result."""
    eq = parse_equation(equation)
    sizes = _sizes(eq, a_shape, b_shape)
    return [sizes[letter] for letter in eq.out]


def flops(equation: str, a_shape: Sequence[int], b_shape: Sequence[int]) -> int:
    """2 · product of all sizes: one multiply and one add per term."""
    return 2 * math.prod(_sizes(parse_equation(equation), a_shape, b_shape).values())


class _Steps(NamedTuple):
    """How a contraction of operands of known shapes runs as one `mm` or `bmm`.

    Each operand is permuted and its letters of each role are flattened to one dim, and so back for
    the result; None where that changes nothing. `swap` computes the transpose of the result.
    `one_call` is the name of torch's function that does all of it, where `a` is contiguous.
    """

    order_a: tuple[int, ...] | None
    shape_a: tuple[int, ...] | None
    order_b: tuple[int, ...] | None
    shape_b: tuple[int, ...] | None
    batched: bool
    swap: bool
    shape_out: tuple[int, ...] | None
    order_out: tuple[int, ...] | None
    one_call: str


@lru_cache(maxsize=4096)
def _steps(equation: str, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> _Steps:
    eq = parse_equation(equation)
    sizes = _sizes(eq, a_shape, b_shape)
    batch, free_a, free_b, swap = _free(eq)

    def arranged(
        letters: str, groups: tuple[str, ...]
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        shape = tuple(math.prod(sizes[c] for c in group) for group in groups)
        return _order(letters, "".join(groups)), None if _are_dims(groups) else shape

    lead = (batch,) if batch else ()
    made = _made(eq)
    return _Steps(
        *arranged(eq.a, (*lead, free_a, eq.contracted)),
        *arranged(eq.b, (*lead, eq.contracted, free_b)),
        batched=bool(batch),
        swap=swap,
        shape_out=None if _are_dims((*lead, free_a, free_b)) else tuple(sizes[c] for c in made),
        order_out=_order(made, eq.out),
        one_call=_one_call(eq),
    )


def _are_dims(groups: Sequence[str]) -> bool:
    """True if each group of letters is one dim already."""
    return all(len(group) == 1 for group in groups)


def _one_call(eq: Equation) -> str:
    """`linear` for rows of `a` with a matrix (out, in), `matmul` with (in, out), else nothing."""
    rows, last = eq.a[:-1], eq.contracted
    if not rows or len(eq.free_b) != 1 or eq.a != rows + last or eq.out != rows + eq.free_b:
        return ""
    return {eq.free_b + last: "linear", last + eq.free_b: "matmul"}.get(eq.b, "")


def _free(eq: Equation) -> tuple[str, str, str, bool]:
    """Batch and free letters in the output's order, and whether `b`'s come before `a`'s in it."""
    # in the output's order so that the result needs no permute
    batch, free_a, free_b = (
        "".join(c for c in eq.out if c in role) for role in (eq.batch, eq.free_a, eq.free_b)
    )
    swap = bool(free_a and free_b) and eq.out.index(free_b[0]) < eq.out.index(free_a[0])
    return batch, free_a, free_b, swap


def _made(eq: Equation) -> str:
    """The letters of the result as the product lays them out."""
    batch, free_a, free_b, swap = _free(eq)
    return batch + (free_b + free_a if swap else free_a + free_b)


def _order(letters: str, wanted: str) -> tuple[int, ...] | None:
    """The permutation from one order of letters to another; None where they are the same."""
    return None if letters == wanted else tuple(letters.index(c) for c in wanted)


def is_dense(equation: str) -> bool:
    """True if `contract` gives a contiguous result, and not a permuted one."""
    eq = parse_equation(equation)
    return _made(eq) == eq.out


def takes_bias(equation: str) -> bool:
    """True if `contract` can add a bias along the result's last dim in the same call."""
    eq = parse_equation(equation)
    return (
        bool(eq.free_a and eq.free_b)
        and not eq.batch
        and eq.out.endswith(eq.free_b)
        and (len(eq.free_b) == 1)
    )


def contract(equation: str, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run a contraction as one `mm` or `bmm`, copying only where a layout demands it.

    Args:
        equation: for `parse_equation`.
        a, b: operands.
        bias: added along the last dim, for an equation that `takes_bias`.
    """
    # the steps are kept by shapes: to find them takes longer than a small product
    steps = _steps(equation, a.shape, b.shape)
    if steps.one_call == "linear" and a.is_contiguous():
        return torch.nn.functional.linear(a, b, bias)
    if steps.one_call == "matmul" and bias is None and a.is_contiguous():
        return torch.matmul(a, b)
    lhs = a if steps.order_a is None else a.permute(steps.order_a)
    lhs = lhs if steps.shape_a is None else lhs.reshape(steps.shape_a)
    rhs = b if steps.order_b is None else b.permute(steps.order_b)
    rhs = rhs if steps.shape_b is None else rhs.reshape(steps.shape_b)
    if steps.batched:
        out = rhs.transpose(1, 2).bmm(lhs.transpose(1, 2)) if steps.swap else lhs.bmm(rhs)
    elif bias is not None:
        out = torch.addmm(bias, lhs, rhs)
    else:
        out = rhs.t().mm(lhs.t()) if steps.swap else lhs.mm(rhs)
    out = out if steps.shape_out is None else out.reshape(steps.shape_out)
    return out if steps.order_out is None else out.permute(steps.order_out)
