"""Pipelines that nobody asked for: chosen where they win, and planned from folded graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.codegen.stage_unfolding import unfolded_plan
from autopar.core.cells import block_order
from autopar.core.constraints import Constraints, PipelinePin
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan, SolverReport
from autopar.core.stage_folding import outline
from autopar.cost_model import Cluster
from autopar.errors import ConstraintError, InfeasiblePlanError
from autopar.search import pipelining, stage_bounds
from autopar.search.pipeline_shapes import Shapes
from autopar.search.pipelining import _Search, plan_step
from autopar.search.stage_bounds import StageBounds
from autopar.search.step_limits import StepLimits
from autopar.solver.fit import UNLIMITED
from autopar.solver.microbatch import split_in_time
from autopar.solver.pipelines.pipeline_shape import PipelineShape
from autopar.tracer.trace import trace
from autopar.verification import verify
from tests import zoo
from tests.test_folding import ShiftedStack, gemma, gpt2, llama, t5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stack(depth: int, width: int = 256) -> tuple[nn.Module, dict[str, Tensor], TracedModel]:
    torch.manual_seed(0)
    model = Stack(depth, width).double().train()
    inputs = {"x": torch.randn(64, width).double()}
    return model, inputs, trace(model, inputs, fold=True)


def nodes_apart(latency_s: float = 2e-4, bandwidth: float = 1e9) -> Cluster:
    """Two nodes of two devices, near each other inside a node and far from one to the other."""
    cluster = Cluster.from_profile("cpu-gloo", nodes=2, devices_per_node=2)
    near = replace(cluster.intra, latency_s=1e-6, base_latency_s=1e-6, bandwidth=1e11)
    far = replace(near, latency_s=latency_s, base_latency_s=latency_s, bandwidth=bandwidth)
    return replace(cluster, intra=near, inter=far)


def planned(traced: TracedModel, cluster: Cluster, limit: int | None = None, **pins: Any) -> Plan:
    return plan_step(traced, cluster, constraints=Constraints.parse(pins), memory_limit=limit)


@pytest.mark.parametrize("depth", [4, 9])
def test_a_pipeline_is_chosen_where_nodes_are_far_apart(depth: int) -> None:
    model, inputs, traced = stack(depth)
    assert bool(traced.repeats) == (depth == 9)
    whole = planned(traced, nodes_apart(), pipeline="none")
    plan = planned(traced, nodes_apart())
    assert whole.pipeline is None
    assert plan.pipeline is not None
    assert plan.pipeline.size > 1
    assert plan.predicted.step_time_s < whole.predicted.step_time_s
    assert verify(plan, model, inputs).worst[1] <= 1e-9


def test_none_is_chosen_where_devices_are_near() -> None:
    traced = stack(4)[2]
    assert planned(traced, nodes_apart(1e-6, 1e12)).pipeline is None
    for build in (zoo.gpt2, zoo.vit):
        model, inputs = build()
        small = trace(model.train(), inputs)
        assert planned(small, Cluster.from_profile("cpu-gloo")).pipeline is None


def test_pins_that_take_all_devices_leave_no_pipeline() -> None:
    traced = stack(4)[2]
    for pins in ({"data": 4}, {"tensor": "1d"}, {"zero": 3}, {"pipeline": "none"}):
        assert planned(traced, nodes_apart(), **pins).pipeline is None
    plan = planned(traced, nodes_apart(), tensor={"mode": "1d", "size": 2})
    assert plan.pipeline is not None
    assert plan.mesh_shape == (2,)


def test_microbatches_are_chosen_where_a_step_does_not_fit() -> None:
    model, inputs, traced = stack(4, 32)
    one = Cluster.from_profile("cpu-gloo", devices_per_node=1)
    free = planned(traced, one, pipeline="none").predicted.peak_memory_bytes
    with pytest.raises(InfeasiblePlanError) as told:
        planned(traced, one, 1, pipeline="none")
    assert told.value.required_bytes is not None
    least = told.value.required_bytes - 1
    assert least < free
    plan = planned(traced, one, least)
    assert plan.pipeline is not None
    assert (plan.pipeline.size, plan.pipeline.microbatches > 1) == (1, True)
    assert plan.predicted.peak_memory_bytes <= least
    assert verify(plan, model, inputs).worst[1] <= 1e-9


def test_no_recomputation_is_planned_where_a_pipeline_is_too_slow_without_any() -> None:
    model, inputs = zoo.gpt2(layers=4)
    traced = trace(model.train(), inputs, fold=True)
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    shape = PipelineShape(size=2, microbatches=2, schedule="1f1b")
    known = StepLimits(traced, cluster, Constraints())
    free = _Search(known, UNLIMITED).planner.plan(shape)
    limit = int(0.95 * free.predicted.peak_memory_bytes)
    search = _Search(known, limit)
    search.cuts.large.append(shape)
    shapes = Shapes(search.planner, PipelinePin(), short=True)
    assert search._limited(shapes, free.predicted.step_time_s) is None
    found = search._limited(shapes, math.inf)
    assert found is not None
    assert found.predicted.peak_memory_bytes <= limit
    assert found.predicted.step_time_s >= free.predicted.step_time_s


def test_bounds_of_a_pinned_pipeline_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, pin = stack(8)[2], {"size": 4, "microbatches": 4}
    gaps = [planned(traced, nodes_apart(1e-6, 1e12), pipeline=pin).solver.gap]
    monkeypatch.setattr(Shapes, "close_least", lambda *given, **more: None)
    gaps.append(planned(traced, nodes_apart(1e-6, 1e12), pipeline=pin).solver.gap)
    assert gaps[0] < 0.02 < 0.05 < gaps[1]


def test_reshapes_of_equal_shapes_are_priced_by_their_strides() -> None:
    """In microbatches of one sample some are views that are copies elsewhere."""
    ids = torch.ones(8, 16).long()
    traced = trace(llama(9).train(), {"input_ids": ids, "labels": ids}, fold=True)
    plan = planned(traced, nodes_apart(1e-6, 1e12), pipeline={"size": 2, "microbatches": 8})
    assert plan.pipeline is not None
    assert plan.pipeline.size == 2


@pytest.mark.parametrize("share", [1.0, pytest.param(0.9, marks=pytest.mark.slow)])
def test_stages_of_a_rank_fit_together_though_not_each_at_its_peak(share: float) -> None:
    traced = stack(4, 32)[2]
    if share < 1.0:  # with blocks that are worth computing again
        model, inputs = zoo.gpt2(layers=8)
        traced = trace(model.train(), inputs)
    two = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    pin = {"size": 2, "chunks": 2, "microbatches": 2, "schedule": "interleaved"}
    free = planned(traced, two, pipeline=pin)
    assert free.pipeline is not None
    most = free.predicted.peak_memory_bytes
    assert most == max(free.pipeline.peaks)
    apart = [p.predicted.peak_memory_bytes for p in free.pipeline.stages]
    assert most < max(sum(apart[rank::2]) for rank in range(2))
    tight = planned(traced, two, int(share * most), pipeline=pin)
    assert tight.pipeline is not None
    assert max(tight.pipeline.peaks) == tight.predicted.peak_memory_bytes <= share * most
    if share == 1.0:
        assert tight.predicted == free.predicted
    else:  # more than half of the limit each, where that is what a stage needs
        parts = [p.predicted.peak_memory_bytes for p in tight.pipeline.stages]
        assert max(parts) > share * most / 2


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_microbatches_of_a_pinned_pipeline_divide_the_batch(schedule: str) -> None:
    """Fewer than it has ranks, or more: the fastest of them, and not all at once."""
    torch.manual_seed(0)
    rows = 6 if schedule == "1f1b" else 12
    model, inputs = Stack(8, 256).double().train(), {"x": torch.randn(rows, 256).double()}
    traced = trace(model, inputs, fold=True)
    pin = {"size": 4, "schedule": schedule}
    plan = planned(traced, nodes_apart(1e-6, 1e12), pipeline=pin)
    assert plan.pipeline is not None
    assert plan.pipeline.microbatches > 1
    listed = {}
    for number in (2, 3, 4, 6, 8, 12):
        with suppress(ConstraintError):
            some = {**pin, "microbatches": number}
            found = planned(traced, nodes_apart(1e-6, 1e12), pipeline=some)
            listed[number] = found.predicted.step_time_s
    assert len(listed) > 1
    assert plan.predicted.step_time_s == pytest.approx(min(listed.values()), rel=1e-2)
    assert verify(plan, model, inputs).worst[1] <= 1e-9


def test_the_choice_is_the_same_every_time() -> None:
    plans = [planned(stack(9)[2], nodes_apart()).to_dict() for _ in range(2)]
    assert _without_seconds(plans[0]) == _without_seconds(plans[1])


def _without_seconds(value: Any) -> Any:
    """How long the solver took differs from run to run."""
    if isinstance(value, list):
        return [_without_seconds(v) for v in value]
    if not isinstance(value, dict):
        return value
    report = set(value) == {"status", *SolverReport.__dataclass_fields__}
    return {k: _without_seconds(v) for k, v in value.items() if not (report and k == "seconds")}


def test_models_that_need_the_whole_batch_are_planned_in_one_piece() -> None:
    far = nodes_apart()
    model, inputs = zoo.resnet()
    assert planned(trace(model.train(), inputs), far).pipeline is None


TEXT = {"input_ids": 1 + torch.arange(64).reshape(4, 16), "labels": torch.ones(4, 16).long()}
SHAPES: dict[str, dict[str, Any]] = {
    "three-stages": {"size": 3, "microbatches": 2, "schedule": "1f1b",
                     "cuts": ["model.layers.6", "model.layers.12"]},
    "two-stages": {"size": 2, "microbatches": 4, "schedule": "zero-bubble"},
    "six-stages": {"size": 6, "microbatches": 4, "schedule": "zero-bubble"},
    "interleaved": {"size": 3, "microbatches": 3, "schedule": "interleaved", "chunks": 2},
    "one-stage": {"size": 1, "microbatches": 2},
}  # fmt: skip


_LONG = [
    pytest.param(shape, marks=pytest.mark.slow)
    for shape in ("two-stages", "three-stages", "six-stages")
]


@pytest.mark.parametrize("shape", ["one-stage", *_LONG])
@pytest.mark.parametrize("kind", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_folded_stages_cost_what_whole_ones_do(shape: str, kind: str) -> None:
    model = llama(18)
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=6)
    pins: dict[str, Any] = {"pipeline": SHAPES[shape], "checkpoint": kind}
    folded = trace(model, TEXT, training=True, fold=True)
    whole = trace(model, TEXT, training=True)
    assert len(folded.graph.nodes) < len(whole.graph.nodes)
    short, long = planned(folded, cluster, **pins), planned(whole, cluster, **pins)
    assert short.pipeline is not None
    assert long.pipeline is not None
    assert short.pipeline.cuts == long.pipeline.cuts
    assert short.predicted.step_time_s == pytest.approx(long.predicted.step_time_s, rel=1e-9)
    # the first backward makes the sums of a folded block's gradients all at once
    least = long.predicted.peak_memory_bytes
    assert least <= short.predicted.peak_memory_bytes <= 1.01 * least
    for mine, other in zip(short.pipeline.peaks, long.pipeline.peaks, strict=True):
        assert other <= mine <= 1.01 * other
    assert list(short.parameters) == list(long.parameters)
    for mine, other in zip(short.pipeline.stages, long.pipeline.stages, strict=True):
        assert mine.predicted.step_time_s == pytest.approx(other.predicted.step_time_s, rel=1e-9)
        assert set(mine.parameters) == set(other.parameters)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "buffers",
        "seldom",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "gemma", "t5")),
    ],
)
def test_folded_stages_give_the_same_numbers(name: str) -> None:
    build: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: llama(9),
        "gpt2": lambda: gpt2(8),
        "gemma": lambda: gemma(14),
        "seldom": lambda: gemma(18, 4),
        "t5": lambda: t5(18),
        "buffers": lambda: ShiftedStack(9),
    }
    torch.manual_seed(0)
    model = build[name]().double().train()
    labels = TEXT["labels"].clone()
    labels[0, 3:] = -100
    inputs = {**TEXT, "labels": labels}
    folded = trace(model, inputs, fold=True)
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=6)
    plan = planned(folded, cluster, pipeline={"size": 3, "microbatches": 2})
    assert plan.repeats
    assert Plan.from_dict(plan.to_dict()).pipeline is not None
    found = verify(plan, model, inputs)
    assert len(found.gradients) == len(list(model.parameters()))
    assert found.worst[1] < 1e-6  # the losses compute in float32


@pytest.mark.parametrize(
    ("layers", "cuts", "tied"),
    [
        (9, ["layers.2", "layers.7"], False),
        (9, ["layers.5"], False),
        (12, ["layers.2", "layers.7"], False),
        (14, ["layers.2", "layers.7", "layers.12"], False),  # of two equal stages, one is made
        (14, ["layers.2", "layers.7", "layers.12"], True),
    ],
)
def test_a_folded_stage_has_buffers_of_all_its_blocks(
    layers: int, cuts: list[str], tied: bool
) -> None:
    torch.manual_seed(0)
    model = ShiftedStack(layers).double().train()
    if tied:
        model.head.weight = model.embed.weight
    size = len(cuts) + 1
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=2 * size)
    pin: dict[str, Any] = {"size": size, "microbatches": 2, "cuts": cuts}
    plan = planned(trace(model, TEXT, fold=True), cluster, pipeline=pin)
    assert plan.repeats
    found = verify(plan, model, TEXT)
    assert len(found.gradients) == len(list(model.parameters()))
    assert found.worst[1] <= 1e-9


def test_a_folded_plan_is_unfolded_for_the_whole_program() -> None:
    model = llama(18)
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=3)
    options: dict[str, Any] = {"training": True}
    folded, whole = trace(model, TEXT, **options, fold=True), trace(model, TEXT, **options)
    plan = planned(folded, cluster, pipeline=SHAPES["three-stages"])
    full = unfolded_plan(plan, folded, whole)
    assert full.pipeline is not None
    assert not full.repeats
    assert full.fingerprint == whole.fingerprint()
    for stage in full.pipeline.stages:
        assert len(stage.nodes) > 0
        assert not stage.repeats


def test_equal_stages_are_made_once_and_cuts_spare_what_repeats_together() -> None:
    body = trace(llama(26), TEXT, training=True, fold=True)
    names = [f"model.layers.{n}" for n in (5, 10, 15, 19, 23)]
    found = outline(body, names)
    assert found.kinds == (0, 1, 1, 2, 2, 3)
    assert found.shifts == (0, 0, 5, 0, 4, 0)
    assert [len(r) for r in found.repeats] == [1, 1, 0, 0]
    assert len(block_order(body)) == 4
    local = trace(gemma(14), TEXT, training=True, fold=True)
    with pytest.raises(ConstraintError, match="repeat together"):
        outline(local, ["model.layers.5"])


def test_parallelize_plans_in_one_piece_until_it_has_seen_a_batch() -> None:
    parsed = Constraints.parse({"pipeline": "none"})
    assert parsed.to_dict() == {"pipeline": {"size": 1, "microbatches": 1}}
    with pytest.raises(ConstraintError, match="give a size"):
        Constraints.parse({"pipeline": "off"})
    model, inputs, _ = stack(4)
    assert autopar.plan(model, nodes_apart(), inputs, constraints={"pipeline": 1}).num_devices == 4


def test_stages_that_share_a_graph_hide_communication_under_their_own_names() -> None:
    """The second and the third of four stages have one graph, with the second's blocks."""
    model = llama(32)
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=8)
    pins = {"pipeline": {"size": 4, "microbatches": 2}, "data": 2, "zero": 1}
    plan = autopar.plan(model, cluster, TEXT, constraints=pins, cache=False)
    assert plan.pipeline is not None
    names = [set(stage.parameters) for stage in plan.pipeline.stages]
    assert set.union(*names) == {name for name, _ in model.named_parameters()}
    assert sum(map(len, names)) == len(set.union(*names))
    assert "model.layers.16.mlp.up_proj.weight" in names[2]
    assert all(stage.predicted.hidden_time_s > 0 for stage in plan.pipeline.stages)


@pytest.mark.parametrize("name", ["stack", "gpt2", "llama"])
@pytest.mark.parametrize("near", [False, True])
def test_no_plan_in_one_piece_takes_less_than_what_is_known_of_all(name: str, near: bool) -> None:
    if name == "stack":
        traced = stack(4)[2]
    else:
        model, inputs = zoo.MODELS[name]()
        traced = trace(model.train(), inputs)
    cluster = nodes_apart(1e-6, 1e12) if near else nodes_apart()
    cluster = cluster.with_mesh_shape((2, 2), ("between", "inside"))
    known = StepLimits(traced, cluster, Constraints())
    least_s = known.planner(UNLIMITED).least_alone_s()
    found = known.free(UNLIMITED)
    assert 0 < least_s <= found.solver.objective
    assert least_s >= 0.4 * found.solver.bound  # and it says something


def test_no_plan_in_one_piece_is_made_where_pipelines_are_far_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced, cluster = stack(4)[2], nodes_apart()
    both = planned(traced, cluster)
    known = StepLimits(traced, cluster, Constraints())
    assert known.planner(UNLIMITED).least_alone_s() * pipelining._FAR < both.predicted.step_time_s
    monkeypatch.setattr(pipelining, "_FAR", 10.0)
    plan = _Search(known, cluster.memory_bytes).unasked()
    assert known._free is None
    assert plan.pipeline is not None and both.pipeline is not None
    assert plan.pipeline.cuts == both.pipeline.cuts
    assert plan.predicted == both.predicted
    assert 0 < plan.solver.bound <= known.planner(cluster.memory_bytes).least_alone_s()
    # one that was expected to be far ahead, and is not, is weighed against the plan in one piece
    share = both.predicted.step_time_s / known.planner(UNLIMITED).least_alone_s()
    monkeypatch.setattr(pipelining, "_FAR", 0.999 * share)
    assert _Search(known, cluster.memory_bytes).unasked().predicted == both.predicted
    assert known._free is not None


class Named(nn.Module):
    """Modules that follow each other, as a part of the model, and their loss."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 16)
        self.net = nn.Sequential(first, nn.GELU(), second, nn.GELU(), third)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), labels)


def test_a_stage_may_have_no_parameters() -> None:
    """Nothing runs once in it, and it runs at each turn all the same."""
    model = Named().double().train()
    batch = (torch.randn(32, 64).double(), torch.randint(0, 16, (32,)))
    pin = {"size": 4, "microbatches": 4, "cuts": ["net.1", "net.2", "net.4"]}
    plan = planned(trace(model, batch), Cluster.from_profile("cpu-gloo"), pipeline=pin)
    assert plan.pipeline is not None
    assert [bool(stage.parameters) for stage in plan.pipeline.stages] == [True, False, True, True]
    assert verify(plan, model, batch).worst[1] <= 1e-9


class Normed(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@pytest.mark.parametrize(("batch", "asked"), [(64, [2]), (18, [2, 3])])
def test_what_cannot_run_in_some_turns_is_not_asked_for_their_multiples(
    monkeypatch: pytest.MonkeyPatch, batch: int, asked: list[int]
) -> None:
    """A batch norm needs the whole batch: that is found out before anything is bounded."""
    tried: list[int] = []

    def split(traced: TracedModel, cluster: Cluster, microbatches: int) -> Any:
        tried.append(microbatches)
        return split_in_time(traced, cluster, microbatches)

    monkeypatch.setattr(stage_bounds, "split_in_time", split)
    monkeypatch.setattr(StageBounds, "_floored", None)  # no bound of blocks is asked for
    model = nn.Sequential(*(Normed(64) for _ in range(4)), Mean()).train()
    traced = trace(model, (torch.randn(batch, 64),), fold=True)
    cluster = Cluster.from_profile("h100-sxm", nodes=2, devices_per_node=8, mesh_shape=(2, 8))
    plan = plan_step(traced, cluster, constraints=Constraints())
    assert plan.pipeline is None
    assert sorted(set(tried)) == asked
    refused = [row.why for row in plan.considered if row.bound_s is None]
    assert refused
    assert all("needs the whole batch" in why for why in refused)


def test_a_pinned_pipeline_of_what_needs_the_whole_batch_runs_in_one_turn() -> None:
    model = nn.Sequential(*(Normed(64) for _ in range(4)), Mean()).train()
    traced = trace(model, (torch.randn(64, 64),), fold=True)
    cluster = Cluster.from_profile("h100-sxm", nodes=2, devices_per_node=8, mesh_shape=(2, 8))
    plan = plan_step(traced, cluster, constraints=Constraints(pipeline=PipelinePin(size=2)))
    assert plan.pipeline is not None
    assert (plan.pipeline.size, plan.pipeline.microbatches) == (2, 1)
    with pytest.raises(ConstraintError, match=r"in 8 microbatches.*needs the whole batch"):
        pin = PipelinePin(size=2, microbatches=8)
        plan_step(traced, cluster, constraints=Constraints(pipeline=pin))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Headed(nn.Module):
    """A stack whose head takes most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(4, 16)
        self.head = nn.Linear(16, 4096)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.stack.layers:
            x = layer(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("chunks", [1, 2])
def test_all_stages_fit_the_limit_that_an_error_names(chunks: int) -> None:
    traced = trace(Headed().double(), (torch.randn(8, 16, dtype=torch.float64),))
    two = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    pin: dict[str, Any] = {"size": 2, "microbatches": 2, "chunks": chunks}
    if chunks > 1:
        pin["schedule"] = "interleaved"
    with pytest.raises(InfeasiblePlanError, match=r"stage 0 of.* of all stages was found") as told:
        planned(traced, two, 1, pipeline=pin)
    least = told.value.required_bytes
    assert least is not None and f"{least} bytes" in str(told.value)
    assert planned(traced, two, least, pipeline=pin).predicted.peak_memory_bytes <= least


class Aside(nn.Module):
    """Equal blocks that the loss needs, if any, and others that it does not."""

    def __init__(self, live: int) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.live = nn.ModuleList(Block(8) for _ in range(live))
        self.aside = nn.ModuleList(Block(8) for _ in range(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        for block in self.live:
            x = block(x)
        loss = x.square().mean()
        for block in self.aside:
            x = block(x)
        return {"loss": loss, "hidden": x}


@pytest.mark.parametrize(("live", "size"), [(0, 1), (8, 1), (8, 2)])
def test_folded_blocks_that_the_loss_does_not_need_keep_their_parameters(
    live: int, size: int
) -> None:
    model = Aside(live).double().train()
    inputs = {"x": torch.randn(8, 8, dtype=torch.float64)}
    traced = trace(model, inputs, fold=True)
    assert {r.container for r in traced.repeats} >= {"aside"}
    two = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = planned(traced, two, pipeline={"size": size, "microbatches": 2})
    assert set(plan.parameters) == {name for name, _ in model.named_parameters()}
    name, error = verify(plan, model, inputs, traced=trace(model, inputs)).worst
    assert error <= 1e-12, name
