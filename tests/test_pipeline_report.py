"""What is predicted and shown of pipelined steps: sums, traces, the page, and a measured step."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.core.plan import Plan
from autopar.core.timeline import PipelineSlot
from autopar.report import format_bytes, format_seconds, parameter_rows, render_summary
from autopar.report.page import page_data, render_page
from autopar.scheduling import scheduled
from tests.browser import browser, inspect
from tests.dist import run_ranks
from tests.test_turn_passes import MODES, built, planned

SHOWN = ("turns-zero1", "pp2-zero3", "zero-bubble-zero3", "gpipe-zero1")


@cache
def plan_of(mode: str) -> Plan:
    return scheduled(planned("plain", mode), built("plain")[2])


@pytest.mark.parametrize("mode", SHOWN)
def test_the_printed_step_adds_up(mode: str) -> None:
    plan = plan_of(mode)
    p = plan.predicted
    assert p.bubble_s >= 0
    total = p.compute_time_s + p.exposed_time_s + p.bubble_s + p.offload_s
    assert total == pytest.approx(p.step_time_s, rel=1e-6)
    assert 0 <= p.hidden_time_s <= p.comm_time_s
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    text = plan.summary()
    assert f"({MODES[mode][0]} devices)" in text
    assert ("+ bubble" in text) == mode.startswith(("pp2", "zero", "gpipe"))


def test_ranks_and_stages_are_shown() -> None:
    """Each rank's peak, each stage's seconds; parameters are added up by device."""
    plan = plan_of("pp2-zero3")
    p = plan.pipeline
    assert p is not None and p.size == 2 and len(p.peaks) == 2
    text = render_summary(plan, 200)
    rows = [line.split() for line in text.split("each pipeline rank")[1].splitlines() if line]
    for rank, peak in enumerate(p.peaks):
        (row,) = [cells for cells in rows if cells[:2] == [str(rank)] * 2]
        assert format_bytes(peak) in " ".join(row)
    times = text.split("Time of each stage")[1].split("Compute of")[0]
    for stage in p.stages:
        phases = stage.predicted.phases
        for seconds in (phases["forward"], phases["input"] + phases["weight"]):
            assert f" {format_seconds(seconds)} " in times
    assert all(f" {cut} " in times for cut in p.cuts)
    stored = [sum(row.num_bytes * row.count for row in parameter_rows(stage)) for stage in p.stages]
    (total,) = [line for line in text.splitlines() if line.startswith(" total, pipeline rank")]
    assert total.endswith(format_bytes(max(stored))) and sum(stored) > max(stored)
    assert f"rank {stored.index(max(stored))} (most)" in total
    assert "of their time on average" in text and "bubble of this rank" in text
    for kind in ("received", "sent"):
        (row,) = [line for line in text.splitlines() if line.startswith(f" {kind} ")]
        assert "neighbours of this pipeline stage" in row
    assert "\nInputs" not in text
    one = render_summary(plan_of("turns-zero1"), 200)
    assert "pipeline rank" not in one and "stand idle" not in one


@pytest.mark.parametrize("mode", SHOWN)
def test_hidden_seconds_of_stages_are_those_of_their_phases(mode: str) -> None:
    """Each stage's parts add up to its compute and its exposed communication."""
    plan = plan_of(mode)
    assert plan.pipeline is not None
    for stage in plan.pipeline.stages:
        phases, p = stage.predicted.phases, stage.predicted
        turn = phases["forward"] + phases["input"] + phases["weight"]
        total = phases["prepare"] + plan.pipeline.microbatches * turn + phases["finish"]
        assert total == pytest.approx(p.compute_time_s + p.exposed_time_s, rel=1e-6)


@pytest.mark.parametrize("mode", SHOWN)
def test_a_rank_does_one_thing_at_a_time(mode: str) -> None:
    plan = plan_of(mode)
    assert plan.pipeline is not None
    by_rank: dict[int, list[PipelineSlot]] = defaultdict(list)
    for slot in plan.pipeline.slots:
        by_rank[slot.rank].append(slot)
    assert sorted(by_rank) == list(range(plan.pipeline.size))
    rounding = 1e-8 * plan.predicted.step_time_s
    for slots in by_rank.values():
        assert sum(slot.kind == "F" for slot in slots) == plan.pipeline.microbatches
        for before, after in itertools.pairwise(slots):
            assert before.start_s + before.seconds <= after.start_s + rounding
        assert slots[-1].start_s + slots[-1].seconds <= plan.predicted.step_time_s + rounding


def read_trace(path: Path) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Intervals by process and name of the lane."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for (pid, _), name in names.items():
        found[pid][name] = []
    for e in events:
        if e["ph"] == "X":
            found[e["pid"]][names[e["pid"], e["tid"]]].append(e)
    return found


def test_the_trace_has_a_process_for_each_rank_with_the_lanes_of_its_stages(tmp_path: Path) -> None:
    plan = plan_of("pp2-zero3")
    assert plan.to_trace(tmp_path / "plan.json") == 4
    found = read_trace(tmp_path / "plan.json")
    assert sorted(found) == [0, 1, 2, 3]
    for rank, lanes in found.items():
        stage = rank // 2
        assert set(lanes) >= {f"stage {stage}", f"stage {stage}: compute"}
        names = [e["name"] for e in lanes[f"stage {stage}"]]
        assert {f"F {i}" for i in range(4)} | {f"B {i}" for i in range(4)} <= set(names)


def test_the_page_draws_every_stage_and_microbatch() -> None:
    plan = plan_of("pp2-zero3")
    data = page_data(plan)["pipeline"]
    assert data["ranks"] == 2
    assert {(slot[2], slot[3]) for slot in data["slots"]} == {
        (s, i) for s in (0, 1) for i in range(4)
    }
    page = render_page(plan)
    assert 'id="pipeline-svg"' in page
    assert "pipeline 2 × " in page


@pytest.mark.skipif(browser() is None, reason="no Chromium is installed")
def test_the_drawn_page_has_a_row_for_each_stage() -> None:
    probe = """(doc) => {
      const rects = [...doc.querySelectorAll("#pipeline-svg rect")];
      const texts = [...doc.querySelectorAll("#pipeline-svg text")].map((t) => t.textContent);
      return {
        rects: rects.length,
        kinds: [...new Set(rects.map((r) => r.dataset.kind))],
        rows: texts.filter((t) => t.startsWith("rank")),
        legend: doc.querySelectorAll("#pipeline-legend span").length,
      };
    }"""
    plan = plan_of("pp2-zero3")
    assert plan.pipeline is not None
    seen = inspect(render_page(plan), probe=probe)
    assert seen["ready"] == "yes"
    assert seen["requests"] == []
    found = seen["found"]
    assert found["rects"] == len(plan.pipeline.slots)
    assert found["rows"] == ["rank 0, stage 0", "rank 1, stage 1"]
    assert {"F", "B"} <= set(found["kinds"])
    assert found["legend"] >= 2


def profiled(rank: int, path: str) -> tuple[float, float]:
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    torch.set_num_threads(1)
    model, inputs, _ = built("plain")
    constraints = {"pipeline": {"size": 2, "microbatches": 2, "schedule": "1f1b"}}
    mesh = init_device_mesh("cpu", (2,))
    parallel = autopar.parallelize(model, mesh, inputs, constraints=constraints, cache=False)
    plain = float(parallel.train_step(**inputs))
    return plain, float(parallel.profile_step(path, **inputs))


def test_a_measured_step_stands_beside_the_predicted_one(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    for plain, measured in run_ranks(profiled, 2, str(path), timeout=300):
        assert plain == measured
    found = read_trace(path)
    assert sorted(found) == [0, 1, 2, 3]  # predicted and measured of two ranks
    for pid, lanes in found.items():
        stage = pid // 2
        names = [e["name"] for e in lanes[f"stage {stage}"]]
        assert {"F 0", "F 1", "B 0", "B 1"} <= set(names)
        assert bool(lanes[f"stage {stage}: compute"]) == bool(pid % 2)
