"""The optimizer's update is part of what a plan takes, and so of what is chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.core.constraints import Constraints
from autopar.core.placement import local_shape
from autopar.core.plan import Plan
from autopar.cost_model import (
    Cluster,
    Curve,
    Offloaded,
    kernel_seconds,
    update_seconds,
)
from autopar.cost_model.probes import probes
from autopar.cost_model.simulator import optimizer_seconds
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from tests import handwritten as hw

FOUR = Cluster.from_profile("h100-sxm", devices_per_node=4)


def with_update(seconds: float) -> Cluster:
    """The same, but that updating a MB takes so long."""
    curve = Curve(
        op_class="update", dtype="float32", unit="bytes", work=(1.0, 1e6), seconds=(1e-12, seconds)
    )
    return replace(FOUR, device=replace(FOUR.device, curves=(curve,), kernel_overhead_s=0.0))


@pytest.fixture(scope="module")
def traced() -> Any:
    return trace(hw.Mlp(width=64, layers=3), hw.vectors(512, width=64))


def shares(plan: Plan) -> list[tuple[int, str]]:
    return [
        (4 * math.prod(local_shape(plan.shapes[n], layout, plan.mesh_shape)), "float32")
        for n, layout in plan.parameters.items()
    ]


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_takes_the_update_of_what_a_rank_holds(
    traced: Any, zero: int, optimizer: str
) -> None:
    wanted = Constraints.parse({"data": 4, "zero": zero})
    plan = solve(traced, FOUR, constraints=wanted, optimizer=optimizer, exposed=1.0)
    p = plan.predicted
    assert p.update_s == pytest.approx(optimizer_seconds(FOUR.device, shares(plan), optimizer))
    assert p.update_s > 0
    assert p.step_time_s == pytest.approx(p.compute_time_s + p.comm_time_s + p.update_s)
    assert plan.solver.objective == pytest.approx(p.step_time_s, rel=1e-6)


def test_a_slow_update_is_shared(traced: Any) -> None:
    for cluster, optimizer, split in (
        (FOUR, None, False),
        (with_update(1e-9), "adamw", False),
        (with_update(1.0), "adamw", True),
    ):
        plan = solve(traced, cluster, optimizer=optimizer)
        weights = [
            n for n, shape in plan.shapes.items() if len(shape) == 2 and n in plan.parameters
        ]
        assert weights
        for name in weights:
            assert any(p.is_shard for p in plan.parameters[name]) == split, (name, optimizer)


@given(
    num_bytes=st.integers(1 << 10, 1 << 34).map(lambda n: 4 * n),
    more=st.integers(0, 1 << 34).map(lambda n: 4 * n),
    name=st.sampled_from(["adamw", "sgd", "adafactor"]),
)
def test_more_to_update_takes_no_less(num_bytes: int, more: int, name: str) -> None:
    one = update_seconds(FOUR.device, name, num_bytes, "float32")
    assert 0 < one <= update_seconds(FOUR.device, name, num_bytes + more, "float32")
    assert update_seconds(FOUR.device, Offloaded(name), num_bytes, "float32") == one
    assert update_seconds(FOUR.device, None, num_bytes, "float32") == 0


def test_many_small_parameters_take_what_one_large_one_does() -> None:
    """Optimizers take many at once: no launch of each is counted."""
    one = update_seconds(FOUR.device, "adamw", 4 << 20, "float32")
    many = 1024 * update_seconds(FOUR.device, "adamw", 4 << 10, "float32")
    assert many == pytest.approx(one, rel=0.01)
    assert one < FOUR.device.kernel_overhead_s + 7 * (4 << 20) / FOUR.device.memory_bandwidth * 2


def test_without_a_curve_of_its_own_an_update_is_an_op_on_elements() -> None:
    pointwise = Curve(
        op_class="pointwise", dtype="float32", unit="bytes", work=(1e3, 1e9), seconds=(1e-5, 1.0)
    )
    device = replace(FOUR.device, curves=(pointwise,))
    expected = kernel_seconds(
        device, "pointwise", "float32", np.array(7 * 4096.0), launches=np.zeros(())
    )
    assert update_seconds(device, "adamw", 4096, "float32") == pytest.approx(float(expected))


def test_the_update_is_measured_as_it_runs() -> None:
    """In place: fresh memory for results, as other ops have, takes some CPUs four times as long."""
    found = [p for p in probes("cpu", "float32", largest=1) if p.op_class == "update"]
    assert [p.work for p in found] == [7 * 4 * 256, 7 * 4 * 4096]
    for probe in found:
        assert probe.unit == "bytes" and probe.run() is None
