"""Matmuls together with the collective next to them, as one op each.

- ``autopar::gather_matmul``: X = all-gather(x) and the products of X with other tensors.
- ``autopar::matmul_reduce_scatter``: the reduce-scatter of a product.

On CUDA, where the ranks of the group reach each other's memory, both are torch's symmetric-memory
ops, which copy a rank's part while the part before it is multiplied (`symmetric_device.py`).
Elsewhere they are what their names say, one after the other.

Those ops take matrices. The gathered or scattered dim comes first, so that a rank's part is a run
of rows: with g that dim, f the other free dims of its operand, k the contracted ones, n the free
dims of the other operand::

    (g f, k) × (k, n) = (g f, n)

Each result is permuted to the order of its equation, and is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.core.einsum import Equation, contract, output_shape, parse_equation
from autopar.core.library import KERNEL, LIBRARY, fake_of
from autopar.core.symmetric_device import fused_calls

__all__ = [
    "GATHER_MATMUL",
    "MATMUL_REDUCE_SCATTER",
    "copied",
    "may_be_rows",
    "multiplied",
    "parts_of",
]

c10d = torch.ops._c10d_functional

LIBRARY.define(
    "gather_matmul(Tensor shard, Tensor[] others, str[] equations, int dim, bool keep, int ranks,"
    " str group_name) -> Tensor[]"
)
LIBRARY.define(
    "matmul_reduce_scatter(Tensor a, Tensor b, str equation, int dim, int ranks, str group_name)"
    " -> Tensor"
)
GATHER_MATMUL = torch.ops.autopar.gather_matmul.default
MATMUL_REDUCE_SCATTER = torch.ops.autopar.matmul_reduce_scatter.default


def may_be_rows(equation: Equation, mark: str) -> bool:
    """True if a contraction is one of matrices whose rows may begin with the dim `mark` of `a`."""
    return mark in equation.free_a and bool(equation.contracted) and not equation.batch


def copied(equation: str, dim: int, a: Sequence[int], b: Sequence[int]) -> tuple[bool, bool, bool]:
    """Which of both operands and the result are copied to be matrices, and from one.

    Args:
        equation: of a product, which `may_be_rows`.
        dim: of `a`, that is gathered or scattered.
        a, b: shapes of the operands.
    """
    form = _Form(equation, dim)
    e = form.equation
    single = {c for c, n in (*zip(e.a, a, strict=True), *zip(e.b, b, strict=True)) if n == 1}

    def seen(letters: str) -> str:
        return "".join(c for c in letters if c not in single)

    left = seen(e.a) != seen(form.rows + e.contracted)
    right = seen(e.b) not in (seen(e.contracted + e.free_b), seen(e.free_b + e.contracted))
    return left, right, seen(e.out) != seen(form.rows + e.free_b)


# --- all-gather, then products


def multiplied(
    whole: Tensor, others: Sequence[Tensor], equations: Sequence[str], keep: bool
) -> list[Tensor]:
    """What `gather_matmul` yields, of the gathered tensor."""
    found = [contract(e, whole, b).contiguous() for e, b in zip(equations, others, strict=True)]
    return [*found, whole] if keep else found


def _gather_matmul(
    shard: Tensor,
    others: Sequence[Tensor],
    equations: Sequence[str],
    dim: int,
    keep: bool,
    ranks: int,
    group_name: str,
) -> list[Tensor]:
    """The products of a gathered tensor, and that tensor itself where `keep`.

    Args:
        shard: this rank's part.
        others: second operands of the products.
        equations: of the products, the gathered tensor first.
        dim: that is gathered.
        keep: whether the gathered tensor is wanted, too, as the last result.
        ranks, group_name: of the group.
    """
    calls = fused_calls(group_name, shard.device)
    if calls is None:
        flat = c10d.all_gather_into_tensor(shard.contiguous(), ranks, group_name)
        flat = c10d.wait_tensor(flat).view(ranks, *shard.shape)
        # a fresh tensor, as what is put out must not be what came in
        whole = flat.movedim(0, dim).flatten(dim, dim + 1).contiguous()
        return multiplied(whole, others, equations, keep)
    forms = [_Form(equation, dim) for equation in equations]
    (first, *_) = forms
    sides = [form.right(other) for form, other in zip(forms, others, strict=True)]
    matrix, products = calls.gather_matmul(first.left(shard), sides, group_name, keep)
    shape = [*shard.shape]
    shape[dim] *= ranks
    found = [
        form.result(product, shape, other.shape)
        for form, other, product in zip(forms, others, products, strict=True)
    ]
    if keep:
        assert matrix is not None
        found.append(first.operand(matrix, shape))
    return found


LIBRARY.impl("gather_matmul", _gather_matmul, KERNEL)


@fake_of("gather_matmul")
def _gather_matmul_fake(  # type: ignore[no-untyped-def]
    shard, others, equations, dim, keep, ranks, group_name
):
    whole = [*shard.shape]
    whole[dim] *= ranks
    found = [
        shard.new_empty(output_shape(e, whole, b.shape))
        for e, b in zip(equations, others, strict=True)
    ]
    return [*found, shard.new_empty(whole)] if keep else found


# --- a product, then reduce-scatter


def parts_of(product: Tensor, dim: int, ranks: int) -> Tensor:
    """`(…, n, …)` as `(ranks, …, n / ranks, …)`, contiguous: what each rank gets, in rank order."""
    return torch.stack(product.chunk(ranks, dim))


def _matmul_reduce_scatter(
    a: Tensor, b: Tensor, equation: str, dim: int, ranks: int, group_name: str
) -> Tensor:
    """This rank's part of the sum over ranks of a product.

    Args:
        a, b: operands; the scattered dim is one of `a`.
        equation: of the product.
        dim: of the product, that is scattered.
        ranks, group_name: of the group.
    """
    calls = fused_calls(group_name, a.device)
    if calls is None:
        parts = parts_of(contract(equation, a, b), dim, ranks)
        summed = c10d.reduce_scatter_tensor(parts, "sum", ranks, group_name)
        return c10d.wait_tensor(summed).squeeze(0)
    parsed = parse_equation(equation)
    form = _Form(equation, parsed.a.index(parsed.out[dim]))
    summed = calls.matmul_reduce_scatter(form.left(a), form.right(b), group_name)
    shape = [*a.shape]
    shape[form.dim] //= ranks
    return form.result(summed, shape, b.shape)


LIBRARY.impl("matmul_reduce_scatter", _matmul_reduce_scatter, KERNEL)


@fake_of("matmul_reduce_scatter")
def _matmul_reduce_scatter_fake(a, b, equation, dim, ranks, group_name):  # type: ignore[no-untyped-def]
    shape = output_shape(equation, a.shape, b.shape)
    shape[dim] //= ranks
    return a.new_empty(shape)


# --- matrices


class _Form:
    """A contraction as a product of matrices.

    Args:
        equation: of the contraction, which `may_be_rows`.
        dim: of `a`, that the rows begin with.
    """

    def __init__(self, equation: str, dim: int) -> None:
        self.equation = parse_equation(equation)
        self.dim = dim
        mark = self.equation.a[dim]
        self.rows = mark + self.equation.free_a.replace(mark, "")

    def left(self, a: Tensor) -> Tensor:
        """`a` as (rows, contracted), contiguous, as the parts that are copied must be."""
        return _matrix(a, self.equation.a, self.rows, self.equation.contracted).contiguous()

    def right(self, b: Tensor) -> Tensor:
        """`b` as (contracted, columns), of any strides."""
        return _matrix(b, self.equation.b, self.equation.contracted, self.equation.free_b)

    def operand(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `left`."""
        a = self.equation.a
        return _tensor(
            matrix, self.rows + self.equation.contracted, a, dict(zip(a, shape, strict=True))
        )

    def result(self, matrix: Tensor, a: Sequence[int], b: Sequence[int]) -> Tensor:
        """The product of operands of these shapes."""
        sizes = {
            **dict(zip(self.equation.a, a, strict=True)),
            **dict(zip(self.equation.b, b, strict=True)),
        }
        return _tensor(matrix, self.rows + self.equation.free_b, self.equation.out, sizes)


def _matrix(x: Tensor, letters: str, rows: str, columns: str) -> Tensor:
    moved = x.permute([letters.index(c) for c in rows + columns])
    return moved.reshape(math.prod(moved.shape[: len(rows)]), -1)


def _tensor(matrix: Tensor, letters: str, wanted: str, sizes: dict[str, int]) -> Tensor:
    shaped = matrix.reshape([sizes[c] for c in letters])
    return shaped.permute([letters.index(c) for c in wanted]).contiguous()
