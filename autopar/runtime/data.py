"""Data loading: each rank reads only the rows of the global batch that it holds."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from autopar._compat import register_dataclasses
from autopar.core.graph import node_info
from autopar.core.placement import Layout, Replicate, Shard, shard_factor
from autopar.core.strategy import op_call
from autopar.errors import AutoparError
from autopar.runtime.shards import shard_index, take_shard
from autopar.runtime.state import to_dtensor

if TYPE_CHECKING:
    from autopar.runtime.module import ParallelModule

__all__ = ["ShardedLoader"]


class _RowsOfBatches:
    """A batch sampler that keeps this rank's rows of each global batch, or all of them.

    Args:
        batches: indices of the samples of each.
        rows: this rank's; None for all.
        batch_size: samples of a batch.
        seed: of the order, where nothing else seeds it.
    """

    def __init__(
        self, batches: Iterable[list[int]], rows: Tensor | None, batch_size: int, seed: int
    ) -> None:
        self.batches = batches
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed

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
            if self.rows is None:
                yield batch
                continue
            if len(batch) != self.batch_size:
                raise AutoparError(
                    f"a batch has {len(batch)} samples and others {self.batch_size}, so that ranks "
                    "cannot read their rows alone: use drop_last=True in the DataLoader"
                )
            yield [batch[int(row)] for row in self.rows]

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


def _source(node: fx.Node) -> str:
    """The op that a value comes from, which is not the node where the op has several outputs."""
    if node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source.name
    return node.name


def _picks_samples(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    """True for a loader that asks a dataset for the samples of a batch by their index."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


class ShardedLoader:
    """Iterates a loader's batches as this rank's shares, wrapped as DTensors.

    A `DataLoader` over a map-style dataset is rebuilt so that other ranks' samples are never
    read, unless its batches do not split evenly. A sampler with a generator of its own must have it
    seeded alike on every rank; one without is seeded so here. Any other iterable is read whole and
    cut.
    """

    def __init__(self, loader: Iterable[Any], module: ParallelModule) -> None:
        self.module = module
        self.source = loader
        self._common = self._row_layout()
        self._whole = True
        if _picks_samples(loader):
            self.source = self._rebuilt(loader)

    @property
    def _parts(self) -> int:
        """How many shares the rows of a batch are split into."""
        if self._common is None:
            return 1
        return shard_factor(self._common, self.module.plan.mesh_shape)

    def _row_layout(self) -> Layout | None:
        """The finest split of rows that some op of the forward has; None where none does.

        An op that takes an input whole does not stop the split: the input is then gathered when
        it is fed.
        """
        step = self.module.first_step
        rows = {s.node: s.shape[0] for s in step.traced.inputs if s.kind == "input" and s.shape}
        smallest = math.gcd(*rows.values())
        split: dict[int, None] = {}
        for node in step.traced.graph.nodes:
            chosen = step.plan.nodes.get(node.name)
            if chosen is None:
                continue
            call = op_call(node, 1)
            held = [rows.get(_source(operand), 0) for operand in call.nodes]
            found = [layout for n, layout in zip(held, chosen.inputs, strict=True) if n]
            batch = max(held, default=0)
            # a value made of the batch with as many rows holds the batch in its dim 0
            if batch and node_info(step.traced, node).phase == "forward":
                if call.outputs[0].shape[:1] == (batch,):
                    rows[node.name] = batch
                    found.append(chosen.outputs[0])
                for layout in found:
                    split.update(dict.fromkeys(a for a, p in enumerate(layout) if p == Shard(0)))
        mesh_shape = step.plan.mesh_shape
        for axis in sorted(split):  # ops may split different axes, and all together too many
            if smallest % mesh_shape[axis]:
                del split[axis]
            else:
                smallest //= mesh_shape[axis]
        layout = tuple(
            Shard(0) if axis in split else Replicate() for axis in range(len(mesh_shape))
        )
        return layout if split else None

    def _rebuilt(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The loader in the same order on all ranks, of this rank's rows where they are even."""
        batch_size = loader.batch_size or len(next(iter(loader.batch_sampler)))  # type: ignore[arg-type]
        rows: Tensor | None = None
        if self._common is not None and batch_size % self._parts == 0:
            mesh_shape, coords = self.module.plan.mesh_shape, self.module.coords
            rows = shard_index([batch_size], self._common, mesh_shape, coords)[0]
            self._whole = False
        batches: Any = loader.batch_sampler
        return DataLoader(
            loader.dataset,
            batch_sampler=_RowsOfBatches(batches, rows, batch_size, self.module._seed),
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
            register_dataclasses(batch)
            yield self._shares(batch)

    def _shares(self, batch: Any) -> Any:
        """A batch whose tensors are DTensors, in any containers that torch or Python knows."""

        def share(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._share(leaf)
            if not isinstance(leaf, MutableMapping):
                return leaf
            made = copy.copy(leaf)  # such as what a tokenizer returns, which torch takes for a leaf
            made.update({key: self._shares(value) for key, value in leaf.items()})
            return made

        return pytree.tree_map(share, batch)

    def _share(self, value: Tensor) -> Tensor:
        layout, parts = self._common, self._parts
        if layout is None or parts == 1 or not value.dim():
            return value
        if self._whole and value.shape[0] % parts:  # an odd batch: its step is planned anew
            return value
        local = value
        shape = list(value.shape)
        if self._whole:
            local = take_shard(value, layout, self.module.plan.mesh_shape, self.module.coords)
        else:
            shape[0] *= parts
        local = local.to(torch.device(self.module.mesh.device_type))
        return to_dtensor(local, tuple(shape), layout, self.module.mesh)
