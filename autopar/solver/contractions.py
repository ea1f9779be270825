"""Contractions of an activation with a weight, forward and backward, and their kind on an axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from autopar.core.blocks import block_of
from autopar.core.graph import TracedModel, node_info
from autopar.core.placement import Placement, Shard
from autopar.core.strategy import AxisStrategy
from autopar.solver.candidates import Candidate, axis_rows
from autopar.solver.step import Op, Step, Value, unview

__all__ = [
    "Contraction",
    "Gradient",
    "Samples",
    "find_contractions",
    "find_gradients",
    "find_samples",
    "is_attention",
    "kind_on_axis",
    "undivided_batch",
]

aten = torch.ops.aten
autopar_ops = torch.ops.autopar
_CONTRACTING = (autopar_ops.einsum.default, aten.convolution.default, aten.mm.default)


@dataclass(frozen=True, slots=True)
class Contraction:
    """A forward contraction of an activation with a weight.

    Attributes:
        op: the op.
        weight: placeholder of the parameter.
        activation_index, weight_index: which operand is which.
        core: it stands inside a repeated block, and its weight has channels to split.
        batch_dim: of the activation; behind the groups that a grouped linear has in front, and
            behind the sequence where a model puts that first.
        sequence_dim: of the activation, beside the batch.
    """

    op: Op
    weight: str
    activation_index: int
    weight_index: int
    core: bool
    batch_dim: int = 0
    sequence_dim: int = 1


def find_contractions(
    traced: TracedModel, step: Step, samples: Mapping[Value, Placement]
) -> dict[str, Contraction]:
    """Contractions of a weight with what depends on the inputs, in the forward, by op name.

    Args:
        traced, step: the model.
        samples: where they are split, if the batch is pinned (`find_samples`).
    """
    nodes = {n.name: n for n in traced.graph.nodes}
    found: dict[str, Contraction] = {}
    fed = _fed_by_inputs(step)
    for op in step.ops.values():
        if not op.forward or op.call.target not in _CONTRACTING:
            continue
        sources = [unview(step.ops, value)[0] for value in op.operands[:2]]
        weights = [i for i, name in enumerate(sources) if name in step.parameters]
        if len(weights) != 1 or sources[1 - weights[0]] not in fed:
            continue
        module = node_info(traced, nodes[op.name]).module
        first = _batch_dim(op, weights[0])
        known = samples.get(op.operands[1 - weights[0]])
        batch = first if known is None else known.dim
        found[op.name] = Contraction(
            op,
            sources[weights[0]],
            1 - weights[0],
            weights[0],
            block_of(module) is not None and _has_channels(op, weights[0]),
            batch,
            first + 1 if batch == first else first,
        )
    if found and not any(c.core for c in found.values()):
        found = {k: replace(c, core=_has_channels(c.op, c.weight_index)) for k, c in found.items()}
    return found


def _has_channels(op: Op, weight_at: int) -> bool:
    """False for a weight of one channel in and one out, such as a filter along a dim."""
    shape = op.call.operands[weight_at].shape
    return max(shape[:2] if op.call.target is aten.convolution.default else shape, default=1) > 1


def _fed_by_inputs(step: Step) -> set[str]:
    """What depends on the user's inputs; all else, such as a table of positions, has no batch.

    Nor has an input that is one number, such as a timestep for all samples.
    """
    inputs = [(name, s) for name, s in step.inputs.items() if s.kind == "input"]
    fed = {name for name, spec in inputs if math.prod(spec.shape) != 1}
    fed |= {name for name in step.ports if not step.is_hoisted(name)}
    for op in step.ops.values():
        if any(name in fed for name, _ in op.operands):
            fed.add(op.name)
    return fed


class Samples(NamedTuple):
    """Where samples are split: the dim of each input that has them, and of what the rules reach."""

    dims: Mapping[str, int]
    carried: Mapping[Value, Placement]


def find_samples(step: Step, axis_size: int) -> Samples:
    """Where samples are: in the first dim of inputs, unless the rules carry the second one further.

    A recurrent layer of (steps, batch, …) mixes its steps.

    Args:
        step: of the model.
        axis_size: devices that the batch is split over.
    """
    first = _counting(step, 0)
    reached, stops = _carried(step, axis_size, first)
    if stops:
        second = _counting(step, 1)
        farther, ends = _carried(step, axis_size, second)
        features = any(op.call.target in _CONTRACTING for op in ends)  # which a weight sums over
        if len(farther) > len(reached) and not features:
            return Samples(second, farther)
    return Samples(first, reached)


def _counting(step: Step, dim: int) -> dict[str, int]:
    """The same dim of all inputs; the first, where that alone is as long as the first input's."""
    specs = [spec for spec in step.inputs.values() if spec.kind == "input" and spec.shape]
    size = specs[0].shape[dim : dim + 1] if specs else ()
    return {s.node: d for s in specs for d in (0, dim) if size and s.shape[d : d + 1] == size}


def _carried(
    step: Step, axis_size: int, inputs: Mapping[str, int]
) -> tuple[dict[Value, Placement], list[Op]]:
    """Where samples are split in a value, as far as the rules carry it from the inputs on.

    What another stage sends is taken to have them first. Also, the ops that stop it.
    """
    found: dict[Value, Placement] = {(name, 0): Shard(dim) for name, dim in inputs.items()}
    found |= {(name, 0): Shard(0) for name in step.ports if not step.is_hoisted(name)}
    stops: list[Op] = []
    for op in step.ops.values():
        held = {i: found[value] for i, value in enumerate(op.operands) if value in found}
        if not op.forward or not held:
            continue
        rows_of_op = axis_rows(replace(op.call, axis_size=axis_size))
        row = next((row for row in rows_of_op if _splits(row, held)), None)
        if row is None or _is_contracted(op, row):
            stops.append(op)
        for index, out in enumerate(row.outputs if row else ()):
            if out.is_shard and not out.own:
                found[op.name, index] = out
    return found, stops


def _is_contracted(op: Op, row: AxisStrategy) -> bool:
    return op.call.target in _CONTRACTING and any(p.is_partial for p in row.outputs)


def _splits(row: AxisStrategy, held: Mapping[int, Placement]) -> bool:
    """True if a row has each of these operands split so, and neither sums nor sends anything."""
    samples = all(row.inputs[i] == placement for i, placement in held.items()) and not row.comm
    return samples and not any(p.is_partial for p in row.inputs)


def _batch_dim(op: Op, weight_index: int) -> int:
    """The first dim of the activation that the weight has not."""
    if op.call.target is not autopar_ops.einsum.default:
        return 0
    labels = str(op.call.args[0]).split("->")[0].split(",")
    activation, weight = labels[1 - weight_index], labels[weight_index]
    return next((dim for dim, label in enumerate(activation) if label not in weight), 0)


def undivided_batch(contraction: Contraction, ranks: int, step: Step) -> str:
    """The batch that so many data ranks cannot share evenly, and what would do; "" if they can."""
    size = contraction.op.call.operands[contraction.activation_index].shape[contraction.batch_dim]
    if ranks == 1 or (size and size % ranks == 0):
        return ""
    given = [s for s in step.inputs.values() if s.kind == "input" and s.shape]
    sizes = ", ".join(f"{s.target} {list(s.shape)}" for s in given[:3])
    same = any(s.shape[0] == size for s in given)
    turn = " in a microbatch" if step.in_turns else ""
    batch = given[0].shape[0] if given else 0
    if size and not same and batch % size == 0 and batch % ranks == 0 and not turn:
        return (
            f"the forward calls it with {size} of the batch of {batch} at a time, which {ranks} "
            f"ranks cannot share (inputs: {sizes}). Call it with the whole batch, or with parts "
            f"that are multiples of {ranks}."
        )
    what = f"the batch of {size}" if same else f"its batch dim of {size}"
    next_size = max(ranks, size + -size % ranks)
    return (
        f"{what}{turn} is not divided by {ranks} ranks (inputs: {sizes}). Pass a batch that is a "
        f"multiple of {ranks}, such as {next_size}, or split data over a number of ranks that "
        "divides the batch."
    )


def kind_on_axis(contraction: Contraction, candidate: Candidate, axis: int) -> str:
    """`M`, `N`, `K`, `B` (a dim of all three), `R` (all replicated) or `P`."""
    x = candidate.inputs[contraction.activation_index][axis]
    w = candidate.inputs[contraction.weight_index][axis]
    out = candidate.outputs[0][axis]
    if x.is_partial or w.is_partial:
        return "P"
    shape = (x.is_shard, w.is_shard, out.is_shard)
    return {
        (True, False, True): "M",
        (False, True, True): "N",
        (True, True, False): "K",
        (True, True, True): "B",
    }.get(shape, "R")


@dataclass(frozen=True, slots=True)
class Gradient:
    """A backward contraction of a weight: for the activation, or for the weight itself.

    Attributes:
        grad, other: operand indices of the output gradient, and of the weight or activation.
        of_weight: it yields the weight's gradient.
    """

    grad: int
    other: int
    of_weight: bool

    def kinds(self, candidate: Candidate, num_axes: int) -> list[str]:
        """`M`, `N`, `K`, `B` or `R` of each axis, in terms of the forward contraction."""
        table = {
            # (dY, W) -> dX, and (dY, X) -> dW
            False: {(1, 0, 1): "M", (1, 1, 0): "N", (0, 1, 1): "K", (1, 1, 1): "B"},
            True: {(1, 1, 0): "M", (1, 0, 1): "N", (0, 1, 1): "K", (1, 1, 1): "B"},
        }[self.of_weight]
        found = []
        for axis in range(num_axes):
            dy, other = candidate.inputs[self.grad][axis], candidate.inputs[self.other][axis]
            shape = (dy.is_shard, other.is_shard, candidate.outputs[0][axis].is_shard)
            found.append("P" if dy.is_partial or other.is_partial else table.get(shape, "R"))
        return found


def find_gradients(step: Step, by_weight: dict[str, list[Contraction]]) -> dict[str, Gradient]:
    """The two gradient contractions of each core weight that one linear alone uses."""
    single = {w: uses[0] for w, uses in by_weight.items() if len(uses) == 1 and uses[0].core}
    completed = {unview(step.ops, step.gradients[w])[0] for w in single if w in step.gradients}
    found: dict[str, Gradient] = {}
    for op in step.ops.values():
        if op.forward or op.call.target is not autopar_ops.einsum.default:
            continue
        sources = [unview(step.ops, value)[0] for value in op.operands[:2]]
        weights = [i for i, name in enumerate(sources) if name in single]
        if len(weights) == 1:
            found[op.name] = Gradient(1 - weights[0], weights[0], False)
        elif op.name in completed and not weights:
            backward = [
                i for i, n in enumerate(sources) if n in step.ops and not step.ops[n].forward
            ]
            if len(backward) == 1:
                found[op.name] = Gradient(backward[0], 1 - backward[0], True)
    return found


def is_attention(op: Op) -> bool:
    """A contraction of two activations with batch and heads in front, or the attention op."""
    if op.call.target is autopar_ops.attention.default:
        return True
    return (
        op.call.target is autopar_ops.einsum.default
        and len(op.call.operands[0].shape) == 4
        and len(op.call.operands[1].shape) == 4
    )
