"""What copies of activations with host memory run beside, before anything is placed.

What is kept for a block goes to the host beside the block's forward, and comes back beside the
backward that runs before its own, which is taken to be as long. Whatever is chosen, a block takes
no less than its ops with the fastest candidate each, so that of b bytes over a link of bandwidth w,
what compute waits for is taken to be

    max(0, b / w − Σ_ops min_candidates seconds),

where the copies of one block share the sum by their bytes. It is an estimate for the search; the
emitted program is simulated (`cost_model/simulator.py`), and its waits are what a plan predicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autopar.core.blocks import Block
from autopar.core.host import WITH_HOST
from autopar.cost_model import can_offload
from autopar.solver.offers import Offers
from autopar.solver.step import Op, Step

__all__ = ["run_beside"]

_Part = tuple[Block | None, bool]


def run_beside(step: Step, offers: Offers) -> Mapping[str, float]:
    """Seconds of compute that are left for each copy with host memory to hide behind, by op.

    Empty where the host's memory is the device's, as nothing runs beside a copy there.
    """
    copies: dict[_Part, list[Op]] = defaultdict(list)
    for op in step.ops.values():
        if op.call.target in WITH_HOST:
            copies[_part(step, op)].append(op)
    if not copies or not can_offload(offers.cluster.device):
        return {}
    seconds: dict[_Part, float] = defaultdict(float)
    for op in step.ops.values():
        part = _part(step, op)
        if part in copies and op.call.target not in WITH_HOST and not step.is_hoisted(op.name):
            found = offers.of(op.call, step.shares.get(op.name)).seconds
            seconds[part] += float(found.min()) if len(found) else 0.0
    return {
        op.name: seconds[part] * _bytes(op) / sum(map(_bytes, alike))
        for part, alike in copies.items()
        for op in alike
    }


def _part(step: Step, op: Op) -> _Part:
    place = step.blocks.place.get(op.name)
    return (None if place is None else place[0]), op.backward


def _bytes(op: Op) -> int:
    return op.call.outputs[0].num_bytes
