"""`shard_dataloader`: whatever holds a batch, and before there is a plan."""

from __future__ import annotations

import copy
import multiprocessing
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset, default_collate

import autopar
from tests import handwritten as hw
from tests.dist import run_ranks

VALUES = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROWS = [{"x": x, "labels": torch.tensor(i % 4)} for i, x in enumerate(VALUES)]


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict, as tokenizers of transformers return."""


def collated(rows: list[Any]) -> Encoding:
    return Encoding(default_collate(rows))


def loss_of(module: nn.Module, batch: Any) -> Any:
    found = module(**batch)
    return found if isinstance(found, torch.Tensor) else found["loss"]


class Stream(IterableDataset[Any]):
    """A dataset without indices."""

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


def gradients(rank: int, streamed: bool) -> tuple[list[str], float]:
    """Types of what a sharded loader yields, and the largest difference of a gradient."""
    torch.manual_seed(0)
    single = hw.Mlp().double()
    whole = default_collate(ROWS)
    parallel = autopar.parallelize(
        copy.deepcopy(single), init_device_mesh("cpu", (2,)), whole, constraints={"data": 2}
    )
    loss_of(single, whole).backward()
    kinds = []
    rows: Any = Stream() if streamed else ROWS
    for batch in parallel.shard_dataloader(DataLoader(rows, batch_size=8, collate_fn=collated)):
        kinds.append(type(batch).__name__)
        loss_of(parallel, batch).backward()
    expected = dict(single.named_parameters())
    apart = [
        float((p.grad.full_tensor() - expected[name].grad).abs().max())
        for name, p in parallel.named_parameters()
    ]
    return kinds, max(apart)


@pytest.mark.parametrize("streamed", [False, True])
def test_batches_in_mappings_that_torch_does_not_know_are_sharded(streamed: bool) -> None:
    for kinds, apart in run_ranks(gradients, 2, streamed):
        assert kinds == ["Encoding"]
        assert apart < 1e-12


def odd_batches(rank: int) -> float:
    """The largest difference of a gradient, summed over batches that two ranks cannot share."""
    torch.manual_seed(0)
    single = hw.Mlp().double()
    parallel = autopar.parallelize(
        copy.deepcopy(single),
        init_device_mesh("cpu", (2,)),
        default_collate(ROWS),
        constraints={"data": 2},
    )
    loader = DataLoader(ROWS, batch_size=3)
    for batch in loader:
        loss_of(single, batch).backward()
    for batch in parallel.shard_dataloader(loader):
        parallel.train_step(**batch)
    expected = dict(single.named_parameters())
    return max(
        float((p.grad.full_tensor() - expected[name].grad).abs().max())
        for name, p in parallel.named_parameters()
    )


def test_no_row_of_an_odd_batch_is_lost() -> None:
    for apart in run_ranks(odd_batches, 2):
        assert apart < 1e-12


def last_batch(rank: int, samples: int, workers: int) -> tuple[float, list[tuple[int, ...]]]:
    """As `odd_batches`, with a last batch that is smaller; and the shapes of this rank's parts."""
    multiprocessing.current_process()._config["daemon"] = False  # which may have no workers
    torch.manual_seed(0)
    single = hw.Mlp().double()
    parallel = autopar.parallelize(
        copy.deepcopy(single),
        init_device_mesh("cpu", (2,)),
        default_collate(ROWS[:4]),
        constraints={"data": 2},
    )
    loader = DataLoader(ROWS[:samples], batch_size=4, num_workers=workers)
    for batch in loader:
        loss_of(single, batch).backward()
    held = []
    for batch in parallel.shard_dataloader(loader):
        x = batch["x"]
        held.append(tuple(getattr(x, "_local_tensor", x).shape))
        parallel.train_step(**batch)
    expected = dict(single.named_parameters())
    apart = max(
        float((p.grad.full_tensor() - expected[name].grad).abs().max())
        for name, p in parallel.named_parameters()
    )
    return apart, held


@pytest.mark.parametrize(
    ("samples", "workers", "last"), [(6, 0, (1, 16)), (6, 1, (1, 16)), (7, 0, (3, 16))]
)
def test_a_last_batch_of_another_size_is_read_whole(
    samples: int, workers: int, last: tuple[int, ...]
) -> None:
    for apart, held in run_ranks(last_batch, 2, samples, workers):
        assert apart < 1e-12
        assert held == [(2, 16), last]


def with_scale(rows: list[Any]) -> dict[str, Any]:
    """A batch with a tensor that is of no sample."""
    return {**default_collate(rows), "scale": torch.ones(1, 3)}


def packed(rows: list[Any]) -> dict[str, Any]:
    """A batch with offsets of its samples, of which there is one more."""
    return {**default_collate(rows), "offsets": torch.arange(len(rows) + 1)}


def collated_otherwise(rank: int) -> tuple[list[tuple[int, ...]], str]:
    parallel = autopar.parallelize(
        hw.Mlp().double(),
        init_device_mesh("cpu", (2,)),
        default_collate(ROWS),
        constraints={"data": 2},
    )
    loader = DataLoader(ROWS, batch_size=8, collate_fn=with_scale)
    shapes = [tuple(v.shape) for batch in parallel.shard_dataloader(loader) for v in batch.values()]
    with pytest.raises(autopar.AutoparError) as caught:
        next(iter(parallel.shard_dataloader(DataLoader(ROWS, batch_size=8, collate_fn=packed))))
    return shapes, str(caught.value)


def test_tensors_that_are_not_of_samples() -> None:
    for shapes, message in run_ranks(collated_otherwise, 2):
        assert shapes == [(8, 16), (8,), (1, 3)]
        assert "shape [5], made of the 4 samples" in message


def shuffled(rank: int, constraints: Any) -> list[float]:
    """The loss of each batch, where ranks would shuffle in orders of their own."""
    torch.manual_seed(0)
    model, mesh = hw.Mlp(layers=2).double(), init_device_mesh("cpu", (2,))
    batch = default_collate(ROWS)
    parallel = autopar.parallelize(model, mesh, batch, constraints=constraints, seed=1)
    torch.manual_seed(rank)
    loader = parallel.shard_dataloader(DataLoader(ROWS, batch_size=2, shuffle=True))
    return [float(parallel.train_step(**batch)) for batch in loader]


@pytest.mark.parametrize("pins", [{"data": 2}, {"pipeline": {"size": 2, "microbatches": 2}}])
def test_ranks_shuffle_alike_with_any_plan(pins: Any) -> None:
    first, second = run_ranks(shuffled, 2, pins)
    assert len(first) == 4 and first == second


def before_a_plan(rank: int) -> str:
    parallel = autopar.parallelize(hw.Mlp(), init_device_mesh("cpu", (1,)))
    with pytest.raises(autopar.AutoparError) as caught:
        parallel.shard_dataloader(DataLoader(ROWS, batch_size=8))
    return str(caught.value)


def test_a_loader_before_there_is_a_plan_is_refused() -> None:
    assert "pass example_inputs" in run_ranks(before_a_plan, 1)[0]
