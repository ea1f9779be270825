"""Ranks that disagree, or of which one fails: every rank stops, soon, and says what is wrong."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.same_batch import check_same_batch
from tests import handwritten as hw
from tests.dist import RankError, try_ranks


def half_mesh(rank: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    autopar.parallelize(hw.Mlp(), DeviceMesh("cpu", [0, 1]), hw.vectors())


def different_width(rank: int) -> None:
    autopar.parallelize(
        hw.Mlp(classes=8 + 4 * (rank == 2)), init_device_mesh("cpu", (3,)), hw.vectors()
    )


class Twist(hw.Mlp):
    """The same parameters, another computation on one rank."""

    def __init__(self, twisted: bool) -> None:
        super().__init__()
        self.twisted = twisted

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(x.tanh() if self.twisted else x, labels)


def different_code(rank: int) -> None:
    autopar.parallelize(Twist(rank == 1), init_device_mesh("cpu", (3,)), hw.vectors())


def different_batch(rank: int) -> None:
    autopar.parallelize(hw.Mlp(), init_device_mesh("cpu", (3,)), hw.vectors(8 + 4 * (rank == 1)))


def own_labels(rank: int) -> None:
    """Each rank passes what a DistributedSampler would give it."""
    batch = hw.vectors()
    module = autopar.parallelize(hw.Mlp(), init_device_mesh("cpu", (3,)), batch)
    batch["labels"] = (batch["labels"] + (rank == 2)) % 4
    module.train_step(**batch)


class Failing(hw.Mlp):
    """Raises an error of its own on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.rank == 1:
            raise KeyError("no such feature")
        return super().forward(x, labels)


def failing_trace(rank: int) -> None:
    autopar.parallelize(Failing(rank), init_device_mesh("cpu", (3,)), hw.vectors())


def mixed_devices(rank: int) -> None:
    model = hw.Mlp()
    if rank == 0:
        model.head.to("meta")
    autopar.parallelize(model, init_device_mesh("cpu", (3,)), hw.vectors())


def different_constraints(rank: int) -> None:
    autopar.parallelize(
        hw.Mlp(),
        init_device_mesh("cpu", (3,)),
        hw.vectors(),
        constraints={"data": 1} if rank == 1 else None,
    )


def impossible_plan(rank: int) -> None:
    autopar.parallelize(hw.Mlp(), init_device_mesh("cpu", (3,)), hw.vectors(), memory_limit=1000)


def pipelined_lbfgs(rank: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    pins = {"pipeline": {"size": 3, "microbatches": 2}}
    model, batch = hw.Mlp(layers=3), hw.vectors()
    module = autopar.parallelize(model, mesh, batch, constraints=pins)
    torch.optim.LBFGS(module.parameters()).step(lambda: module.train_step(**batch))


def frozen_lbfgs(rank: int) -> None:
    model, batch = hw.Mlp(), hw.vectors()
    model.head.bias.requires_grad_(False)
    module = autopar.parallelize(model, init_device_mesh("cpu", (3,)), batch)
    trained = [p for p in module.parameters() if p.requires_grad]
    torch.optim.LBFGS(trained, max_iter=2).step(lambda: module.train_step(**batch))
    torch.optim.LBFGS(module.parameters()).step(lambda: module.train_step(**batch))


def foreign_adafactor(rank: int) -> None:
    from transformers.optimization import Adafactor

    model, batch = hw.Mlp(), hw.vectors()
    module = autopar.parallelize(model, init_device_mesh("cpu", (3,)), batch)
    module.train_step(**batch)
    Adafactor(module.parameters()).step()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (half_mesh, ["2 devices", "3 ranks"]),
        (different_width, ["head.weight", "(8, 16)", "(12, 16)", "0 and 2"]),
        (different_code, ["ops", "0 and 1"]),
        (different_batch, ["(8, 16)", "(12, 16)", "0 and 1"]),
        (own_labels, ["rank 2 passes another batch", "labels", "DistributedSampler"]),
        (different_constraints, ["constraints", "0 and 1"]),
        (failing_trace, ["no such feature"]),
        (mixed_devices, ["layers.0.0.weight", "head.weight", "meta"]),
        (pipelined_lbfgs, ["LBFGS", "pipeline", "none"]),
        (frozen_lbfgs, ["LBFGS", "1 frozen", "requires_grad"]),
        (foreign_adafactor, ["transformers.optimization.Adafactor", "torch.optim.Adafactor"]),
        (impossible_plan, ["no plan fits", "smallest limit"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_all_ranks_stop_and_say_why(function: Any, words: list[str]) -> None:
    outcomes = try_ranks(function, 3, timeout=100)
    for outcome in outcomes:
        assert isinstance(outcome, RankError), "a rank went on"
        assert outcome.kind in ("AutoparError", "TraceError", "InfeasiblePlanError"), outcome.trace
        for word in words:
            assert word in outcome.message, outcome.message


def batches(rank: int) -> list[str]:
    """Which of these the check takes for batches that differ from the first rank's."""
    rounding = 1 + 1e-6 * rank
    x = torch.arange(1.0, 10.0)
    twice = torch.ones(3, 20000)
    twice[1, 7] += rank * 1e6  # between the elements that are compared
    same = {
        "rounding": x * rounding,
        "nan": torch.where(x > 4, torch.nan, x * rounding),
        "infinite": torch.full((3,), torch.inf),
        "empty": torch.empty(0, 4),
        "whole": torch.arange(9) - 4,
        "mask": x > 4,
        "complex": torch.complex(x, x * rounding),
        "half": x.to(torch.bfloat16).expand(2, 9),
    }
    other = {
        "values": x + rank,
        "one id of many": torch.arange(50000) + rank * (torch.arange(50000) == 77),
        "mask": x > 4 + rank,
        "one element": twice,
        "nan": torch.where(x > 4 + rank, torch.nan, x),
    }
    found = []
    for name, value in (*same.items(), *other.items()):
        try:
            check_same_batch((), {"x": value})
        except autopar.AutoparError as error:
            assert "rank 1 passes another batch" in str(error)
            found.append(name)
    return found


def test_which_batches_differ() -> None:
    differ = ["values", "one id of many", "mask", "one element", "nan"]
    assert try_ranks(batches, 2) == [differ, differ]


def different_batch_later(rank: int) -> None:
    """The second batch of one rank has another shape, and the other one is busy elsewhere."""
    os.environ["AUTOPAR_TIMEOUT_S"] = "5"
    pins = {"data": 2}
    mesh = init_device_mesh("cpu", (2,))
    module = autopar.parallelize(hw.Mlp(), mesh, hw.vectors(), constraints=pins)
    module.train_step(**hw.vectors())
    if rank == 1:
        module.train_step(**hw.vectors(12))
    time.sleep(10)


def test_a_rank_that_plans_alone_does_not_wait_for_ever() -> None:
    stayed, left = try_ranks(different_batch_later, 2, timeout=100)
    assert isinstance(left, RankError) and left.kind == "AutoparError", left
    for word in ("rank 1 waited 5 s for ranks 0", "another shape"):
        assert word in left.message
    assert isinstance(stayed, RankError) and stayed.kind != "Timeout", stayed


def different_batch_at_first(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    module = autopar.parallelize(hw.Mlp(), mesh, hw.vectors(), constraints={"data": 2})
    module.train_step(**hw.vectors(8 + 4 * (rank == 1)))


def test_no_rank_waits_where_one_alone_has_a_step_to_plan() -> None:
    """All know at once: the timeout of five minutes is not waited for."""
    first, second = try_ranks(different_batch_at_first, 2, timeout=100)
    for outcome, did, other in (
        (first, "compare their batches", "rank 1 to plan a step"),
        (second, "plan a step", "rank 0 to compare their batches"),
    ):
        assert isinstance(outcome, RankError) and outcome.kind == "AutoparError", outcome
        for word in (f"came to {did}", other, "another shape"):
            assert word in outcome.message


def solved_on_each_rank(rank: int) -> bool:
    """Every rank makes the plan itself; how long the solver took is no difference."""
    mesh = init_device_mesh("cpu", (2,))
    plan = autopar.plan(hw.Mlp(), autopar.Cluster.from_mesh(mesh), hw.vectors(), cache=False)
    return autopar.parallelize(hw.Mlp(), mesh, hw.vectors(), plan=plan).plan == plan


def test_ranks_may_each_plan() -> None:
    assert try_ranks(solved_on_each_rank, 2) == [True, True]


def another_program(rank: int, name: str, pins: dict[str, Any], changed: dict[str, Any]) -> None:
    """One rank writes its program otherwise than the rest do."""
    module, _, function = name.rpartition(".")
    emit = getattr(importlib.import_module(module), function)

    def written(*args: Any, **kwargs: Any) -> Any:
        return emit(*args, **{**kwargs, **(changed if rank == 3 else {})})

    with mock.patch(name, written):
        mesh = init_device_mesh("cpu", (4,))
        autopar.parallelize(hw.Mlp(layers=2), mesh, hw.vectors(), constraints=pins)


PIPELINE = {"pipeline": {"size": 2, "microbatches": 2}, "data": 2}


@pytest.mark.parametrize(
    ("name", "pins", "changed", "words"),
    [
        ("autopar.planning.emit", {"data": 4}, {"passes": ()}, ["the step", "3 than on rank 0"]),
        ("autopar.planning.emit", {"data": 4}, {"passes": ["none"]}, ["none", "passes"]),
        (
            "autopar.runtime.pipeline.emit_stage",
            PIPELINE,
            {"passes": ()},
            ["stage 1", "3 than on rank 2"],
        ),
    ],
    ids=["joined", "failed", "stage"],
)
def test_no_step_begins_where_ranks_have_unlike_collectives(
    name: str, pins: dict[str, Any], changed: dict[str, Any], words: list[str]
) -> None:
    for outcome in try_ranks(another_program, 4, name, pins, changed, timeout=100):
        assert isinstance(outcome, RankError), "a rank went on"
        assert outcome.kind == "AutoparError", outcome.trace
        for word in words:
            assert word in outcome.message, outcome.message
