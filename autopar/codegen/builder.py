"""`Builder`: appends calls to an fx graph and keeps the fake value of each node.

Lowerings and redistributions are written against it. Nodes that communicate carry their mesh
axis and the size of their buffer in `meta`, so that bytes can be counted and the program can be
run for many ranks in one process. Nodes that only bring a tensor into the order of ranks, or out of
it, say so (`packs`), as the search prices no packing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.codegen.fakes import fake_call
from autopar.core.graph import value_of
from autopar.core.placement import Placement
from autopar.core.work import lays_out_contiguously

__all__ = ["Builder"]

c10d = torch.ops._c10d_functional
aten = torch.ops.aten


def pack(*values: Any) -> tuple[Any, ...]:
    """The results of an op with several outputs; its own function, so that a graph can call it."""
    return values


class Builder:
    """Writes one rank's program.

    Args:
        graph: where nodes go.
        mesh_shape: sizes of the mesh axes.
        coords: this rank's coordinate on each axis.
        group_names: name of the process group of each axis.
        fake_mode: mode of the fake values.
        device: where factory calls put their result.
    """

    def __init__(
        self,
        graph: fx.Graph,
        *,
        mesh_shape: Sequence[int],
        coords: Sequence[int],
        group_names: Sequence[str],
        fake_mode: FakeTensorMode,
        device: torch.device,
    ) -> None:
        self.graph = graph
        self.mesh_shape = tuple(mesh_shape)
        self.coords = tuple(coords)
        self.group_names = tuple(group_names)
        self.fake_mode = fake_mode
        self.device = device
        self.origin: str = ""
        self.times: int = 1  # how often what is emitted stands in a folded model
        self.phase: str = "forward"
        self._packs = False
        self._turned: set[fx.Node] = set()  # they may have other strides than their fakes

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call; its fake value comes from running it on the fake arguments."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = fake_call(self.fake_mode, target, args, kwargs)
        node.meta["origin"] = self.origin
        node.meta["phase"] = self.phase
        node.meta["times"] = self.times
        if self._packs:
            node.meta["packs"] = "order"
        self._note_turned(node)
        return node

    @contextmanager
    def packing(self) -> Iterator[None]:
        """What is emitted meanwhile brings a tensor into the order of ranks, or out of it."""
        before, self._packs = self._packs, True
        yield
        self._packs = before

    def _note_turned(self, node: fx.Node) -> None:
        """Fakes of products are contiguous: the real ones, and what follows them, need not be."""
        product = node.target is torch.ops.autopar.einsum.default
        if product or not self._turned.isdisjoint(node.all_input_nodes):
            packed = node.kwargs.get("memory_format") is torch.contiguous_format
            if not packed and not lays_out_contiguously(node.target, node.args):
                self._turned.add(node)

    def note_dense(self, node: fx.Node) -> None:
        """Take a result for what its fake says, as that of an op on dense operands is."""
        self._turned.discard(node)

    def value(self, node: fx.Node) -> Tensor:
        """The fake tensor of a node."""
        return value_of(node)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(self.value(node).shape)

    def pack(self, *outputs: fx.Node | None) -> fx.Node:
        """One node whose value is the tuple of `outputs`: what a lowering returns for several."""
        return self.call(pack, *outputs)

    def item(self, x: fx.Node, index: int) -> fx.Node:
        """One output of an op with several."""
        return self.call(operator.getitem, x, index)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`x` in another dtype."""
        if self.value(x).dtype == dtype:
            return x
        return self.call(aten._to_copy.default, x, dtype=dtype)

    def widen(self, x: fx.Node) -> fx.Node:
        """`x` in at least float32, for sums over many elements or ranks."""
        return self.cast(x, torch.promote_types(self.value(x).dtype, torch.float32))

    # --- collectives ---------------------------------------------------------------------------
    def _collective(self, kind: str, axis: int, num_bytes: int, target: Any, *args: Any) -> fx.Node:
        started = self.call(target, *args)
        started.meta["collective"] = (kind, axis, num_bytes, self.times)
        return self.call(c10d.wait_tensor.default, started)

    def _num_bytes(self, node: fx.Node) -> int:
        value = self.value(node)
        return value.numel() * value.element_size()

    def all_reduce(self, x: fx.Node, axis: int, op: str = "sum") -> fx.Node:
        """Reduce over the ranks of `axis` (`sum`, `max` or `min`)."""
        if self.mesh_shape[axis] == 1:
            return x
        x = self.contiguous(x)
        return self._collective(
            "all_reduce", axis, self._num_bytes(x), c10d.all_reduce.default, x, op,
            self.group_names[axis],
        )  # fmt: skip

    def all_gather(self, x: fx.Node, axis: int, dim: int, split: int = 1) -> fx.Node:
        """Concatenate the shards of `axis` along `dim`, undoing `Shard(dim, split)`."""
        size = self.mesh_shape[axis]
        if size == 1:
            return x
        local = self.shape(x)
        x = self.contiguous(x)
        flat = self._collective(
            "all_gather", axis, self._num_bytes(x) * size, c10d.all_gather_into_tensor.default,
            self.call(aten.reshape.default, x, [1, *local]), size, self.group_names[axis],
        )  # fmt: skip
        if dim == 0 and split == 1:
            return self.call(aten.reshape.default, flat, [size * local[0], *local[1:]])
        # (size, …, split · run, …) -> (…, split, size, run, …)
        run = local[dim] // split
        parts = self.call(
            aten.reshape.default, flat, [size, *local[:dim], split, run, *local[dim + 1 :]]
        )
        rank = len(local) + 2
        order = [*range(1, dim + 2), 0, *range(dim + 2, rank)]
        moved = self.call(aten.permute.default, parts, order)
        full = [*local[:dim], size * local[dim], *local[dim + 1 :]]
        return self.call(aten.reshape.default, moved, full)

    def reduce_scatter(self, x: fx.Node, axis: int, dim: int, split: int = 1) -> fx.Node:
        """Sum over `axis`, keeping this rank's `Shard(dim, split)`."""
        size = self.mesh_shape[axis]
        if size == 1:
            return x
        x = self._parts_first(x, size, dim, split)
        num_bytes = self._num_bytes(x)
        local = self.shape(x)[1:]
        out = self._collective(
            "reduce_scatter", axis, num_bytes, c10d.reduce_scatter_tensor.default,
            self.contiguous(x), "sum", size, self.group_names[axis],
        )  # fmt: skip
        return self.call(aten.reshape.default, out, list(local))

    def _parts_first(self, x: fx.Node, size: int, dim: int, split: int) -> fx.Node:
        """`(…, n, …)` to `(size, …, n / size, …)`: what each rank gets, in rank order."""
        shape = self.shape(x)
        run = shape[dim] // (split * size)
        parts = self.call(
            aten.reshape.default, x, [*shape[:dim], split, size, run, *shape[dim + 1 :]]
        )
        rank = len(shape) + 2
        order = [dim + 1, *range(dim + 1), *range(dim + 2, rank)]
        moved = self.call(aten.permute.default, parts, order)
        return self.call(
            aten.reshape.default, moved, [size, *shape[:dim], split * run, *shape[dim + 1 :]]
        )

    def all_to_all(self, x: fx.Node, axis: int, src: Placement, dst: Placement) -> fx.Node:
        """From `Shard(src.dim)` to `Shard(dst.dim)` on `axis`."""
        size = self.mesh_shape[axis]
        if size == 1:
            return x
        parts = self._parts_first(x, size, dst.dim, dst.split)
        local = self.shape(parts)[1:]
        splits = [1] * size
        flat = self._collective(
            "all_to_all", axis, self._num_bytes(parts), c10d.all_to_all_single.default,
            self.contiguous(parts), splits, splits, self.group_names[axis],
        )  # fmt: skip
        run = local[src.dim] // src.split
        shaped = self.call(
            aten.reshape.default,
            flat,
            [size, *local[: src.dim], src.split, run, *local[src.dim + 1 :]],
        )
        rank = len(local) + 2
        order = [*range(1, src.dim + 2), 0, *range(src.dim + 2, rank)]
        moved = self.call(aten.permute.default, shaped, order)
        full = [*local[: src.dim], size * local[src.dim], *local[src.dim + 1 :]]
        return self.call(aten.reshape.default, moved, full)

    def rotate(self, x: fx.Node, axis: int) -> fx.Node:
        """Send to the next rank along the ring of `axis`, receive from the one before."""
        size = self.mesh_shape[axis]
        if size == 1:
            return x
        me = self.coords[axis]
        shape = self.shape(x)
        count = shape[0]
        outgoing = [count if rank == (me + 1) % size else 0 for rank in range(size)]
        incoming = [count if rank == (me - 1) % size else 0 for rank in range(size)]
        return self._collective(
            "send_recv", axis, self._num_bytes(x), c10d.all_to_all_single.default,
            self.contiguous(x), incoming, outgoing, self.group_names[axis],
        )  # fmt: skip

    def exchange(
        self, x: fx.Node, axis: int, incoming: Sequence[int], outgoing: Sequence[int]
    ) -> fx.Node:
        """Send so many rows of `x` to each rank of `axis`, in their order, and receive others."""
        return self._collective(
            "all_to_all", axis, self._num_bytes(x), c10d.all_to_all_single.default,
            self.contiguous(x), list(incoming), list(outgoing), self.group_names[axis],
        )  # fmt: skip

    # --- local moves ---------------------------------------------------------------------------
    def contiguous(self, x: fx.Node) -> fx.Node:
        if self.value(x).is_contiguous():
            return x
        return self._packed(x)

    def dense(self, x: fx.Node) -> fx.Node:
        """`x`, for an op that fails or reads wrong elements where it is not contiguous."""
        return self._packed(x) if x in self._turned else self.contiguous(x)

    def alone(self, x: fx.Node) -> fx.Node:
        """`x`, for an op whose result has a storage as large as that of which `x` shows a part."""
        part = self.value(x).untyped_storage().nbytes() > self._num_bytes(x)
        return self.call(aten.clone.default, x) if part else x

    def _packed(self, x: fx.Node) -> fx.Node:
        return self.call(aten.clone.default, x, memory_format=torch.contiguous_format)

    def shard(self, x: fx.Node, axis: int, dim: int, split: int = 1) -> fx.Node:
        """This rank's `Shard(dim, split)` of a tensor replicated on `axis`."""
        size, me = self.mesh_shape[axis], self.coords[axis]
        if size == 1:
            return x
        shape = self.shape(x)
        run = shape[dim] // (split * size)
        if split == 1:
            return self.call(aten.slice.Tensor, x, dim, me * run, (me + 1) * run)
        parts = self.call(
            aten.reshape.default, x, [*shape[:dim], split, size, run, *shape[dim + 1 :]]
        )
        mine = self.call(aten.select.int, parts, dim + 1, me)
        return self.call(aten.reshape.default, mine, [*shape[:dim], split * run, *shape[dim + 1 :]])
