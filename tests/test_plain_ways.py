"""Parameters and gradients of a parallel module, used as plain tensors are: the same numbers."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from tests.dist import run_ranks

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, {"data": 2, "zero": 3}),
    "2d": (4, {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3}),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def batch() -> tuple[Tensor, Tensor]:
    drawn = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return drawn[0], drawn[1]


def backward(m: Any, *penalties: Any) -> Tensor:
    m.zero_grad()
    x, target = batch()
    loss = nn.functional.mse_loss(m(x), target) + sum(penalties)
    loss.backward()
    return loss.detach()


def numbers(m: Any) -> list[Any]:
    backward(m)
    found: list[Any] = []
    for p in m.parameters():
        found += [p.grad.norm().item(), float(p.grad.abs().max()), p.detach().std().item()]
        found += [
            torch.from_numpy(p.detach().numpy()),
            p.grad.tolist(),
            float(f"{p.grad.norm():.6f}"),
        ]
        found += [bool((p.grad > 0.01).any()), p.grad.detach().norm().clamp_(min=1e-3).item()]
    found += [torch.allclose(p, torch.zeros(p.shape).double()) for p in m.parameters()]
    found += [torch.allclose(p, p.detach() + 1e-12) for p in m.parameters()]
    with torch.autograd.set_detect_anomaly(True):
        backward(m)
    total = sum(p.grad.norm().item() ** 2 for p in m.parameters()) ** 0.5
    return [*found, total]


def penalties(m: Any) -> list[Any]:
    anchor = {name: torch.full(p.shape, 0.1).double() for name, p in m.named_parameters()}
    near = sum((p - anchor[name]).square().sum() for name, p in m.named_parameters())
    loss = backward(m, near, sum(p.abs().sum() for p in m.parameters()) * 1e-2)
    with torch.no_grad():
        for p in m.parameters():
            p.grad *= (torch.arange(p.numel()).reshape(p.shape) % 3 != 0).double()
    return [loss.item()]


def data(m: Any) -> list[Any]:
    backward(m)
    kept = [p.data.clone() for p in m.parameters()]
    for p in m.parameters():
        p.data = p.data - 0.1 * p.grad
    moved = backward(m).item()
    for p, before in zip(m.parameters(), kept, strict=True):
        p.data = before
    half = torch.nn.utils.parameters_to_vector(m.parameters()) * 0.5
    torch.nn.utils.vector_to_parameters(half, m.parameters())
    return [moved, backward(m).item()]


@torch.no_grad()
def rows(m: Any) -> list[Any]:
    m.up.weight[0] = 0.5
    m.up.weight.data[2:5, 1] = torch.arange(3.0).double()
    m.up.weight[1, 1] += 4.0
    m.up.weight[6].zero_()
    m.up.weight.data[:, 3].mul_(2.0)
    m.up.bias.narrow(0, 3, 2).fill_(2.0)
    first, last = m.down.weight.chunk(2)
    first.mul_(2)
    last[1:3].add_(1.0)
    m.down.weight.view(-1)[5:9].fill_(7.0)
    m.down.weight.t()[0].fill_(3.0)
    m.down.weight.diagonal().fill_(9.0)
    return [m.up.weight[6].tolist()]


@torch.no_grad()
def functions(m: Any) -> list[Any]:
    """What is written through functions, and at places that several ranks hold."""
    w, v = m.down.weight, m.up.weight
    torch.diagonal(w).fill_(9.0)
    torch.select(w, 0, 1).mul_(2.0)
    torch.narrow(m.up.bias, 0, 3, 2).fill_(2.0)
    torch.chunk(w, 2)[1][0].add_(1.0)
    torch.split(v, [3, 13])[1].add_(0.5)
    torch.tensor_split(w, 3, 1)[2].mul_(3.0)
    torch.unbind(v)[6].zero_()
    for number, row in enumerate(w):
        row.mul_(number)
    w.unfold(0, 2, 2)[1].add_(1.0)
    torch.hsplit(w, 2)[1].t()[0].fill_(4.0)
    torch.diagonal(torch.split(w, 4)[1])[1:].view(-1)[0].mul_(5.0)
    nn.init.constant_(torch.diagonal(v, 2), 3.0)
    nn.functional.relu(w[2], inplace=True)
    torch.mul(w[3], 2, out=w[3])
    torch._foreach_mul_([w[5], torch.diagonal(v)], 0.5)
    torch.diagonal(w)[1] = 5.0
    w[4:5].squeeze(0).data.fill_(0.25)
    torch.ops.aten.select(w, 1, 2).fill_(1.0)
    return []


def gradients(m: Any) -> list[Any]:
    backward(m)
    torch.diagonal(m.down.weight.grad).fill_(0.0)
    torch.select(m.up.weight.grad, 0, 3).zero_()
    m.up.bias.grad.index_fill_(0, torch.tensor([3]), 2.0)
    return []


@torch.no_grad()
def places(m: Any) -> list[Any]:
    w, rows, ones = m.down.weight, torch.tensor([1, 6]), torch.ones(2, 16).double()
    w.index_add_(0, rows, ones)
    w.index_copy_(1, rows, ones.t()[:8] * 3)
    w.index_fill_(0, torch.tensor([5]), 0.5)
    w.index_put_((torch.tensor([2]),), torch.tensor(0.25).double())
    w.scatter_(0, torch.zeros(1, 16).long(), 7.0)
    w.scatter_add_(1, torch.full((8, 1), 3), torch.ones(8, 1).double())
    w.masked_scatter_(w > 6, torch.arange(128.0).double())
    w.fill_diagonal_(0.125)
    w.cumsum_(0)
    m.up.weight.tril_()
    return [w.shape, w.tolist()]


@torch.no_grad()
def drawn(m: Any) -> list[Any]:
    torch.manual_seed(5)
    nn.init.normal_(m.up.weight, std=0.02)
    nn.init.xavier_uniform_(m.down.weight)
    nn.init.trunc_normal_(m.up.bias)
    nn.init.eye_(m.up.weight)
    m.down.weight[2:4].log_normal_()
    m.up.weight.cauchy_().clamp_(-1, 1)
    m.up.bias.random_(3, 9)
    torch.diagonal(m.down.weight).copy_(0.5)
    for p in m.parameters():
        p.add_(torch.randn_like(p) * 0.1)
        p.mul_(torch.bernoulli(torch.full_like(p, 0.9)))
    return []


@torch.no_grad()
def plain_copies(m: Any) -> list[Any]:
    average, other = Net().double(), Net().double()
    other.load_state_dict(m.state_dict())
    for mine, p in zip(average.parameters(), m.parameters(), strict=True):
        mine.zero_().lerp_(p, 0.5).mul_(0.9).add_(p.data, alpha=0.1)
    for mine, p in zip(average.parameters(), m.parameters(), strict=True):
        p.copy_(mine)
    return [*other.parameters(), *average.parameters()]


ACTS: list[Callable[[Any], list[Any]]] = [
    numbers,
    penalties,
    data,
    rows,
    functions,
    gradients,
    places,
]
ACTS += [drawn, plain_copies]


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def both(rank: int, world: int, constraints: Any) -> dict[str, str]:
    torch.manual_seed(0)
    single = Net().double()
    mesh = init_device_mesh("cpu", (world,))
    given = {"constraints": constraints, "cache": False}
    parallel = autopar.parallelize(copy.deepcopy(single), mesh, batch()[:1], **given)
    wrong = {}
    for act in ACTS:
        found, expected = act(parallel), act(single)
        others = dict(parallel.named_parameters())
        for name, p in single.named_parameters():
            found += [whole(others[name]), whole(others[name].grad)]
            expected += [p, p.grad]
        try:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        except AssertionError as error:
            wrong[act.__name__] = str(error)
    return wrong


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_are_used_as_plain_tensors_are(plan: str) -> None:
    world, constraints = PLANS[plan]
    assert run_ranks(both, world, world, constraints) == [{}] * world


def refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    given = {"constraints": PLANS["zero3"][1], "cache": False}
    parallel = autopar.parallelize(Net().double(), mesh, batch()[:1], **given)
    weight = parallel.up.weight
    with pytest.raises(autopar.AutoparError, match=r"under torch\.no_grad"):
        weight[0] = 1.0
    with pytest.raises(autopar.AutoparError, match=r"\(16, 8\).*given data of shape \(2, 2\)"):
        weight.data = torch.zeros(2, 2)
    with pytest.raises(autopar.AutoparError, match=r"under torch\.no_grad"):
        weight.fill_diagonal_(1.0)
    with pytest.raises(ValueError, match="read-only"):  # it shows no memory of the parameter
        weight.detach().numpy()[0] = 1.0


def steps(m: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        backward(m)
        optimizer.step()


def resumed(rank: int) -> list[float]:
    """Distances from one device: resumed from its states, and from those of another plan."""
    single, mesh = Net().double(), init_device_mesh("cpu", (4,))
    made = torch.optim.AdamW(single.parameters(), lr=1e-2)
    steps(single, made)
    states = copy.deepcopy((single.state_dict(), made.state_dict()))
    found = []
    for constraints in ({"data": 4, "zero": 3}, PLANS["2d"][1]):
        given = {"constraints": constraints, "cache": False}
        parallel = autopar.parallelize(Net().double(), mesh, batch()[:1], **given)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        parallel.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        steps(parallel, optimizer)
        steps(single, made)
        others = dict(parallel.named_parameters())
        found += [float(torch.dist(whole(others[n]), p)) for n, p in single.named_parameters()]
        states = parallel.state_dict(), optimizer.state_dict()
    return found


def test_states_of_one_device_and_of_another_plan_are_taken_up() -> None:
    assert max(max(found) for found in run_ranks(resumed, 4)) < 1e-12


def saved_by_one(rank: int, path: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    given = {"constraints": PLANS["zero3"][1], "cache": False}
    parallel = autopar.parallelize(Net().double(), mesh, batch()[:1], **given)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    steps(parallel, optimizer)
    if rank == 0:
        torch.save((parallel.state_dict(), optimizer.state_dict()), path)
    torch.save((parallel.state_dict(), optimizer.state_dict()), f"{path}.{rank}")
    torch.distributed.barrier()
    states = torch.load(f"{path}.{rank}")
    optimizer.load_state_dict(states[1])
    parallel.load_state_dict(states[0])
    steps(parallel, optimizer)
    states = torch.load(path)
    optimizer.load_state_dict(states[1])
    told = []
    for act in (lambda: parallel.load_state_dict(states[0]), optimizer.step):
        try:
            act()
        except autopar.CheckpointError as error:
            told.append(str(error))
    return told


def test_shares_that_one_rank_saved_are_not_taken_for_those_of_others(tmp_path: Path) -> None:
    first, second = run_ranks(saved_by_one, 2, str(tmp_path / "state.pt"))
    assert all("rank 1 failed: CheckpointError" in told for told in first)
    assert "up.weight and 3 more of what is loaded on rank 1 are shares of rank 0" in second[0]
    assert "the state 'exp_avg' number 1 and 7 more" in second[1]


class Halves(nn.Module):
    """Two equal blocks, so that each stage of a pipeline has as many parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def saved_by_first_stage(rank: int, path: str) -> str:
    x = torch.arange(16, dtype=torch.float64).reshape(4, 4) / 16
    pins = {"pipeline": {"size": 2, "microbatches": 2}}
    mesh = init_device_mesh("cpu", (2,))
    parallel = autopar.parallelize(Halves().double(), mesh, (x,), constraints=pins, cache=False)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    parallel.train_step(x)
    optimizer.step()
    if rank == 0:
        torch.save(optimizer.state_dict(), path)
    torch.distributed.barrier()
    optimizer.load_state_dict(torch.load(path))
    with pytest.raises(autopar.CheckpointError) as caught:
        optimizer.step()
    return str(caught.value)


def test_states_of_another_stage_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    first, second = run_ranks(saved_by_first_stage, 2, str(tmp_path / "state.pt"))
    assert "rank 1 failed: CheckpointError" in first
    assert "of what is loaded on rank 1 are shares of rank 0" in second


def early(rank: int) -> None:
    torch.manual_seed(0)
    parallel = autopar.parallelize(Net(), init_device_mesh("cpu", (1,)), cache=False)
    for act in (
        lambda: copy.deepcopy(parallel),
        parallel.state_dict,
        parallel.up.weight.norm().item,
    ):
        with pytest.raises(autopar.AutoparError, match=r"before the first call.*example_inputs"):
            act()


def test_values_before_the_first_call_are_refused() -> None:
    run_ranks(early, 1)


def alone(rank: int) -> str:
    os.environ["AUTOPAR_TIMEOUT_S"] = "2"
    mesh = init_device_mesh("cpu", (2,))
    given = {"constraints": PLANS["zero3"][1], "cache": False}
    parallel = autopar.parallelize(Net().double(), mesh, batch()[:1], **given)
    if rank == 0:
        with pytest.raises(autopar.AutoparError) as told:
            parallel.up.weight.norm().item()
        return str(told.value)
    return ""


def test_a_rank_that_asks_alone_is_told_where() -> None:
    told = run_ranks(alone, 2)[0]
    assert "test_plain_ways.py:" in told
    assert "ranks 1 did not come in 2 s" in told


def test_parts_of_what_trains_and_other_shapes_are_refused() -> None:
    run_ranks(refused, 2)
