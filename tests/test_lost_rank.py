"""A rank killed in a step, or while it saves: the others name it, and a restart loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.planning import Planner
from autopar.runtime import agree, lost
from autopar.runtime.pipeline_run import PipelineRun
from autopar.runtime.storage import Writer
from tests import handwritten as hw
from tests import zoo
from tests.dist import RankError, run_ranks, try_ranks

VICTIM, STEPS = 3, 4
PLANS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline": {"size": 2, "microbatches": 4}, "tensor": "1d"},
    "data and tensor": {"data": 2, "tensor": {"mode": "1d", "size": 2}},
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in_a_step(parallel: Any) -> None:
    """The next step ends in its second microbatch, or between forward and backward."""
    if parallel.plan.pipeline is None:
        parallel.register_forward_hook(lambda *_: die())
        return
    act, calls = PipelineRun._act, [0]

    def deadly(self: Any, *args: Any) -> None:
        calls[0] += 1
        if calls[0] == 4:
            die()
        act(self, *args)

    PipelineRun._act = deadly  # type: ignore[method-assign]


def dies_in_a_save() -> None:
    Writer.write_data = lambda *_: die()  # type: ignore[method-assign,assign]


def run(rank: int, path: str, plan: str, kind: str) -> list[float]:
    """Losses of steps with a save behind each; `kind`: what happens on the way."""
    torch.manual_seed(0)
    model, inputs = zoo.gpt2(layers=2)
    mesh = init_device_mesh("cpu", (4,))
    parallel = autopar.parallelize(model.train(), mesh, inputs, constraints=PLANS[plan])
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    done = 0
    if kind == "restart":
        done = autopar.load_checkpoint(path, parallel, optimizer).step
    losses = []
    for step in range(done, STEPS):
        if step == 2 and rank == VICTIM and kind == "step":
            dies_in_a_step(parallel)
        losses.append(parallel.train_step(**inputs).item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and rank == VICTIM and kind == "save":
            dies_in_a_save()
        if kind != "unbroken":
            autopar.save_checkpoint(path, parallel, optimizer, step=step + 1)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["step", "save"])
@pytest.mark.parametrize("plan", PLANS)
def test_the_others_name_the_lost_rank_and_a_restart_goes_on(
    tmp_path: Path, plan: str, kind: str
) -> None:
    unbroken = run_ranks(run, 4, str(tmp_path), plan, "unbroken", timeout=300)[0]
    outcomes = try_ranks(run, 4, str(tmp_path), plan, kind, timeout=300)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, RankError)
        if rank == VICTIM:
            assert outcome.kind == "Died"
            continue
        assert outcome.kind == ("LostRankError" if kind == "step" else "CheckpointError")
        assert f"rank {VICTIM} ended" in outcome.message, outcome.trace
    assert (tmp_path / "latest").read_text() == "step-00000002"
    for losses in run_ranks(run, 4, str(tmp_path), plan, "restart", timeout=300):
        assert losses == pytest.approx(unbroken[2:], rel=1e-6)


def behind_a_step(rank: int, pipelined: bool, kind: str) -> None:
    """Rank 1 ends when the gradients are there, and rank 0 goes on to what comes before a step."""
    lost._INTERVAL_S, lost._SILENCE_S = 0.1, 1.0
    constraints = {"pipeline": {"size": 2, "microbatches": 2}} if pipelined else {"data": 2}
    mesh = init_device_mesh("cpu", (2,))
    model, inputs = hw.Mlp(layers=2), hw.vectors()
    parallel = autopar.parallelize(model.train(), mesh, inputs, constraints=constraints)
    optimizer = torch.optim.SGD(parallel.parameters())
    scaler = autopar.LossScaler(parallel)
    parallel.train_step(**inputs)
    if rank == 1:
        die()
    if kind == "clip":
        parallel.clip_grad_norm_(1.0)
    elif kind == "torch's clip":
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
    else:
        scaler.unscale_(optimizer)


@pytest.mark.parametrize(
    ("pipelined", "kind"), [(False, "clip"), (False, "unscale"), (True, "torch's clip")]
)
def test_a_rank_lost_between_steps_is_named(pipelined: bool, kind: str) -> None:
    survivor, victim = try_ranks(behind_a_step, 2, pipelined, kind)
    assert isinstance(survivor, RankError) and isinstance(victim, RankError)
    assert victim.kind == "Died"
    assert survivor.kind == autopar.LostRankError.__name__, survivor.trace
    assert "rank 0 stops" in survivor.message and "rank 1 ended" in survivor.message


_BEATS_TO_THE_END = """
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from autopar.planning import Planner
from autopar.runtime import agree, lost

lost._INTERVAL_S = 0.0
store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
dist.init_process_group("fake", store=store, rank=0, world_size=2)
lost.beat()
"""


def test_a_process_that_shows_life_to_its_end_ends_well() -> None:
    """A thread that waits for the interpreter while that goes away brings the process down."""
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", _BEATS_TO_THE_END], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr


def raises_between_steps(rank: int) -> None:
    """Rank 1 ends by an exception of the user's, as a process does: with what runs at its end."""
    lost._SILENCE_S = 600.0  # which is not waited for
    inputs = hw.vectors()
    parallel = autopar.parallelize(
        hw.Mlp(layers=2).train(), init_device_mesh("cpu", (2,)), inputs, constraints={"data": 2}
    )
    parallel.train_step(**inputs)
    if rank == 1:
        lost._end_here()
        os._exit(1)
    parallel.train_step(**inputs)


def test_a_rank_that_ends_by_an_exception_is_known_at_once() -> None:
    survivor, victim = try_ranks(raises_between_steps, 2)
    assert isinstance(survivor, RankError) and isinstance(victim, RankError)
    assert survivor.kind == "LostRankError" and "rank 1 ended" in survivor.message


def planning(rank: int, kind: str) -> list[float]:
    """Rank 0 plans for longer than ranks are silent, or ends meanwhile."""
    lost._INTERVAL_S, agree._LOOK_S = 0.1, 0.2
    os.environ["AUTOPAR_TIMEOUT_S"] = "2"
    if rank == 0:
        solve = Planner._solve

        def slow(self: Any, traced: Any) -> Any:
            time.sleep(1 if kind == "ends" else 4)
            if kind == "ends":
                lost._end_here()  # as where the interpreter ends
            if kind != "is slow":
                die()
            return solve(self, traced)

        Planner._solve = slow  # type: ignore[method-assign]
    mesh = init_device_mesh("cpu", (2,))
    parallel = autopar.parallelize(hw.Mlp().train(), mesh, hw.vectors(), cache=False)
    return [parallel.train_step(**hw.vectors()).item()]


@pytest.mark.parametrize("kind", ["is slow", "is killed", "ends"])
def test_the_others_wait_for_the_plan_while_its_rank_lives(kind: str) -> None:
    first, other = try_ranks(planning, 2, kind, timeout=60)
    if kind == "is slow":
        assert first == other
        return
    assert isinstance(other, RankError)
    assert other.kind == "LostRankError", other.trace
    assert "while it was to plan" in other.message
    assert ("rank 0 ended" if kind == "ends" else "no life for 2 s") in other.message
