"""A step without a loss to train says why: what is returned, where, and what to change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import autopar
from autopar.core.loss import missing_loss, position_of_loss
from autopar.tracer.trace import trace
from tests.dist import try_ranks

BATCH = (torch.randn(8, 16), torch.randint(0, 4, (8,)))


class Returning(nn.Module):
    """Returns what a function makes of logits and labels."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any], frozen: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4).requires_grad_(not frozen)
        self.function = function

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.function(self.linear(x), labels)


class Bare(nn.Module):
    """Has a buffer, and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(16, 4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(x @ self.weight, labels)


def under_no_grad(logits: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        return cross_entropy(logits, labels)


CASES: dict[str, tuple[nn.Module, list[str]]] = {
    "frozen": (Returning(cross_entropy, True), ["2 parameters are frozen", "linear.weight"]),
    "no parameter": (Bare(), ["no parameters"]),
    "no_grad": (Returning(under_no_grad), ["is detached", "no_grad"]),
    "detached": (Returning(lambda o, t: cross_entropy(o, t).detach()), ["is detached"]),
    "of no parameter": (
        Returning(lambda o, t: {"loss": t.float().mean(), "o": o}),
        ["output['loss']", "test_missing_loss.py:", "does not depend", "linear.weight"],
    ),
    "integer": (
        Returning(lambda o, t: (o.argmax(-1) == t).sum()),
        ["int64", "test_missing_loss.py:", "cross_entropy"],
    ),
    "number": (Returning(lambda o, t: cross_entropy(o, t).item()), ["Python number", ".item()"]),
    "nothing": (Returning(lambda o, t: None), ["returns None", "loss_fn="]),
    "each": (
        Returning(lambda o, t: cross_entropy(o, t, reduction="none")),
        ["shape [8]", "test_missing_loss.py:", "reduction='none'", "mean()"],
    ),
    "two": (
        Returning(lambda o, t: (cross_entropy(o, t), o.square().mean())),
        ["2 scalars: output[0], output[1]"],
    ),
}


@pytest.mark.parametrize(("model", "words"), CASES.values(), ids=CASES)
def test_a_missing_loss_is_explained(model: nn.Module, words: list[str]) -> None:
    traced = trace(model, BATCH, training=True)
    with pytest.raises(autopar.AutoparError, match="needs one scalar loss") as caught:
        position_of_loss(traced)
    for word in words:
        assert word in str(caught.value)


def test_microbatches_explain_it_too() -> None:
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    pins = {"pipeline": {"size": 1, "microbatches": 2}}
    model, _ = CASES["each"]
    with pytest.raises(autopar.ConstraintError, match=r"shape \[8\]"):
        autopar.plan(model, cluster, BATCH, constraints=pins, cache=False)


def test_a_trace_without_gradients_says_so() -> None:
    traced = trace(Returning(cross_entropy), BATCH, training=False)
    assert "without gradients" in missing_loss(traced)


def steps_without_loss(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1,))
    parallel = autopar.parallelize(Returning(cross_entropy), mesh, BATCH, cache=False)
    with torch.no_grad(), pytest.raises(autopar.AutoparError, match="no_grad"):
        parallel.train_step(*BATCH)
    frozen = autopar.parallelize(Returning(cross_entropy, True), mesh, BATCH, cache=False)
    with pytest.raises(autopar.AutoparError, match="frozen"):
        frozen.train_step(*BATCH)


def test_train_step_says_why() -> None:
    (outcome,) = try_ranks(steps_without_loss, 1)
    assert outcome is None, outcome


def logs_its_loss(rank: int) -> list[float]:
    """Gradients of losses that are returned a second time, detached or as they are."""
    mesh, found = init_device_mesh("cpu", (1,)), []
    for again in (lambda loss: loss.detach(), lambda loss: loss):
        returned = Returning(lambda o, t, f=again: {"log": f(s := cross_entropy(o, t)), "loss": s})
        plain = copy.deepcopy(returned)
        parallel = autopar.parallelize(returned, mesh, BATCH, cache=False)
        logged = [m(*BATCH) for m in (parallel, plain)]
        assert logged[0]["log"].requires_grad == logged[1]["log"].requires_grad
        for results in logged:
            results["loss"].backward()
        weights = zip(parallel.parameters(), plain.parameters(), strict=True)
        found += [float((whole(p.grad) - q.grad).abs().max()) for p, q in weights]
    return found


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def test_a_loss_may_be_returned_detached_too() -> None:
    (outcome,) = try_ranks(logs_its_loss, 1)
    assert isinstance(outcome, list) and max(outcome) < 1e-6, outcome
