"""The page of a pipelined plan: each op in its stage, each parameter on the rank that holds it."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar.core.plan import Plan
from autopar.core.units import format_bytes
from autopar.report.page import page_data, render_page
from autopar.report.parameters import parameter_rows
from autopar.report.stages import holders, longest_rank, stage_groups
from tests.browser import browser, inspect
from tests.folding import cluster
from tests.test_stage_passes import Tower

in_browser = pytest.mark.skipif(browser() is None, reason="no Chromium is installed")

MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "line": (4, {"pipeline": {"size": 4, "microbatches": 4, "schedule": "1f1b"}}),
    "chunks": (
        4,
        {
            "pipeline": {"size": 2, "chunks": 2, "microbatches": 4, "schedule": "interleaved"},
            "data": 2,
            "zero": 2,
        },
    ),
    "split": (
        4,
        {"pipeline": {"size": 2, "microbatches": 2, "schedule": "zero-bubble"}, "data": 2},
    ),
    "turns": (2, {"pipeline": {"size": 1, "microbatches": 4}, "data": 2, "zero": 1}),
}


@cache
def plan_of(mode: str) -> Plan:
    """Of eight blocks; those in the middle are planned once."""
    devices, constraints = MODES[mode]
    torch.manual_seed(0)
    inputs = {"x": torch.randn(16, 8), "labels": torch.arange(16) % 4}
    model = Tower(0.0, layers=8)
    return autopar.plan(model, cluster(devices), inputs, constraints=constraints, cache=False)


@pytest.mark.parametrize("mode", MODES)
def test_every_op_has_its_placements_and_its_stage(mode: str) -> None:
    plan = plan_of(mode)
    assert plan.pipeline is not None
    data = page_data(plan)
    groups = stage_groups(plan)
    assert sorted(s for g in groups for s in g.stages) == list(range(len(plan.pipeline.stages)))
    assert [g["label"] for g in data["groups"]] == {
        "line": ["0", "1-2", "3"],
        "chunks": ["0", "1-2", "3"],
        "split": ["0", "1"],
        "turns": ["0"],
    }[mode]
    by_name = {(op["group"], op["name"]): op for op in data["ops"]}
    assert len(by_name) == len(data["ops"]) == sum(len(g.plan.nodes) for g in groups)
    for number, stage in enumerate(plan.pipeline.stages):
        group = next(i for i, g in enumerate(groups) if number in g.stages)
        for name, node in stage.nodes.items():
            op = by_name[group, name]
            assert op["outputs"] == [[p.short for p in x] for x in node.outputs]
            assert op["inputs"] == [[p.short for p in x] for x in node.inputs]
    assert json.loads(json.dumps(data)) == data


def test_unlike_stages_of_equal_graphs_tell_whose_names_they_have() -> None:
    plan = plan_of("line")
    p = plan.pipeline
    assert p is not None
    timeline = p.stages[2].predicted.timeline
    slow = replace(timeline, ops=tuple(replace(op, compute_s=1.0) for op in timeline.ops))
    stage = replace(p.stages[2], predicted=replace(p.stages[2].predicted, timeline=slow))
    other = replace(plan, pipeline=replace(p, stages=(*p.stages[:2], stage, p.stages[3])))
    names = [group.name for group in stage_groups(other)]
    assert names == ["stage 0", "stage 1", "stage 2 (named as in stage 1)", "stage 3"]


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_ops_add_up_to_the_breakdown(mode: str) -> None:
    plan = plan_of(mode)
    assert plan.pipeline is not None
    data, rank = page_data(plan), longest_rank(plan)
    compute: dict[int, float] = defaultdict(float)
    comm: dict[int, float] = defaultdict(float)
    for op in data["ops"]:
        compute[op["group"]] += op["compute_s"] * op["times"]
        comm[op["group"]] += sum(move[3] * move[4] for move in op["moves"])
    own = [
        number
        for number, group in enumerate(stage_groups(plan))
        for stage in group.stages
        if stage % plan.pipeline.size == rank
    ]
    shown = sum(s for _, by_phase in data["compute"] for _, s in by_phase)
    assert sum(compute[g] for g in own) == pytest.approx(shown, rel=1e-7)
    assert shown == pytest.approx(plan.predicted.compute_time_s, rel=1e-7)
    sent = sum(row[4] for row in data["communication"])
    assert sum(comm[g] for g in own) == pytest.approx(sent, rel=1e-7, abs=1e-15)
    assert sent == pytest.approx(plan.predicted.comm_time_s, rel=1e-7, abs=1e-15)


@pytest.mark.parametrize("mode", ["line", "chunks"])
def test_parameters_are_with_the_ranks_of_their_stages(mode: str) -> None:
    plan = plan_of(mode)
    assert plan.pipeline is not None
    rows = parameter_rows(plan, holders(plan))
    assert sum(row.count for row in rows) == len(plan.parameters)
    expected = defaultdict(set)
    for number, stage in enumerate(plan.pipeline.stages):
        for name in stage.parameters:
            expected[name].add(number % plan.pipeline.size)
    assert holders(plan) == {name: tuple(sorted(ranks)) for name, ranks in expected.items()}
    (head,) = [row for row in rows if row.name == "head.weight"]
    assert head.ranks == (plan.pipeline.size - 1,)
    ups = {row.block: row.ranks for row in rows if row.name == "up.weight"}
    if mode == "chunks":
        assert ups == {"layers.[0-1,4-5]": (0,), "layers.[2-3,6-7]": (1,)}


@pytest.mark.parametrize("mode", MODES)
def test_memory_is_drawn_for_each_rank_up_to_its_peak(mode: str) -> None:
    plan = plan_of(mode)
    p = plan.pipeline
    assert p is not None and max(p.peaks) == plan.predicted.peak_memory_bytes
    memory = page_data(plan)["memory"]
    views = {view["rank"]: view for view in memory["views"] if view["rank"] is not None}
    assert sorted(views) == list(range(p.size))
    for rank, view in views.items():
        totals = [sum(memory["table"][row]) for row in view["rows"] if row >= 0]
        assert max(totals) == p.peaks[rank]
        assert view["rows"][0] >= 0 and view["rows"][-1] >= 0
        names = {memory["names"][name] for name in view["names"] if name >= 0}
        slots = [slot for slot in p.slots if slot.rank == rank]
        assert {f"{s.kind} {s.stage} {s.microbatch}" for s in slots if s.kind in "FB"} <= names
    stages = [view for view in memory["views"] if view["rank"] is None]
    assert len(stages) == len(stage_groups(plan))
    assert all(view["backward_s"] for view in stages)


@pytest.mark.parametrize("mode", MODES)
def test_what_stages_hold_is_saved(mode: str) -> None:
    plan = plan_of(mode)
    assert plan.pipeline is not None
    assert all(stage.predicted.held is not None for stage in plan.pipeline.stages)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def without_held(plan: Plan) -> Plan:
    """As an older autopar saved it."""
    assert plan.pipeline is not None
    stages = tuple(replace(s, predicted=replace(s.predicted, held=None))
                   for s in plan.pipeline.stages)  # fmt: skip
    return replace(plan, pipeline=replace(plan.pipeline, stages=stages))


def test_older_plans_have_peaks_and_microbatches() -> None:
    plan = without_held(plan_of("line"))
    data = page_data(plan)
    assert [view["rank"] for view in data["memory"]["views"]] == [None] * 3
    assert len(data["pipeline"]["peaks"]) == 4


def test_the_idle_shares_are_told_apart() -> None:
    plan = plan_of("line")
    assert plan.pipeline is not None
    text = " ".join(render_page(plan).split())
    bubble = plan.predicted.bubble_s / plan.predicted.step_time_s
    assert f"All ranks together stand idle for {plan.pipeline.bubble:.1%} of their time" in text
    assert f"works longest, for {bubble:.1%} of the step: the bubble" in text
    peak = plan.pipeline.peaks.index(max(plan.pipeline.peaks))
    assert f"peak memory of a device of pipeline rank {peak}, the highest" in text


LOOK = """(d, w) => {
  const input = (id, text) => { const e = d.getElementById(id); e.value = text;
    e.dispatchEvent(new w.Event('input')); };
  const held = () => [...d.querySelectorAll('#mesh-svg rect')]
    .filter((r) => !r.style.fill.includes('--soft')).map((r) => +r.dataset.device);
  const devices = d.querySelectorAll('#mesh-svg rect').length;
  input('tensor-search', 'head.weight');
  d.querySelector('#tensor-list button').click();
  const head = held();
  const select = d.getElementById('op-stage');
  const stages = [...select.options].map((o) => o.textContent);
  select.value = '1';
  select.dispatchEvent(new w.Event('change'));
  const count = d.getElementById('op-count').textContent;
  const results = [...d.querySelectorAll('#op-table tbody tr')].map((r) => r.cells[3].textContent);
  d.querySelector('#op-table tbody tr').click();
  const blocks = [...d.querySelectorAll('#graph-block option')].map((o) => o.textContent);
  const graph = [...d.querySelectorAll('#graph-rows .place')].map((e) => e.textContent);
  const colors = (id) => [...d.querySelectorAll(`#${id} i`)].map((e) => w.getComputedStyle(e).backgroundColor);
  return { devices, head, stages, count, results, after: held(), blocks, graph,
    title: d.getElementById('tensor-title').textContent,
    memory: colors('memory-legend'), areas: d.querySelectorAll('#memory-svg path').length,
    views: [...d.getElementById('memory-view').options].map((o) => o.textContent),
    peaks: [...d.querySelectorAll('.peak .num')].map((e) => e.textContent),
    pipeline: colors('pipeline-legend'),
    text: d.getElementById('memory-text').textContent };
}"""  # noqa: E501


@pytest.mark.parametrize("mode", MODES)
def test_nodes_of_the_program_are_for_ops_of_their_stage(mode: str) -> None:
    plan = plan_of(mode)
    data = page_data(plan)["program"]
    groups = stage_groups(plan)
    assert len(data["groups"]) == len(data["labels"]) == len(plan.excerpts) > 1
    for excerpt, group, label in zip(plan.excerpts, data["groups"], data["labels"], strict=True):
        ops = {op.name: op for op in groups[group].plan.predicted.timeline.ops}
        assert excerpt.stages[0] in groups[group].stages
        assert (label == "") == (mode == "turns")
        known = [ops[node.origin] for node in excerpt.nodes if node.origin in ops]
        assert len(known) > len(excerpt.nodes) / 2 or not excerpt.block
        assert all(op.module.startswith(excerpt.block) for op in known)


@in_browser
@pytest.mark.parametrize("mode", ["line", "chunks", "older"])
def test_the_drawn_page_knows_stages(mode: str) -> None:
    plan = plan_of(mode) if mode != "older" else without_held(plan_of("line"))
    assert plan.pipeline is not None
    width = 800 if mode == "chunks" else 1280
    seen = inspect(render_page(plan), width, LOOK)
    assert seen["ready"] == "yes" and seen["requests"] == []
    assert seen["width"] <= width
    found = seen["found"]
    each = math.prod(plan.mesh_shape)
    assert found["devices"] == plan.num_devices
    last = plan.pipeline.size - 1
    assert found["head"] == list(range(last * each, (last + 1) * each))
    assert found["stages"] == ["all", "stage 0", "stages 1-2", "stage 3"]
    group = stage_groups(plan)[1]
    total = len(page_data(plan)["ops"])
    assert found["count"].startswith(f"{len(group.plan.nodes)} of {total} ops")
    assert found["results"] and all(text.startswith("(") for text in found["results"])
    ranks = [r * each + i for r in group.ranks for i in range(each)]
    assert found["after"] == ranks and "of stages 1-2" in found["title"]
    assert any(text.startswith("stages 1-2: layers.") for text in found["blocks"])
    assert not any("stands for" in text for text in found["blocks"])
    assert found["graph"] and all(text.rstrip()[-1] == ")" for text in found["graph"])
    for legend in ("memory", "pipeline"):
        assert len(set(found[legend])) == len(found[legend])
    assert "on each device" not in found["text"]
    assert found["areas"] > 3
    assert len(found["peaks"]) == plan.pipeline.size
    for text, peak in zip(found["peaks"], plan.pipeline.peaks, strict=True):
        assert text.startswith(format_bytes(peak))
    ranks = [f"pipeline rank {rank}" for rank in range(plan.pipeline.size * (mode != "older"))]
    stages = [f"one microbatch of {name}, op by op" for name in found["stages"][1:]]
    assert found["views"] == ranks + stages
