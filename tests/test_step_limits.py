"""One step under several memory limits: each plan and each bound holds as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.errors import InfeasiblePlanError
from autopar.search.pipelining import plan_step, plan_within
from autopar.search.step_limits import StepLimits
from tests.test_host_memory import heavy, on_host
from tests.test_host_recompute import deep

ROUNDING = 1 - 1e-9


def alone(
    traced: TracedModel, limit: int, wanted: Constraints, host_bytes: int | None
) -> Plan | None:
    on = on_host(2, host_bytes)
    try:
        return plan_step(traced, on, constraints=wanted, memory_limit=limit)
    except InfeasiblePlanError:
        return None


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "pins", "host_bytes"),
    [
        ("heavy", {"pipeline": "none"}, None),
        pytest.param("heavy", {"pipeline": "none"}, 70_000, marks=SLOW),
        pytest.param("heavy", {}, None, marks=SLOW),
        pytest.param("heavy", {"pipeline": {"size": 2}}, 70_000, marks=SLOW),
        pytest.param("deep", {"pipeline": "none"}, None, marks=SLOW),
        pytest.param("deep", {"pipeline": "none"}, 200_000, marks=SLOW),
    ],
)
def test_plans_of_several_limits_keep_to_each(
    name: str, pins: dict[str, Any], host_bytes: int | None
) -> None:
    """Limits fall, as a frontier's do, then rise, and each plan and bound holds by itself."""
    wanted = Constraints.parse(pins)
    traced = heavy()[0] if name == "heavy" else deep()
    known = StepLimits(traced, on_host(2, host_bytes), wanted, several=True)
    free = plan_within(known, 1 << 62)
    most = free.predicted.peak_memory_bytes
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_within(known, 1)
    least = caught.value.required_bytes
    assert least is not None
    limits = [round(most * share) for share in (0.9, 0.6, 0.4, 0.25, 0.6, 0.9)]
    for limit in (*limits, int(least * 0.5)):
        apart = alone(traced, limit, wanted, host_bytes)
        try:
            here = plan_within(known, limit)
        except InfeasiblePlanError:
            assert apart is None
            continue
        p = here.predicted
        assert p.peak_memory_bytes <= limit
        assert host_bytes is None or p.host_bytes <= host_bytes
        assert here.memory_limit_bytes == limit
        assert here.solver.bound <= here.solver.objective
        if here.solver.exposed == free.solver.exposed:  # else they count by other rules
            assert here.solver.objective >= free.solver.bound * ROUNDING
        if apart is not None and here.solver.exposed == apart.solver.exposed:
            assert apart.solver.objective >= here.solver.bound * ROUNDING
            assert here.solver.objective >= apart.solver.bound * ROUNDING


def test_a_limit_below_parameters_and_gradients_is_refused_without_a_look_at_pipelines() -> None:
    known = StepLimits(deep(), on_host(2, None), Constraints())
    whole = 2 * sum(s.dtype.itemsize * _count(s.shape) for s in deep(False).parameters())
    assert known.holds_parameters(-(-whole // 2)) and not known.holds_parameters(whole // 2 - 1)
    with pytest.raises(InfeasiblePlanError, match="The smallest limit that a plan was found for"):
        plan_within(known, whole // 2 - 1)
    assert known._planner is None


def _count(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found
