"""How the ops may be sharded, and what they cost."""

from __future__ import annotations

import math

import torch

from autopar.extend import (
    AxisStrategy,
    Communication,
    OpCall,
    Replicate,
    Shard,
    by_labels,
    linear_rows,
    op_work,
    rule,
)
from autopar_example import ops as _ops  # noqa: F401  (defines the ops)

example = torch.ops.autopar_example


@rule(example.center.default)
def center_rule(call: OpCall) -> list[AxisStrategy]:
    """Rows are independent; over a split last dim the sums are reduced, one number a row."""
    rank = len(call.operands[0].shape)
    names = [*"abcdefgh"[: rank - 1], None]
    last = Shard(rank - 1)
    split = AxisStrategy(
        inputs=(last,),
        outputs=(last, Replicate()),
        variant="split",
        comm=(Communication("all_reduce", ~1),),  # of as many bytes as output 1 has
    )
    return [*by_labels(call, [names], [names, names]), *linear_rows(call, [(0,)]), split]


@rule(example.project.default)
def project_rule(call: OpCall) -> list[AxisStrategy]:
    return by_labels(call, ["bsk", "kn"], ["bsn"], summed="k")


@op_work(example.project.default, op_class="matmul")
def project_flops(call: OpCall) -> float:
    x, weight = call.operands
    return 2.0 * math.prod(x.shape) * weight.shape[1]
