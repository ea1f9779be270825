"""The least seconds that each block of a model can take: its share of the work, evenly split.

No op of a step on n devices in m microbatches does less than 1 / (n m) of its flops at a time, and
touches no less than 1 / (n m) of its bytes; of those that are the same for all microbatches
(weights, and gradients of them), no less than 1 / n. So

    seconds(block) = sum_op roofline(flops / (n m), bytes / (n m) + lasting_bytes / n)

is below what any plan has, communication left out. Only ops that run at each turn count: those that
both a parameter and an input reach. An op that will be in a fused kernel counts with its share.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from autopar.core.cells import Cells
from autopar.core.fused import FusedShares, Share
from autopar.core.graph import TracedModel, dependents, node_info
from autopar.core.loops import bytes_read_again, steps_in_turn
from autopar.core.stage_folding import block_names, period_of
from autopar.core.work import LOOKUPS, global_flops, op_class
from autopar.cost_model import Cluster, compute_seconds_array, kernel_seconds
from autopar.solver.discrete.problem import Array
from autopar.solver.read_step import build_step
from autopar.solver.step import Op, Step, Value

__all__ = ["BlockWork", "owners_of"]


class _Work(NamedTuple):
    block: int
    backward: bool
    at_turns: bool
    flops: float
    num_bytes: float
    lasting_bytes: float
    shared_bytes: float = 0.0  # as part of a fused kernel
    shared_lasting_bytes: float = 0.0
    launches: int = 0
    steps: int = 1  # that run one after the other


class BlockWork:
    """The work of a step, by block in forward order.

    What stands in front of a block belongs to the one before it, and what stands in front of all
    to the first.

    Args:
        traced: the step on the whole batch, folded or not.
        cluster: whose devices compute.
        fused: what fusion will leave of ops' work.

    Attributes:
        names: FQN of every block of the model (`core/cells.py`).
        cells: of the graph.
        joint: True for a block that must stay with the one before: they repeat together.
        held: the blocks of the graph.
        like: for each of the model, which of these it is like.
        parameter_bytes: of each block of the model; one that several use counts where it is first.
        saved_bytes: of values that its forward keeps for the backward.
        crossing_bytes: of values that go from a block to the next one, between whichever least do.
    """

    def __init__(
        self, traced: TracedModel, cluster: Cluster, fused: FusedShares | None = None
    ) -> None:
        self.device = cluster.device
        self.cells = Cells(traced)
        whole = block_names(traced, self.cells)
        self.names = [name for name, _ in whole]
        repeats = {r.container: r for r in traced.repeats}
        periods = [period_of(name, repeats) for name in self.names]
        self.joint = [False, *(a is not None and a == b for a, b in pairwise(periods))]
        held = list(dict.fromkeys(captured for _, captured in whole))
        self.held = held
        self.like = np.array([held.index(captured) for _, captured in whole], dtype=int)
        self.count = max(len(held), 1)
        step = build_step(traced, fused)
        self.groups, owners = self._groups(traced, held, step)
        found = np.zeros((2, self.count))
        for value, num_bytes in step.saved.items():
            found[0, owners.get(value[0], 0)] += num_bytes
        users = {value[0]: op.name for value, op, _ in reversed(list(step.consumers()))}
        for name in step.parameters:
            found[1, owners.get(users.get(name, ""), 0)] += step.specs[name, 0].num_bytes
        self.saved_bytes, self.parameter_bytes = found[:, self.like]
        self.crossing_bytes = self._crossing(step, owners)

    def _crossing(self, step: Step, owners: Mapping[str, int]) -> int:
        found = [0] * (self.count - 1)
        seen: set[Value] = set()
        for value, op, _ in step.consumers():
            maker = owners.get(value[0])
            if value in seen or op.backward or maker is None or maker + 1 != owners.get(op.name):
                continue
            seen.add(value)
            found[maker] += step.specs[value].num_bytes
        return min(found, default=0)

    def _groups(
        self, traced: TracedModel, held: list[str], step: Step
    ) -> tuple[dict[tuple[str, str, str], list[_Work]], dict[str, int]]:
        """Work by kind, dtype and kind of fused kernel, and the block of each op."""
        weighted = dependents(traced, "parameter")
        fed = dependents(traced, "input", "seed")
        sums, lasting = set(step.gradients.values()), _lasting(step, fed)
        groups: dict[tuple[str, str, str], list[_Work]] = defaultdict(list)
        owners = owners_of(traced, self.cells, held, step)
        for op in step.ops.values():
            kind = op_class(op.call)
            if kind == "view" or op.name not in owners:
                continue
            dtype = op.call.outputs[0].dtype if op.call.outputs else torch.float32
            at_turns = op.name in weighted and op.name in fed
            share = step.shares.get(op.name)
            shared = _traffic(op, lasting, sums, share) if share is not None else (0.0, 0.0)
            launches = share.launches if share is not None else 0
            kernel = share.op_class if share is not None else ""
            groups[kind, str(dtype).removeprefix("torch."), kernel].append(
                _Work(
                    owners[op.name],
                    op.backward,
                    at_turns,
                    global_flops(op.call),
                    *_traffic(op, lasting, sums),
                    *shared,
                    launches,
                    steps_in_turn(op.call),
                )
            )
        return groups, owners

    def named(self, cuts: Sequence[str]) -> tuple[str, ...]:
        """Cuts by the blocks that stages begin with; as they are where no block begins."""
        return tuple(cut if cut in self.names else self.cells.of_cut(cut) for cut in cuts)

    def run_of(self, cuts: Sequence[str], stage: int) -> tuple[int, int]:
        """First block of a stage, and the one behind its last."""
        ends = [0, *(self.names.index(cut) for cut in cuts), len(self.names)]
        return ends[stage], ends[stage + 1]

    def whole(self) -> Array:
        """Seconds of each block on one device, forward and backward."""
        return np.add(*self._seconds(self.groups, 1, 1))

    def at_turns(self, devices: int, microbatches: int) -> tuple[Array, Array]:
        """Least seconds of the forward and of the backward of each block, at each turn.

        Args:
            devices: that share the work.
            microbatches: of a step.
        """
        groups = {key: [w for w in works if w.at_turns] for key, works in self.groups.items()}
        return self._seconds(groups, devices, microbatches)

    def _seconds(
        self, groups: Mapping[tuple[str, str, str], list[_Work]], devices: int, microbatches: int
    ) -> tuple[Array, Array]:
        found = np.zeros((2, self.count))
        split = devices * microbatches
        for (kind, dtype, kernel), works in groups.items():
            if works:
                table = np.array(works, dtype=float)
                num_bytes = table[:, 4] / split + table[:, 5] / devices
                seconds = compute_seconds_array(
                    self.device, kind, dtype, table[:, 3] / split, num_bytes, table[:, 9]
                )
                if kernel:
                    num_bytes = table[:, 6] / split + table[:, 7] / devices
                    shared = kernel_seconds(self.device, kernel, dtype, num_bytes, table[:, 8])
                    seconds = np.minimum(seconds, shared)
                np.add.at(found, (table[:, 1].astype(int), table[:, 0].astype(int)), seconds)
        return found[0, self.like], found[1, self.like]


def owners_of(traced: TracedModel, cells: Cells, held: Sequence[str], step: Step) -> dict[str, int]:
    """Number of the block that each op runs with; ops that may run in any stage are left out.

    What stands around the blocks goes with the one before, a backward with its forward.
    """
    if not held:
        return {}
    number = {name: i for i, name in enumerate(held)}
    nodes = traced.nodes()
    owners: dict[str, int] = {}
    of_module: dict[str, int] = {}  # around the blocks
    current = 0
    for op in step.ops.values():
        info = node_info(traced, nodes[op.name])
        inside = number.get(cells.of_module(info.module) or "")
        if inside is not None:
            owners[op.name] = inside
            current = current if op.backward else inside
        elif not op.backward:
            owners[op.name] = of_module[info.module] = current
        elif info.module in of_module:
            owners[op.name] = of_module[info.module]
    return owners


def _lasting(step: Step, fed: Collection[str]) -> set[str]:
    """Parameters, and what is made of them alone and is no larger: the same for all turns.

    What is larger may be repeated for each sample of the batch, which is split over the turns.
    """
    sizes = {name: math.prod(spec.shape) for name, spec in step.parameters.items()}
    for op in step.ops.values():
        largest = max((sizes.get(name, 0) for name, _ in op.operands), default=0)
        own = max((math.prod(spec.shape) for spec in op.call.outputs), default=0)
        if op.name not in fed and own <= largest:
            sizes[op.name] = own
    return set(sizes)


def _traffic(
    op: Op, lasting: Collection[str], sums: set[Value], share: Share | None = None
) -> tuple[float, float]:
    """Bytes that the op reads and writes on one device, and those that are the same for all turns.

    A lookup reads only the rows that it needs. With a `share`, those of its part of a kernel.
    """
    parts = [0.0, float(bytes_read_again(op.call)) if share is None else 0.0]
    reads = share.reads if share is not None else (1.0,) * len(op.operands)
    writes = share.writes if share is not None else (1.0,) * len(op.call.outputs)
    for index, (spec, factor) in enumerate(zip(op.call.outputs, writes, strict=True)):
        parts[(op.name, index) in sums] += factor * spec.num_bytes
    if op.call.target in LOOKUPS and share is None:
        return 2 * parts[0], parts[1]
    for value, spec, factor in zip(op.operands, op.call.operands, reads, strict=True):
        parts[value[0] in lasting] += factor * spec.num_bytes
    return parts[0], parts[1]
