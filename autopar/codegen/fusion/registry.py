"""`@pattern`: registers how a fused op takes the place of a chain of an emitted graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.codegen.fusion.rewriter import Rewriter
from autopar.core import extensions

__all__ = ["PATTERNS", "Pattern", "pattern"]

Rewrite = Callable[[Rewriter, fx.Node], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Looks at nodes of some targets and rewrites what it knows.

    Attributes:
        kernel: the name by which it is switched off; several patterns may share one.
        anchors: targets of nodes to look at.
        rewrite: changes the graph at a node; False where nothing was done.
        rank: patterns of lower rank go first.
        default: False for one that runs only where it is asked for.
    """

    kernel: str
    anchors: tuple[Any, ...]
    rewrite: Rewrite
    rank: int
    default: bool


PATTERNS: list[Pattern] = []


def pattern(
    kernel: str, *anchors: Any, rank: int = 50, default: bool = True
) -> Callable[[Rewrite], Rewrite]:
    """Register a rewrite at nodes of these targets.

    Those of the backward should have a lower rank than those of the forward, which may then find
    that nobody reads their inner values any more.

    Args:
        kernel: name to switch it off by.
        *anchors: targets of the nodes to look at, last op of the chain.
        rank: order among patterns.
        default: whether it runs without being asked for.
    """

    def register(rewrite: Rewrite) -> Rewrite:
        again = [p for p in PATTERNS if extensions.is_same(p.rewrite, rewrite)]
        for old in again:
            PATTERNS.remove(old)
        extensions.note("pattern", [kernel], rewrite)
        PATTERNS.append(
            Pattern(kernel=kernel, anchors=anchors, rewrite=rewrite, rank=rank, default=default)
        )
        return rewrite

    return register
