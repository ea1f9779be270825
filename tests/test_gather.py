"""Gathers of gloo ranks, many of them in flight at once."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

import autopar  # noqa: F401  (whose kernel of the gather is tested)
from tests.dist import run_ranks

SIZES = (8, 64, 1000, 5000)


def gather_many(rank: int, rounds: int) -> bool:
    """Gathers of random sizes, up to five in flight; True where all bring what they should."""
    world, group = dist.get_world_size(), dist.group.WORLD.group_name
    ops = torch.ops._c10d_functional
    draw = random.Random(0)  # the same on all ranks
    flying: list[tuple[torch.Tensor, torch.Tensor]] = []
    right = True
    for turn in range(rounds):
        size = draw.choice(SIZES)
        wanted = torch.cat([torch.full((size,), float(turn + r)) for r in range(world)])
        sent = torch.full((size,), float(turn + rank))
        flying.append((ops.all_gather_into_tensor(sent, world, group), wanted))
        while len(flying) > draw.choice((0, 2, 5)):
            arriving, expected = flying.pop(0)
            right &= torch.equal(ops.wait_tensor(arriving), expected)
    return all([right, *(torch.equal(ops.wait_tensor(a), e) for a, e in flying)])


@pytest.mark.parametrize(
    "rounds", [1000, pytest.param(60_000, marks=pytest.mark.slow, id="until it would crash")]
)
def test_many_in_flight(rounds: int) -> None:
    """gloo's coalesced gather, the op's own kernel, corrupts the heap within some ten thousand."""
    assert run_ranks(gather_many, 2, rounds, timeout=300) == [True, True]


def gather_of_kinds(rank: int) -> list[torch.Tensor]:
    world, group = dist.get_world_size(), dist.group.WORLD.group_name
    sent = [
        torch.arange(6, dtype=torch.int64).view(2, 3) + 10 * rank,
        torch.tensor([[True, False]]) if rank else torch.tensor([[False, False]]),
        torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64) * (rank + 1),
        torch.ones(0, 4),
    ]
    ops = torch.ops._c10d_functional
    return [ops.wait_tensor(ops.all_gather_into_tensor(x, world, group)) for x in sent]


def test_every_dtype_and_shape() -> None:
    """Integers, booleans, complex numbers and nothing at all are put one rank behind the other."""
    numbers = torch.arange(6, dtype=torch.int64).view(2, 3)
    first = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    wanted = [
        torch.cat([numbers, numbers + 10]),
        torch.tensor([[False, False], [True, False]]),
        torch.cat([first, 2 * first]),
        torch.ones(0, 4),
    ]
    for found in run_ranks(gather_of_kinds, 2):
        for mine, expected in zip(found, wanted, strict=True):
            assert torch.equal(mine, expected)
