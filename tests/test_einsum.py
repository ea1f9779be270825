"""Contractions against torch.einsum, however their operands are laid out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.core.einsum import contract, is_dense, takes_bias

SIZES = {"a": 2, "b": 3, "k": 4, "m": 5, "n": 6, "h": 1}
EQUATIONS = [
    "abk,nk->abn",  # a linear layer, and its two gradients
    "abn,nk->abk",
    "abn,abk->nk",
    "ak,nk->an",
    "ak,kn->an",
    "k,nk->n",
    "abk,kn->abn",
    "abk,mnk->abmn",
    "abkm,nkm->abn",
    "abk,nk->nab",
    "bak,nk->abn",
    "hk,nk->hn",
    "abk,abn->akn",
    "abmk,abnk->abmn",
    "abmn,abnk->ambk",
    "abmk,abk->abm",
    "abk,abk->ab",
    "bk,ak->ab",
    "a,b->ab",
    "k,k->",
]


def operand(letters: str, layout: str) -> Tensor:
    """Numbers of a term, as they come from an op or as a view of another tensor."""
    shape = [SIZES[c] for c in letters]
    if layout == "permuted":
        return operand(letters[::-1], "contiguous").permute(*range(len(shape))[::-1])
    if layout == "sliced":
        return operand(letters, "contiguous").repeat(*[1] * (len(shape) - 1), 2)[..., : shape[-1]]
    generator = torch.Generator().manual_seed(len(letters) + sum(shape))
    return torch.rand(shape, dtype=torch.float64, generator=generator) - 0.5


@pytest.mark.parametrize("right", ["contiguous", "permuted", "sliced"])
@pytest.mark.parametrize("left", ["contiguous", "permuted", "sliced"])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_a_contraction_is_the_einsum(equation: str, left: str, right: str) -> None:
    first, second = equation.partition("->")[0].split(",")
    a, b = operand(first, left), operand(second, right)
    expected = torch.einsum(equation, a, b)
    found = contract(equation, a, b)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if is_dense(equation):
        assert found.is_contiguous()
    if takes_bias(equation):
        bias = operand(equation[-1], "contiguous")
        more = contract(equation, a, b, bias)
        torch.testing.assert_close(more, expected + bias, rtol=1e-12, atol=1e-12)
