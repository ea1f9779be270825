"""Seconds and bytes of a part of a local program, such as one transformer block.

An eager program is issued by a host that runs ahead of the device, so with G the seconds of the
device's kernels, C those of exposed collectives and H those in which the host issues the ops::

    seconds = max(G + C, H)

What a framework does to a chain of ops before it runs (fuses it, captures it in a graph, computes
linears in float8, splits a collective to overlap it) is an `Execution`. Fused ops read what comes
from outside their chain and write what is read outside, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.core.work import family
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import CollectiveKind
from autopar.cost_model.compute import compute_seconds_array
from benchmarks.contention import beside_s, wave_factor
from benchmarks.local_ops import LocalOp, LocalProgram, LocalValue

__all__ = ["ONE_KERNEL", "Execution", "LossSteps", "PassCost", "SegmentCost", "segment_cost"]

_POINTWISE = {"pointwise", "special", "tanh", "random", "memory"}
_FUSIBLE = {
    "none": frozenset[str](),
    "pointwise": frozenset(_POINTWISE),
    "compiled": frozenset(_POINTWISE | {"reduction", "norm", "softmax", "loss"}),
}
_VIEW = 0.25  # of the host's seconds of an op that launches a kernel: assumed
_DROPOUT = "autopar.dropout.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSteps:
    """The ops of a cross entropy; the default is one kernel forward and one backward.

    Attributes:
        passes: reads and writes of all logits in the forward.
        passes_backward: of all logits in the backward, beside those of its one kernel.
        kernels: of the forward, over logits.
        token_ops, token_ops_backward: ops over one number of each token, beside those.
    """

    passes: int = 1
    passes_backward: int = 0
    kernels: int = 1
    token_ops: int = 0
    token_ops_backward: int = 0


ONE_KERNEL = LossSteps()


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a framework runs a program.

    Attributes:
        fuse: "none"; "pointwise" for chains of pointwise ops; "compiled" for reductions too.
        fused_norms: a norm is one kernel, whatever ops it is written in.
        host: the host walks through the program op by op; False for one captured before.
        function_factor: host seconds of a linear, norm, softmax or activation over those of torch's
            own; more than 1 where each is an autograd function written in Python.
        forward_calls, again_calls: host calls beside the ops of a segment's forward, and when it is
            computed again, such as those that save and restore the states of random number
            generators; of segments that may be computed again.
        collective_calls: host calls of a collective, issuing it and waiting for it.
        loss: how the loss of the logits is computed.
        dropout_mask: dropout keeps a mask of one byte an element.
        float8_linears: linears of blocks compute in float8; operands are scanned and cast first.
        delayed_scales: the scales of float8 are known before: a norm casts what a linear reads of
            it, other operands are cast once, in both layouts, and a weight's cast is kept
            (TransformerEngine's user guide: delayed scaling, FP8 weight caching; Megatron-Core's
            gpt_layer_specs.py: norms alone are in one module with the linear behind them).
        whole_again: what computes again runs to its end, not only as far as the backward needs; for
            segments that are computed again as a whole.
        split_collectives: a collective beside a linear is sent in as many parts as the axis has
            ranks, all but the first beside the linear.
        async_linears: of a linear's two products in the backward, each runs beside a collective of
            the other: the input is gathered for the weight's gradient while the input's gradient is
            computed, and that is summed over ranks while the weight's is.
    """

    fuse: str = "none"
    fused_norms: bool = True
    host: bool = True
    function_factor: float = 1.0
    forward_calls: int = 0
    again_calls: int = 0
    collective_calls: int = 2
    loss: LossSteps = ONE_KERNEL
    dropout_mask: bool = True
    float8_linears: bool = False
    delayed_scales: bool = False
    whole_again: bool = False
    split_collectives: bool = False
    async_linears: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """One pass through a segment: device, exposed collectives, host; in seconds."""

    device_s: float = 0.0
    comm_s: float = 0.0
    host_s: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.device_s + self.comm_s, self.host_s)

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(
            device_s=self.device_s + other.device_s,
            comm_s=self.comm_s + other.comm_s,
            host_s=self.host_s + other.host_s,
        )

    def scaled(self, factor: float) -> PassCost:
        return PassCost(
            device_s=self.device_s * factor,
            comm_s=self.comm_s * factor,
            host_s=self.host_s * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCost:
    """One segment.

    Attributes:
        forward, recompute, backward: passes.
        weight_s: device seconds of the weights' gradients, a part of `backward`.
        saved_bytes: kept from the forward to the backward.
        again_bytes: what is computed again, and held while the segment's backward runs.
        working_bytes: the most that one op of the backward reads and writes.
    """

    forward: PassCost
    recompute: PassCost
    backward: PassCost
    weight_s: float
    saved_bytes: int
    again_bytes: int
    working_bytes: int


def segment_cost(
    program: LocalProgram,
    ops: Sequence[LocalOp],
    again: Sequence[str],
    cluster: Cluster,
    execution: Execution,
    *,
    float8: bool = False,
    calls: bool = True,
    axes: Sequence[int] = (),
) -> SegmentCost:
    """Price some ops of a program.

    Args:
        program: what they belong to.
        ops: forward and backward ops of one part.
        again: names of forward ops that the backward computes again.
        cluster: of the mesh that the program's collectives are on.
        execution: how it is run.
        float8: the part has linears that may compute in float8.
        calls: the part has the host calls beside its ops that `execution` names.
        axes: the cluster's axis for each of the program's mesh; default: the same.
    """
    pricer = _Pricer(program, cluster, execution, float8 and execution.float8_linears, axes)
    inner = _inside_norms(program, ops) if execution.fused_norms else frozenset()
    _, repeated = program.saved(ops, again)
    kept, _ = program.saved(ops, inner.union(again))
    everything, _ = program.saved(ops, inner)
    forward = [op for op in ops if op.phase == "forward"]
    backward = [op for op in ops if op.phase == "backward"]
    masks = sum(
        op.writes[0][1] // _itemsize(op.dtype)
        for op in forward
        if op.target == _DROPOUT and execution.dropout_mask and op.name not in again
    )
    working = max((sum(size for _, size in (*op.reads, *op.writes)) for op in backward), default=0)
    return SegmentCost(
        forward=pricer.cost(forward, execution.forward_calls if calls else 0),
        recompute=pricer.cost(
            forward if again and execution.whole_again else repeated, execution.again_calls
        ),
        backward=pricer.cost(backward),
        weight_s=pricer.cost([op for op in backward if op.gradient]).device_s,
        saved_bytes=sum(kept.values()) + masks,
        again_bytes=max(0, sum(everything.values()) - sum(kept.values())),
        working_bytes=working,
    )


class _Pricer:
    def __init__(
        self,
        program: LocalProgram,
        cluster: Cluster,
        execution: Execution,
        float8: bool,
        axes: Sequence[int],
    ) -> None:
        self.axes = axes
        self.program = program
        self.cluster = cluster
        self.execution = execution
        self.float8 = float8

    def cost(self, ops: Sequence[LocalOp], calls: int = 0) -> PassCost:
        """One pass through some ops, with host calls beside them."""
        if not ops:
            return PassCost()
        device_s = linear_s = 0.0
        host_ops = calls + _VIEW * sum(op.view for op in ops)
        for group in self._groups(ops):
            seconds = self._group(group)
            device_s += seconds
            host_ops += self._host_ops(group[0])
            linear_s += seconds if group[0].linear else 0.0
            if family(group[0].op_class) == "loss":
                more = self._loss(group[0])
                device_s += more.device_s
                host_ops += more.host_s
        comm_s, collectives = self._collectives(ops)
        if self.execution.split_collectives and comm_s:
            first = comm_s / max(self.cluster.mesh_shape)
            comm_s = first + max(0.0, comm_s - first - linear_s)
        host_ops += collectives * self.execution.collective_calls
        host_s = host_ops * self.cluster.device.host_op_s
        return PassCost(
            device_s=device_s, comm_s=comm_s, host_s=host_s if self.execution.host else 0.0
        )

    def _loss(self, op: LocalOp) -> PassCost:
        """What a loss takes beside its one kernel; `host_s` in ops."""
        steps, device = self.execution.loss, self.cluster.device
        forward = op.phase == "forward"
        small = steps.token_ops if forward else steps.token_ops_backward
        kernels = steps.kernels - 1 if forward else 0
        logits = max(size for _, size in op.reads)
        passes = steps.passes - 1.0 if forward else float(steps.passes_backward)
        moved = np.array([logits * passes, 0.0])
        large_s, token_s = compute_seconds_array(device, "memory", op.dtype, np.zeros(2), moved)
        overheads_s = device.kernel_overhead_s * (kernels - 1)
        return PassCost(
            device_s=float(token_s * small + (large_s + max(0.0, overheads_s) if passes else 0.0)),
            host_s=small + kernels,
        )

    def _host_ops(self, op: LocalOp) -> float:
        """What the host does for one kernel, in ops of torch's own."""
        if op.linear:  # the two products of a linear's backward are one function
            extra = 1.0 if op.phase == "forward" else 0.5
        else:
            extra = float(family(op.op_class) in ("norm", "softmax", "special"))
        return 1.0 + extra * (self.execution.function_factor - 1.0)

    def _collectives(self, ops: Sequence[LocalOp]) -> tuple[float, int]:
        """Seconds and number of the collectives of some ops; what two ops wait for is sent once."""
        sent: set[tuple[str, int, int]] = set()
        total = 0.0
        for op in ops:
            for move in op.moves:
                key = (move.of or op.name, move.axis, move.num_bytes)
                if not move.of.startswith("gradient of ") and key not in sent:
                    sent.add(key)
                    kind = CollectiveKind(move.kind)
                    axis = self.axes[move.axis] if self.axes else move.axis
                    seconds = self.cluster.collective_seconds(kind, move.num_bytes, axis)
                    product_s = self._beside(op, move.of)
                    total += beside_s(self.cluster.device, product_s, seconds) - product_s
        return total, len(sent)

    def _beside(self, op: LocalOp, arrives: str) -> float:
        """Seconds of the product that runs beside what arrives for an op, if there is one."""
        source = op if op.gradient else self.program.by_name.get(arrives)
        if not self.execution.async_linears or source is None:
            return 0.0
        if not source.linear or source.phase == "forward":
            return 0.0
        other = (source.module, not source.gradient)
        products = (o for o in self.program.ops if o.linear and o.phase == "backward")
        return sum(self._group([o]) for o in products if (o.module, o.gradient) == other)

    def _groups(self, ops: Sequence[LocalOp]) -> list[list[LocalOp]]:
        """Chains of ops that run as one kernel; every other op alone."""
        owner: dict[LocalValue, list[LocalOp]] = {}
        found: list[list[LocalOp]] = []
        for op in ops:
            if (op.view and op.op_class == "view") or op.folded:
                continue
            group = next(
                (
                    owner[self.program.base(value)]
                    for value, _ in op.reads
                    if self.program.base(value) in owner
                    and self._joins(owner[self.program.base(value)][-1], op)
                ),
                None,
            )
            if group is None:
                group = []
                found.append(group)
            group.append(op)
            for value, _ in op.writes:
                owner[value] = group
        return found

    def _cast(self, op: LocalOp) -> float:
        """Bytes moved to have a linear's operands in float8."""
        if not self.execution.delayed_scales:
            # each is scanned for its largest value, then read and written as float8
            return 2.5 * sum(size for _, size in op.reads)
        by_name = self.program.by_name
        made = [(by_name.get(self.program.base(value)[0]), size) for value, size in op.reads]
        known = [(by, size) for by, size in made if by is not None]
        if op.gradient:  # its input was transposed with its cast, but for what a norm has cast
            return float(sum(size for by, size in known if _casts(by)))
        # read, and written in float8 in both layouts
        return 2.0 * sum(size for by, size in known if by.phase == op.phase and not _casts(by))

    def _joins(self, last: LocalOp, op: LocalOp) -> bool:
        if self.execution.fused_norms and _norm(op.module) and op.module == last.module:
            return True
        fusible = _FUSIBLE[self.execution.fuse]
        both = {family(op.op_class), family(last.op_class)}
        return both <= fusible and not op.moves

    def _group(self, group: Sequence[LocalOp]) -> float:
        """Device seconds of one kernel."""
        device = self.cluster.device
        made = {value for op in group for value, _ in op.writes}
        names = {op.name for op in group}
        reads: dict[LocalValue, int] = {}
        moved = 0.0
        for op in group:
            for value, size in op.reads:
                base = self.program.base(value)
                if base not in made:
                    reads[base] = max(size, reads.get(base, 0))
            for value, size in op.writes:
                outside = [r for r in self.program.readers[value] if r.name not in names]
                if outside or op is group[-1] or not self.program.readers[value]:
                    moved += size
            if op.target == _DROPOUT and self.execution.dropout_mask:
                moved += op.writes[0][1] / _itemsize(op.dtype)
        moved += sum(reads.values())
        main = group[0]
        dtype, flops = main.dtype, sum(op.flops for op in group)
        seconds = 0.0
        if self.float8 and main.linear:
            cast = np.array(self._cast(main))
            if cast:
                seconds = float(compute_seconds_array(device, "memory", dtype, np.zeros(()), cast))
            dtype, moved = "float8", moved - 0.5 * sum(size for _, size in main.reads)
        kind = main.op_class if len(group) == 1 else "memory"
        if kind == "view":
            kind = "transpose"
        if main.gemm is not None and family(kind) == "matmul":
            flops *= wave_factor(device, main.gemm)
        return seconds + float(
            compute_seconds_array(device, kind, dtype, np.array(flops), np.array(moved))
        )


def _inside_norms(program: LocalProgram, ops: Sequence[LocalOp]) -> frozenset[str]:
    """Forward ops whose results a norm's kernel keeps to itself, and makes again backward."""
    return frozenset(
        op.name
        for op in ops
        if op.phase == "forward"
        and _norm(op.module)
        and all(
            reader.module == op.module or reader.phase == "backward"
            for value, _ in op.writes
            for reader in program.readers[value]
        )
    )


def _casts(op: LocalOp) -> bool:
    """The op's kernel writes its result in float8 where a linear reads it."""
    return op.phase == "forward" and _norm(op.module)


def _norm(module: str) -> bool:
    return "norm" in module.rpartition(".")[2]


def _itemsize(dtype: str) -> int:
    return {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}.get(dtype, 4)
