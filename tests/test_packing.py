"""Seconds of copies on the way from one layout to another, and plans that count them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from autopar.core.constraints import Constraints
from autopar.core.placement import Partial, Replicate, Shard, is_valid
from autopar.core.redistribute import copied_fractions
from autopar.core.strategy import TensorSpec
from autopar.cost_model import Cluster
from autopar.search.scheduling import scheduled
from autopar.solver.moves import MoveCosts
from autopar.solver.packing import packing_seconds
from autopar.solver.solve import solve
from autopar.tracer.trace import trace

_PLACEMENTS = (Replicate(), Partial(), Shard(0), Shard(1), Shard(2), Shard(1, 3))


@pytest.mark.parametrize("shape", [(4, 24, 64), (1, 24, 6), (4096, 48, 2), (8, 3, 4)], ids=str)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_shapes_that_are_alike_are_copied_alike(
    shape: tuple[int, ...], mesh: tuple[int, ...]
) -> None:
    """Seconds for all pairs at once, of large dims without their sizes, are those of each."""
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=4, mesh_shape=mesh)
    layouts = [
        layout
        for layout in itertools.product(_PLACEMENTS, repeat=len(mesh))
        if is_valid(layout, shape, mesh)
    ]
    spec = TensorSpec(shape, torch.bfloat16)
    moves = MoveCosts(cluster)
    moves.packing(layouts[:3], layouts, spec)  # some are known before
    found = moves.packing(layouts, layouts, spec)
    assert (found > 0).any()
    for (i, src), (j, dst) in itertools.product(enumerate(layouts), repeat=2):
        copied = copied_fractions(src, dst, shape, mesh)
        assert found[i, j] == pytest.approx(packing_seconds(copied, spec, cluster)), (src, dst)


def test_nothing_is_copied_of_an_empty_tensor() -> None:
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=4)
    spec = TensorSpec((4, 0), torch.float32)
    assert packing_seconds((1.0,), spec, cluster) == 0
    assert not MoveCosts(cluster).packing([(Shard(1),)], [(Replicate(),)], spec).any()


def test_a_parameter_that_may_be_split_either_way_is_split_where_nothing_is_copied() -> None:
    """Both take the same collectives; of the plans alike in all else, one copies."""
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Tanh(), nn.Linear(512, 512))
    with torch.device("meta"):
        inputs = torch.empty(64, 512)
    traced = trace(model.to("meta"), {"input": inputs})
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=4)
    steps = {}
    for dim in (0, 1):
        pins = {"data": 4, "zero": 3, "params": {"0.weight": [f"Shard({dim})"]}}
        steps[dim] = solve(traced, cluster, constraints=Constraints.parse(pins))
    free = solve(traced, cluster, constraints=Constraints.parse({"data": 4, "zero": 3}))
    assert steps[0].predicted.packing_s == 0
    assert steps[1].predicted.packing_s > 0
    assert steps[1].solver.objective > steps[0].solver.objective
    assert free.parameters["0.weight"] == (Shard(0),)
    assert free.solver.objective == pytest.approx(steps[0].solver.objective)
    program = scheduled(steps[1], traced).predicted
    assert program.packing_s == pytest.approx(steps[1].predicted.packing_s, rel=1e-6)
