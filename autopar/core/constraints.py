"""`Constraints`: what the user pins. What is absent is chosen."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.core.block_kinds import Checkpoint, parse_checkpoint
from autopar.core.schedule import schedules
from autopar.errors import ConstraintError

__all__ = ["NO_PIPELINE", "AxisRole", "Constraints", "PipelinePin", "assign_mesh"]

TENSOR_MODES = ("1d", "2d", "2.5d", "3d")
SEQUENCE_MODES = ("megatron", "ulysses", "ring", "none")
ZERO_STAGES = (0, 1, 2, 3)
_KEYS = ("tensor", "sequence", "data", "zero", "checkpoint", "offload", "pipeline", "params")
OFFLOADS = ("none", "optimizer")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(value: Any, name: str) -> None:
    if not _is_whole(value) or value < 1:
        raise ConstraintError(f"{name}={value!r} must be a positive whole number")


def _known(value: Any, known: Sequence[str], name: str) -> None:
    if value not in known:
        raise ConstraintError(f"unknown {name} {value!r}; known are {', '.join(known)}")


def _texts(value: Any) -> tuple[str, ...] | None:
    """Texts in a list, or one alone; None for anything else."""
    if isinstance(value, str):
        return (value,)
    listed = isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)
    return tuple(value) if listed else None


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

    Raises:
        ConstraintError: an unknown schedule, or a number or cuts that can't be.
    """

    size: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    cuts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("size", "microbatches", "chunks"):
            if (value := getattr(self, name)) is not None:
                _positive(value, f"pipeline {name}")
        if self.schedule is not None:
            _known(self.schedule, schedules(), "pipeline schedule")
        if self.cuts is None:
            return
        cuts = _texts(self.cuts)
        if cuts is None:
            raise ConstraintError(
                f"pipeline cuts={self.cuts!r}: give the FQN of the block that each stage but the "
                "first begins with"
            )
        object.__setattr__(self, "cuts", cuts)
        stages, size, chunks = len(cuts) + 1, self.size, self.chunks
        if size is not None and stages != size * (chunks or max(1, stages // size)):
            raise ConstraintError(
                f"pipeline cuts make {stages} stages, size {size} × chunks {chunks or 1} are "
                f"{size * (chunks or 1)}"
            )

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

    Raises:
        ConstraintError: an unknown mode, a size that is not a positive integer, or a size or depth
            without the mode that it belongs to.
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

    def __post_init__(self) -> None:
        for name, value, known in (
            ("tensor mode", self.tensor_mode, TENSOR_MODES),
            ("sequence mode", self.sequence, SEQUENCE_MODES),
            ("offload", self.offload, OFFLOADS),
        ):
            if value is not None:
                _known(value, known, name)
        for name, size, mode in (
            ("data", self.data, "data"),
            ("tensor size", self.tensor_size, self.tensor_mode),
            ("depth", self.depth, self.tensor_mode),
            ("sequence size", self.sequence_size, self.sequence),
        ):
            if size is not None:
                _positive(size, name)
                if mode is None:
                    raise ConstraintError(f"{name}={size} pins nothing without a mode: give one")
        if self.depth is not None and self.tensor_mode != "2.5d":
            raise ConstraintError(
                f"depth={self.depth} belongs to mode 2.5d, not {self.tensor_mode}"
            )
        if self.zero is not None and not (_is_whole(self.zero) and self.zero in ZERO_STAGES):
            raise ConstraintError(f"zero={self.zero!r}: the stages are 0, 1, 2 and 3")
        for name, read in (("checkpoint", parse_checkpoint), ("pipeline", _pipeline)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, read(value))
        object.__setattr__(self, "params", _params(self.params))

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
        fields = {key: pinned for key, pinned in value.items() if pinned is not None}
        if "tensor" in fields:
            fields |= _tensor(fields.pop("tensor"))
        if "sequence" in fields:
            fields |= _sequence(fields.pop("sequence"))
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


def _params(value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise ConstraintError(f"params={value!r}: give {{FQN glob: placements}}")
    found: dict[str, tuple[str, ...]] = {}
    for glob, wanted in value.items():
        if not isinstance(glob, str):
            raise ConstraintError(f"params of {glob!r}: a parameter is named by its FQN or a glob")
        placements = _texts(wanted)
        if placements is None:
            raise ConstraintError(
                f"params[{glob!r}] = {wanted!r}: give the placement for each mesh axis as text, "
                "such as ['Shard(0)', 'Replicate()']"
            )
        found[glob] = placements
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
    return PipelinePin(**spec)


def _tensor(value: Any) -> dict[str, Any]:
    spec = _settings({"size": value} if isinstance(value, int) else value, "tensor", "mode")
    mode = spec.get("mode")
    fields = {"mode": "tensor_mode", "size": "tensor_size", "depth": "depth"}
    return _fields({**spec, "mode": "1d" if mode is None else mode}, fields, "tensor")


def _sequence(value: Any) -> dict[str, Any]:
    spec = _settings(value, "sequence", "mode")
    _known(spec.get("mode"), SEQUENCE_MODES, "sequence mode")
    return _fields(spec, {"mode": "sequence", "size": "sequence_size"}, "sequence")


def _fields(spec: dict[str, Any], fields: Mapping[str, str], name: str) -> dict[str, Any]:
    """Settings under the names that `Constraints` has for them."""
    unknown = sorted(repr(key) for key in spec if key not in fields)
    if unknown:
        known = ", ".join(fields)
        raise ConstraintError(f"unknown {name} settings [{', '.join(unknown)}]; known: {known}")
    return {fields[key]: value for key, value in spec.items()}


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
