"""Products of picked rows with matrices, as experts with stacked weights take them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import autopar
from tests.test_picked import WIDTH, Head, Model, errors


def _matrices(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = x[mask != 0]
    out = rows @ m.inner.weight + torch.mm(rows, m.inner.weight.T)
    out = out * (rows @ m.inner.bias).unsqueeze(-1)
    columns = m.inner.weight @ rows.T
    return F.cross_entropy(m.classes(out + columns.T), y[mask != 0])


def _batches(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = x[mask != 0].view(-1, 4, WIDTH // 4)
    heads = rows @ m.inner.weight[:4, :4]
    out = torch.bmm(rows, heads.transpose(1, 2)) + torch.matmul(heads, rows.mT)
    out = out.flatten(1) @ m.inner.weight
    stacked = m.classes.weight.view(2, -1, WIDTH)
    parts = torch.matmul(x[mask != 0], stacked.mT)  # (2, rows, CLASSES / 2)
    return F.cross_entropy(m.classes(out) + parts.transpose(0, 1).flatten(1), y[mask != 0])


def _equations(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows, stacked = x[mask != 0], m.classes.weight.view(2, -1, WIDTH)
    parts = torch.einsum("nd, ecd -> nec", rows, stacked)
    own = torch.einsum("nd,nd->n", rows, m.inner(rows))
    return F.cross_entropy(parts.flatten(1) * own.unsqueeze(-1), y[mask != 0])


def _parts(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    gate, up = m.inner(x[mask != 0]).chunk(2, dim=-1)
    first, second = (F.silu(gate) * up).split([3, 5], -1)
    third, fourth = x[mask != 0].split(WIDTH // 2, 1)
    out = torch.cat([first, second, third * fourth], 1)
    return F.cross_entropy(m.classes(out), y[mask != 0])


@pytest.mark.parametrize("head", [_matrices, _batches, _equations, _parts])
def test_a_product_of_picked_rows(head: Head) -> None:
    found = errors(head)
    assert found.worst[1] < 1e-12, found.worst


def _summed_over(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = x[mask != 0]
    return (rows.T @ rows).square().sum() + m.inner(x).sum() + m.classes(x).sum()


def _pairs(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = x[mask != 0]
    return (rows @ rows.T).logsumexp(0).sum() + m.inner(x).sum() + m.classes(x).sum()


def _equation_of_sums(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = m.inner(x[mask != 0])
    return torch.einsum("nd,ne->de", rows, rows).square().sum() + m.classes(x).sum()


@pytest.mark.parametrize("head", [_summed_over, _pairs, _equation_of_sums])
def test_a_product_that_joins_rows_is_refused_with_its_line(head: Head) -> None:
    with pytest.raises(autopar.TraceError, match=r"test_picked_products.py:\d+ in "):
        errors(head)
