"""Contractions of an activation with a weight, forward and backward, and their kind on an axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from autopar.core.blocks import block_of
from autopar.core.graph import TracedModel, node_info
from autopar.core.placement import Shard
from autopar.core.strategy import AxisStrategy
from autopar.solver.candidates import Candidate, axis_rows
from autopar.solver.step import Op, Step, Value, unview

__all__ = [
    "Contraction",
    "Gradient",
    "find_contractions",
    "find_gradients",
    "is_attention",
    "kind_on_axis",
    "undivided_batch",
]

aten = torch.ops.aten
autopar_ops = torch.ops.autopar


@dataclass(frozen=True, slots=True)
class Contraction:
    """A forward contraction of an activation with a weight.

    Attributes:
        op: the op.
        weight: placeholder of the parameter.
        activation_index, weight_index: which operand is which.
        core: it stands inside a repeated block.
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
    traced: TracedModel, step: Step, axis_size: int = 1
) -> dict[str, Contraction]:
    """Contractions of a weight with what depends on the inputs, in the forward, by op name.

    Args:
        traced, step: the model.
        axis_size: devices that the batch is pinned to; 1 where it is not.
    """
    samples = _sample_dims(step, axis_size) if axis_size > 1 else {}
    nodes = {n.name: n for n in traced.graph.nodes}
    found: dict[str, Contraction] = {}
    fed = _fed_by_inputs(step)
    for op in step.ops.values():
        if not op.forward or op.call.target not in (
            autopar_ops.einsum.default,
            aten.convolution.default,
            aten.mm.default,
        ):
            continue
        sources = [unview(step.ops, value)[0] for value in op.operands[:2]]
        weights = [i for i, name in enumerate(sources) if name in step.parameters]
        if len(weights) != 1 or sources[1 - weights[0]] not in fed:
            continue
        module = node_info(traced, nodes[op.name]).module
        first = _batch_dim(op, weights[0])
        batch = samples.get(op.operands[1 - weights[0]], first)
        found[op.name] = Contraction(
            op,
            sources[weights[0]],
            1 - weights[0],
            weights[0],
            block_of(module) is not None,
            batch,
            first + 1 if batch == first else first,
        )
    if found and not any(c.core for c in found.values()):
        found = {k: replace(c, core=True) for k, c in found.items()}
    return found


def _fed_by_inputs(step: Step) -> set[str]:
    """What depends on the user's inputs; all else, such as a table of positions, has no batch."""
    fed = {name for name, spec in step.inputs.items() if spec.kind == "input"}
    fed |= {name for name in step.ports if not step.is_hoisted(name)}
    for op in step.ops.values():
        if any(name in fed for name, _ in op.operands):
            fed.add(op.name)
    return fed


def _sample_dims(step: Step, axis_size: int) -> dict[Value, int]:
    """The dim of a value that counts samples, as far as the rules carry it from the inputs on.

    What another stage sends is taken to have them first.
    """
    specs = [spec for spec in step.inputs.values() if spec.kind == "input" and spec.shape]
    rows = specs[0].shape[:1] if specs else ()
    found: dict[Value, int] = {(s.node, 0): 0 for s in specs if s.shape[:1] == rows}
    found |= {(name, 0): 0 for name in step.ports if not step.is_hoisted(name)}
    for op in step.ops.values():
        held = {i: found[value] for i, value in enumerate(op.operands) if value in found}
        if not op.forward or not held:
            continue
        rows_of_op = axis_rows(replace(op.call, axis_size=axis_size))
        row = next((row for row in rows_of_op if _splits(row, held)), None)
        for index, out in enumerate(row.outputs if row else ()):
            if out.is_shard and out.split == 1 and not out.own:
                found[op.name, index] = out.dim
    return found


def _splits(row: AxisStrategy, held: Mapping[int, int]) -> bool:
    """True if a row shards each of these operands on its dim, and sums nothing."""
    samples = all(row.inputs[i] == Shard(dim) for i, dim in held.items())
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
    what = f"the batch of {size}" if same else f"its batch dim of {size}"
    turn = " in a microbatch" if step.in_turns else ""
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
