"""Seconds of attention over shards of the sequence, which runs in blocks of keys.

The lowerings (`codegen/lowerings/attention.py`, `zigzag.py`) call the op for each block that
travels around the ring, and merge the results. Where rows and keys are sharded alike, one block of
a causal call is half empty, and all others run whole, as some rank needs each of them; in a zigzag
every rank runs half of each. Elsewhere a block is run under a mask. So a causal call may take twice
as long in shards of rows as in shards of heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from autopar.core.key_blocks import first_operand, is_causal, is_diagonal, ring_axes
from autopar.core.placement import local_shape
from autopar.core.strategy import OpCall
from autopar.cost_model import DeviceProfile
from autopar.solver.local_work import LocalWork

if TYPE_CHECKING:
    from autopar.solver.candidates import Candidate

__all__ = ["block_scratch", "block_seconds", "may_run_in_blocks", "runs_in_blocks"]

_ATTENTION = (
    torch.ops.autopar.attention.default,
    torch.ops.autopar.attention_backward.default,
)
_VARIANTS = ("ring", "zigzag", "causal_rows")
_WIDE = 4  # bytes of what results are merged in, at least


def runs_in_blocks(call: OpCall, candidate: Candidate, mesh: tuple[int, ...]) -> bool:
    """True for attention whose rank sees the keys of other ranks' rows."""
    if call.target not in _ATTENTION:
        return False
    return any(v in _VARIANTS and n > 1 for v, n in zip(candidate.variants, mesh, strict=True))


def may_run_in_blocks(call: OpCall, candidates: Iterable[Candidate]) -> bool:
    """False where `runs_in_blocks` is for all candidates on any mesh."""
    if call.target not in _ATTENTION:
        return False
    return any(v in _VARIANTS for c in candidates for v in c.variants)


def block_scratch(call: OpCall, candidate: Candidate, mesh: tuple[int, ...]) -> float:
    """Bytes beside operands and outputs at the highest moment, as ops are emitted one by one."""
    return _Blocks(call, candidate, mesh, fuses=False).scratch()


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
    blocks = _Blocks(call, candidate, mesh, fuses)
    made = (*blocks.calls(flops, num_bytes), *blocks.sent(), *blocks.merged())
    return sum(work.seconds(device, dtype) for work in made)


class _Blocks:
    """What a candidate runs; arguments as of `block_seconds`."""

    def __init__(
        self, call: OpCall, candidate: Candidate, mesh: tuple[int, ...], fuses: bool
    ) -> None:
        self.call, self.candidate, self.mesh, self.fuses = call, candidate, mesh, fuses
        self.first = first_operand(call)
        self.ring = [mesh[axis] for axis in ring_axes(candidate.variants, mesh)]
        self.ring = [mesh[axis] for axis in ring_axes(candidate.variants, mesh)]
        self.count = math.prod(self.ring)
        self.is_zigzag = "zigzag" in candidate.variants
        self.is_masked = call.operand_index(self.first + 3) is not None
        self.is_causal = is_causal(call)
        alike = is_diagonal(call, candidate.inputs, mesh)
        self.is_diagonal = self.is_causal and not self.is_masked and alike
        self.rows = self._local(self.first)[2]
        self.out = self._bytes(~0)  # of the output, or of the gradient of the queries
        self.wide = self.out * max(1.0, _WIDE / call.outputs[0].dtype.itemsize)
        self.lse = float(_WIDE * math.prod(self._local(self.first)[:3]))

    def calls(self, flops: float, num_bytes: float) -> Iterator[LocalWork]:
        """Those of the op, and what makes their masks."""
        base = "attention_backward" if self.first else "attention"
        flops *= (2.0 if self.is_causal else 1.0) / self.count  # of a block that is not half empty
        if self.is_diagonal:
            yield LocalWork(f"{base}_causal", 1, num_bytes, flops / 2)
            if self.is_zigzag:
                yield LocalWork(base, 2 * (self.count - 1), num_bytes / 2, flops / 4)
            else:
                yield LocalWork(base, self.count - 1, num_bytes, flops)
            return
        if self.is_masked:  # of whose columns a call takes those of its block
            num_bytes -= self._bytes(self.first + 3) * (1 - 1 / self.count)
        made = self._pairs()
        suffix = "_masked" if made or self.is_masked else ""
        yield LocalWork(f"{base}{suffix}", self.count, num_bytes + made, flops)
        if made:
            yield LocalWork("pointwise", 2 * self.count, 8.0 * self.rows)  # positions of both
            yield LocalWork("pointwise", self.count * (1 + self.is_masked), 2.0 * made)

    def sent(self) -> Iterator[LocalWork]:
        """Copies of what is sent in the order in which that is done, and of what is received."""
        if self.is_zigzag:
            given, made = range(len(self.call.operands)), range(len(self.call.outputs))
            for tensor in (*given, *(~i for i in made)):
                yield LocalWork("memory", 2, 2 * self._bytes(tensor))
            return
        # of keys on each axis, and of gradients in each ring; what was received is in that order
        rings = sum(math.prod(self.ring[:i]) for i in range(len(self.ring)))
        copies = len(self.ring) + (rings if self.first else 0)
        for i in (1, 2):
            yield LocalWork("memory", copies, 2 * self._bytes(self.first + i))

    def merged(self) -> Iterator[LocalWork]:
        """What makes one result of those of all blocks."""
        merges = self.count - 1
        if self.is_zigzag:  # of chunks: one counts for the second, and one for both or neither
            yield from self._merged(3 * merges, 0.5, 2 * merges * (not self.first))
            yield LocalWork("memory", 1, 2 * self.out)  # both chunks
        else:
            yield from self._merged(merges, 1.0, merges * self.is_diagonal)
        if not self.first:
            return
        for i in (1, 2):
            num_bytes = self._bytes(self.first + i)
            yield LocalWork("pointwise", merges, 3 * num_bytes)
            if self.is_zigzag:
                yield LocalWork("pointwise", 2 * merges, 1.25 * num_bytes)
                yield LocalWork("memory", merges, 2 * num_bytes)

    def scratch(self) -> float:
        """Bytes of copies, of what travels, and of what is merged, less those of the outputs."""
        q, k = (self._bytes(self.first + i) for i in (0, 1))
        out, wide, many = self.out, self.wide, self.count > 2
        made = self._pairs()
        if self.count == 1:  # a mask of the user's is there until both are one, and no output is
            outputs = sum(self._bytes(~i) for i in range(len(self.call.outputs)))
            return max(made, (1 + self.is_masked) * made - outputs)
        if self.first:
            travel = (8 if many else 6) * k
            if self.is_zigzag:
                return 3 * q + travel + 2 * wide + many * out / 2 - (q + 2 * k)
            added = (8 if many else 4) * k + 3 * wide + (wide > out) * out
            return made + max(added, travel + 2 * out) - (q + 2 * k)
        if self.is_zigzag:
            return q + 2 * k + 2 * wide + out / 2 - out
        merged = 3 * wide + many * 2 * k
        return made + max(merged, 3 * k + (wide if many else out), 2 * k + 2 * out) - out

    def _pairs(self) -> float:
        """Bytes of the causal mask of a block that has one."""
        if self.is_diagonal or not self.is_causal:
            return 0.0
        return float(self.rows * self._local(self.first + 1)[2])

    def _merged(self, times: int, share: float, shifted: int) -> Iterator[LocalWork]:
        """Results of a share of the rows, added or weighted by their log-sum-exp.

        Args:
            times: so often.
            share: of the rows.
            shifted: how often a log-sum-exp says that nothing counts.
        """
        out, wide, lse = share * self.out, share * self.wide, 2 * share * self.lse
        yield LocalWork("pointwise", shifted, lse)
        if not self.first:
            yield LocalWork("pointwise", (2 if self.fuses else 7) * times, lse)
        if self.fuses:
            yield LocalWork("pointwise", times, 2 * wide + out)
        else:
            yield LocalWork("pointwise", times, 3 * wide)
            yield LocalWork("pointwise", 0 if self.first else 2 * times, 2 * wide)
        if wide > out and times:
            ends = casts = round(1 / share)
            if not self.fuses:
                casts = times + 2 * ends
            elif self.is_zigzag and self.first:  # what is added to both chunks is in no kernel
                casts = 2 * ends + self.count - 1
            yield LocalWork("pointwise", casts, wide + out)

    def _bytes(self, tensor: int) -> float:
        """Of what a rank has of operand `tensor`, or of output `~tensor` where negative."""
        call, chosen = self.call, self.candidate
        if tensor >= 0:
            spec, layout = call.operands[tensor], chosen.inputs[tensor]
        else:
            spec, layout = call.outputs[~tensor], chosen.outputs[~tensor]
        return float(spec.dtype.itemsize * math.prod(local_shape(spec.shape, layout, self.mesh)))

    def _local(self, index: int) -> tuple[int, ...]:
        spec, layout = self.call.operands[index], self.candidate.inputs[index]
        return local_shape(spec.shape, layout, self.mesh)
