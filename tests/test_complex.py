"""Complex numbers: products, and writes to parts of a spectrum, with every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.verification import relative_error
from tests.test_handwritten import plan_for

DATA, COLUMNS = {"data": 2}, {"tensor": {"mode": "1d", "size": 2}}


class Spectral(nn.Module):
    """The power of what a function makes of spectra (B, C, N) and a weight (C, D, K)."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 4, dtype=torch.complex128))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(torch.fft.fft(x), self.weight).abs().square().mean()


def _lowest(f: Tensor, w: Tensor) -> Tensor:
    """A layer of a Fourier neural operator."""
    out = torch.zeros(f.shape[0], w.shape[1], f.shape[2], dtype=f.dtype)
    out[:, :, :3] = torch.einsum("bix,iox->box", f[..., :3], w[..., :3])
    out[:, :, -1:] = torch.einsum("bix,iox->box", f[..., -1:], w[..., 3:])
    return torch.fft.ifft(out)


def _one(f: Tensor, w: Tensor) -> Tensor:
    out = f.clone()
    out[:, 1] = f[:, 0] * w[0, 0, 0] + f[:, 1].real
    return out


def _scaled(f: Tensor, w: Tensor) -> Tensor:
    """A number times a parameter that is real, as the poles of state space models are."""
    return torch.exp(1j * w.real + (0.5 - 2j) * w.imag) * f[..., :4].sum((0, 1)) / (1 + 3j)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matrix": lambda f, w: f.mT @ w[0] @ w[1],
    "batch": lambda f, w: torch.bmm(f[:4, :, :4], w),
    "modes": lambda f, w: torch.einsum("bix,iox->box", f[..., :4], w),
    "real part": lambda f, w: torch.einsum("bix,iox->box", f[..., :4], w).real,
    "complex numbers": _scaled,
    "written modes": _lowest,
    "written channel": _one,
}


@pytest.mark.parametrize("constraints", [DATA, COLUMNS])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_complex_numbers(name: str, constraints: Any) -> None:
    torch.manual_seed(0)
    model, x = Spectral(FUNCTIONS[name]), torch.randn(8, 4, 8, dtype=torch.float64)
    plan = plan_for(model, (x,), (2,), constraints)
    found = autopar.verify(plan, model, (x,))
    assert set(found.gradients) == {"weight"}
    assert found.worst[1] < 1e-12, found.worst


def test_errors_are_those_of_both_parts() -> None:
    value = torch.tensor([1.0 + 1.0j])
    assert relative_error(value, value.conj()) == pytest.approx(2**0.5)
    assert relative_error(value, value) == 0.0


def test_equal_infinities_are_no_error() -> None:
    value = torch.tensor([1.0, float("inf"), -float("inf")])
    assert relative_error(value, value) == 0.0
    assert relative_error(value, -value) == float("inf")
    assert relative_error(torch.tensor([2.0, float("inf")]), value[:2]) == 1.0
