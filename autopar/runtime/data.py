"""Data loading: each rank reads only the rows of the global batch that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from autopar.core.placement import Layout, Replicate, Shard
from autopar.core.strategy import op_call
from autopar.errors import AutoparError
from autopar.runtime.shards import shard_index, take_shard
from autopar.runtime.state import to_dtensor

if TYPE_CHECKING:
    from autopar.runtime.module import ParallelModule

__all__ = ["ShardedLoader"]


class _RowsOfBatches:
    """A batch sampler that keeps this rank's rows of each global batch."""

    def __init__(
        self,
        batches: Iterable[list[int]],
        layout: Layout,
        mesh_shape: tuple[int, ...],
        coords: tuple[int, ...],
        batch_size: int,
        seed: int,
    ) -> None:
        self.batches = batches
        self.seed = seed
        self.rows = shard_index([batch_size], layout, mesh_shape, coords)[0]
        self.batch_size = batch_size

    def _same_order(self) -> Iterator[list[int]]:
        """The batches; a sampler without a generator of its own is seeded alike on all ranks."""
        batches = iter(self.batches)
        self.seed += 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            first = next(batches, None)  # samplers draw when the first batch is asked for
        if first is not None:
            yield first
            yield from batches

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._same_order():
            if len(batch) != self.batch_size:
                raise AutoparError(
                    f"a batch has {len(batch)} samples, the plan is for {self.batch_size}: use "
                    "drop_last=True in the DataLoader"
                )
            yield [batch[int(row)] for row in self.rows]

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


class ShardedLoader:
    """Iterates a loader's batches as this rank's shares, wrapped as DTensors.

    A `DataLoader` over a map-style dataset is rebuilt so that other ranks' samples are never
    read. A sampler with a generator of its own must have it seeded alike on every rank; one
    without is seeded so here. Any other iterable is read whole and cut.
    """

    def __init__(self, loader: Iterable[Any], module: ParallelModule) -> None:
        self.module = module
        self.source = loader
        self._common = self._row_layout()
        self._whole = True
        if self._common is not None and isinstance(loader, DataLoader) and loader.batch_sampler:
            self.source = self._rebuilt(loader, self._common)
            self._whole = False

    def _row_layout(self) -> Layout | None:
        """The finest split of rows that some op wants of an input; None where none does.

        An input that the program takes otherwise is gathered when it is fed.
        """
        step = next(iter(self.module._steps.values()))
        nodes = {node.name: node for node in step.traced.graph.nodes}
        split = [False] * len(step.plan.mesh_shape)
        for spec in step.traced.inputs:
            for user in nodes[spec.node].users if spec.kind == "input" else ():
                chosen = step.plan.nodes.get(user.name)
                operands = op_call(user, 1).nodes if chosen is not None else ()
                for operand, layout in zip(operands, chosen.inputs if chosen else (), strict=True):
                    for axis, placement in enumerate(layout):
                        split[axis] |= operand.name == spec.node and placement == Shard(0)
        layout = tuple(Shard(0) if rows else Replicate() for rows in split)
        return layout if any(split) else None

    def _rebuilt(self, loader: DataLoader[Any], layout: Layout) -> DataLoader[Any]:
        batch_size = loader.batch_size or len(next(iter(loader.batch_sampler)))  # type: ignore[arg-type]
        rows = _RowsOfBatches(
            loader.batch_sampler,  # type: ignore[arg-type]
            layout,
            self.module.plan.mesh_shape,
            self.module.coords,
            batch_size,
            self.module._seed,
        )
        return DataLoader(
            loader.dataset,
            batch_sampler=rows,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            timeout=loader.timeout,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,  # drawn from before the sampler draws
        )

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.source:
            yield pytree.tree_map_only(Tensor, self._share, batch)

    def _share(self, value: Tensor) -> Tensor:
        mesh_shape = self.module.plan.mesh_shape
        layout = self._common or tuple(Replicate() for _ in mesh_shape)
        if not any(p.is_shard for p in layout):
            return value
        local = value
        shape = list(value.shape)
        if self._whole:
            local = take_shard(value, layout, mesh_shape, self.module.coords)
        else:
            for placement, size in zip(layout, mesh_shape, strict=True):
                if placement.is_shard:
                    shape[0] *= size
        local = local.to(torch.device(self.module.mesh.device_type))
        return to_dtensor(local, tuple(shape), layout, self.module.mesh)
