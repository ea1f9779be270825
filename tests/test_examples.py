"""The tutorials under `examples/`: their losses on gloo ranks are those of one device."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.core.constraints import Constraints, assign_mesh
from tests.dist import run_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = ("vit_hybrid", "vit_pipeline", "parallel_configuration", "gpt_hybrid")


def load(name: str) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def one_device(name: str, steps: int) -> list[float]:
    """Losses of the plain module in fp32, in a loop without autopar."""
    example = load(name).EXAMPLE
    model = example.model().train()
    optimizer = example.optimizer(model.parameters())
    scheduler = example.scheduler(optimizer, steps) if example.scheduler else None
    losses = []
    for batch in example.batches(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def trained(rank: int, name: str, *arguments: str) -> list[float]:
    common, example = load("common"), load(name).EXAMPLE
    losses, _ = common.train(example, common.parse(example, arguments))
    assert isinstance(losses, list)
    return losses


def modes() -> list[Any]:
    return [pytest.param(n, m, id=f"{n}-{m}") for n in NAMES for m in load(n).EXAMPLE.modes]


@pytest.mark.parametrize(("name", "mode"), modes())
def test_every_mode_takes_all_ranks(name: str, mode: str) -> None:
    common, example = load("common"), load(name).EXAMPLE
    options = common.parse(example, ["--mode", mode, "--steps", "3"])
    assert (options.mode, options.auto, options.steps) == (mode, False, 3)
    chosen = example.modes[mode]
    world = 8 if chosen.ranks == 8 else 4
    constraints = Constraints.parse(chosen.on(world))
    stages = chosen.constraints.get("pipeline", {}).get("size", 1)
    roles = assign_mesh(constraints, (world // stages,))
    assert not [role for role in roles if role.name == "free" and role.size > 1]
    if chosen.ranks > 1:
        with pytest.raises(ValueError, match=rf"nproc_per_node {chosen.ranks}"):
            chosen.on(chosen.ranks + 1)


def test_vit_with_a_pipeline_on_two_ranks() -> None:
    expected = one_device("vit_pipeline", 2)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)
    arguments = ("--mode", "uniform", "--steps", "2")
    for losses in run_ranks(trained, 2, "vit_pipeline", *arguments, timeout=300):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), modes())
def test_losses_are_those_of_one_device(name: str, mode: str) -> None:
    expected = one_device(name, 3)
    world = 8 if load(name).EXAMPLE.modes[mode].ranks == 8 else 4
    arguments = ("--mode", mode, "--steps", "3", "--precision", "fp32")
    for losses in run_ranks(trained, world, name, *arguments, timeout=500):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["default", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_under_torchrun(name: str, choice: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=4", str(EXAMPLES / f"{name}.py"), "--steps", "2"]
    command += ["--auto"] if choice == "auto" else []
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d+)  loss \d+\.\d+", done.stdout, re.M) == ["1", "2"]  # one rank's
    assert len(re.findall(r"^plan: mode .* predicted step ", done.stdout, re.M)) == 1


@pytest.mark.slow
def test_too_few_ranks_are_refused() -> None:
    env = {**os.environ, "WORLD_SIZE": "4", "RANK": "0"}
    command = [sys.executable, str(EXAMPLES / "parallel_configuration.py"), "--mode", "2.5d"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "--mode 2.5d needs 8 ranks" in done.stderr
