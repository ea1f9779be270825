"""The shares in which a step reads its inputs: each use is a slice of them, none sends."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.core.graph import InputSpec
from autopar.core.placement import Layout, Replicate, Shard, is_valid
from autopar.core.redistribute import path
from autopar.solver.input_layouts import input_layouts

_SHAPE = (8, 8)


def _share(uses: tuple[Layout, ...], mesh_shape: tuple[int, ...]) -> Layout:
    """Of an input that some ops read in the layouts `uses`."""
    spec = InputSpec(node="x", kind="input", target="0", shape=_SHAPE, dtype=torch.float64)
    ops = [SimpleNamespace(name=f"use{i}") for i in range(len(uses))]
    step: Any = SimpleNamespace(
        inputs={"x": spec},
        consumers=lambda: [(("x", 0), op, 0) for op in ops],
        required=(),
        gradients={},
        sends=(),
    )
    candidates: Any = {
        op.name: SimpleNamespace(inputs=(use,)) for op, use in zip(ops, uses, strict=True)
    }
    return input_layouts(step, candidates, mesh_shape)["x"]


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2), (2, 2, 2)], ids=str)
def test_every_use_is_a_slice_of_the_share(mesh_shape: tuple[int, ...]) -> None:
    some = (Replicate(), Shard(0), Shard(1))
    layouts = [
        layout
        for layout in itertools.product(some, repeat=len(mesh_shape))
        if is_valid(layout, _SHAPE, mesh_shape)
    ]
    for uses in itertools.product(layouts, repeat=2):
        share = _share(uses, mesh_shape)
        for use in uses:
            moves = path(share, use, mesh_shape)
            assert moves is not None
            assert all(m.kind == "slice" for m in moves), (share, use)


def test_the_batch_is_shared_where_all_uses_share_it() -> None:
    batch, whole = Shard(0), Replicate()
    assert _share(((batch, batch), (batch, batch)), (2, 2)) == (batch, batch)
    assert _share(((batch, batch), (batch, whole)), (2, 2)) == (batch, whole)
    assert _share(((batch, batch), (whole, batch)), (2, 2)) == (whole, whole)


class _NoOneLoss(nn.Module):
    """Two scalars, so that neither is the loss, and all outputs come back whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.inner(x).square().mean(), x, self.inner.weight, self.inner.weight.norm()


@pytest.mark.parametrize("constraints", [{"data": 2}, {"data": 2, "zero": 3}], ids=str)
def test_an_input_that_is_returned_stays_whole(constraints: dict[str, Any]) -> None:
    model, x = _NoOneLoss().double(), torch.randn(8, 16, dtype=torch.float64)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, (x,), constraints=constraints, cache=False)
    found = autopar.verify(plan, model, (x,))
    assert found.worst[1] < 1e-12, found.worst


class _ReadsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.inner(x).square().mean(), x[:2]


def test_shares_of_an_input_that_are_no_slice_cost_what_the_search_says() -> None:
    model, x = _ReadsItsInput().double(), torch.randn(8, 16, dtype=torch.float64)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, (x,), constraints={"data": 2}, cache=False)
    found = autopar.verify(plan, model, (x,))
    assert found.worst[1] < 1e-12, found.worst
