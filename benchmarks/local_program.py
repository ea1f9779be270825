"""The local ops of a plan: shards' bytes and flops, from the placements that the plan holds."""

from __future__ import annotations

from typing import TypeAlias

import torch

from autopar.core import einsum
from autopar.core.graph import TracedModel, node_info
from autopar.core.placement import Layout, local_shape, shard_factor
from autopar.core.plan import NodePlan, Plan
from autopar.core.recompute import recomputed
from autopar.core.strategy import TensorSpec
from autopar.core.work import LOOKUPS, global_flops, op_class
from autopar.solver.order import ordered
from autopar.solver.read_step import build_step
from autopar.solver.step import Op, Step, unview
from benchmarks.local_ops import LocalOp, LocalProgram, LocalValue

__all__ = ["local_program"]

Sizes: TypeAlias = tuple[tuple[LocalValue, int], ...]

_einsum = torch.ops.autopar.einsum.default
_add = torch.ops.aten.add.Tensor


def local_program(traced: TracedModel, plan: Plan) -> LocalProgram:
    """What one device runs under a plan.

    Args:
        traced: the graph that the plan was made for.
        plan: with its timeline.
    """
    graph = recomputed(traced, plan.checkpoint)
    step = build_step(graph)
    nodes = {n.name: n for n in graph.graph.nodes}
    moves = {op.name: op.moves for op in plan.predicted.timeline.ops}
    gradients = {unview(step.ops, value)[0] for value in step.gradients.values()}
    linears = _linears(step, gradients)
    found = []
    for op in ordered(step):
        node = plan.nodes[op.name]
        folded = _is_bias(step, op, linears)
        found.append(
            LocalOp(
                name=op.name,
                target=str(op.call.target),
                op_class=op_class(op.call),
                phase="backward" if op.backward else "forward",
                module=node_info(graph, nodes[op.name]).module,
                dtype=str(op.call.outputs[0].dtype).removeprefix("torch.")
                if op.call.outputs
                else "",
                flops=global_flops(op.call) / _split(node, plan.mesh_shape),
                reads=_reads(op, node, plan.mesh_shape),
                writes=_writes(op, node, plan.mesh_shape),
                gemm=_gemm(op, node, plan.mesh_shape),
                linear=op.name in linears,
                gradient=op.name in linears and op.name in gradients,
                view=op.view,
                folded=folded,
                moves=moves.get(op.name, ()),
            )
        )
    return LocalProgram(found)


def _split(node: NodePlan, mesh: tuple[int, ...]) -> int:
    split = 1
    for axis, size in enumerate(mesh):
        if any(layout[axis].is_shard for layout in (*node.inputs, *node.outputs)):
            split *= size
    return split


def _bytes(spec: TensorSpec, layout: Layout, mesh: tuple[int, ...]) -> int:
    return spec.num_bytes // shard_factor(layout, mesh)


def _reads(op: Op, node: NodePlan, mesh: tuple[int, ...]) -> Sizes:
    given = zip(op.operands, op.call.operands, node.inputs, strict=True)
    reads = [(value, _bytes(spec, layout, mesh)) for value, spec, layout in given]
    if op.call.target in LOOKUPS:  # only the rows that it needs
        written = sum(size for _, size in _writes(op, node, mesh))
        return tuple((value, min(size, written)) for value, size in reads)
    return tuple(reads)


def _writes(op: Op, node: NodePlan, mesh: tuple[int, ...]) -> Sizes:
    given = zip(op.call.outputs, node.outputs, strict=True)
    return tuple(
        ((op.name, i), _bytes(spec, layout, mesh)) for i, (spec, layout) in enumerate(given)
    )


def _gemm(op: Op, node: NodePlan, mesh: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    """(batch, M, N, K) of the local contraction."""
    if op.call.target is not _einsum:
        return None
    equation = einsum.parse_equation(op.call.args[0])
    sizes: dict[str, int] = {}
    for letters, spec, layout in zip(
        (equation.a, equation.b), op.call.operands, node.inputs, strict=True
    ):
        sizes.update(zip(letters, local_shape(spec.shape, layout, mesh), strict=True))
    counts = []
    for letters in (equation.batch, equation.free_a, equation.free_b, equation.contracted):
        count = 1
        for letter in letters:
            count *= sizes[letter]
        counts.append(count)
    return counts[0], counts[1], counts[2], counts[3]


def _linears(step: Step, gradients: set[str]) -> set[str]:
    """Contractions with a parameter, and those that yield a parameter's gradient."""
    return {
        op.name
        for op in step.ops.values()
        if op.call.target is _einsum
        and (
            op.name in gradients
            or any(unview(step.ops, v)[0] in step.parameters for v in op.operands)
        )
    }


def _is_bias(step: Step, op: Op, linears: set[str]) -> bool:
    """A forward sum of a linear's result with a parameter of one dim."""
    if op.call.target is not _add or op.backward or len(op.operands) != 2:
        return False
    sources = [unview(step.ops, value)[0] for value in op.operands]
    return (
        sources[0] in linears
        and sources[1] in step.parameters
        and len(step.parameters[sources[1]].shape) == 1
    )
