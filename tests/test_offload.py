"""Optimizer states on the host: the same numbers, and chosen when the limit asks for it.

On these machines host and device are one memory. What is copied, where states are keyed and what
the plan predicts is the same as with an accelerator; that device memory is freed is not seen here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.core.constraints import Constraints
from autopar.core.placement import local_shape
from autopar.cost_model import Cluster, Offloaded, optimizer_state_bytes
from autopar.cost_model.offload import ELEMENTWISE, offload_seconds
from autopar.cost_model.simulator import optimizer_seconds
from autopar.runtime import local_step
from autopar.runtime.offload import is_offloaded
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from tests import handwritten as hw
from tests.dist import run_ranks
from tests.test_gloo import whole

STEPS = 3


class Seen(torch.optim.AdamW):
    """Notes the memory of what it updates. A user's own, so it gets all parameters at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: set[int] = set()

    def _init_group(self, group: Any, *lists: Any) -> bool:
        for p in group["params"]:
            if p.grad is not None:
                self.seen |= {p._local_tensor.data_ptr(), p.grad._local_tensor.data_ptr()}
        return super()._init_group(group, *lists)


def build(constraints: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    world = torch.distributed.get_world_size()
    model = hw.Unused().double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in hw.vectors().items()}
    mesh = init_device_mesh("cpu", (world,))
    return autopar.parallelize(model, mesh, batch, constraints=constraints, seed=3), batch


def make(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    named = list(module.named_parameters())
    groups = [
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for n, p in named if not n.endswith("bias")]},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    if kind == "own":
        return Seen(groups, lr=1e-2)
    return torch.optim.AdamW(groups, lr=1e-2, foreach=kind == "foreach")


def train(module: Any, optimizer: torch.optim.Optimizer, batch: Any, steps: int = STEPS) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    for _ in range(steps):
        loss = module(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def trained(rank: int, kind: str, constraints: Any) -> dict[str, torch.Tensor]:
    local_step._BUCKET_BYTES = 256
    module, batch = build(constraints)
    optimizer = make(kind, module)
    train(module, optimizer, batch)
    mine = {id(p) for p in module.parameters()}
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == mine
    assert {id(p) for p in optimizer.state} <= mine
    memory = {p._local_tensor.data_ptr() for p in module.parameters()}
    away = constraints.get("offload") == "optimizer"
    assert all(is_offloaded(p) == away for p in module.parameters())
    if isinstance(optimizer, Seen):
        assert bool(memory & optimizer.seen) != away
    found = {n: whole(p.detach()) for n, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                found[f"{name}/{key}"] = whole(value)
    return found


def one_device(kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = hw.Unused().double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in hw.vectors().items()}
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for n, p in named.items() if not n.endswith("bias")]},
    ]
    optimizer = (
        torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        if kind == "sgd"
        else torch.optim.AdamW(groups, lr=1e-2)
    )
    train(model, optimizer, batch)
    return {n: p.detach() for n, p in named.items()}


@pytest.mark.parametrize(
    ("kind", "pins"),
    [
        ("own", {"data": 2, "zero": 0}),
        ("adamw", {"data": 2, "zero": 0}),
        ("foreach", {"data": 2, "zero": 3}),
        ("sgd", {"tensor": {"mode": "1d", "size": 2}}),
    ],
)
def test_updates_are_those_without_it_and_of_one_device(kind: str, pins: Any) -> None:
    plain = run_ranks(trained, 2, kind, pins | {"offload": "none"})
    moved = run_ranks(trained, 2, kind, pins | {"offload": "optimizer"})
    expected = one_device(kind)
    for a, b in zip(plain, moved, strict=True):
        assert a.keys() == b.keys() and len(a) > len(expected)
        assert all(torch.equal(a[name], b[name]) for name in a)
        for name, value in expected.items():
            assert float((b[name] - value).norm() / value.norm()) <= 1e-9, name


def wrong_uses(rank: int) -> None:
    module, batch = build({"offload": "optimizer"})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module.train_step(**batch)
    with pytest.raises(autopar.AutoparError, match=r"step\(closure\)"):
        optimizer.step(closure=lambda: module(**batch))
    before = {n: whole(p.detach()).clone() for n, p in module.named_parameters()}
    optimizer.param_groups[0]["betas"] = None  # the update itself fails
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer.step()
    mine = {id(p) for p in module.parameters()}
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == mine
    changed = [n for n, p in module.named_parameters() if not torch.equal(whole(p), before[n])]
    assert changed == [n for n, p in module.named_parameters() if p.grad is not None]


def test_a_closure_is_refused_and_a_failed_step_can_be_repeated() -> None:
    run_ranks(wrong_uses, 1)


def saved_and_resumed(rank: int, folder: str) -> None:
    """Two steps, a checkpoint and one step; against a fresh run that loads it."""
    pins = {"data": 2, "zero": 3, "offload": "optimizer"}
    module, batch = build(pins)
    optimizer = make("adamw", module)
    train(module, optimizer, batch, 2)
    autopar.save_checkpoint(folder, module, optimizer, step=2)
    train(module, optimizer, batch, 1)
    for other in (pins, {"tensor": {"mode": "1d", "size": 2}, "offload": "none"}):
        again, batch = build(other)
        resumed = make("adamw", again)
        autopar.load_checkpoint(folder, again, resumed)
        assert {id(p) for p in resumed.state} <= {id(p) for p in again.parameters()}
        train(again, resumed, batch, 1)
        for (name, a), (_, b) in zip(
            module.named_parameters(), again.named_parameters(), strict=True
        ):
            difference = (whole(a) - whole(b)).norm() / whole(a).norm()
            assert float(difference) <= (0.0 if other is pins else 1e-12), name


def test_a_checkpoint_goes_on_with_and_without_it(tmp_path: Path) -> None:
    run_ranks(saved_and_resumed, 2, str(tmp_path))


# --- the plan -------------------------------------------------------------------------------------
FOUR = Cluster.from_profile("h100-sxm", devices_per_node=4)
CPU = Cluster.from_profile("cpu-gloo", devices_per_node=4)


def with_host(bandwidth: float) -> Cluster:
    figures = {"host_bandwidth": bandwidth, "host_memory_bandwidth": bandwidth}
    return replace(FOUR, device=replace(FOUR.device, **figures))


@pytest.fixture(scope="module")
def traced() -> Any:
    """Much activation and much weight, so that recomputing and offloading both save memory."""
    return trace(hw.Mlp(width=64, layers=6), hw.vectors(512, width=64))


def test_it_is_chosen_when_the_limit_asks_for_it(traced: Any) -> None:
    free = solve(traced, FOUR)
    assert free.offload == "none" and free.predicted.offload_s == 0
    kept = {"checkpoint": "none", "data": 4, "zero": 0}
    whole_states = solve(traced, FOUR, constraints=Constraints.parse(kept))
    limit = whole_states.predicted.peak_memory_bytes - whole_states.predicted.memory["optimizer"]
    tight = solve(traced, FOUR, constraints=Constraints.parse(kept), memory_limit=limit)
    assert tight.offload == "optimizer"
    assert tight.predicted.peak_memory_bytes == limit
    assert not tight.predicted.memory.get("optimizer")
    assert tight.predicted.host_bytes == whole_states.predicted.memory["optimizer"]
    for pins, cluster in ((kept | {"offload": "none"}, FOUR), (kept, CPU)):
        with pytest.raises(autopar.InfeasiblePlanError):
            solve(traced, cluster, constraints=Constraints.parse(pins), memory_limit=limit)
    with pytest.raises(autopar.InfeasiblePlanError):  # SGD keeps nothing that could be moved
        solve(traced, FOUR, constraints=Constraints.parse(kept), memory_limit=limit // 2,
              optimizer="sgd")  # fmt: skip


def test_the_faster_of_recomputing_and_offloading_is_chosen(traced: Any) -> None:
    pins = {"data": 4, "zero": 0}
    limits, times = {}, {}
    for offload in ("none", "optimizer"):
        wanted = Constraints.parse({**pins, "checkpoint": "none", "offload": offload})
        limits[offload] = solve(traced, FOUR, constraints=wanted).predicted.peak_memory_bytes
    recomputing = Constraints.parse({**pins, "checkpoint": "full", "offload": "none"})
    recomputed = solve(traced, FOUR, constraints=recomputing)
    limit = max(limits["optimizer"], recomputed.predicted.peak_memory_bytes)
    assert limit < limits["none"]
    chosen = {}
    for bandwidth in (1e8, 1e15):
        cluster = with_host(bandwidth)
        found = solve(traced, cluster, constraints=Constraints.parse(pins), memory_limit=limit)
        chosen[bandwidth] = found.offload
        others = [
            solve(
                traced,
                cluster,
                constraints=Constraints.parse({**pins, "offload": offload}),
                memory_limit=limit,
            ).predicted.step_time_s
            for offload in ("none", "optimizer")
        ]
        times[bandwidth] = (found.predicted.step_time_s, min(others))
    assert chosen == {1e8: "none", 1e15: "optimizer"}
    for found_s, best_s in times.values():
        assert found_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize("cluster", [FOUR, CPU], ids=["h100-sxm", "cpu-gloo"])
def test_transfers_and_states_are_counted(traced: Any, cluster: Cluster) -> None:
    wanted = {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 1, "offload": "optimizer"}
    plan = solve(traced, cluster, constraints=Constraints.parse(wanted), exposed=1.0)
    shares = [
        4 * math.prod(local_shape(plan.shapes[n], plan.parameters[n], plan.mesh_shape))
        for n in plan.parameters
    ]
    device, held = cluster.device, sum(shares)
    link = device.host_bandwidth or device.memory_bandwidth
    host = device.host_memory_bandwidth or device.memory_bandwidth
    if device.host_bandwidth:  # down, update and up beside one another
        expected = max(2 * held / link, 7 * held / host) - 7 * held / device.memory_bandwidth
    else:
        expected = 3 * held / link
    p = plan.predicted
    assert p.offload_s == pytest.approx(expected, rel=1e-9) and expected > 0
    assert p.host_bytes == 2 * held
    updated_s = p.update_s + p.offload_s
    assert p.step_time_s == pytest.approx(p.compute_time_s + p.comm_time_s + updated_s)
    assert plan.solver.objective == pytest.approx(p.step_time_s, rel=1e-6)
    rows = [(share, "float32") for share in shares]
    on_device = optimizer_seconds(device, rows, "adamw")
    assert p.update_s == pytest.approx(on_device)
    assert optimizer_seconds(device, rows, Offloaded("adamw")) == pytest.approx(
        on_device + p.offload_s
    )
    assert optimizer_state_bytes(Offloaded("adamw"), 100) == 0


@given(
    num_bytes=st.integers(1, 2**40).map(lambda n: 4 * n),
    link=st.floats(1e8, 1e15),
    host=st.floats(1e8, 1e15),
    name=st.sampled_from(["adamw", "sgd", "rmsprop", "muon", "adafactor"]),
)
def test_a_shard_costs_its_slowest_stage(
    num_bytes: int, link: float, host: float, name: str
) -> None:
    device = replace(FOUR.device, host_bandwidth=link, host_memory_bandwidth=host)
    found = offload_seconds(device, Offloaded(name), num_bytes, "float32")
    moved = 3 * num_bytes + 2 * optimizer_state_bytes(name, num_bytes // 4)
    on_device = moved / device.memory_bandwidth
    stages = [2 * num_bytes / link, moved / host, num_bytes / link]
    if name in ELEMENTWISE:
        assert found == pytest.approx(max(0.0, max(stages) - on_device), rel=1e-9, abs=1e-15)
    # no less than nothing, no more than one stage behind the other, and more for more
    assert 0 <= found <= sum(stages) * (1 + 1e-9)
    assert offload_seconds(device, Offloaded(name), 2 * num_bytes, "float32") >= found
    slower = replace(device, host_bandwidth=link / 2)
    assert offload_seconds(slower, Offloaded(name), num_bytes, "float32") >= found
    # parameters of one dtype add up to what they cost together
    if name != "adafactor":
        twice = offload_seconds(device, Offloaded(name), 2 * num_bytes, "float32")
        assert twice == pytest.approx(2 * found, rel=1e-9)


def test_what_is_priced_bucket_by_bucket_runs_so() -> None:
    assert {kind.__name__.lower() for kind in local_step._ELEMENTWISE} == ELEMENTWISE


def test_the_plan_names_an_optimizer_that_is_given_as_a_partial(traced: Any) -> None:
    plan = solve(traced, FOUR, optimizer=partial(torch.optim.SGD, momentum=0.9))
    assert plan.optimizer == "sgd(momentum)"


def test_the_plan_says_so_and_keeps_it(traced: Any, tmp_path: Path) -> None:
    plan = solve(traced, FOUR, constraints=Constraints(offload="optimizer"))
    plan.save(tmp_path / "plan.json")
    again = autopar.load_plan(tmp_path / "plan.json")
    assert (again.offload, again.predicted.host_bytes) == ("optimizer", plan.predicted.host_bytes)
    assert again.constraints == {"offload": "optimizer"}
    text = plan.summary()
    assert "on the host" in text and "+ offload" in text
    assert "on the host" not in solve(traced, FOUR).summary()
    with pytest.raises(autopar.ConstraintError, match="none, optimizer"):
        Constraints.parse({"offload": "everything"})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device with its own memory")
def test_states_leave_the_device() -> None:
    (on_host,) = run_ranks(states_on_cuda, 1)
    assert on_host


def states_on_cuda(rank: int) -> bool:
    local_step._BUCKET_BYTES = 256
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (1,))
    batch = {k: v.cuda() for k, v in hw.vectors().items()}
    found = []
    for offload in ("none", "optimizer"):
        torch.manual_seed(0)
        wanted = {"offload": offload}
        module = autopar.parallelize(hw.Mlp(), mesh, batch, constraints=wanted)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(3):
            module.train_step(**batch)
            optimizer.step()
            optimizer.zero_grad()
        found.append([whole(p.detach()) for p in module.parameters()])
    torch.testing.assert_close(*found)
    values = [v for state in optimizer.state.values() for v in state.values()]
    return all(v.to_local().device.type == "cpu" for v in values if hasattr(v, "to_local"))
