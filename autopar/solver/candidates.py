"""Candidates of an op: one rule row per mesh axis, kept where every shard is even."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.core.fused import Share
from autopar.core.loops import LOOPS, bytes_read_again, steps_in_turn, working_tensors
from autopar.core.placement import Layout, is_valid, shard_factor
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.core.work import LOOKUPS, global_flops, op_class
from autopar.cost_model import Cluster, CollectiveKind, compute_seconds_array, kernel_seconds
from autopar.errors import UnsupportedOpWarning
from autopar.solver.discrete.problem import Array
from autopar.solver.key_blocks import (
    block_scratch,
    block_seconds,
    may_run_in_blocks,
    runs_in_blocks,
)
from autopar.solver.rules.joined import joined_rows
from autopar.solver.rules.labels import replicated
from autopar.solver.rules.own_order import own_order_rows
from autopar.solver.rules.registry import find_rule, goes_together, stub_for
from autopar.solver.split_rows import row_seconds, splits_rows

__all__ = [
    "Candidate",
    "InnerCollective",
    "Pricer",
    "expand",
    "has_scratch",
    "scratch_bytes",
    "unlike",
]


class InnerCollective(NamedTuple):
    """A collective inside an op's lowering, priced by the whole mesh layout."""

    kind: str
    axis: int
    num_bytes: float


class Candidate(NamedTuple):
    """One way to run an op on the whole mesh; `copied` as of `AxisStrategy`."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    variants: tuple[str, ...]
    comm: tuple[InnerCollective, ...]
    copied: tuple[int, ...] = ()


_warned: set[str] = set()


def axis_rows(call: OpCall) -> list[AxisStrategy]:
    """The rule's rows for one axis; one warning per op where there is no rule."""
    if call.axis_size == 1:
        return [replicated(call)]
    function = find_rule(call.target)
    if function is None:
        if str(call.target) not in _warned:
            _warned.add(str(call.target))
            warnings.warn(stub_for(call), UnsupportedOpWarning, stacklevel=2)
        return [replicated(call)]
    return list(dict.fromkeys((*function(call), *own_order_rows(call), *joined_rows(call))))


def expand(call: OpCall, mesh_shape: Sequence[int]) -> list[Candidate]:
    """All valid combinations of rule rows, one per mesh axis."""
    mesh = tuple(mesh_shape)
    per_axis = [
        [row for row in axis_rows(_with_size(call, size)) if _fits_alone(call, row, axis, mesh)]
        for axis, size in enumerate(mesh)
    ]
    found: dict[tuple[Any, ...], Candidate] = {}
    for rows in itertools.product(*per_axis):
        inputs = tuple(zip(*(row.inputs for row in rows), strict=True)) if call.operands else ()
        outputs = tuple(zip(*(row.outputs for row in rows), strict=True)) if call.outputs else ()
        if not all(
            is_valid(layout, spec.shape, mesh)
            for layout, spec in (
                *zip(inputs, call.operands, strict=True),
                *zip(outputs, call.outputs, strict=True),
            )
        ):
            continue
        if not goes_together(call, rows, mesh):
            continue
        variants = tuple(row.variant for row in rows)
        comm = tuple(
            InnerCollective(c.kind, axis, c.times * _local_bytes(call, inputs, outputs, c, mesh))
            for axis, row in enumerate(rows)
            for c in row.comm * _rounds(rows, axis, mesh)
        )
        copied = max((row.copied for row in rows), key=len, default=())  # once for all axes
        each = Candidate(inputs, outputs, variants, comm, copied)
        found.setdefault((inputs, outputs, variants), each)
    return list(found.values())


def _rounds(rows: Sequence[AxisStrategy], axis: int, mesh: tuple[int, ...]) -> int:
    """How often the collectives of an axis are made inside of those of the axes before."""
    if not any(c.nested for c in rows[axis].comm):
        return 1
    same = (row.variant == rows[axis].variant for row in rows[:axis])
    return math.prod(size for size, nests in zip(mesh, same, strict=False) if nests)


def _with_size(call: OpCall, size: int) -> OpCall:
    return OpCall(
        call.target, call.args, call.kwargs, call.operands, call.outputs, size, call.nodes
    )


def _fits_alone(call: OpCall, row: AxisStrategy, axis: int, mesh: tuple[int, ...]) -> bool:
    """Drop rows that no combination can save: a dim that one axis alone does not divide."""
    size = mesh[axis]
    pairs = (
        *zip(row.inputs, call.operands, strict=True),
        *zip(row.outputs, call.outputs, strict=True),
    )
    return all(
        not p.is_shard or (p.dim < len(spec.shape) and spec.shape[p.dim] % (size * p.split) == 0)
        for p, spec in pairs
    )


def _local_bytes(
    call: OpCall,
    inputs: tuple[Layout, ...],
    outputs: tuple[Layout, ...],
    comm: Any,
    mesh: tuple[int, ...],
) -> float:
    if comm.tensor >= 0:
        spec, layout = call.operands[comm.tensor], inputs[comm.tensor]
    else:
        spec, layout = call.outputs[~comm.tensor], outputs[~comm.tensor]
    return spec.num_bytes / shard_factor(layout, mesh)


@dataclass(slots=True)
class Pricer:
    """Seconds of candidates on a cluster.

    Attributes:
        cluster: with the mesh.
        fuses: elementwise ops are fused.
    """

    cluster: Cluster
    fuses: bool = False

    def collective(self, kind: str, axis: int, num_bytes: float, shared: int = 1) -> float:
        """Seconds of one collective over a mesh axis; `shared` as in `bucketed_seconds`."""
        return self.cluster.bucketed_seconds(CollectiveKind(kind), num_bytes, axis, shared)

    def compute(
        self, call: OpCall, candidates: Sequence[Candidate], share: Share | None = None
    ) -> Array:
        """Seconds of the local compute of each candidate.

        With a `share`, those that a fused kernel takes on behalf of the op, but for candidates with
        collectives inside, which end a kernel.
        """
        mesh = self.cluster.mesh_shape
        kind = op_class(call)
        if kind == "view" or not candidates:
            return np.zeros(len(candidates))
        flops = global_flops(call)
        local_flops = np.empty(len(candidates))
        local_bytes = np.empty(len(candidates))
        for index, candidate in enumerate(candidates):
            split = 1
            for axis, size in enumerate(mesh):
                if any(x[axis].is_shard for x in (*candidate.inputs, *candidate.outputs)):
                    split *= size
            local_flops[index] = flops / split
            local_bytes[index] = _traffic(call, candidate, mesh)
        alone = compute_seconds_array(
            self.cluster.device, kind, _dtype(call), local_flops, local_bytes, steps_in_turn(call)
        )
        alone += self._copies(call, candidates)
        for index, candidate in enumerate(candidates):
            if any(candidate.variants):
                work = local_flops[index], local_bytes[index]
                alone[index] = self._of_variant(call, candidate, *work, alone[index])
        if share is None:
            return alone
        moved = np.array([_shared_traffic(call, c, share, mesh) for c in candidates])
        launches = np.array(share.launches)
        shared = kernel_seconds(self.cluster.device, share.op_class, _dtype(call), moved, launches)
        broken = np.array([bool(c.comm) for c in candidates])
        return np.where(broken, alone, np.minimum(alone, shared))

    def _of_variant(
        self, call: OpCall, candidate: Candidate, flops: float, num_bytes: float, own_s: float
    ) -> float:
        """Seconds of a candidate that may run as other ops than the traced one.

        Args:
            call, candidate: the op.
            flops, num_bytes, own_s: of a rank, if it ran as traced.
        """
        given = (self.cluster.device, call, candidate, self.cluster.mesh_shape)
        dtype, fuses = _dtype(call), self.fuses
        if runs_in_blocks(*given[1:]):
            return block_seconds(*given, dtype=dtype, flops=flops, num_bytes=num_bytes, fuses=fuses)
        if splits_rows(*given[1:]):
            return row_seconds(*given, dtype=dtype, own_s=own_s, fuses=fuses)
        return own_s

    def _copies(self, call: OpCall, candidates: Sequence[Candidate]) -> Array:
        """Seconds of what the lowering of each candidate copies around the op."""
        if not any(candidate.copied for candidate in candidates):
            return np.zeros(len(candidates))
        found = (_copied_bytes(call, c, self.cluster.mesh_shape) for c in candidates)
        moved = np.array([2.0 * (sum(before) + sum(behind)) for before, behind in found])
        launches = np.array([len(candidate.copied) for candidate in candidates])
        return kernel_seconds(self.cluster.device, "memory", _dtype(call), moved, launches)

    def broken(
        self, call: OpCall, share: Share, sources: Sequence[Layout], index: int,
        candidates: Sequence[Candidate],
    ) -> Array:  # fmt: skip
        """Seconds that a fused kernel loses where an operand inside it is moved.

        Args:
            call, share: the op that reads the operand.
            sources: layouts that the operand may be produced in.
            index: of the operand.
            candidates: of the op; those with collectives inside are in no kernel.

        Returns:
            (sources, candidates), 0 where nothing is moved.
        """
        inside = next((x for x in share.inside if x.index == index), None)
        if inside is None:
            return np.zeros((len(sources), len(candidates)))
        mesh, num_bytes = self.cluster.mesh_shape, call.operands[index].num_bytes
        targets = [c.inputs[index] for c in candidates]
        # what is lost is split as what the operand was made of: a partial sum's terms are, too
        split = [math.prod(n for p, n in zip(x, mesh, strict=True) if not p.is_replicate)
                 for x in sources]  # fmt: skip
        written = np.array([
            num_bytes * (inside.write / shard_factor(x, mesh) + inside.lost / s)
            for x, s in zip(sources, split, strict=True)
        ])  # fmt: skip
        read = np.array([num_bytes / shard_factor(x, mesh) for x in targets])
        lost = kernel_seconds(
            self.cluster.device, share.op_class, _dtype(call), written[:, None] + read,
            np.array(int(inside.launch)),
        )  # fmt: skip
        joined = np.array([not c.comm for c in candidates])
        return np.where(unlike(sources, targets, mesh) & joined, lost, 0.0)

    def inner(self, candidates: Sequence[Candidate]) -> Array:
        """Seconds of the collectives inside each candidate."""
        return np.array([sum(self.collective(*self._args(c)) for c in x.comm) for x in candidates])

    @staticmethod
    def _args(comm: InnerCollective) -> tuple[str, int, float]:
        return comm.kind, comm.axis, comm.num_bytes


def unlike(
    sources: Sequence[Layout], targets: Sequence[Layout], mesh: Sequence[int]
) -> NDArray[np.bool_]:
    """(sources, targets), True where two layouts differ on an axis of several devices."""
    numbers: dict[Layout, int] = {}
    real = [axis for axis, size in enumerate(mesh) if size > 1]
    before, after = (
        np.array([numbers.setdefault(tuple(x[i] for i in real), len(numbers)) for x in layouts])
        for layouts in (sources, targets)
    )
    return np.asarray(before[:, None] != after)


def _dtype(call: OpCall) -> str:
    return str(call.outputs[0].dtype if call.outputs else torch.float32).removeprefix("torch.")


def _shared_traffic(
    call: OpCall, candidate: Candidate, share: Share, mesh: tuple[int, ...]
) -> float:
    """Bytes that a kernel moves on behalf of one of its ops."""
    return sum(
        factor * spec.num_bytes / shard_factor(layout, mesh)
        for factors, specs, layouts in (
            (share.reads, call.operands, candidate.inputs),
            (share.writes, call.outputs, candidate.outputs),
        )
        for factor, spec, layout in zip(factors, specs, layouts, strict=True)
        if factor
    )


def _copied_bytes(
    call: OpCall, candidate: Candidate, mesh: tuple[int, ...]
) -> tuple[list[float], list[float]]:
    """Bytes of the copies of operands, and of outputs, around a local op."""
    before, behind = [], []
    for i in candidate.copied:
        if i >= 0:
            before.append(call.operands[i].num_bytes / shard_factor(candidate.inputs[i], mesh))
        else:
            behind.append(call.outputs[~i].num_bytes / shard_factor(candidate.outputs[~i], mesh))
    return before, behind


def scratch_bytes(call: OpCall, candidates: Sequence[Candidate], mesh: tuple[int, ...]) -> Array:
    """Bytes that the lowering of each candidate needs beside its operands and its outputs.

    While the op runs, copies of its operands and what it works with; then the output that the next
    copy is made of.
    """
    found = (_copied_bytes(call, c, mesh) if c.copied else ([], []) for c in candidates)
    copied = np.array([max(sum(before), max(behind, default=0.0)) for before, behind in found])
    for index, candidate in enumerate(candidates):
        if runs_in_blocks(call, candidate, mesh):
            copied[index] = block_scratch(call, candidate, mesh)
    working = working_tensors(call)
    if working is None:
        return copied
    # split as the first operand, a step's samples
    return copied + [working.num_bytes / shard_factor(c.inputs[0], mesh) for c in candidates]


def has_scratch(call: OpCall, candidates: Sequence[Candidate]) -> bool:
    """False where `scratch_bytes` are 0."""
    if call.target in LOOPS or any(c.copied for c in candidates):
        return True
    return may_run_in_blocks(call, candidates)


def _traffic(call: OpCall, candidate: Candidate, mesh: tuple[int, ...]) -> float:
    """Bytes that the local op reads and writes; a lookup reads only the rows it needs."""
    written = sum(
        spec.num_bytes / shard_factor(layout, mesh)
        for spec, layout in zip(call.outputs, candidate.outputs, strict=True)
    )
    if call.target in LOOKUPS:
        return 2.0 * written
    read = sum(
        spec.num_bytes / shard_factor(layout, mesh)
        for spec, layout in zip(call.operands, candidate.inputs, strict=True)
    )
    return read + written + bytes_read_again(call)
