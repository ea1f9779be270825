"""Plans whose blocks are recomputed in several ways: what is found, and what none is below."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.errors import InfeasiblePlanError
from autopar.search.pipelining import plan_step
from autopar.solver import sums
from autopar.solver.mixed_bound import least_mixed
from autopar.solver.overlap import ALL, weights_at
from autopar.solver.solve import StepSearch, solve
from autopar.tracer.trace import trace

DEVICES, ROUNDING = 4, 1 + 1e-6
SIZES = {"wide": (2048, 6), "deep": (1024, 8)}
TOKENS = 16384


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@lru_cache(maxsize=2)
def traced(size: str) -> TracedModel:
    width, depth = SIZES[size]
    with torch.device("meta"):
        model = Deep(width, depth).to(torch.bfloat16).train()
        x = torch.empty(TOKENS, width, dtype=torch.bfloat16)
    return trace(model, {"x": x}, fold=True)


def cluster() -> Cluster:
    return Cluster.from_profile("h100-sxm", devices_per_node=DEVICES)


def planned(size: str, limit: int | None = None, **pins: Any) -> Plan:
    constraints = Constraints.parse({"pipeline": "none", **pins})
    return plan_step(traced(size), cluster(), constraints=constraints, memory_limit=limit)


@lru_cache(maxsize=2)
def most(size: str) -> int:
    """Bytes of the fastest plan."""
    return planned(size).predicted.peak_memory_bytes


@pytest.mark.parametrize(("size", "share"), [("wide", 0.5), ("deep", 0.4), ("deep", 0.5)])
def test_pins_make_no_plan_faster_where_blocks_are_recomputed(size: str, share: float) -> None:
    """With parameters split by a pin, mixtures were found that a search without it had missed."""
    limit = int(share * most(size))
    free, pinned = planned(size, limit), planned(size, limit, data=DEVICES, zero=3)
    assert not isinstance(pinned.checkpoint, str), "a mixture"
    assert free.predicted.peak_memory_bytes <= limit
    counted = pinned
    if free.solver.exposed != pinned.solver.exposed:  # which are two sums
        pins = Constraints.parse({"pipeline": "none", "data": DEVICES, "zero": 3})
        exposed = free.solver.exposed
        counted = solve(
            traced(size), cluster(), constraints=pins, memory_limit=limit, exposed=exposed
        )
    assert free.solver.bound <= counted.solver.objective * ROUNDING
    assert free.predicted.step_time_s <= pinned.predicted.step_time_s * 1.002


@pytest.mark.parametrize("share", [0.45, 0.6, 0.8])
def test_no_mixture_is_below_the_bound(share: float) -> None:
    step, depth = traced("deep"), SIZES["deep"][1]
    limit = int(share * most("deep"))

    def solved(checkpoint: dict[str, str] | None) -> Plan:
        pins = Constraints.parse({"zero": 3, "data": DEVICES, "checkpoint": checkpoint})
        return solve(step, cluster(), constraints=pins, memory_limit=limit, exposed=1.0)

    bound, found = solved(None).solver.bound, 0
    for cheap, strong in (("none", "selective"), ("none", "full"), ("selective", "full")):
        for number in range(1, depth, 2):
            kinds = {f"layers.0-{number - 1}": strong, f"layers.{number}-{depth - 1}": cheap}
            try:
                plan = solved(kinds)
            except InfeasiblePlanError:
                continue
            found += 1
            assert bound <= plan.solver.objective * ROUNDING, kinds
    assert found >= 2


def test_the_bound_does_not_hang_on_the_price_that_it_starts_with() -> None:
    limit = int(0.6 * most("deep"))
    given = StepSearch(traced("deep"), cluster(), memory_limit=limit).search.variants
    prices = (0.0, 1e-15, 1e-12, 1e-6, 1.0)
    found = [least_mixed(given, "adamw", ALL, price, math.inf) for price in prices]
    free_s = solve(traced("deep"), cluster(), memory_limit=1 << 60, exposed=1.0).solver.bound
    assert min(found) > 1.02 * free_s
    assert min(found) >= 0.98 * max(found)


@pytest.mark.parametrize(("gap", "takes_long"), [(0.5e-2, False), (5e-2, True)])
def test_no_bound_that_takes_long_is_looked_for_near_one_that_is_known(
    gap: float, takes_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = StepSearch(traced("wide"), cluster(), memory_limit=int(0.9 * most("wide")))
    search.run()
    asked: list[float] = []
    monkeypatch.setattr(sums, "least_mixed", lambda *given: asked.append(given[-1]) or 0.0)
    told = search.search._told[-1]
    now_s = told.free_s / (1 - gap)
    weights = weights_at(told.t, search.exposed)
    assert search.search.of_any(weights, now_s, now_s) == told.free_s
    assert bool(asked) == takes_long
