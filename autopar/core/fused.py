"""What remains of the memory traffic of each op that a fused kernel replaces.

A kernel reads its operands once, writes its results once and is launched once. Each of these is
assigned to one op of the kernel: an operand to the first op that reads it, a result to the op that
yields it, the launch to one of them. So with b the bytes of an op's operands and results when it
runs alone, and r and w the factors held here,

    bytes = Σ r_i b_i + Σ w_j b_j

where all factors are 1 for an op that is not fused. The bytes of the ops of a kernel add up to
those of the kernel, in any layout that they share.

A value that no kernel writes takes no memory, and what a kernel of the backward computes again need
not be kept for it. So of an op in a kernel it is also known what must be there when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from torch import fx

__all__ = ["FusedShares", "Inside", "Share", "origin_of"]


@dataclass(frozen=True, slots=True)
class Inside:
    """An operand that another op of the kernel yields, and what redistributing it would cost.

    Attributes:
        index: of the operand.
        write: share of the operand's bytes that its producer would have to write.
        launch: True if the kernel would become two.
        lost: bytes that the second part would read again of the first, or the first write for it,
            as a
            multiple of the operand's.
    """

    index: int
    write: float
    launch: bool
    lost: float = 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """What remains of the work of an op inside a kernel.

    Attributes:
        target: the op, as text.
        op_class: of the kernel.
        reads: factor of each operand's bytes.
        writes: factor of each result's bytes.
        launches: 1 for the op that carries the kernel's launch, more where the kernel is cut, else
            0.
        inside: operands that stay inside the kernel.
        held: the way to each operand of the kernel that this op answers for: the index of one of
            its own operands, then of an operand of the op which yields that, and so on.
        kernel: number of the kernel; equal blocks have those of the first. Shares that differ in
            nothing else are equal.
    """

    target: str
    op_class: str
    reads: tuple[float, ...]
    writes: tuple[float, ...]
    launches: int
    inside: tuple[Inside, ...] = ()
    held: tuple[tuple[int, ...], ...] = ()
    kernel: int | None = field(default=None, compare=False)


FusedShares: TypeAlias = dict[str, Share]
"""Shares by the name of the op in the traced graph (`origin_of`)."""


def origin_of(node: fx.Node) -> str:
    """The op of the traced graph that a node of a part, a microbatch or a copy comes from."""
    return str(node.meta.get("origin", node.name))
