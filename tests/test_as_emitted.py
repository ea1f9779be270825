"""What a program takes beside what the search counts: packing, and collectives in their buckets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.codegen.emit import written
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.cost_model.simulator import simulate
from autopar.search.pipelining import plan_step
from autopar.search.scheduling import scheduled
from autopar.search.trials import Trial, bucketed
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from autopar.verification import verify
from tests import zoo

GPUS = Cluster.from_profile("h100-sxm", devices_per_node=4)


class Wide(nn.Module):
    """Linear layers whose weights are large."""

    def __init__(self, width: int = 1024, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def wide(width: int = 1024, layers: int = 3) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Wide(width, layers).double().train(), {"x": torch.randn(16, width).double()}


@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        ("llama", {"data": 4, "zero": 3}),
        ("gpt2", {"data": 4, "zero": 1}),
        ("gpt2", {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3}),
        ("vit", {"tensor": {"mode": "1d", "size": 4}}),
    ],
)
def test_packing_and_collectives_are_those_of_the_program(
    name: str, constraints: Mapping[str, Any]
) -> None:
    model, inputs = zoo.MODELS[name]()
    traced = trace(model.train(), inputs)
    counted = solve(traced, GPUS, constraints=Constraints.parse(constraints))
    plan = scheduled(counted, traced)
    program = autopar.simulate(plan, model, inputs, traced=traced)
    predicted = plan.predicted
    assert predicted.packing_s > 0
    assert predicted.packing_s == pytest.approx(program.packing_s, rel=1e-6)
    assert predicted.comm_time_s == pytest.approx(sum(program.comm_s), rel=1e-6)
    assert predicted.exposed_time_s == pytest.approx(sum(program.exposed_s), rel=1e-2)
    assert predicted.compute_time_s == pytest.approx(program.compute_s, rel=1e-6)
    more_s = predicted.compute_time_s - counted.predicted.compute_time_s
    assert more_s == pytest.approx(predicted.unseen_compute_s, rel=1e-6, abs=1e-12)
    assert Plan.from_dict(plan.to_dict()).predicted.packing_s == predicted.packing_s
    assert "(packing " in plan.summary()


def test_the_first_dim_is_in_the_order_of_ranks() -> None:
    """A gradient that is scattered along another dim is copied, and what is gathered so."""
    model, inputs = wide(layers=1)
    traced = trace(model, inputs)
    found = {}
    for dim in (0, 1):
        pins = {"data": 4, "zero": 3, "params": {"layers.0.weight": [f"Shard({dim})"]}}
        plan = solve(traced, GPUS, constraints=Constraints.parse(pins))
        found[dim] = scheduled(plan, traced).predicted
    assert found[0].packing_s == 0
    copied = 2 * 1024 * 1024 * 8  # bytes that one copy reads and writes
    assert found[1].packing_s > 2 * copied / GPUS.device.memory_bandwidth
    assert found[1].step_time_s > found[0].step_time_s


class Windows(nn.Module):
    """Images cut into windows of 4 x 4 and put together again, each a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.within = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        images, height, width, channels = x.shape
        cut = x.view(images, height // 4, 4, width // 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
        cut = self.within(cut.reshape(-1, 16, channels)).tanh()
        cut = cut.view(images, height // 4, width // 4, 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
        return cut.reshape(images, height, width, channels).square().mean()


def test_reshapes_that_copy_are_counted() -> None:
    inputs = {"x": torch.randn(64, 32, 32, 64)}
    traced = trace(Windows().train(), inputs)
    counted = solve(traced, GPUS, constraints=Constraints.parse({"data": 4, "zero": 0}))
    program = scheduled(counted, traced).predicted
    ops = {op.name: op for op in counted.predicted.timeline.ops}
    copies = [op for op in ops.values() if "view" in op.op and op.op_class != "view"]
    assert len(copies) == 3  # there and back; images have no gradient
    assert {op.op_class for op in copies} == {"memory"}  # their rows are runs
    moved = 2 * inputs["x"].nbytes / 4
    for op in copies:
        assert op.compute_s >= moved / GPUS.device.memory_bandwidth
    emitted = {op.name: op.compute_s for op in program.timeline.ops}
    assert all(emitted[op.name] == pytest.approx(op.compute_s) for op in copies)
    others = [op for op in ops.values() if op.op_class == "view"]
    assert others and all(op.compute_s == 0 for op in others)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_parts_of_a_stage_take_what_they_pack(schedule: str) -> None:
    model, inputs = wide(width=512, layers=4)
    traced = trace(model, inputs)
    pins = {"pipeline": {"size": 2, "microbatches": 4, "schedule": schedule}, "zero": 3}
    pins["params"] = {"layers.*.weight": ["Shard(1)"]}
    counted = plan_step(traced, GPUS, constraints=Constraints.parse(pins))
    plan = scheduled(counted, traced)
    assert plan.pipeline is not None and counted.pipeline is not None
    for before, after in zip(counted.pipeline.stages, plan.pipeline.stages, strict=True):
        was, now = before.predicted, after.predicted
        assert now.packing_s > 0
        counted_s = now.compute_time_s - now.unseen_compute_s
        assert counted_s == pytest.approx(was.compute_time_s, rel=1e-6)
        once = now.phases["prepare"] + now.phases["finish"]
        turns = 4 * sum(now.phases[part] for part in ("forward", "input", "weight"))
        took_s = now.compute_time_s + now.exposed_time_s
        assert once + turns == pytest.approx(took_s, rel=1e-6)
    assert verify(plan, model, inputs).worst[1] <= 1e-9


# --- buckets ----------------------------------------------------------------------------------
def trial_of(plan: Plan, traced: TracedModel) -> Trial:
    cluster = Cluster.from_dict(plan.cluster)
    graph = written(traced, plan, [0] * len(plan.mesh_shape)).program(None).joint.graph
    return Trial(graph=graph, parts={"step": simulate(graph, cluster)})


def with_latency(seconds: float) -> Cluster:
    intra = replace(GPUS.intra, latency_s=seconds, base_latency_s=seconds)
    return replace(GPUS, intra=intra)


def test_buckets_are_as_large_as_serves() -> None:
    """Latency asks for large buckets, and copies for small ones."""
    model, inputs = wide(layers=6)
    inputs = {"x": torch.randn(512, 1024).double()}
    traced = trace(model, inputs)
    pins = Constraints.parse({"data": 4, "zero": 0})
    sizes = {}
    for latency_s in (1e-7, 1e-3):
        plan = solve(traced, with_latency(latency_s), constraints=pins)
        # buckets that hold several gradients
        plan = replace(plan, buckets=tuple(replace(b, num_bytes=1 << 25) for b in plan.buckets))
        chosen, trial = bucketed(plan, lambda p: trial_of(p, traced))
        assert trial.step_s() <= trial_of(plan, traced).step_s()
        assert trial.step_s() == trial_of(chosen, traced).step_s()
        sizes[latency_s] = max(b.num_bytes for b in chosen.buckets)
        assert verify(chosen, model, inputs).worst[1] <= 1e-9
    assert sizes[1e-7] < sizes[1e-3] == 1 << 25


@pytest.mark.parametrize(
    ("steps", "best", "runs"),
    [
        ({1: 9, 8: 7, 16: 8, 4: 7.5}, 8, [1, 8, 16, 4]),
        ({1: 9, 8: 7, 16: 8, 4: 6, 2: 6.5}, 4, [1, 8, 16, 4, 2]),
        ({1: 9, 8: 7, 16: 6, 32: 5, 64: 4}, 64, [1, 8, 16, 32, 64]),
        ({1: 9, 8: 7, 16: 6, 32: 8}, 16, [1, 8, 16, 32]),
        ({1: 9, 8: 10, 4: 8, 2: 8.5}, 4, [1, 8, 4, 2]),
        ({1: 9, 8: 10, 4: 8, 2: 7}, 2, [1, 8, 4, 2]),
        ({1: 9, 8: 10, 4: 11}, 1, [1, 8, 4]),
    ],
)
def test_larger_and_smaller_buckets_are_tried(
    steps: dict[int, float], best: int, runs: list[int]
) -> None:
    """Steps may get longer and shorter again, from bucket to bucket."""
    model, inputs = wide(layers=2)
    plan = solve(trace(model, inputs), GPUS, constraints=Constraints.parse({"data": 4, "zero": 1}))
    most = max(b.num_bytes for b in plan.buckets)
    seen = []

    def run(trial: Plan) -> Any:
        seen.append(round(most / max(b.num_bytes for b in trial.buckets)))
        step_s = steps[seen[-1]]
        like = {"step_s": lambda: step_s, "joining_s": lambda: 1.0}
        return SimpleNamespace(**like, is_same_with=lambda num_bytes: False)

    chosen, _ = bucketed(plan, run)
    assert seen == runs
    assert round(most / max(b.num_bytes for b in chosen.buckets)) == best


def test_no_others_are_tried_where_little_is_copied_or_another_plan_is_faster() -> None:
    model, inputs = wide(layers=2)
    plan = solve(trace(model, inputs), GPUS, constraints=Constraints.parse({"data": 4, "zero": 1}))
    runs: list[int] = []

    def run(trial: Plan) -> Any:
        runs.append(max(b.num_bytes for b in trial.buckets))
        step_s, joining_s = 1 / len(runs), 1e-2 / len(runs) ** 2
        like = {"step_s": lambda: step_s, "joining_s": lambda: joining_s}
        return SimpleNamespace(**like, is_same_with=lambda num_bytes: False)

    bucketed(plan, run)
    assert len(runs) == 2  # the second copies half a percent
    runs.clear()
    bucketed(plan, run, below_s=0.9)
    assert len(runs) == 1
    runs.clear()
    bucketed(plan, run, below_s=0.99)
    assert len(runs) == 2


def test_buckets_that_are_known_to_serve_are_taken() -> None:
    model, inputs = wide(layers=3)
    traced = trace(model, inputs)
    plan = solve(traced, GPUS, constraints=Constraints.parse({"data": 4, "zero": 1}))
    given = tuple(replace(row, num_bytes=1 << 20) for row in plan.buckets)
    found = scheduled(plan, traced, buckets=given)
    assert found.buckets == given != plan.buckets
    assert verify(found, model, inputs).worst[1] <= 1e-9


def test_a_program_that_copies_next_to_nothing_keeps_its_buckets() -> None:
    model, inputs = wide(layers=2)
    traced = trace(model, inputs)
    plan = solve(traced, GPUS, constraints=Constraints.parse({"data": 1}))
    runs = []

    def run(trial: Plan) -> Trial:
        runs.append(trial)
        return trial_of(trial, traced)

    chosen, _ = bucketed(plan, run)
    assert chosen is plan and len(runs) == 1
