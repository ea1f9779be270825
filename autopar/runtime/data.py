"""Data loading: each rank reads only the rows of the global batch that it holds."""

from __future__ import annotations

import copy
import math
import operator
from collections import deque
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

    A batch of another size, such as the last one, is kept whole.

    Args:
        batches: indices of the samples of each.
        rows: this rank's; None for all.
        batch_size: samples of a batch.
        seed: of the order, where nothing else seeds it.

    Attributes:
        read_whole: of the latest iterator, for each batch that it has given out.
    """

    def __init__(
        self, batches: Iterable[list[int]], rows: Tensor | None, batch_size: int, seed: int
    ) -> None:
        self.batches = batches
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.read_whole: deque[bool] = deque()

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
        self.read_whole = deque()  # of this iterator, which may read ahead of its user
        return self._kept(self.read_whole)

    def _kept(self, read_whole: deque[bool]) -> Iterator[list[int]]:
        for batch in self._same_order():
            rows = self.rows if len(batch) == self.batch_size else None
            read_whole.append(rows is None)
            yield batch if rows is None else [batch[int(row)] for row in rows]

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
    read, but in batches that do not split evenly, or are of another size than the others. Its
    `collate_fn` then sees this rank's samples alone, so it must not pad to the longest of them. A
    sampler with a generator of its own must have it
    seeded alike on every rank; one without is seeded so here. Any other iterable is read whole and
    cut.
    """

    def __init__(self, loader: Iterable[Any], module: ParallelModule) -> None:
        self.module = module
        self.source = loader
        self._common = self._row_layout()
        self._sampler: _RowsOfBatches | None = None
        if _picks_samples(loader):
            self._sampler = self._rows_of(loader)
            self.source = _rebuilt(loader, self._sampler)

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

    def _rows_of(self, loader: DataLoader[Any]) -> _RowsOfBatches:
        """The loader's batches in one order on all ranks, of this rank's rows where even."""
        batch_size = loader.batch_size or len(next(iter(loader.batch_sampler)))  # type: ignore[arg-type]
        rows: Tensor | None = None
        if self._common is not None and batch_size % self._parts == 0:
            mesh_shape, coords = self.module.plan.mesh_shape, self.module.coords
            rows = shard_index([batch_size], self._common, mesh_shape, coords)[0]
        batches: Any = loader.batch_sampler
        return _RowsOfBatches(batches, rows, batch_size, self.module._seed)

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.source)
        read_whole = self._sampler.read_whole if self._sampler is not None else None
        for batch in batches:
            register_dataclasses(batch)
            yield self._shares(batch, read_whole is None or read_whole.popleft())

    def _shares(self, batch: Any, whole: bool) -> Any:
        """A batch whose tensors are DTensors, in any containers that torch or Python knows."""

        def share(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._share(leaf) if whole else self._joined(leaf)
            if not isinstance(leaf, MutableMapping):
                return leaf
            made = copy.copy(leaf)  # such as what a tokenizer returns, which torch takes for a leaf
            made.update({key: self._shares(value, whole) for key, value in leaf.items()})
            return made

        return pytree.tree_map(share, batch)

    def _share(self, value: Tensor) -> Tensor:
        """This rank's rows of a tensor of the whole batch."""
        layout, parts = self._common, self._parts
        # an odd batch is handed on: its step is planned anew
        if layout is None or parts == 1 or not value.dim() or value.shape[0] % parts:
            return value
        local = take_shard(value, layout, self.module.plan.mesh_shape, self.module.coords)
        return self._on_mesh(local, tuple(value.shape))

    def _joined(self, value: Tensor) -> Tensor:
        """The tensor that this rank's rows and the other ranks' make up."""
        assert self._sampler is not None and self._sampler.rows is not None
        read = len(self._sampler.rows)
        if not value.dim() or (value.shape[0] == 1 != read):  # of no sample: the same on all ranks
            return value
        if value.shape[0] != read:
            raise AutoparError(
                f"a batch has a tensor of shape {list(value.shape)}, made of the {read} samples "
                "that this rank reads, so that ranks' tensors do not make up the whole batch's: "
                "give each sample a row of it, or pass an iterable of whole batches"
            )
        return self._on_mesh(value, (read * self._parts, *value.shape[1:]))

    def _on_mesh(self, local: Tensor, shape: tuple[int, ...]) -> Tensor:
        assert self._common is not None
        local = local.to(torch.device(self.module.mesh.device_type))
        return to_dtensor(local, shape, self._common, self.module.mesh)


def _rebuilt(loader: DataLoader[Any], sampler: _RowsOfBatches) -> DataLoader[Any]:
    """The loader with another sampler."""
    batches: Any = sampler
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
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
