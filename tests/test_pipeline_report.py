"""What is predicted and shown of pipelined steps: sums, traces, the page, and a measured step."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.core import trace_events
from autopar.core.plan import Plan
from autopar.core.timeline import PipelineSlot
from autopar.core.trace_events import event, predicted_count, predicted_events, spread
from autopar.report import format_bytes, format_seconds, parameter_rows, render_summary
from autopar.report.page import page_data, render_page
from autopar.search.scheduling import scheduled
from tests.browser import browser, inspect
from tests.dist import run_ranks
from tests.test_stage_passes import MODES, built, planned

SHOWN = ("turns-zero1", "pp2-zero3", "zero-bubble-zero3", "gpipe-zero1")


@cache
def plan_of(mode: str) -> Plan:
    return scheduled(planned("plain", mode), built("plain")[2])


@pytest.mark.parametrize("mode", SHOWN)
def test_the_printed_step_adds_up(mode: str) -> None:
    plan = plan_of(mode)
    p = plan.predicted
    assert p.bubble_s >= 0
    total = p.compute_time_s + p.exposed_time_s + p.bubble_s + p.update_s + p.offload_s
    assert total == pytest.approx(p.step_time_s, rel=1e-6)
    assert 0 <= p.hidden_time_s <= p.comm_time_s
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    text = plan.summary()
    assert f"({MODES[mode][0]} devices)" in text
    assert ("+ bubble" in text) == mode.startswith(("pp2", "zero", "gpipe"))


@pytest.mark.parametrize(
    ("mode", "fqn", "name"),
    [
        ("turns-zero1", "layers.0.up.weight", "data + ZeRO-1"),
        ("gpipe-zero1", "head.weight", "data + ZeRO-1"),
        ("pp2-zero2", "layers.0.up.weight", "data + ZeRO-2"),
        ("pp2-zero3", "layers.0.up.weight", "data + ZeRO-3"),
        ("turns-tensor", "layers.0.up.weight", "1D column"),
        ("turns-tensor", "head.weight", "1D column, stored whole"),
    ],
)
def test_modes_say_how_weights_and_sums_of_gradients_are_kept(
    mode: str, fqn: str, name: str
) -> None:
    plan = planned("plain", mode)
    assert plan.modes[fqn] == name
    assert any(p.is_shard for p in plan.parameters[fqn]) == ("whole" not in name)


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


@pytest.mark.parametrize("mode", SHOWN)
def test_each_slot_of_the_trace_has_the_ops_of_its_stage(mode: str, tmp_path: Path) -> None:
    """Ops and collectives add up to what the stage is predicted to take, inside of its slots."""
    plan = plan_of(mode)
    assert plan.pipeline is not None
    total = plan.to_trace(tmp_path / "plan.json")
    found = read_trace(tmp_path / "plan.json")
    for rank, lanes in found.items():
        stage = rank * plan.pipeline.size // total
        own = plan.pipeline.stages[stage].predicted
        sent = f"stage {stage}: communication on {plan.axis_names[0]}"
        assert list(lanes) == [f"stage {stage}", f"stage {stage}: compute", sent]
        slots, ops, moves = lanes.values()
        assert sum(e["dur"] for e in ops) / 1e6 == pytest.approx(own.compute_time_s, rel=0.02)
        assert sum(e["dur"] for e in moves) / 1e6 == pytest.approx(own.comm_time_s, rel=0.02)
        turns = [op for op in own.timeline.ops if op.compute_s and op.part != "prepare"]
        assert len(ops) == sum(op.times for op in own.timeline.ops if op.compute_s)
        for slot in slots:
            inside = [e["name"] for e in ops if _within(e, slot)]
            parts = {"F": ["forward"], "B": ["input", "weight"], "I": ["input"], "W": ["weight"]}
            if slot["name"][0] in parts:
                mine = parts[slot["name"][0]]
                assert inside == [op.name for op in turns if op.part in mine]
        for move in moves:
            first = max(s["ts"] for s in slots if s["ts"] <= move["ts"] + 0.01)
            last = max(s["ts"] + s["dur"] for s in slots)
            ends = [s["ts"] + s["dur"] for s in slots if s["ts"] == first]
            is_last = "gradient of" in move["args"]["of"]
            assert move["ts"] + move["dur"] <= (last if is_last else max(ends)) + 0.05


def _within(op: dict[str, Any], slot: dict[str, Any]) -> bool:
    end_us = slot["ts"] + slot["dur"]
    return bool(slot["ts"] - 0.001 <= op["ts"] and op["ts"] + op["dur"] <= end_us + 0.05)


def test_a_large_trace_has_one_rank_of_each_stage_and_ops_of_the_first_microbatches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("pp2-zero3")
    counts = [predicted_count(plan, rank) for rank in range(2)]
    for rank, count in enumerate(counts):
        assert count == len(list(predicted_events(plan, 0, rank)))
    monkeypatch.setattr(trace_events, "MAX_EVENTS", sum(counts) // 2)
    assert plan.to_trace(tmp_path / "plan.json") == 2
    about = json.loads((tmp_path / "plan.json").read_text())["otherData"]
    assert about["ranks_written"] == about["microbatches_with_ops"] == 2
    found = read_trace(tmp_path / "plan.json")
    assert sorted(found) == [0, 2]
    for rank, lanes in found.items():
        stage = rank // 2
        assert sum(e["name"].startswith("F") for e in lanes[f"stage {stage}"]) == 4
        names = [e["name"] for e in lanes[f"stage {stage}: compute"]]
        assert set(map(names.count, names)) == {2}
    assert plan.to_trace(tmp_path / "plan.json", ranks=3) == 3
    assert sorted(read_trace(tmp_path / "plan.json")) == [0, 1, 2]


def test_what_overlaps_in_a_lane_goes_to_a_further_one() -> None:
    """Perfetto draws complete events of a thread as calls, which do not overlap."""
    spans = [(0, 0, 2), (0, 2, 1), (1, 0, 10), (1, 5, 10), (1, 6, 1), (1, 12, 1), (1, 15.01, 2)]
    one = [event(0, lane, str(start), start / 1e6, us / 1e6) for lane, start, us in spans]
    one += [event(0, 1, "touching", 17 / 1e6, 1 / 1e6), {"ph": "C", "ts": 0.0}]
    other = [event(1, 1, "alone", 0.0, 1.0)]
    names = spread(["compute", "communication on dp", "communication on tp"], [one, other])
    assert names == ["compute", "communication on dp", "communication on dp, 2",
                     "communication on dp, 3", "communication on tp"]  # fmt: skip
    assert [e["tid"] for e in one[:-1]] == [0, 0, 1, 2, 3, 1, 1, 1]
    assert one[-2]["ts"] == one[-3]["ts"] + one[-3]["dur"]  # cut by what was rounding
    assert other[0]["tid"] == 1


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


def profiled(rank: int, path: str) -> dict[str, Any]:
    """Losses of a plain and of a measured step, and the programs of both ranks as text."""
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    torch.set_num_threads(1)
    model, inputs, _ = built("plain")
    constraints = {"pipeline": {"size": 2, "microbatches": 2, "schedule": "1f1b"}}
    mesh = init_device_mesh("cpu", (2,))
    parallel = autopar.parallelize(model, mesh, inputs, constraints=constraints, cache=False)
    plain = float(parallel.train_step(**inputs))
    measured = float(parallel.profile_step(path, **inputs))
    texts = []
    for which in (None, 0, 1):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            parallel.print_program(which)
        texts.append(out.getvalue())
    for absent in (-1, 2):
        with pytest.raises(
            autopar.AutoparError, match=r"the pipeline of 2 times \(1,\) has 2 ranks"
        ):
            parallel.print_program(absent)
    return {"losses": (plain, measured), "texts": texts}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("pipeline") / "step.json"
    return path, run_ranks(profiled, 2, str(path), timeout=300)


def test_a_measured_step_stands_beside_the_predicted_one(
    ran: tuple[Path, list[dict[str, Any]]],
) -> None:
    path, ranks = ran
    for rank in ranks:
        assert rank["losses"][0] == rank["losses"][1]
    found = read_trace(path)
    assert sorted(found) == [0, 1, 2, 3]  # predicted and measured of two ranks
    for pid, lanes in found.items():
        stage = pid // 2
        names = [e["name"] for e in lanes[f"stage {stage}"]]
        assert {"F 0", "F 1", "B 0", "B 1"} <= set(names)
        assert {e["args"]["op"] for e in lanes[f"stage {stage}: compute"]}
        assert list(lanes) == list(found[2 * stage])
        for events in lanes.values():
            for before, after in itertools.pairwise(sorted(events, key=lambda e: float(e["ts"]))):
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_the_program_of_any_rank_is_printed_part_by_part(
    ran: tuple[Path, list[dict[str, Any]]],
) -> None:
    orders = ("0F0, 0F1, 0B0, 0B1", "1F0, 1B0, 1F1, 1B1")
    for rank, found in enumerate(ran[1]):
        own, *every = found["texts"]
        assert len(own.splitlines()) == len(every[rank].splitlines())
        assert every == ran[1][0]["texts"][1:]
        for stage, (text, order) in enumerate(zip(every, orders, strict=True)):
            assert f"# rank {stage} of 2: rank {stage} of 2 of the pipeline" in text
            assert f"stage, action and microbatch: {order}\n" in text
            for line in (
                f"# === stage {stage}\n# mesh: ",
                "\n# --- prepare, once\n",
                "\n# --- forward, of each microbatch (F)\n",
                "\n# --- backward, of each microbatch (B)\n",
                "\n# --- finish, once\n",
                f"  layers.{stage}.up\n#   test_stage_passes.py:",
                ": return x + self.drop(",
                "\n#   (R) × (R) → (R)\n",
                "  # float64[8, 16]\n",
                f"\ngradient layers.{stage}.up.weight = ",
                f"\nsent {('add_tensor_2', 'add_tensor_7')[stage]} = ",
            ):
                assert line in text, line
            assert f"layers.{1 - stage}." not in text
            assert "def forward" not in text
