"""Values and gradients do not tell that a rank has other strides than those of the trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.tracer.decompositions import decomposition_table
from tests.test_handwritten import plan_for

aten = torch.ops.aten
DATA, COLUMNS = {"data": 2}, {"tensor": {"mode": "1d", "size": 2}}


def _double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Apply(nn.Module):
    """The sum of a function of the input, a weight and a column-major parameter."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(_double(4, 4))
        self.columns = nn.Parameter(torch.linalg.qr(_double(4, 4))[0])
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(x, self.weight, self.columns) * x[:, 0, 0]).sum() + (
            x @ self.columns
        ).square().mean()


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "slogdet turned": lambda x, w, c: torch.slogdet((x @ w).mT * 2)[1],
    "slogdet of an einsum": lambda x, w, c: torch.slogdet(torch.einsum("bik,kj->bji", x, w))[1],
    "det of an einsum": lambda x, w, c: torch.det(torch.einsum("bik,kj->bji", x, w)),
    "slogdet of a parameter": lambda x, w, c: torch.slogdet(c)[1] + (x @ w).sum((1, 2)),
    "det of a parameter": lambda x, w, c: torch.det(c) + (x @ w).sum((1, 2)),
    "solve": lambda x, w, c: torch.linalg.solve(torch.einsum("bik,kj->bji", x, w), c).sum((1, 2)),
}


def _turned(x: Tensor, w: Tensor) -> Tensor:
    """A product that is computed as `bij` and shown as `bji`."""
    return torch.einsum("bik,kj->bji", x, w)


# by kernels that take contiguous operands alone
FUNCTIONS |= {
    "group norm": lambda x, w, c: F.group_norm(_turned(x, w), 2).pow(3).sum((1, 2)),
    "group norm later": lambda x, w, c: (
        F.group_norm(F.gelu(_turned(x, w))[:, :2], 2).pow(3).sum((1, 2))
    ),
    "group norm earlier": lambda x, w, c: (_turned(F.group_norm(x @ w, 2), w) ** 2).sum((1, 2)),
    "pairwise distances": lambda x, w, c: (
        torch.pdist(torch.einsum("aik,kj->ji", x, w)).sum()
        + torch.pdist(_turned(x, w)[0]).sum() * x.sum((1, 2))
    ),
}


@pytest.mark.filterwarnings("ignore::autopar.errors.UnsupportedOpWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("constraints", [DATA, COLUMNS])
def test_gradients_do_not_depend_on_strides(name: str, constraints: Any) -> None:
    model, x = Apply(FUNCTIONS[name]), _double(8, 4, 4)
    plan = plan_for(model, (x,), (2,), constraints)
    result = autopar.verify(plan, model, (x,))
    assert set(result.gradients) == {"weight", "columns"}
    assert result.worst[1] < 1e-9, result.worst


@pytest.mark.parametrize("op", [aten._linalg_det.default, aten._linalg_slogdet.default])
@pytest.mark.parametrize("layout", ["rows", "columns", "singular", "complex", "none"])
def test_determinants_say_what_the_call_says(op: Any, layout: str) -> None:
    a = _double(3, 4, 4)
    if layout == "singular":
        a[:, :, 0] = 0.0
    a = {"columns": a.mT, "complex": torch.complex(a, a.mT), "none": a[:, :0, :0]}.get(layout, a)
    for found, expected in zip(decomposition_table()[op](a), op(a), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class TurnedNorm(nn.Module):
    """A group norm of a turned product, beside random numbers: the trace is the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.inner(x).transpose(1, 2))
        return (found * torch.rand_like(found)).square().mean()


def test_a_replayed_trace_gives_kernels_dense_operands() -> None:
    model, inputs = TurnedNorm().double(), (_double(4, 6, 8),)
    plan = plan_for(model, inputs, (2,), DATA)
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-9
