"""Gradients that were reduced in one bucket share its memory, and are apart all the same."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

import autopar
from tests.dist import run_ranks

Batch = tuple[Tensor, Tensor]


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.rand(8, 6, dtype=torch.float64, generator=generator),
            torch.rand(8, 4, dtype=torch.float64, generator=generator),
        )
        for _ in range(2)
    ]


class Pair:
    """A module on one device and on two ranks, which a script does the same to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.parallel = autopar.parallelize(
            copy.deepcopy(self.plain),
            init_device_mesh("cpu", (2,)),
            batches()[0],
            loss_fn=mse_loss,
            constraints={"data": 2, "zero": 0},
        )

    def step(self, batch: Batch) -> None:
        self.parallel.train_step(*batch)
        mse_loss(self.plain(batch[0]), batch[1]).backward()

    def zero(self, set_to_none: bool) -> None:
        self.parallel.zero_grad(set_to_none)
        self.plain.zero_grad(set_to_none)

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Of each parameter, on this rank and on one device."""
        found = []
        for mine, right in zip(self.parallel.parameters(), self.plain.parameters(), strict=True):
            assert isinstance(mine.grad, DTensor) and right.grad is not None
            found.append((mine.grad.to_local(), right.grad))
        return found

    def check(self) -> None:
        for mine, right in self.gradients():
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-14)


def script(rank: int) -> None:
    pair, (first, second) = Pair(), batches()
    pair.step(first)
    pair.check()
    storages = {mine.untyped_storage().data_ptr() for mine, _ in pair.gradients()}
    assert len(storages) < len(pair.gradients())  # or there would be nothing to see here

    kept = [(mine, mine.clone()) for mine, _ in pair.gradients()]
    pair.zero(set_to_none=True)
    pair.step(second)
    pair.check()
    assert all(torch.equal(mine, before) for mine, before in kept)

    pair.step(first)  # added up
    pair.check()
    pair.zero(set_to_none=False)
    assert not any(mine.any() for mine, _ in pair.gradients())
    pair.step(first)
    pair.check()

    for gradients in zip(*pair.gradients(), strict=True):
        gradients[1].mul_(3.0)  # of one parameter
    pair.check()
    for module in (pair.parallel, pair.plain):
        clip_grad_norm_(module.parameters(), 1e-3)
    pair.check()


def test_gradients_of_one_bucket_are_apart() -> None:
    run_ranks(script, 2)
