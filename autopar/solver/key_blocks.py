"""Seconds of attention over shards of the sequence, which runs in blocks of keys.

The lowering (`codegen/lowerings/attention.py`) calls the op for each block that travels around the
ring, and merges the results. Where rows and keys are sharded alike, one block of a causal call is
half empty, and all others run whole, as some rank needs each of them; elsewhere each is run under a
mask. So a causal call takes up to twice as long in shards of rows as in shards of heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from autopar.core.key_blocks import first_operand, is_causal, is_diagonal, ring_axes
from autopar.core.placement import local_shape
from autopar.core.strategy import OpCall
from autopar.cost_model import DeviceProfile, compute_seconds_array

if TYPE_CHECKING:
    from autopar.solver.candidates import Candidate

__all__ = ["block_seconds", "runs_in_blocks"]

_ATTENTION = (
    torch.ops.autopar.attention.default,
    torch.ops.autopar.attention_backward.default,
)
_VARIANTS = ("ring", "causal_rows")
_WIDE = 4  # bytes of what results are merged in, at least


class _Work(NamedTuple):
    """Ops of one kind: how many, and what each does."""

    op_class: str
    times: int
    num_bytes: float
    flops: float = 0.0

    def seconds(self, device: DeviceProfile, dtype: str) -> float:
        if not self.times:
            return 0.0
        flops, num_bytes = np.array(self.flops), np.array(self.num_bytes)
        each = compute_seconds_array(device, self.op_class, dtype, flops, num_bytes)
        return self.times * float(each)


def runs_in_blocks(call: OpCall, candidate: Candidate, mesh: tuple[int, ...]) -> bool:
    """True for attention whose rank sees the keys of other ranks' rows."""
    if call.target not in _ATTENTION:
        return False
    return any(v in _VARIANTS and n > 1 for v, n in zip(candidate.variants, mesh, strict=True))


def block_seconds(
    device: DeviceProfile,
    call: OpCall,
    candidate: Candidate,
    mesh: tuple[int, ...],
    *,
    dtype: str,
    flops: float,
    num_bytes: float,
    fuses: bool,
) -> float:
    """Seconds of the local compute.

    Args:
        device: that runs it.
        call, candidate, mesh: as for `runs_in_blocks`, which is True.
        dtype: that it computes in.
        flops, num_bytes: a rank's share of the flops of the call, and the bytes of its operands and
            outputs.
        fuses: elementwise ops that follow each other are one kernel.
    """
    blocks = _Blocks(call, candidate, mesh)
    merging = blocks.merged_backward(fuses) if blocks.first else blocks.merged_forward(fuses)
    works = (*blocks.calls(flops, num_bytes), *merging)
    return sum(work.seconds(device, dtype) for work in works)


class _Blocks:
    """What a candidate runs; arguments as of `block_seconds`."""

    def __init__(self, call: OpCall, candidate: Candidate, mesh: tuple[int, ...]) -> None:
        self.call, self.candidate, self.mesh = call, candidate, mesh
        self.first = first_operand(call)
        self.count = math.prod(mesh[axis] for axis in ring_axes(candidate.variants, mesh))
        self.is_masked = call.operand_index(self.first + 3) is not None
        self.is_causal = is_causal(call)
        alike = is_diagonal(call, candidate.inputs, mesh)
        self.is_diagonal = self.is_causal and not self.is_masked and alike
        self.q, k, _ = (self._local(self.first + i) for i in range(3))
        self.pairs = self.q[2] * k[2]

    def calls(self, flops: float, num_bytes: float) -> Iterator[_Work]:
        """Those of the op, and what makes their masks."""
        base = "attention_backward" if self.first else "attention"
        flops *= (2.0 if self.is_causal else 1.0) / self.count  # of a block that is not half empty
        if self.is_diagonal:
            yield _Work(f"{base}_causal", 1, num_bytes, flops / 2)
            yield _Work(base, self.count - 1, num_bytes, flops)
            return
        made = self.pairs if self.is_causal else 0
        suffix = "_masked" if made or self.is_masked else ""
        yield _Work(f"{base}{suffix}", self.count, num_bytes + made, flops)
        if made:
            yield _Work("pointwise", 2 * self.count, 8.0 * self.q[2])  # positions of both
            yield _Work("pointwise", self.count * (1 + self.is_masked), 2.0 * made)

    def merged_forward(self, fuses: bool) -> Iterator[_Work]:
        """Outputs of blocks, weighted by their log-sum-exp."""
        merges, out = self.count - 1, _size(self.call.outputs[0].dtype, self.q)
        lse, wide = 2.0 * _WIDE * math.prod(self.q[:3]), self._wide(out)
        yield from self._sent()
        if fuses:
            yield _Work("pointwise", (2 + self.is_diagonal) * merges, lse)
            yield _Work("pointwise", merges, 2 * wide + out)
        else:
            yield _Work("pointwise", (7 + self.is_diagonal) * merges, lse)
            yield _Work("pointwise", 2 * merges, 2 * wide)
            yield _Work("pointwise", merges, 3 * wide)
        yield from self._cast(out, 1 if fuses else merges + 2)

    def merged_backward(self, fuses: bool) -> Iterator[_Work]:
        """Gradients of the queries added up, and those of the keys that travel on."""
        merges, out = self.count - 1, _size(self.call.outputs[0].dtype, self.q)
        lse, wide = 2.0 * _WIDE * math.prod(self.q[:3]), self._wide(out)
        yield from self._sent()
        yield from self._sent()
        yield _Work("pointwise", self.is_diagonal * merges, lse)
        for number in (1, 2):
            yield _Work("pointwise", merges, 3 * self._key_size(number))
        yield _Work("pointwise", merges, 2 * wide + out if fuses else 3 * wide)
        yield from self._cast(out, 1 if fuses else merges + 2)

    def _sent(self) -> Iterator[_Work]:
        """Copies of keys and values in the order in which they are sent."""
        for number in (1, 2):
            yield _Work("memory", int(self.count > 1), 2 * self._key_size(number))

    def _cast(self, out: float, times: int) -> Iterator[_Work]:
        wide = self._wide(out)
        if wide > out and self.count > 1:
            yield _Work("pointwise", times, wide + out)

    def _wide(self, num_bytes: float) -> float:
        return num_bytes * max(1.0, _WIDE / self.call.outputs[0].dtype.itemsize)

    def _key_size(self, number: int) -> float:
        """Bytes of k or v that a rank holds."""
        index = self.first + number
        return _size(self.call.operands[index].dtype, self._local(index))

    def _local(self, index: int) -> tuple[int, ...]:
        spec, layout = self.call.operands[index], self.candidate.inputs[index]
        return local_shape(spec.shape, layout, self.mesh)


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> float:
    return float(dtype.itemsize * math.prod(shape))
