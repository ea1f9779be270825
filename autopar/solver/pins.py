"""Constraints as filters on candidates, on parameter storage and on what an op's input arrives as.

A weight contraction has three kinds of dims: M (activation and output), N (weight and output) and
K (contracted). On one mesh axis a candidate shards one of them, and the named modes say which:

    1D         N (column) or K (row); the groups of a grouped convolution
    2D         M on r, N on c; X arrives as (M, K), W is stored sharded on both axes
    2.5D       2D, with M also on the depth axis and W whole there
    3D         M on i; N on j and K on k, or K on j and N on k; W is stored sharded on all three
    data       M, on the batch
    Megatron   1D; a column linear's X arrives sharded on the sequence, a row linear leaves it so
    none       1D; a column linear's X arrives whole, a row linear leaves it so, and a weight whose
               storage is pinned is read as it is stored
    Ulysses    M on the sequence; attention on heads
    ring       M on the sequence; attention by the ring

They hold for every weight contraction inside repeated blocks, and outside where sizes allow. The
two gradient contractions of a weight that is used once keep the forward's sharding of M, N and K:
that is what makes the modes' communication what their papers say.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence

import torch

from autopar.core.constraints import AxisRole, Constraints
from autopar.core.graph import TracedModel
from autopar.core.placement import Layout, Placement, format_layout, is_valid, parse_placement
from autopar.cost_model import Cluster
from autopar.errors import ConstraintError
from autopar.solver.candidates import Candidate
from autopar.solver.contractions import (
    Contraction,
    Samples,
    find_contractions,
    find_gradients,
    find_samples,
    is_attention,
    kind_on_axis,
    undivided_batch,
)
from autopar.solver.step import Op, Step, Value

__all__ = ["Pins", "with_roles"]

aten = torch.ops.aten
autopar_ops = torch.ops.autopar
_SEQUENCE_DIM = 1
_RINGS = ("ring", "zigzag")  # variants of attention in which keys travel


def with_roles(cluster: Cluster, roles: Sequence[AxisRole]) -> Cluster:
    """The devices in the mesh that pins want (`assign_mesh`), its axes named by their roles."""
    shape = tuple(r.size for r in roles)
    if shape == cluster.mesh_shape:
        return cluster
    names: list[str] = []
    for role in roles:
        name = role.name.replace("-", "")
        names.append(name if name not in names else f"{name}{len(names)}")
    return cluster.with_mesh_shape(shape, tuple(names))


class Pins:
    """Filters that a set of constraints puts on a step.

    Args:
        constraints: what is pinned.
        roles: role of each mesh axis.
        traced, step: the model.
    """

    def __init__(
        self,
        constraints: Constraints,
        roles: Sequence[AxisRole],
        traced: TracedModel,
        step: Step,
    ) -> None:
        self.constraints = constraints
        self.roles = tuple(roles)
        self.mesh_shape = tuple(r.size for r in roles)
        self.step = step
        # an axis of one device splits nothing, so there is nothing to pin on it
        split = [(i, r.name) for i, r in enumerate(roles) if r.size > 1]
        self.tensor_axes = [i for i, name in split if name.startswith("tensor")]
        self.data_axes = [i for i, name in split if name == "data"]
        self.sequence_axes = [i for i, name in split if name == "sequence"]
        batch = math.prod(self.mesh_shape[i] for i in self.data_axes)
        samples = find_samples(step, batch) if batch > 1 else Samples({}, {})
        self.batch_dims = samples.dims
        self.contractions = find_contractions(traced, step, samples.carried)
        # the axes of N and K are interchangeable: the first contraction settles which is which
        self.first = next((c.op.name for c in self.contractions.values() if c.core), None)
        self.by_weight: dict[str, list[Contraction]] = {}
        for contraction in self.contractions.values():
            if not contraction.op.recomputed:
                self.by_weight.setdefault(contraction.weight, []).append(contraction)
        self.gradients = find_gradients(step, self.by_weight)
        self._check_attention()

    def _check_attention(self) -> None:
        mode = self.constraints.sequence
        if mode in (None, "none"):
            return
        ops = self.step.ops.values()
        fused = any(op.call.target is autopar_ops.attention.default for op in ops)
        if mode == "ring" and not fused:
            raise ConstraintError(
                "sequence 'ring' needs attention that torch's scaled_dot_product_attention "
                "computes without dropout and without a learned bias; this model has none"
            )
        if not any(is_attention(op) for op in ops):
            raise ConstraintError(f"sequence {mode!r}: this model has no attention")

    # --- contractions --------------------------------------------------------------------------
    def allows(self, op: Op, candidate: Candidate) -> bool:
        """True if a candidate of an op agrees with the mode of every axis."""
        contraction = self.contractions.get(op.name)
        if contraction is not None:
            return self._contraction_allows(contraction, candidate)
        if op.name in self.gradients:
            return self._kinds_allowed(
                self.gradients[op.name].kinds(candidate, len(self.roles)), None
            )
        if op.forward and is_attention(op):
            return self._attention_allows(candidate)
        return True

    def prefer(self, op: Op, candidates: list[Candidate]) -> list[Candidate]:
        """Of an op's candidates, those that read only a data rank's share of the user's inputs.

        All of them where none does: what has no rows to share is read whole, and so may be what
        takes them in an order that each rank has of its own.
        """
        dims = [(i, self.batch_dims.get(name)) for i, (name, _) in enumerate(op.operands)]
        readers = [(i, dim) for i, dim in dims if dim is not None]
        sharing = [
            candidate
            for candidate in candidates
            if all(_shards(candidate.inputs[i][a], d) for i, d in readers for a in self.data_axes)
        ]
        known = [c for c in sharing if not any(p.own for x in (*c.inputs, *c.outputs) for p in x)]
        return sharing if known else candidates

    def _contraction_allows(self, c: Contraction, candidate: Candidate) -> bool:
        kinds = [kind_on_axis(c, candidate, axis) for axis in range(len(self.roles))]
        x = candidate.inputs[c.activation_index]
        if any(x[axis].dim != c.batch_dim for axis in self.data_axes):
            return False
        if not self._is_megatron() and any(x[a].dim != c.sequence_dim for a in self.sequence_axes):
            return False
        if self._is_plain_tensor() and not self._as_pinned(c, candidate):
            return False
        return self._kinds_allowed(kinds, c)

    def _as_pinned(self, c: Contraction, candidate: Candidate) -> bool:
        """True unless the user's pattern stores the weight in another way than it is read."""
        if c.op.call.operands[c.weight_index].shape != self.step.parameters[c.weight].shape:
            return True
        return all(candidate.inputs[c.weight_index] == layout for layout in self.pinned(c.weight))

    def _kinds_allowed(self, kinds: Sequence[str], c: Contraction | None) -> bool:
        """True if the kind on each axis is one that the pinned modes use there."""
        if any(kinds[axis] != "M" for axis in self.data_axes):
            return False
        for axis in self.sequence_axes:
            wanted = "NK" if self._is_megatron() else "M"
            if kinds[axis] not in wanted:
                return False
        if not self.tensor_axes:
            return True
        tensor = "".join(kinds[axis] for axis in self.tensor_axes)
        allowed = {
            None: ("",),
            # a convolution of groups has no sum over ranks: its channels are of all three
            "1d": ("N", "K", "B") if c is not None and _is_grouped(c) else ("N", "K"),
            "2d": ("MN",),
            "2.5d": ("MMN",),
            "3d": ("MNK",) if c is not None and c.op.name == self.first else ("MNK", "MKN"),
        }[self.constraints.tensor_mode]
        return tensor in allowed

    def _attention_allows(self, candidate: Candidate) -> bool:
        for axis in self.sequence_axes:
            q = candidate.inputs[0][axis]
            if self.constraints.sequence == "ulysses" and not (q.is_shard and q.dim == 1):
                return False
            if self.constraints.sequence == "ring" and candidate.variants[axis] not in _RINGS:
                return False
        return True

    def arrives(self, op: Op, index: int) -> Callable[[Layout, Candidate], bool] | None:
        """Filter on the layout that an operand has before redistribution, if there is one."""
        if op.name in self.step.copies or op.name in self.step.prepared:
            return self._copy_arrives(op)
        c = self.contractions.get(op.name)
        if c is None or index != c.activation_index or not c.core:
            return None
        mode = self.constraints.tensor_mode
        if self._is_megatron():
            (axis,) = self.sequence_axes or self.tensor_axes
            return lambda source, candidate: (
                kind_on_axis(c, candidate, axis) != "N" or _shards(source[axis], _SEQUENCE_DIM)
            )
        if self._is_plain_tensor():
            (axis,) = self.tensor_axes
            return lambda source, candidate: (
                kind_on_axis(c, candidate, axis) != "N" or source[axis].is_replicate
            )
        if mode not in ("2d", "2.5d", "3d"):
            return None
        last = _contracted_dim(c)

        def blocked(source: Layout, candidate: Candidate) -> bool:
            for axis in self.tensor_axes:
                kind = kind_on_axis(c, candidate, axis)
                placement = source[axis]
                if kind == "M" and not (placement.is_shard and placement.dim != last):
                    return False
                if kind == "K" and not _shards(placement, last):
                    return False
                # 2D gathers X along the axis of N from its K blocks, 3D from blocks of its rows
                if kind == "N" and mode == "3d":
                    if not (placement.is_shard and placement.dim != last):
                        return False
                elif kind == "N" and not _shards(placement, last):
                    return False
            return True

        return blocked

    def _copy_arrives(self, op: Op) -> Callable[[Layout, Candidate], bool] | None:
        """Filter on `(layout, candidate)` of a parameter on its way to what compute reads."""
        zero = self.constraints.zero
        as_stored = list(self.data_axes) if zero == 3 else []
        if self.constraints.tensor_mode in ("2d", "2.5d", "3d"):
            as_stored += self.tensor_axes
        whole = self.data_axes if zero in (1, 2) and op.name in self.step.copies else []
        if not as_stored and not whole:
            return None
        return lambda source, candidate: (
            all(candidate.inputs[0][axis] == source[axis] for axis in as_stored)
            and all(candidate.inputs[0][axis].is_replicate for axis in whole)
        )

    def summed(self) -> Callable[[Layout, Layout], bool] | None:
        """Filter on `(layout of the sum over microbatches, storage)` of a gradient.

        With stage 2 and 3 the sum is sharded as the gradient is, so it is reduced at each turn.
        """
        if not self.step.in_turns or self.constraints.zero not in (2, 3):
            return None
        return lambda kept, stored: all(
            kept[axis] == stored[axis] for axis in self.data_axes if stored[axis].is_shard
        )

    def leaves(self, value: Value) -> Callable[[Layout, Layout], bool] | None:
        """Filter on `(produced, wanted)` layouts of a value that a pinned op produces."""
        c = self.contractions.get(value[0])
        if c is None or not c.core:
            return None
        if self._is_plain_tensor():
            (axis,) = self.tensor_axes
            return lambda produced, wanted: (
                not produced[axis].is_partial or (wanted[axis].is_replicate)
            )
        if not self._is_megatron():
            return None
        (axis,) = self.sequence_axes or self.tensor_axes
        return lambda produced, wanted: (
            not produced[axis].is_partial or _shards(wanted[axis], _SEQUENCE_DIM)
        )

    def _is_megatron(self) -> bool:
        split = bool(self.sequence_axes or self.tensor_axes)
        return split and self.constraints.sequence == "megatron"

    def _is_plain_tensor(self) -> bool:
        return bool(self.tensor_axes) and self.constraints.sequence == "none"

    # --- parameters ----------------------------------------------------------------------------
    def pinned(self, placeholder: str) -> tuple[Layout, ...]:
        """The layouts that the user's patterns ask of a parameter."""
        target = self.step.parameters[placeholder].target
        return tuple(
            self._pinned(glob, wanted)
            for glob, wanted in self.constraints.params.items()
            if fnmatch.fnmatchcase(target, glob)
        )

    def allows_storage(self, placeholder: str, layout: Layout) -> bool:
        """True if a parameter may be stored so."""
        spec = self.step.parameters[placeholder]
        if any(layout != wanted for wanted in self.pinned(placeholder)):
            return False
        shardable = any(
            size and size % axis_size == 0
            for size in spec.shape
            for axis_size in self._zero_sizes()
        )
        zero = self.constraints.zero
        for axis in self.data_axes:
            if zero == 0 and layout[axis].is_shard:
                return False
            if zero and shardable and not layout[axis].is_shard:
                return False
        core = any(c.core for c in self.by_weight.get(placeholder, ()))
        mode = self.constraints.tensor_mode
        if core and mode in ("2d", "3d"):
            return all(layout[axis].is_shard for axis in self.tensor_axes)
        if core and mode == "2.5d":
            depth, *square = self.tensor_axes
            return layout[depth].is_replicate and all(layout[a].is_shard for a in square)
        return True

    def _zero_sizes(self) -> list[int]:
        return [self.mesh_shape[axis] for axis in self.data_axes]

    def _pinned(self, glob: str, wanted: Sequence[str]) -> Layout:
        layout = tuple(parse_placement(text) for text in wanted)
        if len(layout) != len(self.roles):
            raise ConstraintError(
                f"params[{glob!r}] names {len(layout)} placements for a mesh of "
                f"{len(self.roles)} axes {self.mesh_shape}"
            )
        return layout

    def check_params(self) -> None:
        """Every pin matches a parameter, and fits the shape of each that it matches."""
        for glob, wanted in self.constraints.params.items():
            layout = self._pinned(glob, wanted)
            matched = [
                s for s in self.step.parameters.values() if fnmatch.fnmatchcase(s.target, glob)
            ]
            if not matched:
                raise ConstraintError(
                    f"params[{glob!r}] matches no parameter; the first ones are "
                    + ", ".join(s.target for s in list(self.step.parameters.values())[:3])
                )
            for spec in matched:
                if any(p.is_partial for p in layout) or not is_valid(
                    layout, spec.shape, self.mesh_shape
                ):
                    raise ConstraintError(
                        f"params[{glob!r}] = {format_layout(layout)} cannot hold for "
                        f"{spec.target} of shape {spec.shape} on mesh {self.mesh_shape}"
                    )

    # --- errors --------------------------------------------------------------------------------
    def describe(self) -> str:
        """The pinned modes, for messages."""
        c = self.constraints
        parts = [f"{r.name}={r.size}" for r in self.roles]
        names = [f"tensor {c.tensor_mode}"] if c.tensor_mode else []
        names += [f"sequence {c.sequence}"] if c.sequence else []
        names += [f"data {c.data}"] if c.data else []
        names += [f"zero {c.zero}"] if c.zero is not None else []
        return f"{', '.join(names) or 'params'} on mesh ({', '.join(parts)})"

    def refuse(self, op: Op) -> ConstraintError:
        """The error for an op of a block that no candidate fits."""
        c = self.contractions.get(op.name)
        shapes = " x ".join(str(list(s.shape)) for s in op.call.operands)
        if c is not None and _is_grouped(c):
            shapes += f" in {op.call.args[8]} groups"
        where = self.step.parameters[c.weight].target if c is not None else op.name
        ranks = math.prod(self.mesh_shape[axis] for axis in self.data_axes)
        if c is not None and (batch := undivided_batch(c, ranks, self.step)):
            return ConstraintError(f"{self.describe()} cannot hold for {where}: {batch}")
        return ConstraintError(
            f"{self.describe()} cannot hold for {where}: operands {shapes} do not divide, or the "
            "op has no such form. Change the sizes, the number of devices, or drop the constraint."
        )


def _shards(placement: Placement, dim: int) -> bool:
    return placement.is_shard and placement.dim == dim


def _is_grouped(c: Contraction) -> bool:
    return c.op.call.target is aten.convolution.default and c.op.call.args[8] != 1


def _contracted_dim(c: Contraction) -> int:
    """The dim of the activation that is contracted: last for linears, channels for convs."""
    if c.op.call.target is aten.convolution.default:
        return 1
    return len(c.op.call.operands[c.activation_index].shape) - 1
