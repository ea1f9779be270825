"""Rules in factor notation: one letter per independent dim of an op.

``m k, k n -> m n`` says it all about a matmul: sharding ``m`` or ``n`` shards the output, sharding
``k`` leaves a partial sum. Most ops are of this kind, and most rules are one call of `by_labels`.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.core.placement import Partial, Placement, Replicate, Shard
from autopar.core.strategy import AxisStrategy, OpCall

__all__ = ["by_labels", "linear_rows", "replicated"]

Labels = Sequence[str | None]
"""One label per tensor dim; None is a dim that cannot be sharded."""


def _placement(labels: Labels, label: str) -> Placement:
    return Shard(list(labels).index(label)) if label in labels else Replicate()


def replicated(call: OpCall) -> AxisStrategy:
    """Every rank of the axis does the whole op: always right."""
    return AxisStrategy(
        tuple(Replicate() for _ in call.operands), tuple(Replicate() for _ in call.outputs)
    )


def by_labels(
    call: OpCall,
    inputs: Sequence[Labels],
    outputs: Sequence[Labels],
    *,
    summed: Sequence[str] = (),
) -> list[AxisStrategy]:
    """Rows of an op given the label of each dim.

    Args:
        call: the op.
        inputs, outputs: labels of each operand's and output's dims.
        summed: labels that the op sums over; sharding one makes every output without it Partial.
            A label that is in no output and not in `summed` is not offered.
    """
    rows = [replicated(call)]
    seen: set[str] = set()
    for label in (x for labels in (*inputs, *outputs) for x in labels):
        if label is None or label in seen:
            continue
        seen.add(label)
        missing = [labels for labels in outputs if label not in labels]
        if missing and label not in summed:
            continue
        rows.append(
            AxisStrategy(
                tuple(_placement(labels, label) for labels in inputs),
                tuple(
                    _placement(labels, label) if label in labels else Partial()
                    for labels in outputs
                ),
            )
        )
    return rows


def linear_rows(call: OpCall, groups: Sequence[Sequence[int]]) -> list[AxisStrategy]:
    """Rows for ops that are linear in each of `groups` of operands taken together.

    `add(x, y)` is linear in (x, y): both Partial gives a Partial sum. `mul(x, y)` is linear in
    (x,) and in (y,): one Partial, the other replicated.
    """
    return [
        AxisStrategy(
            tuple(Partial() if i in group else Replicate() for i in range(len(call.operands))),
            tuple(Partial() for _ in call.outputs),
        )
        for group in groups
    ]
