"""What scripts do that know nothing of pipelines: short batches, scaled losses, other outputs."""

from __future__ import annotations

import warnings
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.pipeline import PipelinedStep
from autopar.verification import verify
from tests.dist import run_ranks
from tests.test_pipeline_search import Stack, nodes_apart
from tests.test_stage_gradients import Tower, tower

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, {"pipeline": {"size": 2, "microbatches": 4, "schedule": "1f1b"}}),
    "interleaved": (
        2,
        {"pipeline": {"size": 2, "microbatches": 4, "chunks": 2, "schedule": "interleaved"}},
    ),
    "breadth-first": (
        2,
        {"pipeline": {"size": 2, "microbatches": 4, "chunks": 2, "schedule": "gpipe"}},
    ),
    "zero-bubble-zero3": (
        4,
        {
            "pipeline": {"size": 2, "microbatches": 4, "schedule": "zero-bubble"},
            "data": 2,
            "zero": 3,
        },
    ),
}
SIZES = (8, 6, 3, 1, 8)


def steps(rank: int, world: int, constraints: Any) -> tuple[list[float], list[int], float]:
    """Losses and norms of steps on batches of several sizes; microbatches of each size."""
    model, x = tower()
    mesh = init_device_mesh("cpu", (world,))
    parallel = autopar.parallelize(model, mesh, x, constraints=constraints, cache=False)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    numbers = []
    for size in SIZES:
        optimizer.zero_grad()
        numbers.append(parallel.train_step(x[:size]).item())
        numbers.append(float(parallel.clip_grad_norm_(1e9)))
        optimizer.step()
    turns = [
        step.pipeline.microbatches
        for step in parallel._steps.values()
        if isinstance(step, PipelinedStep)
    ]
    parallel.eval()
    with torch.no_grad():
        return numbers, turns, parallel(x[:5]).item()


@pytest.mark.parametrize("plan", PLANS)
def test_a_batch_that_the_microbatches_do_not_divide_is_run_in_fewer(plan: str) -> None:
    model, x = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for size in SIZES:
        optimizer.zero_grad()
        loss = model(x[:size])
        loss.backward()
        expected.append(loss.item())
        expected.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
    world, constraints = PLANS[plan]
    for numbers, turns, evaluated in run_ranks(steps, world, world, constraints):
        assert numbers == pytest.approx(expected, rel=1e-6)
        assert turns == [4, 3, 3, 1]
        assert evaluated == pytest.approx(model(x[:5]).item(), rel=1e-9)


def asked(rank: int) -> str:
    model, x = tower()
    given = {"constraints": PLANS["1f1b"][1], "cache": False}
    parallel = autopar.parallelize(model, init_device_mesh("cpu", (2,)), x, **given)
    held = dict(parallel.named_parameters())
    other = next(name for name, _ in model.named_parameters() if name not in held)
    try:
        reduce(getattr, other.split("."), parallel)
    except AttributeError as error:
        return str(error)
    return ""


def test_a_parameter_of_another_stage_is_said_to_be_one() -> None:
    for told in run_ranks(asked, 2):
        assert "is a parameter of a pipeline stage that another rank holds" in told


class Labelled(nn.Module):
    """Outputs, and a loss where there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"out": x} if labels is None else {"loss": (x - labels).square().mean(), "out": x}


def without_labels(rank: int) -> tuple[str, Tensor]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8), "labels": torch.randn(8, 8)}
    mesh, pins = init_device_mesh("cpu", (2,)), PLANS["1f1b"][1]
    parallel = autopar.parallelize(Labelled(), mesh, batch, constraints=pins)
    message = ""
    try:
        parallel(x=batch["x"])
    except autopar.AutoparError as error:
        message = str(error)
    with torch.no_grad():
        return message, parallel(x=batch["x"])["out"]


def test_a_training_call_without_a_loss_says_that_a_pipeline_needs_one() -> None:
    torch.manual_seed(0)
    x, _ = torch.randn(8, 8), torch.randn(8, 8)
    expected = Labelled()(x)["out"]
    for message, out in run_ranks(without_labels, 2):
        assert "a training step of a pipeline needs one scalar loss" in message
        assert "under torch.no_grad()" in message
        torch.testing.assert_close(out, expected)


class Scaled(nn.Module):
    """A loss of several terms, each with a factor: its own gradient passes ops of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return 0.3 * (self.second(hidden).square().mean() * 2 + hidden.abs().mean() / 3)


class ScaledTower(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(("kind", "size"), [(Scaled, 1), (ScaledTower, 2)])
def test_a_loss_may_be_scaled(kind: type[nn.Module], size: int, microbatches: int) -> None:
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(8, 8, dtype=torch.float64)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    pin = {"pipeline": {"size": size, "microbatches": microbatches}}
    plan = autopar.plan(model, cluster, x, constraints=pin, cache=False)
    assert verify(plan, model, x).worst[1] <= 1e-9


class WithLogits(Stack):
    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean(), "logits": x, "other": [x.sum(1)]}


def told(rank: int, constraints: Any) -> tuple[list[str], bool, bool]:
    torch.manual_seed(0)
    model, x = WithLogits(4, 256).double(), torch.randn(64, 256, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (4,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallel = autopar.parallelize(
            model, mesh, x, constraints=constraints, cluster=nodes_apart(), cache=False
        )
    found = parallel(x)
    messages = [str(w.message) for w in caught if "microbatches" in str(w.message)]
    return messages, parallel.plan.pipeline is not None, found["logits"] is None


def test_outputs_that_an_unasked_pipeline_drops_are_named() -> None:
    for messages, pipelined, dropped in run_ranks(told, 4, None):
        assert (pipelined, dropped, len(messages)) == (True, True, 1)
        assert "['logits'], ['other'][0]" in messages[0]
        assert "'pipeline': 'none'" in messages[0]
    for messages, pipelined, dropped in run_ranks(told, 4, {"pipeline": "none"}):
        assert (pipelined, dropped, messages) == (False, False, [])
