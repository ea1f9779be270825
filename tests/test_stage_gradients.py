"""torch's own gradient norms on a rank of a pipeline, which holds some of the parameters only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.stage_gradients import StageGradient
from tests.dist import run_ranks

NORMS = {
    "clip": lambda p: torch.nn.utils.clip_grad_norm_(p, 1e9),
    "clip-foreach": lambda p: torch.nn.utils.clip_grad_norm_(p, 1e9, foreach=True),
    "clip-1": lambda p: torch.nn.utils.clip_grad_norm_(p, 1e9, norm_type=1.0),
    "clip-inf": lambda p: torch.nn.utils.clip_grad_norm_(p, 1e9, norm_type=float("inf")),
    "total": lambda p: torch.nn.utils.get_total_norm([x.grad for x in p]),
    "stacked": lambda p: torch.stack([x.grad.norm() for x in p]).norm(),
    "stacked-p": lambda p: torch.norm(torch.stack([torch.norm(x.grad, 3.0) for x in p]), 3.0),
}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pipeline": {"size": 2, "microbatches": 2}}),
    "pp2-zero3": (4, {"pipeline": {"size": 2, "microbatches": 2}, "data": 2, "zero": 3}),
    "pp2-tensor": (4, {"pipeline": {"size": 2, "microbatches": 2}, "tensor": "1d"}),
}


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=i % 2 == 0) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x.square().mean()


def tower() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Tower().double(), torch.randn(8, 8, dtype=torch.float64)


def norms(parameters: list[Any]) -> dict[str, float]:
    found = {}
    for name, norm in NORMS.items():
        value = norm(parameters)
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = float(value)
    return found


def of_a_rank(rank: int, world: int, constraints: Any) -> tuple[dict[str, float], list[float]]:
    model, x = tower()
    mesh = init_device_mesh("cpu", (world,))
    parallel = autopar.parallelize(model, mesh, x, constraints=constraints, cache=False)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel(x).backward()
    parallel.train_step(x)  # adds to the gradients that are there
    parameters = list(parallel.parameters())
    assert len(parameters) < 6
    assert all(isinstance(p.grad, StageGradient) for p in parameters)
    for p in parameters:  # in place, so that they are counted still
        assert p.grad is not None
        p.grad *= 2.0
        p.grad /= 2.0
    found = norms(parameters)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(float(parallel.train_step(x)))
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.05)
        optimizer.step()
    return found, losses


@pytest.mark.parametrize("plan", PLANS)
def test_norms_are_those_of_all_stages(plan: str) -> None:
    model, x = tower()
    for _ in range(2):
        model(x).backward()
    expected = norms(list(model.parameters()))
    assert expected["clip"] > 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    world, constraints = PLANS[plan]
    for found, found_losses in run_ranks(of_a_rank, world, world, constraints):
        assert found == pytest.approx(expected, rel=1e-9)
        assert found_losses == pytest.approx(losses, rel=1e-9)


def frozen_stage(rank: int) -> tuple[str, float]:
    model, x = tower()
    for layer in model.layers[:2]:  # type: ignore[index]
        layer.requires_grad_(False)
    constraints = {"pipeline": {"size": 2, "microbatches": 2, "cuts": ["layers.2"]}}
    mesh = init_device_mesh("cpu", (2,))
    parallel = autopar.parallelize(model, mesh, x, constraints=constraints, cache=False)
    parallel.train_step(x)
    own = float(parallel.clip_grad_norm_(1e9))
    try:
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1e9)
    except autopar.AutoparError as error:
        return str(error), own
    return "", own


def test_a_stage_without_gradients_is_named() -> None:
    model, x = tower()
    for layer in model.layers[:2]:  # type: ignore[index]
        layer.requires_grad_(False)
    model(x).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    (first, norm0), (second, norm1) = run_ranks(frozen_stage, 2)
    assert first == ""  # it has nothing to clip
    assert "pipeline ranks [0]" in second
    assert "clip_grad_norm_" in second
    assert [norm0, norm1] == pytest.approx([expected] * 2)


def frozen_later(rank: int) -> list[float]:
    """Norms and losses of steps, of which the middle ones have the first stage frozen."""
    model, x = tower()
    constraints = {"pipeline": {"size": 2, "microbatches": 2, "cuts": ["layers.2"]}}
    mesh = init_device_mesh("cpu", (2,))
    return with_frozen_steps(
        autopar.parallelize(model, mesh, x, constraints=constraints, cache=False), x
    )


def with_frozen_steps(model: nn.Module, x: Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[float] = []
    for step, order in enumerate((2.0, 2.0, 1.0, float("inf"), 2.0)):
        for layer in model.layers[:2]:  # type: ignore[index]
            layer.requires_grad_(step in (0, 4))
        loss = model(x)
        loss.backward()
        chosen = [p for p in model.parameters() if p.requires_grad]
        given = chosen if step == 2 else model.parameters()
        norm = torch.nn.utils.clip_grad_norm_(given, 0.1, norm_type=order)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), norm.item()]
    return found


def test_a_stage_that_is_frozen_later_takes_part_in_norms() -> None:
    expected = with_frozen_steps(*tower())
    for found in run_ranks(frozen_later, 2):
        assert found == pytest.approx(expected, rel=1e-6)  # torch makes a norm of nothing in fp32


def some_of_them(rank: int) -> tuple[int, list[str], list[float]]:
    """What torch's norms say to a part of this rank's gradients, and what the module's own gives.

    The last layer is on the second rank only: the first one calls with nothing.
    """
    model, x = tower()
    constraints = {"pipeline": {"size": 2, "microbatches": 2, "cuts": ["layers.2"]}}
    mesh = init_device_mesh("cpu", (2,))
    parallel = autopar.parallelize(model, mesh, x, constraints=constraints, cache=False)
    parallel.train_step(x)
    last = [p for name, p in parallel.named_parameters() if name.startswith("layers.3.")]
    matrices = [p for p in parallel.parameters() if p.dim() == 2]
    messages = []
    for norm in (NORMS["clip"], NORMS["clip-foreach"], NORMS["stacked-p"]):
        for chosen in (last, matrices[:1]):
            if chosen:
                with pytest.raises(autopar.AutoparError) as caught:
                    norm(chosen)
                messages.append(str(caught.value))
    own = [float(parallel.clip_grad_norm_(1e9, parameters=p)) for p in (last, matrices)]
    # with the others' gradients gone, what is given is all
    for p in set(parallel.parameters()) - set(matrices):
        p.grad = None
    own.append(float(torch.nn.utils.clip_grad_norm_(matrices, 1e9)))
    return len(last), messages, own


def test_a_norm_of_some_of_a_stages_gradients_is_refused_before_it_waits() -> None:
    model, x = tower()
    model(x).backward()
    named = dict(model.named_parameters())
    last = [p for name, p in named.items() if name.startswith("layers.3.")]
    matrices = [p for p in named.values() if p.dim() == 2]
    expected = [float(torch.nn.utils.clip_grad_norm_(p, 1e9)) for p in (last, matrices, matrices)]
    (count0, messages0, own0), (count1, messages1, own1) = run_ranks(some_of_them, 2)
    assert (count0, count1) == (0, 1)
    assert len(messages0) == 3 and len(messages1) == 6
    for message in messages0 + messages1:
        assert "1 of the 3 gradients" in message
        assert "clip_grad_norm_(max_norm, parameters=" in message
    assert own0 == pytest.approx(expected, rel=1e-6)
    assert own1 == pytest.approx(expected, rel=1e-6)
