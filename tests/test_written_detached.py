"""What is added in place to a tensor that was detached keeps its gradient, or is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar

Positions = Callable[["_Model", Tensor], Tensor]


class _Model(nn.Module):
    def __init__(self, positions: Positions) -> None:
        super().__init__()
        self.kind = nn.Embedding(2, 8)
        self.inner = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(16, 8))
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.positions(self, x)).square().sum()


def _rows(m: _Model, x: Tensor) -> Tensor:
    assert isinstance(m.table, Tensor)
    places = torch.arange(x.shape[1]).repeat(x.shape[0])
    return m.table.index_select(0, places).view(x.shape)


def _kind(m: _Model, x: Tensor) -> Tensor:
    kinds: Tensor = m.kind(torch.zeros((x.shape[0], 1), dtype=torch.int64))
    return kinds


def _detached(m: _Model, x: Tensor) -> Tensor:
    found = _rows(m, x).detach()
    found += _kind(m, x)
    return found


def _without_grad(m: _Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        found = _rows(m, x).detach()
    found += _kind(m, x)
    return found * 2


def _never_read(m: _Model, x: Tensor) -> Tensor:
    """What is written had a gradient, which nothing takes from there."""
    found = m.inner(x).detach()
    found.mul_(0.5)
    return found + _kind(m, x)


def _region(m: _Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        found = m.inner(x) * 1
        found += _kind(m, x)
        kept = found.detach().clone()
        kept.mul_(2)
    return found * kept


def _tracked(m: _Model, x: Tensor) -> Tensor:
    """A mean of what was seen, as of a codebook, which takes no gradient."""
    rows = m.inner(x + _kind(m, x))
    assert isinstance(m.table, Tensor)
    with torch.autocast("cpu", enabled=False):
        m.table.data.lerp_(rows.mean((0, 1)).expand(16, 8), 0.1)
    return rows


@pytest.mark.parametrize("positions", [_detached, _without_grad, _never_read, _region, _tracked])
def test_what_is_added_keeps_its_gradient(positions: Positions) -> None:
    torch.manual_seed(0)
    model, x = _Model(positions).double(), torch.randn(4, 5, 8).double()
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, (x,), constraints={"data": 2}, cache=False)
    found = autopar.verify(plan, model, (x,))
    assert found.worst[1] < 1e-12, found.worst
    assert "kind.weight" in found.gradients


def _read_later(m: _Model, x: Tensor) -> Tensor:
    rows = _rows(m, x)
    found = rows.detach()
    found += _kind(m, x)
    return found + rows


def _with_gradient(m: _Model, x: Tensor) -> Tensor:
    rows = m.inner(x)
    found = rows.detach()
    found += _kind(m, x)
    return found + x


def _scaled(m: _Model, x: Tensor) -> Tensor:
    """The value changes and the gradient does not."""
    rows = m.inner(x)
    rows.data.mul_(0.5)
    return rows


def _scaled_in_region(m: _Model, x: Tensor) -> Tensor:
    rows = m.inner(x)
    with torch.autocast("cpu", enabled=False):
        rows.detach().mul_(0.5)
    return rows


def _added_in_region(m: _Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return _detached(m, x) + m.inner(x)


def _scaled_in_region_that_is_detached_before(m: _Model, x: Tensor) -> Tensor:
    y = m.inner(x)
    part = y.detach()
    with torch.autocast("cpu", enabled=False):
        z = m.inner(x)
        part.mul_(0.5)
    return y * z


def _scaled_in_nested_region(m: _Model, x: Tensor) -> Tensor:
    y = m.inner(x)
    with torch.autocast("cpu", enabled=False):
        z = m.inner(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y.detach().mul_(0.5)
        z = z + 1
    return y * z


def _scaled_behind_region(m: _Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = m.inner(x)
        part = y.detach()
    part.mul_(0.5)
    return y


def _scaled_behind_region_that_detached(m: _Model, x: Tensor) -> Tensor:
    y = m.inner(x)
    with torch.autocast("cpu", enabled=False):
        part, z = y.detach(), m.inner(x)
    part.mul_(0.5)
    return y * z


@pytest.mark.parametrize(
    "positions",
    [
        _read_later, _with_gradient, _scaled, _scaled_in_region, _added_in_region,
        _scaled_in_region_that_is_detached_before, _scaled_in_nested_region, _scaled_behind_region,
        _scaled_behind_region_that_detached,
    ],
)  # fmt: skip
def test_a_write_that_others_see_is_refused_with_its_line(positions: Positions) -> None:
    model, x = _Model(positions).double(), torch.randn(4, 5, 8).double()
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with pytest.raises(autopar.TraceError, match=r"shares by detach\(\)") as refused:
        autopar.plan(model, cluster, (x,), cache=False)
    assert "test_written_detached.py:" in str(refused.value)
