"""What is kept in host memory stays below each device's share of it, or is refused with numbers."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.cost_model.catalogue import load_profile, profile_names
from autopar.cost_model.host_memory import machine_memory_bytes, with_live_memory
from autopar.cost_model.measure import measure_profile
from autopar.cost_model.profile import ClusterError, Profile
from autopar.cost_model.toml_text import to_toml
from autopar.errors import InfeasiblePlanError
from autopar.report.summary import facts
from autopar.search.pipelining import plan_step
from autopar.solver.row_at import HOST_ROW
from autopar.solver.solve import StepSearch
from autopar.tracer.trace import trace
from tests.test_host_recompute import deep, devices


def on_host(count: int, host_bytes: int | None) -> Cluster:
    found = devices(count)
    return replace(found, device=replace(found.device, host_memory_bytes=host_bytes))


class _Heavy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@lru_cache(maxsize=1)
def heavy() -> tuple[TracedModel, int]:
    """Parameters weigh far more than activations; with the bytes of their AdamW states."""
    model = _Heavy()
    traced = trace(model, {"x": torch.randn(8, 64)}, training=True)
    return traced, 2 * sum(p.numel() * 4 for p in model.parameters())


def planned(
    traced: TracedModel,
    on: Cluster,
    limit: int | None = None,
    optimizer: str = "adamw",
    **pins: Any,
) -> Plan:
    wanted = Constraints.parse(pins)
    return plan_step(traced, on, constraints=wanted, memory_limit=limit, optimizer=optimizer)


# --- profiles ----------------------------------------------------------------------------------
def test_profiles_say_what_a_device_has_of_its_host() -> None:
    known = {name: load_profile(name).device for name in profile_names()}
    assert known["h100-sxm"].host_memory_bytes == 250_000_000_000
    assert known["cpu-gloo"].host_memory_bytes is None
    for device in known.values():
        if device.host_memory_bytes is not None:
            assert device.host_memory_bytes > device.memory_bytes
            assert device.sources["host_memory_bytes"]
    for name in ("h100-sxm", "cpu-gloo"):  # None is left out
        profile = load_profile(name)
        assert Profile.from_dict(tomllib.loads(to_toml(profile.to_dict()))) == profile
    with pytest.raises(ClusterError, match="host_memory_bytes must be positive"):
        on_host(2, 0)


def test_the_machine_at_hand() -> None:
    total = machine_memory_bytes()
    base = load_profile("cpu-gloo")
    found = with_live_memory(base.device, "cpu", 4, 4)
    assert found.host_memory_bytes == total // 4 == found.memory_bytes
    assert with_live_memory(base.device, "cpu", 0, 4) == base.device
    measured = measure_profile("here", base=base, ranks=1, rounds=1, quick=True)
    assert measured.device.host_memory_bytes == total
    assert measured.device.sources["host_memory_bytes"].startswith("measured")


# --- one piece ---------------------------------------------------------------------------------
def test_a_pinned_plan_that_the_host_cannot_hold_is_refused_with_the_numbers() -> None:
    traced, states = heavy()
    pins: dict[str, Any] = {"offload": "optimizer", "data": 4, "zero": 0}
    plan = planned(traced, on_host(4, states), **pins)
    assert plan.predicted.host_bytes == states
    assert dict(facts(plan))["host memory"].endswith("for each device (100.0%)")
    with pytest.raises(InfeasiblePlanError) as caught:
        planned(traced, on_host(4, states - 1), **pins)
    text = str(caught.value)
    assert "of host memory per device" in text and "host_memory_bytes" in text
    assert "optimizer states 130.00 KiB, activations 0 B" in text
    assert "host memory" not in dict(facts(planned(traced, on_host(4, None))))


def test_states_are_sharded_where_the_host_is_short() -> None:
    """The rule is on the sum of choices: what is not pinned moves until it fits."""
    traced, states = heavy()
    slow = on_host(4, None)
    slow = replace(slow, intra=replace(slow.intra, bandwidth=1e6, lines=()))
    free = planned(traced, slow, offload="optimizer", pipeline="none")
    assert free.predicted.host_bytes > states // 3  # gathering is dear
    for limit in (states // 3, states // 4):
        device = replace(slow.device, host_memory_bytes=limit)
        plan = planned(traced, replace(slow, device=device), offload="optimizer", pipeline="none")
        assert plan.predicted.host_bytes <= limit
        assert plan.predicted.step_time_s >= free.predicted.step_time_s * (1 - 1e-9)
    with pytest.raises(InfeasiblePlanError, match="of host memory per device"):
        device = replace(slow.device, host_memory_bytes=states // 4 - 1)
        planned(traced, replace(slow, device=device), offload="optimizer", pipeline="none")


def test_the_row_of_the_host_is_what_is_priced() -> None:
    for traced, optimizer, pins in (
        (heavy()[0], "adamw", {"offload": "optimizer"}),
        (deep(), "sgd", {"checkpoint": "host"}),
        (deep(False), "adamw", {"checkpoint": "host", "offload": "optimizer"}),
    ):
        on = on_host(2, 1 << 30)
        pinned = Constraints.parse(pins)
        given = {"constraints": pinned, "memory_limit": 1 << 34, "optimizer": optimizer}
        found = StepSearch(traced, on, **given).run()
        row = found._found.search.memory.relaxed.liveness.row(HOST_ROW)
        host_bytes = found.plan.predicted.host_bytes
        assert host_bytes > 0
        assert row.value(found._fit.solution.chosen) == pytest.approx(16 * host_bytes, rel=1e-12)


def test_what_is_not_pinned_leaves_the_host_alone_where_it_is_short() -> None:
    traced, states = heavy()
    least = planned(traced, on_host(2, None), pipeline="none", offload="none")
    limit = least.predicted.peak_memory_bytes - states // 2
    away = planned(traced, on_host(2, None), limit, pipeline="none")
    assert away.offload == "optimizer"
    assert planned(traced, on_host(2, states), limit, pipeline="none").offload == "optimizer"
    try:
        found = planned(traced, on_host(2, 1024), limit, pipeline="none")
    except InfeasiblePlanError as error:
        assert "host memory" in str(error) or "no plan fits" in str(error)
    else:
        assert found.offload == "none"


def test_activations_go_to_the_host_as_far_as_it_has_room() -> None:
    traced = deep()
    host = planned(traced, on_host(2, None), optimizer="sgd", checkpoint="host", pipeline="none")
    kept = host.predicted.host_activation_bytes
    assert kept > 0
    with pytest.raises(InfeasiblePlanError, match="activations"):
        short = on_host(2, kept // 4)
        planned(traced, short, optimizer="sgd", checkpoint="host", pipeline="none", data=2)
    limit = host.predicted.peak_memory_bytes
    free = planned(traced, on_host(2, None), limit, "sgd", pipeline="none")
    plan = planned(traced, on_host(2, kept // 4), limit * 2, "sgd", pipeline="none")
    assert plan.predicted.host_bytes <= kept // 4
    assert free.predicted.host_bytes <= kept


# --- pipelines ---------------------------------------------------------------------------------
CUTS = {1: ["layers.2"], 2: ["layers.1", "layers.2", "layers.3"]}


@pytest.mark.parametrize("chunks", CUTS)
def test_stages_of_a_rank_share_its_host(chunks: int) -> None:
    traced, _ = heavy()
    pins: dict[str, Any] = {
        "offload": "optimizer",
        "pipeline": {"size": 2, "microbatches": 2, "chunks": chunks, "cuts": CUTS[chunks]},
    }
    plan = planned(traced, on_host(2, None), **pins)
    need = plan.predicted.host_bytes
    assert planned(traced, on_host(2, need), **pins).predicted.host_bytes == need
    with pytest.raises(InfeasiblePlanError, match="of host memory per device"):
        planned(traced, on_host(2, need - 1), **pins)
