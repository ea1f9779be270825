"""ATen calls spelled with other ops: the same values and gradients as the calls themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.tracer.decompositions import REPLACEMENTS

aten = torch.ops.aten
_MASK = torch.tensor([[True, False, True], [False, False, True]])


def _x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


CALLS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "glu": (aten.glu.default, lambda: (_x(4, 6),)),
    "glu dim": (aten.glu.default, lambda: (_x(4, 6, 3), 1)),
    "einsum promotes": (aten.einsum.default, lambda: ("i, j -> i j", [torch.arange(3), _x(4)])),
    **{
        f"einsum broadcasts {equation}": (
            aten.einsum.default,
            lambda e=equation: (e, [_x(4, 3, 2), _x(1, 3, 1)]),
        )
        for equation in ("abc,abc->ab", "abc, abc -> c", "abc,abd->cd")
    },
    "addmv": (aten.addmv.default, lambda: (_x(4), _x(4, 3), _x(3))),
    "addmv broadcast": (aten.addmv.default, lambda: (_x(1), _x(4, 3), _x(3))),
    "addr": (aten.addr.default, lambda: (_x(4, 3), _x(4), _x(3))),
    "addr broadcast": (aten.addr.default, lambda: (_x(3), _x(4), _x(3))),
    **{f"dist {p}": (aten.dist.default, lambda p=p: (_x(4, 3), _x(3), p)) for p in (0.5, 1, 2)},
    "block_diag": (aten.block_diag.default, lambda: ([_x(2, 3), _x(4), _x(1, 2), _x()],)),
    "trace": (aten.trace.default, lambda: (_x(4, 6),)),
    "masked_scatter": (aten.masked_scatter.default, lambda: (_x(2, 3), _MASK, _x(5))),
    "masked_scatter broadcast": (
        aten.masked_scatter.default,
        lambda: (_x(4, 2, 3), _MASK, _x(3, 4)),
    ),
    "masked_scatter tokens": (
        aten.masked_scatter.default,
        lambda: (_x(2, 3, 4), _MASK.unsqueeze(-1).expand(2, 3, 4), _x(1, 4, 4)),
    ),
    "masked_scatter flat source": (
        aten.masked_scatter.default,
        lambda: (_x(2, 3, 4), _MASK.unsqueeze(-1).expand(2, 3, 4), _x(16)),
    ),
    **{
        f"rot90 {k}": (aten.rot90.default, lambda k=k: (_x(4, 6, 3), k, [0, 2]))
        for k in range(-1, 5)
    },
    **{
        f"affine_grid {size} {corners}": (
            aten.affine_grid_generator.default,
            lambda s=size, c=corners: (_x(2, len(s) - 2, len(s) - 1), s, c),
        )
        for size in ([2, 3, 5, 4], [2, 3, 1, 4], [2, 3, 3, 2, 4])
        for corners in (False, True)
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_same_as_the_call(name: str) -> None:
    torch.manual_seed(0)
    op, inputs = CALLS[name]
    given = inputs()
    found, expected = REPLACEMENTS[op](None, *given), op(*given)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    leaves = pytree.tree_leaves(given)
    reads = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    weights = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(found, reads, weights),
        torch.autograd.grad(expected, reads, weights),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Rng:
    def uniform(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        return torch.rand(shape, dtype=dtype)


def test_an_order_is_one_of_all() -> None:
    torch.manual_seed(0)
    found = [REPLACEMENTS[aten.randperm.default](Rng(), 7) for _ in range(3)]
    assert len({tuple(x.tolist()) for x in found}) == 3
    assert all(sorted(x.tolist()) == list(range(7)) for x in found)


@pytest.mark.parametrize("replacement", [False, True])
def test_places_are_drawn_by_their_weights(replacement: bool) -> None:
    torch.manual_seed(0)
    weights = torch.tensor([[0.0, 1.0, 2.0, 0.0, 1.0], [3.0, 0.0, 1.0, 4.0, 0.0]])
    some, op = weights.repeat(20000, 1), aten.multinomial.default
    for count in (1, 2):
        found = REPLACEMENTS[op](Rng(), some, count, replacement)
        expected = op(some, count, replacement)
        assert found.dtype is torch.int64 and found.shape == expected.shape
        for row in (0, 1):  # each pair that is drawn, in its order
            codes = [(x[row::2] * torch.tensor([1, 5])[:count]).sum(1) for x in (found, expected)]
            shares = [c.bincount(minlength=25) / 20000 for c in codes]
            assert ((shares[0] > 0) == (shares[1] > 0)).all()
            torch.testing.assert_close(*shares, rtol=0.0, atol=0.015)
