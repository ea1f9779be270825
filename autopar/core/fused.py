"""What a fused kernel leaves of the traffic of each op that it stands for.

A kernel reads its operands once, writes its results once and is launched once. Each of these
belongs to one op of the kernel: an operand to the first that reads it, a result to the one that
yields it, the launch to one of them. So with b the bytes of an op's operands and results where it
runs, and r and w the factors here,

    bytes = Σ r_i b_i + Σ w_j b_j

which of ops that nothing fuses are all 1. The bytes of the ops of a kernel add up to those of the
kernel, in any layout that they share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import fx

__all__ = ["FusedShares", "Inside", "Share", "origin_of"]


@dataclass(frozen=True, slots=True)
class Inside:
    """An operand that another op of the kernel yields, and what it costs where that is moved.

    Attributes:
        index: of the operand.
        write: share of the operand's bytes that its producer must write then.
        launch: the kernel falls in two.
        lost: bytes that the second part reads again of the first, or the first writes for it, as a
            multiple of the operand's.
    """

    index: int
    write: float
    launch: bool
    lost: float = 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """What an op of a kernel does of its work.

    Attributes:
        target: the op, as text.
        op_class: of the kernel.
        reads: factor of each operand's bytes.
        writes: of each result's.
        launches: 1 for the op that has the kernel's launch, more where the kernel is cut.
        inside: operands that stay in the kernel.
    """

    target: str
    op_class: str
    reads: tuple[float, ...]
    writes: tuple[float, ...]
    launches: int
    inside: tuple[Inside, ...] = ()


FusedShares: TypeAlias = dict[str, Share]
"""Shares by the name of the op in the traced graph (`origin_of`)."""


def origin_of(node: fx.Node) -> str:
    """The op of the traced graph that a node of a part, a microbatch or a copy comes from."""
    return str(node.meta.get("origin", node.name))
