"""One device's share of a planned step, op by op: all that is needed to price it without a device.

A value is ``(producer, output index)``. Bytes and flops are those of the local shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autopar.core.blocks import block_of
from autopar.core.timeline import PlannedMove

__all__ = ["LocalOp", "LocalProgram", "LocalValue"]

LocalValue: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOp:
    """One op on one device.

    Attributes:
        name: of its graph node.
        target: name of the operator.
        op_class: of the cost model.
        phase: forward or backward.
        module: FQN of the user's module that it runs in.
        dtype: of the first output.
        flops: local.
        reads, writes: values with their local bytes.
        gemm: (batch, M, N, K) of a contraction.
        linear: a contraction with a weight, or of a weight's gradient.
        gradient: the latter.
        view: shows the memory of its first operand.
        folded: a bias that the contraction before it adds.
        moves: collectives that belong to it.
    """

    name: str
    target: str
    op_class: str
    phase: Literal["forward", "backward"]
    module: str
    dtype: str
    flops: float
    reads: tuple[tuple[LocalValue, int], ...]
    writes: tuple[tuple[LocalValue, int], ...]
    gemm: tuple[int, int, int, int] | None = None
    linear: bool = False
    gradient: bool = False
    view: bool = False
    folded: bool = False
    moves: tuple[PlannedMove, ...] = ()


class LocalProgram:
    """The ops of one device, with what stands where.

    Args:
        ops: forward and then backward, in order of execution.
    """

    def __init__(self, ops: Iterable[LocalOp]) -> None:
        self.ops = tuple(ops)
        self.by_name = {op.name: op for op in self.ops}
        self.readers: dict[LocalValue, list[LocalOp]] = defaultdict(list)
        for op in self.ops:
            if not op.view:
                for value, _ in op.reads:
                    self.readers[self.base(value)].append(op)

    def base(self, value: LocalValue) -> LocalValue:
        """The value whose memory this one shows."""
        op = self.by_name.get(value[0])
        while op is not None and (op.view or op.folded):
            value = op.reads[0][0]
            op = self.by_name.get(value[0])
        return value

    def block(self, container: str, number: int) -> tuple[LocalOp, ...]:
        """The ops of one numbered block."""
        return tuple(op for op in self.ops if block_of(op.module) == (container, number))

    def around(self, container: str) -> tuple[tuple[LocalOp, ...], tuple[LocalOp, ...]]:
        """The ops in front of the blocks and behind them, with their backward ops."""
        inside = [self._inside(op, container) for op in self.ops]
        forward = [i for i, op in enumerate(self.ops) if op.phase == "forward"]
        backward = [i for i, op in enumerate(self.ops) if op.phase == "backward"]
        front, behind = _split(forward, inside)
        late, early = _split(backward, inside)
        return self._pick([*front, *early]), self._pick([*behind, *late])

    def _inside(self, op: LocalOp, container: str) -> bool:
        block = block_of(op.module)
        return block is not None and block.container == container

    def _pick(self, positions: Sequence[int]) -> tuple[LocalOp, ...]:
        return tuple(self.ops[i] for i in positions)

    def saved(
        self, ops: Sequence[LocalOp], again: Collection[str]
    ) -> tuple[dict[LocalValue, int], list[LocalOp]]:
        """What some ops' backward keeps of their forward.

        Args:
            ops: of one block.
            again: names of forward ops whose results are not kept but computed again.

        Returns:
            The kept values with their bytes, and the ops that run again, in order.
        """
        forward = {op.name: op for op in ops if op.phase == "forward"}
        kept: dict[LocalValue, int] = {}
        repeated: set[str] = set()
        stack = [value for op in ops if op.phase == "backward" for value, _ in op.reads]
        while stack:
            value = stack.pop()
            source = self.by_name.get(value[0])
            if source is None or source.phase == "backward":
                continue  # a parameter or an input, or made by the backward itself
            if source.name in repeated:
                continue
            if source.view or source.folded or (source.name in again and source.name in forward):
                repeated.add(source.name)
                stack += [read for read, _ in source.reads]
            else:
                # as it was made: what a collective made of it is not kept
                kept[value] = dict(source.writes)[value]
        order = [op for op in ops if op.name in repeated and op.name in again]
        return kept, order


def _split(positions: Sequence[int], inside: Sequence[bool]) -> tuple[list[int], list[int]]:
    """Positions in front of the first one inside, and all others that are not inside."""
    first = next((n for n, i in enumerate(positions) if inside[i]), len(positions))
    return (
        list(positions[:first]),
        [i for i in positions[first:] if not inside[i]],
    )
