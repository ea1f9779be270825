"""What runs under `no_grad` is known by the user's line and module, like everything else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.tracer.trace import trace


class Scaled(nn.Module):
    """Its scale has no gradient; `counts`: a buffer is updated beside it."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.inner, self.counts = nn.Linear(8, 8), counts
        self.register_buffer("seen", torch.zeros(8))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.cumsum(0)
            if self.counts:
                self.seen.add_(scale.sum(0))
        return (self.inner(x) * scale).mean()


@pytest.mark.parametrize("counts", [False, True])
def test_lines_under_no_grad(counts: bool) -> None:
    outer = nn.Sequential(nn.Linear(8, 8), Scaled(counts))
    traced = trace(outer, (torch.randn(4, 8),))
    first = Scaled.forward.__code__.co_firstlineno
    info = traced.info["cumsum"]
    assert info.source == f"{__file__}:{first + 2}"
    assert info.module == "1"
    if counts:
        (buffer,) = (spec.node for spec in traced.outputs if spec.kind == "buffer")
        assert traced.info[str(buffer)].source == f"{__file__}:{first + 4}"
    assert all(
        found.source.startswith(__file__) for found in traced.info.values() if found.module == "1"
    )
