"""Which dtype gradients are summed over ranks in, where the user has set it.

A gradient runs from the op that computes it through casts, views and sums of several uses to its
parameter's storage. On this way a value of another dtype than the one that was set must not be
summed over ranks: edges that would are forbidden, so the sum is left to those of that dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from autopar.core.ops import NARROW, REARRANGING
from autopar.core.placement import Layout
from autopar.solver.discrete.problem import Array
from autopar.solver.step import Step, Value

__all__ = ["GradientSums"]

_PASSING = {
    *REARRANGING,
    NARROW,
    torch.ops.aten.alias.default,
    torch.ops.aten.add.Tensor,
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class GradientSums:
    """Forbids sums over ranks in other dtypes.

    Args:
        step: with the gradients.
        reduce_dtype: the one that was set, or None.
    """

    def __init__(self, step: Step, reduce_dtype: str | None) -> None:
        self.kept: set[Value] = set()
        self.ways: set[str] = set()
        if reduce_dtype is not None:
            for value in step.gradients.values():
                self._follow(step, value, _DTYPES[reduce_dtype])

    def _follow(self, step: Step, value: Value, wanted: torch.dtype) -> None:
        stack = [value]
        while stack:
            value = stack.pop()
            if step.specs[value].dtype != wanted:
                self.kept.add(value)
            op = step.ops.get(value[0])
            if op is not None and op.backward and op.call.target in _PASSING:
                self.ways.add(op.name)
                stack.extend(op.operands)

    def restrict(
        self,
        matrix: Array,
        value: Value,
        consumer: str,
        have: Sequence[Layout],
        want: Sequence[Layout],
    ) -> Array:
        """The costs of an edge, infinite where it would sum a gradient in another dtype.

        Args:
            matrix: seconds, a row for each layout in `have`, a column for each in `want`.
            value: what travels.
            consumer: the op that reads it, or "" where it goes to storage.
        """
        if value not in self.kept or (consumer and consumer not in self.ways):
            return matrix
        sums = [[_adds(a, b) for b in want] for a in have]
        return np.where(np.array(sums), np.inf, matrix)


def _adds(have: Layout, want: Layout) -> bool:
    return any(p.is_partial and not q.is_partial for p, q in zip(have, want, strict=True))
