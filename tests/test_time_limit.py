"""A time limit: the best plan by then, which fits and computes the same, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.core.constraints import Constraints
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.errors import AutoparError, InfeasiblePlanError
from autopar.search.one_piece import OnePiece
from autopar.search.step_limits import StepLimits
from autopar.solver.discrete import time_limit as timing
from autopar.solver.discrete.time_limit import OutOfTime, check_time, plan_found, time_limit
from autopar.tracer.trace import trace
from tests.dist import run_ranks

NOW = 1e-9
FOUR = Cluster.from_profile("a100-80g", devices_per_node=4)


class Blocks(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


X = (torch.ones(8, 16, 64, dtype=torch.float64),)


def planned(**asked: Any) -> Plan:
    return autopar.plan(Blocks().double(), FOUR, X, cache=False, **asked)


def test_nothing_ends_before_a_plan_is_known() -> None:
    with time_limit(NOW):
        check_time()
        with pytest.raises(OutOfTime):
            plan_found()
            check_time()
    check_time()


def test_a_search_that_takes_long_says_once_how_to_end_it(monkeypatch, caplog) -> None:
    def told() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "autopar"]

    planned()
    assert not told()
    monkeypatch.setattr(timing, "_LONG_S", 0.0)
    planned(time_limit=600)
    check_time()  # outside of a search
    assert not told()
    planned()
    (message,) = told()
    assert "time_limit=" in message


@pytest.mark.parametrize(
    "constraints",
    [{}, {"pipeline": {"size": 2, "microbatches": 4}}, {"pipeline": {"microbatches": 2}}],
    ids=["free", "pipeline", "microbatches"],
)
@pytest.mark.parametrize("share", [2.0, 0.45])
def test_the_best_plan_by_then_fits_and_computes_the_same(
    constraints: dict[str, Any], share: float
) -> None:
    whole = planned(constraints={"data": 4, "zero": 0}).predicted.peak_memory_bytes
    limit = int(share * whole)
    found = planned(constraints=constraints, memory_limit=limit, time_limit=NOW)
    assert found.predicted.peak_memory_bytes <= found.memory_limit_bytes == limit
    best = planned(constraints=constraints, memory_limit=limit)
    assert not best.solver.out_of_time
    # what is done before the time is asked for is done
    assert found.solver.out_of_time or found.solver.objective == best.solver.objective
    assert found.solver.out_of_time or constraints
    # no bound that is told is above what the whole search finds
    assert found.solver.bound <= best.solver.objective * (1 + 1e-9)
    assert found.solver.bound <= found.solver.objective
    assert found.solver.gap >= best.solver.gap - 1e-9
    if constraints:  # shapes have bounds before any has a plan
        assert found.solver.bound > 0
    assert found.constraints == best.constraints
    assert autopar.verify(found, Blocks().double(), X).worst[1] < 1e-9


@pytest.mark.parametrize("share", [0.5, 0.3])
def test_a_first_plan_is_soon_found_where_memory_is_short(share: float) -> None:
    whole = planned(constraints={"data": 4, "zero": 0}).predicted.peak_memory_bytes
    limit = int(share * whole)
    traced = trace(Blocks().double(), X, fold=True)
    known = StepLimits(traced, FOUR, Constraints())
    found = known.whole.hasty(limit)
    assert found is not None
    assert found.predicted.peak_memory_bytes <= limit


def test_what_is_proved_of_plans_in_one_piece_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = {"pipeline": "none"}
    whole = planned(constraints={"data": 4, "zero": 0}).predicted.peak_memory_bytes
    best = planned(constraints=pins, memory_limit=whole // 2)

    def ended(*_: object, **__: object) -> None:
        raise OutOfTime

    # the search has a plan and its bound, and is about to look at others
    monkeypatch.setattr(OnePiece, "_fastest_of_others", ended)
    found = planned(constraints=pins, memory_limit=whole // 2, time_limit=3600)
    assert found.solver.out_of_time
    assert 0 < found.solver.bound <= best.solver.objective * (1 + 1e-9)


def test_a_search_that_ends_before_its_limit_says_nothing_of_it() -> None:
    found, best = planned(time_limit=3600), planned()
    assert not found.solver.out_of_time
    assert found.predicted.step_time_s <= best.predicted.step_time_s * (1 + 1e-9)


def test_what_fits_nowhere_is_refused_as_ever() -> None:
    with pytest.raises(InfeasiblePlanError):
        planned(memory_limit=1000, time_limit=NOW)


def test_the_plan_tells_that_time_ended_the_search(tmp_path: Path) -> None:
    found = planned(time_limit=NOW)
    assert "the time limit ended the search" in " ".join(found.summary().split())
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").solver.out_of_time
    assert "time limit" not in planned().summary()


def test_a_cached_plan_of_a_whole_search_serves_under_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    hasty = autopar.plan(Blocks().double(), FOUR, X, time_limit=NOW)
    assert hasty.solver.out_of_time
    assert autopar.plan(Blocks().double(), FOUR, X, time_limit=NOW).digest() == hasty.digest()
    whole = autopar.plan(Blocks().double(), FOUR, X)
    assert not whole.solver.out_of_time
    assert not autopar.plan(Blocks().double(), FOUR, X, time_limit=NOW).solver.out_of_time


@pytest.mark.parametrize("given", [0, -1.0, float("nan"), float("inf"), 10**400, True, "60"])
def test_a_limit_is_a_number_of_seconds(given: object) -> None:
    with pytest.raises(AutoparError, match=r"time_limit=.* must be a number of seconds"):
        planned(time_limit=given)


def _a_step(rank: int) -> tuple[bool, float]:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = autopar.parallelize(Blocks().double(), mesh, X, cache=False, time_limit=NOW)
    return model.plan.solver.out_of_time, float(model.train_step(*X))


def test_ranks_train_with_what_the_first_of_them_knew() -> None:
    torch.manual_seed(0)
    loss = float(Blocks().double()(*X))
    for ended, found in run_ranks(_a_step, 2):
        assert ended
        assert found == pytest.approx(loss, rel=1e-12)
