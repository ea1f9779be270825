"""Seconds and bytes of a pipelined step from the plans of its stages.

Stages run on the clock of their schedule (`cost_model/pipeline.py`), each rank as soon as it has
prepared its parameters, and reduces gradients behind its last action::

    step = max_r (end of r's last action + finish_r) + max_r offload_r

The prediction is that of the rank that works longest. Whatever it does not work, it stands idle::

    step = compute + exposed communication and copies + offload + bubble
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.core.list_schedule import RankLoad
from autopar.core.plan import CommBytes, Plan, Prediction
from autopar.core.schedule import Kind, Orders
from autopar.core.timeline import PipelineSlot, Timeline, rounded
from autopar.core.transfers import Transfer
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import CollectiveKind
from autopar.cost_model.pipeline import PipelineSimulation, simulate_pipeline

__all__ = [
    "PipelinedTime",
    "RanksTime",
    "action_seconds",
    "pipelined_time",
    "rank_load",
    "ranks_time",
    "transfer_seconds",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinedTime:
    """What is expected of a pipelined step.

    Attributes:
        predicted: of the rank that works longest; its peak memory is the largest of all ranks.
        bubble: share of all ranks' time in which they stand idle.
        slots: what each rank does when.
    """

    predicted: Prediction
    bubble: float
    slots: tuple[PipelineSlot, ...]


def action_seconds(plan: Plan) -> dict[Kind, float]:
    """Seconds of one microbatch's forward and backward, and of the backward's two parts."""
    phases = plan.predicted.phases
    return {
        "F": phases["forward"],
        "B": phases["input"] + phases["weight"],
        "I": phases["input"],
        "W": phases["weight"],
    }


def rank_load(plan: Plan, limit: int | None) -> RankLoad:
    """What a rank with one stage does and, within a limit in bytes, may hold."""
    seconds, held = action_seconds(plan), plan.predicted.held
    load = RankLoad(
        forward_s=seconds["F"],
        input_s=seconds["I"],
        weight_s=seconds["W"],
        begin_s=plan.predicted.phases["prepare"],
    )
    if limit is None:
        return load
    assert held is not None
    waiting = sum(held.waiting.values()) + held.up
    delayed = sum(held.delayed.values())
    tops = {
        part: max(sum(kinds.values()) for (_, p), kinds in held.tops.items() if p == part)
        for _, part in held.tops
    }
    own = {0: waiting, 1: waiting, 2: delayed}  # a part's microbatch is in its highest moment
    budget = min(limit - tops[part] + own[part] for part in own if part in tops)
    return replace(load, waiting=waiting, delayed=delayed, budget=budget)


def transfer_seconds(
    transfers: Iterable[Transfer], plans: Sequence[Plan], cluster: Cluster, size: int
) -> list[float]:
    """Seconds that a microbatch's values take over each cut, the slower way of the two.

    Args:
        transfers: between the stages.
        plans: of the stages.
        cluster: with the mesh of one pipeline rank.
        size: number of pipeline ranks.
    """
    mesh = cluster.mesh_shape
    line = replace(cluster, mesh_shape=(size, *mesh), axis_names=("pipeline", *cluster.axis_names))
    found: list[dict[str, float]] = [{"forward": 0.0, "backward": 0.0} for _ in plans[1:]]
    for transfer in transfers:
        below = min(transfer.source, transfer.target)
        if transfer.phase not in ("forward", "backward"):
            continue
        num_bytes = math.prod(transfer.shape) * transfer.dtype.itemsize
        plan = plans[transfer.target]  # whose mesh may have other axes than the cluster's
        for placement, parts in zip(plan.inputs[transfer.value], plan.mesh_shape, strict=True):
            num_bytes //= parts if placement.is_shard else 1
        seconds = line.collective_seconds(CollectiveKind("send_recv"), num_bytes, 0)
        found[below][transfer.phase] += seconds
    return [max(ways.values()) for ways in found]


@dataclass(frozen=True, slots=True)
class RanksTime:
    """When each rank of a pipeline does what.

    Attributes:
        simulated: the actions.
        own: stages of each rank.
        ends_s: when each has reduced its gradients.
        updated_s: of each, the optimizer, with what states on the host add.
        busy_s: of each, all that it works in a step.
    """

    simulated: PipelineSimulation
    own: tuple[tuple[Plan, ...], ...]
    ends_s: tuple[float, ...]
    updated_s: tuple[float, ...]
    busy_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Until the last rank is done."""
        return max(self.ends_s) + max(self.updated_s)


def ranks_time(plans: Sequence[Plan], orders: Orders, transfer_s: Sequence[float]) -> RanksTime:
    """Run the stages' plans on the clock.

    Args:
        plans: of the stages; stage s is on rank s modulo the number of ranks.
        orders: of each rank.
        transfer_s: as `transfer_seconds` gives them.
    """
    size = len(orders)
    own = tuple(tuple(plans[rank::size]) for rank in range(size))
    prepare_s, finish_s = (
        [sum(p.predicted.phases[phase] for p in stages) for stages in own]
        for phase in ("prepare", "finish")
    )
    seconds = _beside_sends(plans, transfer_s, size)
    simulated = simulate_pipeline(orders, seconds, list(transfer_s), begin_s=prepare_s)
    updated_s = tuple(
        sum(p.predicted.update_s + p.predicted.offload_s for p in stages) for stages in own
    )
    ends = zip(simulated.finish_s(), finish_s, strict=True)
    worked = zip(prepare_s, simulated.busy_s, finish_s, updated_s, strict=True)
    return RanksTime(
        simulated, own, tuple(map(sum, ends)), updated_s, busy_s=tuple(map(sum, worked))
    )


def _beside_sends(
    plans: Sequence[Plan], transfer_s: Sequence[float], size: int
) -> list[dict[Kind, float]]:
    """Seconds of the actions of each stage, with what its sends and receives take of compute.

    A measured send is one that every rank of a ring makes, with the receive: of one of both, half.
    """
    seconds = [action_seconds(p) for p in plans]
    links = (plans[0].cluster.get(link) or {} for link in ("intra", "inter"))
    share = max(float(link.get("compute_share", 0.0)) for link in links) if size > 1 else 0.0
    if not share:
        return seconds
    cuts = [0.0, *transfer_s, 0.0]
    for stage, (into_s, out_s) in enumerate(pairwise(cuts)):
        for kind in ("F", "I", "B"):
            seconds[stage][kind] += share * (into_s + out_s) / 2
    return seconds


def pipelined_time(
    plans: Sequence[Plan],
    orders: Orders,
    transfer_s: Sequence[float],
    memory: Mapping[str, int],
) -> PipelinedTime:
    """What is expected of a step, from the stages' plans.

    Args:
        plans: of the stages; stage s is on rank s modulo the number of ranks.
        orders: of each rank.
        transfer_s: as `transfer_seconds` gives them.
        memory: bytes by kind of the rank that peaks highest (`rank_memory`).
    """
    size, time = len(orders), ranks_time(plans, orders, transfer_s)
    slots = [
        PipelineSlot(s.rank, s.action.kind, s.action.stage, s.action.microbatch,
                     rounded(s.start_s), rounded(s.end_s - s.start_s))
        for s in time.simulated.spans
    ]  # fmt: skip
    for rank, end_s in enumerate(time.simulated.finish_s()):
        slots += _once(time.own[rank], rank, size, end_s)
    idle_s = sum(time.step_s - busy for busy in time.busy_s)
    return PipelinedTime(
        predicted=_predicted(time, memory),
        bubble=idle_s / (size * time.step_s) if time.step_s else 0.0,
        slots=tuple(sorted(slots, key=lambda s: (s.start_s, s.rank))),
    )


def _once(stages: Sequence[Plan], rank: int, size: int, end_s: float) -> Iterable[PipelineSlot]:
    """What a rank does before its actions, and from `end_s` on, its last stage first."""
    before = 0.0
    for index, plan in enumerate(stages):
        seconds = plan.predicted.phases["prepare"]
        if seconds:
            yield PipelineSlot(rank, "P", rank + index * size, 0, rounded(before), rounded(seconds))
        before += seconds
    for index, plan in reversed(list(enumerate(stages))):
        seconds = plan.predicted.phases["finish"]
        if seconds:
            yield PipelineSlot(rank, "R", rank + index * size, 0, rounded(end_s), rounded(seconds))
        end_s += seconds


def _predicted(time: RanksTime, memory: Mapping[str, int]) -> Prediction:
    own, busy_s, step_s = time.own, time.busy_s, time.step_s
    slowest = [p.predicted for p in own[max(range(len(own)), key=busy_s.__getitem__)]]
    num_axes = max(len(p.hidden_comm_s) for p in slowest)
    hidden = [sum(p.hidden_comm_s[axis] for p in slowest if p.hidden_comm_s)
              for axis in range(num_axes)]  # fmt: skip
    compute_s = sum(p.compute_time_s for p in slowest)
    comm_s = sum(p.comm_time_s for p in slowest)
    update_s, offload_s = (sum(getattr(p, n) for p in slowest) for n in ("update_s", "offload_s"))
    copies_s = sum(p.exposed_copy_s for p in slowest)
    idle_s = step_s - compute_s - (comm_s - sum(hidden)) - copies_s - update_s - offload_s
    phases: Counter[str] = Counter()
    for p in slowest:
        phases.update(p.phases)
    return Prediction(
        step_time_s=step_s,
        compute_time_s=compute_s,
        comm_time_s=comm_s,
        hidden_comm_s=tuple(hidden),
        packing_s=sum(p.packing_s for p in slowest),
        unseen_compute_s=sum(p.unseen_compute_s for p in slowest),
        bubble_s=max(0.0, idle_s),
        peak_memory_bytes=sum(memory.values()),
        memory=dict(memory),
        comm_bytes=_comm_bytes(slowest),
        timeline=_timeline(slowest),
        phases=dict(phases),
        update_s=update_s,
        offload_s=offload_s,
        host_bytes=max(sum(p.predicted.host_bytes for p in stages) for stages in own),
        host_activation_bytes=max(
            sum(p.predicted.host_activation_bytes for p in stages) for stages in own
        ),
        copy_time_s=sum(p.copy_time_s for p in slowest),
        exposed_copy_s=copies_s,
    )


def _comm_bytes(stages: Iterable[Prediction]) -> tuple[CommBytes, ...]:
    size: Counter[tuple[int, str]] = Counter()
    count: Counter[tuple[int, str]] = Counter()
    for row in (row for p in stages for row in p.comm_bytes):
        size[row.axis, row.kind] += row.num_bytes
        count[row.axis, row.kind] += row.count
    return tuple(
        CommBytes(axis=axis, kind=kind, num_bytes=size[axis, kind], count=n)
        for (axis, kind), n in sorted(count.items())
    )


def _timeline(stages: Sequence[Prediction]) -> Timeline:
    """The stages of a rank one behind the other."""
    if len(stages) == 1:
        return stages[0].timeline
    kinds = tuple(dict.fromkeys(kind for p in stages for kind in p.timeline.kinds))
    ops = []
    for p in stages:
        for op in p.timeline.ops:
            known: Mapping[str, int] = dict(zip(p.timeline.kinds, op.live, strict=False))
            live = tuple(known.get(kind, 0) for kind in kinds) if op.live else ()
            ops.append(replace(op, live=live))
    alternatives = {k: a for p in stages for k, a in p.timeline.alternatives.items()}
    return Timeline(ops=tuple(ops), kinds=kinds, alternatives=alternatives)
