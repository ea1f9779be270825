"""Plan files that are broken, or made for something else."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.core.plan import Plan
from tests import handwritten as hw
from tests.dist import RankError, run_ranks, try_ranks


def cluster(devices: int = 4) -> Any:
    return autopar.Cluster.from_profile("cpu-gloo", devices_per_node=devices)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = autopar.plan(hw.Mlp(), cluster(2), hw.vectors(), constraints={"data": 2})
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    return path


def test_plan_file_is_truncated(saved: Path, tmp_path: Path) -> None:
    text = saved.read_text()
    for cut in (0, 1, len(text) // 2, len(text) - 2):
        path = tmp_path / "cut.json"
        path.write_text(text[:cut])
        with pytest.raises(autopar.PlanMismatchError, match="cut short"):
            autopar.load_plan(path)


def test_plan_file_is_damaged(saved: Path, tmp_path: Path) -> None:
    data = json.loads(saved.read_text())
    path = tmp_path / "plan.json"
    optional = {f.name for f in fields(Plan) if f.default is not MISSING}
    optional |= {f.name for f in fields(Plan) if f.default_factory is not MISSING}
    optional.remove("version")
    for key in data:
        broken = {k: v for k, v in data.items() if k != key}
        path.write_text(json.dumps(broken))
        if key in optional:
            continue
        with pytest.raises(autopar.PlanMismatchError):
            autopar.load_plan(path)
    for value in ([], 3, "plan"):
        path.write_text(json.dumps(value))
        with pytest.raises(autopar.PlanMismatchError):
            autopar.load_plan(path)


def test_plan_of_another_version(saved: Path, tmp_path: Path) -> None:
    data = json.loads(saved.read_text())
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**data, "version": 99}))
    with pytest.raises(autopar.PlanMismatchError, match="version 99"):
        autopar.load_plan(path)


def use_plan(rank: int, path: str, layers: int, width: int) -> None:
    autopar.parallelize(
        hw.Mlp(layers=layers, width=width),
        init_device_mesh("cpu", (2,)),
        hw.vectors(width=width),
        plan=path,
    )


@pytest.mark.parametrize(
    ("layers", "width", "word"), [(3, 16, "layers.2.0.bias"), (2, 32, "(8, 32)")]
)
def test_plan_of_another_model(saved: Path, layers: int, width: int, word: str) -> None:
    for outcome in try_ranks(use_plan, 2, str(saved), layers, width):
        assert isinstance(outcome, RankError) and outcome.kind == "PlanMismatchError"
        assert word in outcome.message


def use_otherwise(rank: int, path: str, settings: dict[str, Any]) -> str:
    model, mesh = hw.Mlp(), init_device_mesh("cpu", (2,))
    autopar.parallelize(model, mesh, hw.vectors(), plan=path, constraints={"data": 2})
    with pytest.raises(autopar.PlanMismatchError) as caught:
        autopar.parallelize(model, mesh, hw.vectors(), plan=path, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"constraints": {"data": 2, "zero": 3}}, "leave constraints= out"),
        ({"memory_limit": "2 KiB"}, "more than the memory_limit of 2.00 KiB"),
    ],
)
def test_a_plan_that_was_made_otherwise(saved: Path, settings: dict[str, Any], words: str) -> None:
    for message in run_ranks(use_otherwise, 2, str(saved), settings):
        assert words in message


class Block(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(8, 16), activation, nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(x)))


class Blocks(nn.Module):
    """So many equal blocks that they are folded; parameters do not tell activations apart."""

    def __init__(self, activation: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(activation()) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


OTHERS = [(nn.ReLU, 8), (nn.GELU, 16)]  # another graph of the same parameters, another batch


@pytest.fixture(scope="module", params=[{"data": 2}, {"pipeline": {"size": 2, "microbatches": 2}}])
def folded(request: pytest.FixtureRequest) -> Plan:
    plan = autopar.plan(Blocks(), cluster(2), (torch.randn(8, 8),), constraints=request.param)
    assert plan.repeats
    return plan


@pytest.mark.parametrize(("activation", "batch"), OTHERS)
def test_folded_plan_of_another_graph(
    folded: Plan, activation: type[nn.Module], batch: int
) -> None:
    model, inputs = Blocks(activation), (torch.randn(batch, 8),)
    with pytest.raises(autopar.PlanMismatchError, match="or plan again"):
        autopar.verify(folded, model, inputs)
    if folded.pipeline is None:
        with pytest.raises(autopar.PlanMismatchError, match="or plan again"):
            autopar.simulate(folded, model, inputs)


def use_folded_plan(rank: int, path: str, activation: type[nn.Module], batch: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    autopar.parallelize(Blocks(activation), mesh, (torch.ones(batch, 8),), plan=path)


@pytest.mark.parametrize(("activation", "batch"), OTHERS)
def test_folded_plan_of_another_graph_on_ranks(
    folded: Plan, tmp_path: Path, activation: type[nn.Module], batch: int
) -> None:
    path = tmp_path / "plan.json"
    folded.save(path)
    for outcome in try_ranks(use_folded_plan, 2, str(path), activation, batch):
        assert isinstance(outcome, RankError) and outcome.kind == "PlanMismatchError"
        assert "or plan again" in outcome.message
