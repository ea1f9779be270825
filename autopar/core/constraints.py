"""`Constraints`: what the user pins. What is absent is chosen."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.core.block_kinds import Checkpoint, parse_checkpoint
from autopar.core.schedule import schedules
from autopar.errors import ConstraintError

__all__ = ["NO_PIPELINE", "AxisRole", "Constraints", "PipelinePin", "assign_mesh"]

TENSOR_MODES = ("1d", "2d", "2.5d", "3d")
SEQUENCE_MODES = ("megatron", "ulysses", "ring", "none")
_KEYS = ("tensor", "sequence", "data", "zero", "checkpoint", "offload", "pipeline", "params")
OFFLOADS = ("none", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRole:
    """What a mesh axis is pinned to: `data`, `free`, `tensor-0`…, `sequence`."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePin:
    """What is pinned of a pipeline; None leaves a field to the solver.

    Attributes:
        size: pipeline ranks, which a microbatch passes one after the other; 1 for microbatches
            without a pipeline.
        microbatches: microbatches of a step; their number divides the batch.
        schedule: one of `core.schedule.schedules()`.
        chunks: stages of each pipeline rank; more than 1 for "interleaved" only.
        cuts: FQN of the block that each stage but the first begins with.
    """

    size: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    cuts: tuple[str, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Only what is pinned."""
        found = {k: getattr(self, k) for k in self.__dataclass_fields__}
        found["cuts"] = list(self.cuts) if self.cuts is not None else None
        return {k: v for k, v in found.items() if v is not None}


NO_PIPELINE = PipelinePin(size=1, microbatches=1)
"""The step in one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the user pins of a plan; the solver chooses whatever is None or absent.

    Functions that take constraints also take the dict that `parse` reads, such as
    ``{"tensor": {"mode": "1d", "size": 4}, "data": 2, "zero": 3}`` (docs/constraints.md).

    Attributes:
        tensor_mode: tensor parallelism, "1d", "2d", "2.5d" or "3d".
        tensor_size: devices of the tensor mode; None takes all that `data` leaves.
        depth: depth of the 2.5D mode.
        sequence: sequence parallelism, "megatron", "ulysses" or "ring"; "none" keeps what enters
            and leaves a 1D tensor-parallel pair whole, as plain Megatron does.
        sequence_size: devices of the sequence axis; None takes all that are left.
        data: devices that split the batch.
        zero: ZeRO stage on the data axes. 0 keeps every parameter whole; the others shard optimizer
            state and gradient, and gather the parameter once a step (1, 2) or at each use (3).
        checkpoint: recomputation of activations: "none", "selective", "full", or "host",
            which is "full" with what blocks keep for it in host memory. One kind for all blocks, or
            a dict of kinds by FQN, run or glob of blocks; blocks that no key matches are free.
        offload: what stays in host memory between updates, "none" or "optimizer".
        pipeline: pipeline ranks, microbatches, schedule and cuts.
        params: storage placements of parameters by FQN glob, one per mesh axis (in a pipeline, of a
            stage's mesh).
    """

    tensor_mode: str | None = None
    tensor_size: int | None = None
    depth: int | None = None
    sequence: str | None = None
    sequence_size: int | None = None
    data: int | None = None
    zero: int | None = None
    checkpoint: Checkpoint | None = None
    pipeline: PipelinePin | None = None
    offload: str | None = None
    params: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def pins_blocks(self) -> bool:
        """The recomputation of single blocks is pinned."""
        return self.checkpoint is not None and not isinstance(self.checkpoint, str)

    @classmethod
    def parse(cls, value: Constraints | Mapping[str, Any] | None) -> Constraints:
        """Constraints from their dict form, whose keys docs/constraints.md describes.

        Raises:
            ConstraintError: an unknown key or mode, or a size that is not a positive integer.
        """
        if value is None:
            return cls()
        if isinstance(value, Constraints):
            return value
        if not isinstance(value, Mapping):
            raise ConstraintError(f"constraints={value!r}: give a dict, such as {{'data': 2}}")
        for key in value:
            if key not in _KEYS:
                near = difflib.get_close_matches(str(key), _KEYS, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConstraintError(
                    f"unknown constraint {key!r}; known are {', '.join(_KEYS)}.{hint}"
                )
        fields: dict[str, Any] = {}
        if (tensor := value.get("tensor")) is not None:
            fields.update(_tensor(tensor))
        if (sequence := value.get("sequence")) is not None:
            fields.update(_sequence(sequence))
        if value.get("data") is not None:
            fields["data"] = _positive(value["data"], "data")
        if (zero := value.get("zero")) is not None:
            if isinstance(zero, bool) or zero not in (0, 1, 2, 3):
                raise ConstraintError(f"zero={zero!r}: the stages are 0, 1, 2 and 3")
            fields["zero"] = zero
        if (checkpoint := value.get("checkpoint")) is not None:
            fields["checkpoint"] = parse_checkpoint(checkpoint)
        if (pipeline := value.get("pipeline")) is not None:
            fields["pipeline"] = _pipeline(pipeline)
        if (offload := value.get("offload")) is not None:
            if offload not in OFFLOADS:
                raise ConstraintError(f"offload={offload!r}: known are {', '.join(OFFLOADS)}")
            fields["offload"] = offload
        fields["params"] = _params(value.get("params") or {})
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Only what is pinned, as plain JSON types that `parse` reads."""
        found: dict[str, Any] = {}
        tensor = {"mode": self.tensor_mode, "size": self.tensor_size, "depth": self.depth}
        sequence = {"mode": self.sequence, "size": self.sequence_size}
        for key, value in (("tensor", tensor), ("sequence", sequence)):
            if value["mode"] is not None:
                found[key] = {k: v for k, v in value.items() if v is not None}
        for key in ("data", "zero", "checkpoint", "offload"):
            if getattr(self, key) is not None:
                found[key] = getattr(self, key)
        if isinstance(self.checkpoint, Mapping):
            found["checkpoint"] = dict(self.checkpoint)
        if self.pipeline is not None:
            found["pipeline"] = self.pipeline.to_dict()
        if self.params:
            found["params"] = {glob: list(wanted) for glob, wanted in self.params.items()}
        return found


def _positive(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConstraintError(f"{name}={value!r} must be a positive whole number")
    return value


def _params(value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise ConstraintError(f"params={value!r}: give {{FQN glob: placements}}")
    found: dict[str, tuple[str, ...]] = {}
    for glob, wanted in value.items():
        placements = [wanted] if isinstance(wanted, str) else wanted
        listed = isinstance(placements, (list, tuple))
        if not listed or not all(isinstance(p, str) for p in placements):
            raise ConstraintError(
                f"params[{glob!r}] = {wanted!r}: give the placement for each mesh axis as text, "
                "such as ['Shard(0)', 'Replicate()']"
            )
        found[glob] = tuple(placements)
    return found


def _settings(value: Any, name: str, short: str) -> dict[str, Any]:
    """The settings of a constraint, which may be given as one of them alone, by a string."""
    if isinstance(value, str):
        return {short: value}
    if not isinstance(value, Mapping):
        raise ConstraintError(f"{name}={value!r}: give settings, such as {{{short!r}: …}}")
    return dict(value)


def _pipeline(value: Any) -> PipelinePin:
    if isinstance(value, PipelinePin):
        return value
    if value == "none":
        return NO_PIPELINE
    if isinstance(value, str):
        raise ConstraintError(f"pipeline={value!r}: give a size, settings, or 'none'")
    spec = _settings({"size": value} if isinstance(value, int) else value, "pipeline", "size")
    known = tuple(PipelinePin.__dataclass_fields__)
    for key in spec:
        if key not in known:
            raise ConstraintError(f"unknown pipeline setting {key!r}; known: {', '.join(known)}")
    for key in ("size", "microbatches", "chunks"):
        if spec.get(key) is not None:
            _positive(spec[key], f"pipeline {key}")
    schedule = spec.get("schedule")
    if schedule is not None and schedule not in schedules():
        raise ConstraintError(
            f"unknown pipeline schedule {schedule!r}; known are {', '.join(schedules())}"
        )
    if spec.get("cuts") is not None:
        spec["cuts"] = tuple(spec["cuts"])
        stages = len(spec["cuts"]) + 1
        size, chunks = spec.get("size"), spec.get("chunks")
        if size is not None and stages != size * (chunks or max(1, stages // size)):
            raise ConstraintError(
                f"pipeline cuts make {stages} stages, size {size} × chunks {chunks or 1} are "
                f"{size * (chunks or 1)}"
            )
    return PipelinePin(**spec)


def _tensor(value: Any) -> dict[str, Any]:
    given = {"size": value} if isinstance(value, int) else value
    spec = _settings(given, "tensor", "mode")
    mode = spec.pop("mode", "1d")
    if mode not in TENSOR_MODES:
        raise ConstraintError(f"unknown tensor mode {mode!r}; known are {', '.join(TENSOR_MODES)}")
    fields: dict[str, Any] = {"tensor_mode": mode}
    if (size := spec.pop("size", None)) is not None:
        fields["tensor_size"] = _positive(size, "tensor size")
    if (depth := spec.pop("depth", None)) is not None:
        if mode != "2.5d":
            raise ConstraintError(f"depth={depth} belongs to mode 2.5d, not {mode}")
        fields["depth"] = _positive(depth, "depth")
    if spec:
        raise ConstraintError(f"unknown tensor settings {sorted(spec)}; known: mode, size, depth")
    return fields


def _sequence(value: Any) -> dict[str, Any]:
    spec = _settings(value, "sequence", "mode")
    mode = spec.pop("mode", None)
    if mode not in SEQUENCE_MODES:
        raise ConstraintError(
            f"unknown sequence mode {mode!r}; known are {', '.join(SEQUENCE_MODES)}"
        )
    fields: dict[str, Any] = {"sequence": mode}
    if (size := spec.pop("size", None)) is not None:
        fields["sequence_size"] = _positive(size, "sequence size")
    if spec:
        raise ConstraintError(f"unknown sequence settings {sorted(spec)}; known: mode, size")
    return fields


def _root(size: int, power: int, mode: str) -> int:
    q = round(size ** (1 / power))
    if q**power != size or q < 2:
        kind = {2: "square", 3: "cube"}[power]
        raise ConstraintError(
            f"tensor mode {mode} needs a number of devices that is the {kind} of a whole number "
            f"of at least 2, got {size}"
        )
    return q


def _tensor_sizes(c: Constraints, size: int) -> list[int]:
    if c.tensor_mode == "1d":
        return [size]
    if c.tensor_mode == "2d":
        return [_root(size, 2, "2d")] * 2
    if c.tensor_mode == "3d":
        return [_root(size, 3, "3d")] * 3
    depth = c.depth
    if depth is None:
        depth = next((d for d in range(2, size) if _is_square(size, d)), 0)
    if not depth or size % depth:
        raise ConstraintError(f"tensor mode 2.5d: depth {depth} does not divide size {size}")
    if not _is_square(size, depth):
        raise ConstraintError(
            f"tensor mode 2.5d: size {size} over depth {depth} is no square of at least 2 × 2"
        )
    return [depth, *[math.isqrt(size // depth)] * 2]


def _is_square(size: int, depth: int) -> bool:
    q = math.isqrt(size // depth)
    return size % depth == 0 and q >= 2 and q * q * depth == size


def assign_mesh(c: Constraints, mesh_shape: tuple[int, ...]) -> tuple[AxisRole, ...]:
    """Mesh axes that the constraints call for, outermost first, with their roles.

    The user's own axes are kept where the pinned sizes match them one to one (then the pinned
    axes are the last ones); otherwise the same devices form a mesh of the needed shape.

    Raises:
        ConstraintError: the pinned sizes do not divide the number of devices.
    """
    total = math.prod(mesh_shape)
    pinned: list[AxisRole] = []
    left = total
    if c.data is not None:
        left = _take(left, c.data, "data", total)
    if c.tensor_mode is not None:
        size = c.tensor_size or left
        left = _take(left, size, f"tensor {c.tensor_mode}", total)
        sizes = _tensor_sizes(c, size)
        pinned += [AxisRole(name=f"tensor-{i}", size=n) for i, n in enumerate(sizes)]
    if c.sequence == "none" and c.tensor_mode != "1d":
        raise ConstraintError("sequence 'none' belongs to tensor mode 1d: add it, or drop 'none'")
    own_axis = c.sequence in ("ulysses", "ring") or (
        c.sequence == "megatron" and c.tensor_mode != "1d"
    )
    if own_axis:
        if c.sequence == "megatron" and c.tensor_mode is not None:
            raise ConstraintError(
                f"sequence 'megatron' splits the sequence over the 1D tensor axis; it does not "
                f"go with tensor mode {c.tensor_mode}"
            )
        size = c.sequence_size or left
        left = _take(left, size, f"sequence {c.sequence}", total)
        pinned.append(AxisRole(name="sequence", size=size))
    data = c.data
    if data is None and c.zero is not None and left > 1:
        data, left = left, 1
    roles = [AxisRole(name="data", size=data)] if data else []
    if not pinned and not roles:
        return tuple(AxisRole(name="free", size=n) for n in mesh_shape)
    free = _free_axes(left, mesh_shape, [r.size for r in (*roles, *pinned)])
    return (*roles, *(AxisRole(name="free", size=n) for n in free), *pinned)


def _take(left: int, size: int, name: str, total: int) -> int:
    if left % size:
        raise ConstraintError(
            f"{name} takes {size} devices, but {left} of {total} are left, which {size} does not "
            "divide"
        )
    return left // size


def _free_axes(left: int, mesh_shape: tuple[int, ...], used: list[int]) -> list[int]:
    """Axes for the devices that no role takes: the mesh's own ones where they fit."""
    if left == 1:
        return []
    remaining = list(mesh_shape)
    for size in used:
        if size in remaining:
            remaining.remove(size)
    return remaining if math.prod(remaining) == left else [left]
