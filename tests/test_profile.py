"""The measured step in the lanes of the predicted one, and the program of a rank as text."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests import handwritten as hw
from tests.dist import run_ranks


def profiled(rank: int, world: int, folder: str, pins: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradients of a plain and of a measured step, and the text of both programs."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    parallel = autopar.parallelize(hw.Mlp().train(), mesh, hw.vectors(), constraints=pins)
    plain = parallel.train_step(**hw.vectors())
    expected = [p.grad.full_tensor() for p in parallel.parameters()]  # type: ignore[union-attr]
    parallel.zero_grad()
    measured = parallel.profile_step(f"{folder}/step.json", **hw.vectors())
    found = [p.grad.full_tensor() for p in parallel.parameters()]  # type: ignore[union-attr]
    parallel.profile_step(f"{folder}/first.json.gz", **hw.vectors(), ranks=1)
    again = parallel.train_step(**hw.vectors())
    texts = []
    for which in (None, rank, 1 - rank):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            parallel.print_program(which)
        texts.append(out.getvalue())
    with pytest.raises(autopar.AutoparError, match="rank 2: the mesh"):
        parallel.print_program(2)
    (step,) = parallel._steps.values()
    nodes = [n for n in step.program.joint.graph.nodes if n.op == "call_function"]
    return {
        "losses": [float(plain), float(measured), float(again)],
        "equal": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
        "texts": texts,
        "names": [n.name for n in nodes],
        "executed": sum(n.op == "call_function" for n in step.at_once.graph.nodes),
        "collectives": sum("collective" in n.meta for n in nodes),
        "axes": list(parallel.plan.axis_names),
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("profile")
    pins = {"data": 2, "zero": 3, "checkpoint": "selective"}
    return folder, run_ranks(profiled, 2, 2, str(folder), pins)


def test_a_measured_step_is_a_training_step(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in ran[1]:
        assert rank["equal"]
        assert rank["losses"][0] == rank["losses"][1] == rank["losses"][2]


def test_both_steps_stand_in_the_same_lanes(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = ran
    events = json.loads((folder / "step.json").read_text())["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == [
        f"rank {rank}, {step}" for rank in (0, 1) for step in ("predicted", "measured")
    ]
    lanes = {
        pid: [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid]
        for pid in range(4)
    }
    assert all(names == lanes[0] for names in lanes.values())
    plain = [name for name in lanes[0] if ", " not in name]
    assert plain == ["compute", *(f"communication on {a}" for a in ranks[0]["axes"])]
    further = [name for name in lanes[0] if name not in plain]
    assert all(name.partition(", ")[0] in plain[1:] for name in further)
    for pid in (1, 3):
        mine = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
        assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in mine)
        sent = [e for e in mine if e["tid"] > 0]
        assert len(sent) == ranks[0]["collectives"] > 0
        # a collective is one interval, not its start and its wait
        assert len(mine) == ranks[0]["executed"] - len(sent)
        compute = sorted((e["ts"], e["ts"] + e["dur"]) for e in mine if e["tid"] == 0)
        assert all(b[0] >= a[1] - 0.01 for a, b in itertools.pairwise(compute))
        for tid in range(1, len(lanes[pid])):  # gloo's threads run several at a time
            lane = sorted((e["ts"], e["ts"] + e["dur"]) for e in sent if e["tid"] == tid)
            assert all(b[0] >= a[1] - 1e-3 for a, b in itertools.pairwise(lane))
        kinds = {e["name"] for e in sent}
        predicted = {e["name"] for e in events
                     if e["ph"] == "X" and e["pid"] == pid - 1 and e["tid"] > 0}  # fmt: skip
        assert kinds == predicted


def test_only_the_ranks_asked_for(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    import gzip

    with gzip.open(ran[0] / "first.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}


def test_the_program_is_printed(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in ran[1]:
        own, same, other = rank["texts"]
        # groups have names of their own in a running process
        assert len(own.splitlines()) == len(same.splitlines()) == len(other.splitlines())
        for name in rank["names"]:
            assert f"\n{name} = " in own
        for part in (
            "# --- forward",
            "# --- backward",
            "(computed again)",
            "handwritten.py:",
            ": x = x + layer(x)",
            f"all_gather on {rank['axes'][0]}",
            f"reduce_scatter on {rank['axes'][0]}",
            "gradient layers.0.0.weight = ",
            "# gradient of layers.0.0.weight",
            "(S0) × (R) → (S0)",
        ):
            assert part in own, part
    assert ran[1][0]["texts"][1] == ran[1][1]["texts"][2]
