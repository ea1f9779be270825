"""Recomputation of single blocks: pinned, and chosen where a limit lies between the kinds."""

from __future__ import annotations

import copy
import itertools
import json
import random
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.core.block_kinds import (
    RECOMPUTATIONS,
    as_checkpoint,
    checkpoint_text,
    kinds_of,
    moved_checkpoint,
)
from autopar.core.blocks import Block, Blocks
from autopar.core.constraints import Constraints
from autopar.core.folding import unfolded
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.core.recompute import recomputed
from autopar.cost_model import Cluster
from autopar.errors import ConstraintError, PlanMismatchError
from autopar.explanation import explain
from autopar.memory_frontier import frontier, render_frontier
from autopar.report.differences import render_differences
from autopar.search.pipelining import plan_step
from autopar.solver.solve import StepSearch, solve
from autopar.tracer.trace import trace
from benchmarks.memory import measure, predicted_of
from tests import zoo
from tests.dist import run_ranks
from tests.folding import cluster
from tests.test_folding import CASES, TEXT, gpt2, llama

MODELS = {"vit": lambda: zoo.vit(layers=4), "resnet": zoo.resnet, "t5": zoo.t5}
# of the blocks of all three; the first key that matches counts
MIXED = {"vit.layers.[02]": "full", "*.0": "selective", "*": "none"}
SEARCHED = RECOMPUTATIONS[:3]  # on devices whose memory is the host's
PLAIN: dict[str, Any] = {"data": 2, "zero": 3}
TURNS: dict[str, Any] = {"pipeline": {"size": 1, "microbatches": 2}, "data": 2, "zero": 1}
STAGES: dict[str, Any] = {"pipeline": {"size": 2, "microbatches": 2}}


@lru_cache(maxsize=1)
def double(name: str) -> tuple[nn.Module, dict[str, Any], TracedModel]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = model.double().train()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    return model, inputs, trace(model, inputs)


def devices(count: int) -> Cluster:
    return Cluster.from_profile("cpu-gloo", devices_per_node=count)


def planned(traced: TracedModel, count: int, limit: int | None = None, **pins: Any) -> Plan:
    wanted = Constraints.parse(pins)
    return plan_step(traced, devices(count), constraints=wanted, memory_limit=limit)


def pinned(name: str) -> dict[str, str]:
    """Those of the pins that some block of a model answers to."""
    names = [f"{b.container}.{b.number}" for b in Blocks(double(name)[2]).every()]
    keys = [k for k in MIXED if k != "vit.layers.[02]" or name == "vit"]
    assert names
    return {key: MIXED[key] for key in keys}


# --- what a plan says ----------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(20))
def test_a_plan_says_the_kind_of_every_block(seed: int) -> None:
    rng = random.Random(seed)
    blocks = [Block(c, n) for c in ("a.layers", "b") for n in range(rng.randrange(1, 9))]
    kinds = {block: rng.choice(RECOMPUTATIONS) for block in blocks}
    said = as_checkpoint(kinds)
    assert kinds_of(json.loads(json.dumps(said)), blocks) == kinds
    moved = {Block(b.container, b.number + 7 * (b.container == "b")): k for b, k in kinds.items()}
    assert kinds_of(moved_checkpoint(said, "b", 7), list(moved)) == moved
    for kind in set(kinds.values()):
        assert kind in checkpoint_text(said)


def test_a_saved_plan_says_it_again_and_reports_it() -> None:
    traced = double("vit")[2]
    plan = planned(traced, 2, **PLAIN, checkpoint=pinned("vit"))
    assert plan.checkpoint == {
        "vit.layers.0": "full",
        "vit.layers.1": "none",
        "vit.layers.2": "full",
        "vit.layers.3": "none",
    }
    data = json.loads(json.dumps(plan.to_dict()))
    assert Plan.from_dict(data).checkpoint == plan.checkpoint
    same = planned(traced, 2, **PLAIN, checkpoint=plan.checkpoint)
    assert same.nodes == plan.nodes
    assert "full: vit.layers.0, vit.layers.2; none: vit.layers.1" in plan.summary()
    whole = planned(traced, 2, **PLAIN, checkpoint="full")
    assert "full: vit.layers.0, vit.layers.2" in " ".join(
        render_differences(plan, whole, 300).split()
    )
    for damaged in ({"vit.layers.*": "full"}, {"vit.layers.0": "some"}, {}, 3):
        with pytest.raises(PlanMismatchError, match="checkpoint"):
            Plan.from_dict({**data, "checkpoint": damaged})


@pytest.mark.parametrize("pipeline", [{}, STAGES], ids=["plain", "stages"])
@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ({"vit.layers.9": "full"}, r"'vit.layers.9'.*blocks are vit.layers.0-3.*'vit.layers.\*'"),
        ({"*": "none", "decoder.*": "full"}, r"'decoder.\*'.*blocks are vit.layers.0-3"),
        ({"*": "some"}, "'some': known are none, selective, full, host"),
        ({3: "full"}, "checkpoint of 3: a block is named by its FQN or a glob"),
        ({}, "names no block"),
        (["full"], r"checkpoint=\['full'\]: known are none, selective, full, host, or a mapping"),
    ],
)
def test_bad_pins_are_refused(checkpoint: Any, message: str, pipeline: dict[str, Any]) -> None:
    with pytest.raises(ConstraintError, match=message):
        planned(double("vit")[2], 2, **pipeline, checkpoint=checkpoint)


def test_blocks_that_no_pin_speaks_of_are_free() -> None:
    traced = double("vit")[2]
    pins = {"checkpoint": {"vit.layers.3": "full"}}
    free = planned(traced, 1, pipeline="none", **pins)
    assert free.checkpoint == {"vit.layers.0-2": "none", "vit.layers.3": "full"}
    least = planned(traced, 1, pipeline="none", checkpoint="full").predicted.peak_memory_bytes
    tight = planned(traced, 1, least, pipeline="none", **pins)
    assert tight.predicted.peak_memory_bytes <= least
    assert kinds_of(tight.checkpoint, [Block("vit.layers", 3)])[Block("vit.layers", 3)] == "full"
    assert tight.checkpoint != free.checkpoint


# --- the same numbers ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "pins"),
    [
        ("vit", STAGES),
        ("resnet", PLAIN),
        pytest.param("vit", PLAIN, marks=pytest.mark.slow),
        pytest.param("vit", TURNS, marks=pytest.mark.slow),
        pytest.param("t5", STAGES, marks=pytest.mark.slow),
        pytest.param("t5", PLAIN, marks=pytest.mark.slow),
        pytest.param("t5", TURNS, marks=pytest.mark.slow),
        pytest.param(
            "vit",
            {"pipeline": {"size": 2, "microbatches": 2, "schedule": "zero-bubble"}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "t5", {"pipeline": {"size": 2, "microbatches": 2, "chunks": 2}}, marks=pytest.mark.slow
        ),
    ],
)
def test_gradients_are_those_of_the_module(name: str, pins: dict[str, Any]) -> None:
    model, inputs, traced = double(name)
    plan = planned(traced, 2, **pins, checkpoint=pinned(name))
    assert not isinstance(plan.checkpoint, str)
    found = autopar.verify(plan, model, inputs, traced=traced)
    assert len(found.gradients) == sum(p.requires_grad for p in model.parameters())
    assert found.worst[1] <= 1e-9


def errors(rank: int, pins: dict[str, Any]) -> dict[str, float]:
    """Of the gradients of a rank's parameters, against those of one process."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    model, inputs = zoo.vit(layers=4)
    model = model.double().train()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    single = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parallel = autopar.parallelize(model, mesh, inputs, constraints=pins, cache=False)
    assert not isinstance(parallel.plan.checkpoint, str)
    parallel.train_step(**inputs)
    single(**inputs).loss.backward()
    expected = {name: p.grad for name, p in single.named_parameters()}
    largest = max(float(g.norm()) for g in expected.values() if g is not None)
    found = {}
    for name, parameter in parallel.named_parameters():
        grad, other = parameter.grad, expected[name]
        assert grad is not None and other is not None
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found[name] = float((whole - other).norm() / max(float(other.norm()), 1e-6 * largest))
    return found


@pytest.mark.parametrize(
    "pins", [pytest.param(PLAIN, marks=pytest.mark.slow), STAGES], ids=["plain", "stages"]
)
def test_gradients_on_real_ranks(pins: dict[str, Any]) -> None:
    ranks = run_ranks(errors, 2, {**pins, "checkpoint": MIXED})
    assert {name for found in ranks for name in found} == {
        name for name, _ in zoo.vit(layers=4)[0].named_parameters()
    }
    assert max(error for found in ranks for error in found.values()) <= 1e-9


# --- folded graphs -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("llama", 0),
        *(pytest.param(n, s, marks=pytest.mark.slow) for n in CASES for s in (1, 2, 3, 4)),
    ],
)
def test_a_folded_mixture_costs_what_the_whole_one_does(name: str, seed: int) -> None:
    rng = random.Random(seed)
    model = CASES[name][0]()
    folded = trace(model, TEXT, training=True, fold=True)
    whole = trace(model, TEXT, training=True)
    blocks = Blocks(folded).every()
    assert set(blocks) == set(Blocks(whole).every())
    kinds = {}
    while blocks:  # runs of one kind, of one block and of many
        kind, length = rng.choice(RECOMPUTATIONS), rng.randrange(1, 6)
        kinds |= dict.fromkeys(blocks[:length], kind)
        blocks = blocks[length:]
    said = as_checkpoint(kinds)
    pins = Constraints(checkpoint=said if isinstance(said, str) else dict(said))
    short, long = (solve(t, cluster(2, 4), constraints=pins) for t in (folded, whole))
    assert short.checkpoint == long.checkpoint == said
    assert short.predicted.step_time_s == pytest.approx(long.predicted.step_time_s, rel=1e-9)
    assert short.predicted.peak_memory_bytes == long.predicted.peak_memory_bytes
    assert list(short.parameters) == list(long.parameters)
    full = unfolded(short, folded, whole)
    assert set(full.nodes) == set(long.nodes)


def test_a_mixture_needs_two_stand_ins() -> None:
    folded = trace(llama(24), TEXT, training=True, fold=True)
    said = {"model.layers.0-9": "full", "model.layers.10-23": "none"}
    graph = recomputed(folded, said)
    assert [(r.first, r.times) for r in graph.repeats] == [(2, 7), (11, 12)]
    deep = trace(llama(48), TEXT, training=True, fold=True)
    said = {"model.layers.0-9": "full", "model.layers.10-47": "none"}
    assert len(recomputed(deep, said).graph.nodes) == len(graph.graph.nodes)


# --- the search ----------------------------------------------------------------------------------
@lru_cache(maxsize=2)
def deep(fold: bool) -> TracedModel:
    return trace(gpt2(9), TEXT, training=True, fold=fold)


@lru_cache(maxsize=2)
def uniform(fold: bool) -> dict[str, Plan]:
    return {kind: planned(deep(fold), 1, checkpoint=kind) for kind in SEARCHED}


@pytest.mark.parametrize(
    "fold", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["folded", "whole"]
)
def test_a_limit_between_the_kinds_gives_a_mixture(fold: bool) -> None:
    plans = uniform(fold)
    peaks = {kind: plan.predicted.peak_memory_bytes for kind, plan in plans.items()}
    seconds = {kind: plan.predicted.step_time_s for kind, plan in plans.items()}
    for cheap, strong in (("none", "selective"), ("selective", "full")):
        limit = (peaks[cheap] + peaks[strong]) // 2
        plan = planned(deep(fold), 1, limit, pipeline="none")
        assert len(set(dict(plan.checkpoint).values())) == 2
        assert plan.predicted.peak_memory_bytes <= limit
        assert seconds["none"] < plan.predicted.step_time_s < 0.99 * seconds[strong]
        assert plan.predicted.step_time_s >= plan.solver.bound * (1 - 1e-9)
        again = planned(deep(fold), 1, limit, pipeline="none")
        assert (again.nodes, again.checkpoint) == (plan.nodes, plan.checkpoint)
        # it is found, too, where no kind alone stays below the seconds asked for
        below_s = seconds[strong] * (1 - 1e-3)
        found = StepSearch(deep(fold), devices(1), memory_limit=limit).run(below_s).plan
        assert found.solver.objective < below_s


@pytest.mark.slow
def test_no_mixture_of_two_kinds_is_faster() -> None:
    """On one device nothing but the kinds is chosen, so all mixtures can be listed."""
    blocks = Blocks(deep(True)).every()
    listed: list[tuple[int, float]] = []
    for cheap, strong in itertools.combinations(SEARCHED, 2):
        for number in range(len(blocks) + 1):
            kinds = dict.fromkeys(blocks[:number], strong) | dict.fromkeys(blocks[number:], cheap)
            found = solve(deep(True), devices(1), constraints=Constraints(
                checkpoint=as_checkpoint(kinds)))  # fmt: skip
            listed.append((found.predicted.peak_memory_bytes, found.predicted.step_time_s))
    plans = uniform(True)
    most, least = (plans[k].predicted.peak_memory_bytes for k in ("none", "full"))
    for share in (1, 3, 5):
        limit = least + (most - least) * share // 6
        best_s = min(seconds for peak, seconds in listed if peak <= limit)
        plan = planned(deep(True), 1, limit, pipeline="none")
        assert plan.predicted.step_time_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.slow
def test_a_smaller_limit_is_never_faster() -> None:
    plans = uniform(True)
    most, least = (plans[k].predicted.peak_memory_bytes for k in ("none", "full"))
    limits = [least + (most - least) * share // 8 for share in range(8, -1, -1)]
    found = [planned(deep(True), 1, limit, pipeline="none") for limit in limits]
    seconds = [plan.predicted.step_time_s for plan in found]
    for limit, plan in zip(limits, found, strict=True):
        assert plan.predicted.peak_memory_bytes <= limit
    assert seconds == sorted(seconds)
    assert len(set(seconds)) > len(SEARCHED) + 2
    assert found[0].checkpoint == "none"


@pytest.mark.slow
def test_the_frontier_shows_mixtures() -> None:
    points = frontier(gpt2(9), devices(1), TEXT, points=3, constraints={"pipeline": "none"})
    mixed = [p.plan for p in points if not isinstance(p.plan.checkpoint, str)]
    assert mixed
    text = " ".join(render_frontier(points, 200).split())
    for plan in mixed:
        assert checkpoint_text(plan.checkpoint) in text


@pytest.mark.slow
def test_a_mixture_is_chosen_with_the_placements() -> None:
    """Neither alone gets under the limit in so little time."""
    traced = trace(llama(12), TEXT, training=True, fold=True)
    free = planned(traced, 4, pipeline="none")
    full = planned(traced, 4, pipeline="none", checkpoint="full")
    limit = (free.predicted.peak_memory_bytes + full.predicted.peak_memory_bytes) // 2
    plan = planned(traced, 4, limit, pipeline="none")
    assert plan.predicted.peak_memory_bytes <= limit
    for kind in SEARCHED:
        try:
            other = planned(traced, 4, limit, pipeline="none", checkpoint=kind)
        except autopar.InfeasiblePlanError:
            continue
        assert plan.predicted.step_time_s <= other.predicted.step_time_s * (1 + 1e-9)


def peaks(rank: int, limit: int, pins: dict[str, Any]) -> tuple[Any, int, int]:
    """The plan's mixture, the predicted peak and the measured one of a second step."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    model, inputs = gpt2(9).train(), TEXT
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parallel = autopar.parallelize(
        model, mesh, inputs, constraints=pins, memory_limit=limit, cache=False
    )
    del model
    return parallel.plan.checkpoint, predicted_of(parallel), measure(parallel, inputs)[1]


@pytest.mark.parametrize(
    ("ranks", "pins"),
    [
        (1, {"pipeline": "none"}),
        pytest.param(  # cut so, as it could be cut to fit without
            2,
            {"pipeline": {"size": 2, "microbatches": 4, "cuts": ["transformer.h.5"]}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "stages"],
)
def test_the_peak_of_a_mixture_is_true_and_below_the_limit(
    ranks: int, pins: dict[str, Any]
) -> None:
    most, least = (
        planned(deep(True), ranks, **pins, checkpoint=kind).predicted.peak_memory_bytes
        for kind in ("none", "full")
    )
    limit = (most + least) // 2
    for checkpoint, predicted, measured in run_ranks(peaks, ranks, limit, pins):
        assert not isinstance(checkpoint, str)
        assert measured <= limit
        assert 0.98 * measured <= predicted <= 1.05 * measured


# --- pipelines -----------------------------------------------------------------------------------
@pytest.mark.slow
def test_stages_are_mixed_and_give_the_same_numbers() -> None:
    """Of four folded stages, the two in the middle are equal and share one mixture."""
    size, pipeline = 2, {"size": 2, "microbatches": 4, "chunks": 2}
    torch.manual_seed(0)
    model = llama(18).double().train()
    folded = trace(model, TEXT, fold=True)
    plans = [planned(folded, size, pipeline=pipeline, checkpoint=k) for k in ("none", "full")]
    limit = sum(plan.predicted.peak_memory_bytes for plan in plans) // 2
    plan = planned(folded, size, limit, pipeline=pipeline)
    assert plan.pipeline is not None
    assert max(plan.pipeline.peaks) <= limit
    assert any(not isinstance(stage.checkpoint, str) for stage in plan.pipeline.stages)
    assert plan.predicted.step_time_s <= plans[1].predicted.step_time_s
    blocks = Blocks(folded).every()
    whole = kinds_of(plan.checkpoint, blocks)
    for stage in plan.pipeline.stages:
        own = [b for b in blocks if f"{b.container}.{b.number}.mlp.up_proj.weight"
               in stage.parameters]  # fmt: skip
        assert own
        assert kinds_of(stage.checkpoint, own) == {b: whole[b] for b in own}
    found = autopar.verify(Plan.from_dict(plan.to_dict()), model, TEXT)
    assert len(found.gradients) == len(list(model.parameters()))
    assert found.worst[1] < 1e-6  # the losses compute in float32


def test_a_choice_in_a_mixture_is_explained() -> None:
    model = gpt2(9)
    plans = uniform(True)
    limit = sum(plans[k].predicted.peak_memory_bytes for k in ("none", "selective")) // 2
    plan = autopar.plan(
        model, devices(1), TEXT, memory_limit=limit, constraints={"pipeline": "none"}
    )
    assert not isinstance(plan.checkpoint, str)
    for number in range(9):
        name = f"transformer.h.{number}.mlp.c_fc.weight"
        found = explain(plan, param=name)
        block = Block("transformer.h", int(found.name.split(".")[2]))
        kinds = kinds_of(plan.checkpoint, [block, Block("transformer.h", number)])
        assert len(set(kinds.values())) == 1
    name = next(n for n in plan.nodes if "_period" in n and "einsum" in n)
    again = explain(plan, node=name, model=model, example_inputs=TEXT)
    assert again.unlimited is not None
    assert again.unlimited.plan is not None
    assert again.unlimited.plan.checkpoint == "none"
