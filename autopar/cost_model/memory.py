"""Peak memory of a schedule of ops on one device, and the bytes of optimizer states.

Liveness: with L(i) the buffers live before op i, each rounded up to the allocator's granularity::

    peak = resident + max over i of ( sum of L(i) + alloc(i) + transient(i) )
    L(i+1) = L(i) + alloc(i) - free(i)

so an op's inputs, outputs and scratch are live together, and what it frees is free after it. What
arrives for an op is live before its outputs are.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from autopar.cost_model.profile import ClusterError
from autopar.errors import AutoparError

__all__ = [
    "Offloaded",
    "PeakMemory",
    "ScheduledOp",
    "check_optimizer",
    "dtype_bytes",
    "levels",
    "optimizer_name",
    "optimizer_state_bytes",
    "optimizer_text",
    "peak_bytes",
]

# states of the size of the parameter, and options that each add one
_STATES = {
    "adadelta": 2,
    "adagrad": 1,
    "adam": 2,
    "adamax": 2,
    "adamw": 2,
    "asgd": 1,
    "lion": 1,
    "muon": 1,
    "nadam": 2,
    "radam": 2,
    "rmsprop": 1,
    "rprop": 2,
    "sgd": 0,
    "sparseadam": 2,
}
_OPTIONS = {
    "adam": ("amsgrad",),
    "adamw": ("amsgrad",),
    "rmsprop": ("momentum", "centered"),
    "sgd": ("momentum",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledOp:
    """One op in the order in which the device runs it.

    Attributes:
        name: for the report.
        alloc: (buffer id, bytes) of the buffers that it creates.
        free: ids of the buffers that nobody needs after it.
        transient_bytes: scratch that lives only inside the op.
        arriving_bytes: what lives before it runs, while its operands arrive.
    """

    name: str
    alloc: tuple[tuple[str, int], ...] = ()
    free: tuple[str, ...] = ()
    transient_bytes: int = 0
    arriving_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Offloaded:
    """An optimizer whose states live in host memory: none of their bytes are the device's."""

    optimizer: object


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The moment of a schedule at which most bytes are live.

    Attributes:
        peak_bytes: bytes live then, resident ones included.
        index: position of that op in the schedule (the first such), -1 for an empty schedule.
        name: its name, "" for an empty schedule.
        breakdown: (kind, bytes) of what is live then, largest first; it sums to `peak_bytes`.
    """

    peak_bytes: int
    index: int
    name: str
    breakdown: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, index: int, name: str, kinds: Mapping[str, int]) -> PeakMemory:
        """That of an op, from the bytes of each kind."""
        parts = [(kind, size) for kind, size in kinds.items() if size]
        parts.sort(key=lambda part: (-part[1], part[0]))
        total = sum(size for _, size in parts)
        return cls(peak_bytes=total, index=index, name=name, breakdown=tuple(parts))


def peak_bytes(
    schedule: Iterable[ScheduledOp],
    *,
    resident: Mapping[str, int] | None = None,
    granularity_bytes: int = 1,
    kinds: Mapping[str, str] | None = None,
) -> PeakMemory:
    """The peak of a schedule.

    Args:
        schedule: ops in order.
        resident: bytes that live throughout, per kind, such as ``{"parameters": 10}``; not rounded.
        granularity_bytes: `DeviceProfile.allocation_granularity_bytes`.
        kinds: kind of a buffer id, for the breakdown; "buffer" where missing. Scratch is
            "transient".

    Returns:
        The peak and what it is made of.

    Raises:
        ClusterError: a buffer is created twice or freed when not live, or a size is negative.
    """
    best: tuple[int, str, int, dict[str, int]] = (-1, "", -1, {})
    for index, name, total, live in levels(
        schedule, resident=resident, granularity_bytes=granularity_bytes, kinds=kinds
    ):
        # resident bytes alone are the peak of an empty schedule only
        if total > best[2] or best[0] < 0:
            best = index, name, total, dict(live)
    return PeakMemory.of(best[0], best[1], best[3])


def levels(
    schedule: Iterable[ScheduledOp],
    *,
    resident: Mapping[str, int] | None = None,
    granularity_bytes: int = 1,
    kinds: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, str, int, Mapping[str, int]]]:
    """What is live at each moment of a schedule; arguments and errors as for `peak_bytes`.

    Yields:
        `(index, name, bytes, bytes by kind)`: first -1 with the resident ones, then of each op that
        something arrives for the moment before it runs, and of each op the moment while it runs.
        The last holds until the next moment: copy it to keep it.
    """
    if granularity_bytes < 1:
        raise ClusterError(f"granularity_bytes must be at least 1, got {granularity_bytes}")
    kind_of = kinds or {}
    live = _Live({k: _rounded(n, 1, "resident", k) for k, n in (resident or {}).items()})
    buffers: dict[str, int] = {}
    yield -1, "", live.total, live.kinds
    for index, op in enumerate(schedule):
        arriving = _rounded(op.arriving_bytes, granularity_bytes, "operands of op", index)
        if arriving:
            live.add("transient", arriving)
            yield index, op.name, live.total, live.kinds
            live.add("transient", -arriving)
        for buffer, size in op.alloc:
            if buffer in buffers:
                raise ClusterError(f"op {index} ({op.name}) creates {buffer!r}, which is live")
            buffers[buffer] = _rounded(size, granularity_bytes, "buffer", buffer)
            live.add(kind_of.get(buffer, "buffer"), buffers[buffer])
        transient = _rounded(op.transient_bytes, granularity_bytes, "transient of op", index)
        live.add("transient", transient)
        yield index, op.name, live.total, live.kinds
        live.add("transient", -transient)
        for buffer in op.free:
            if buffer not in buffers:
                raise ClusterError(f"op {index} ({op.name}) frees {buffer!r}, which is not live")
            live.add(kind_of.get(buffer, "buffer"), -buffers.pop(buffer))


class _Live:
    """Live bytes by kind, and their sum."""

    def __init__(self, kinds: dict[str, int]) -> None:
        self.kinds = kinds
        self.total = sum(kinds.values())

    def add(self, kind: str, num_bytes: int) -> None:
        self.kinds[kind] = self.kinds.get(kind, 0) + num_bytes
        self.total += num_bytes


def _rounded(size: int, granularity: int, what: str, name: object) -> int:
    if size < 0:
        raise ClusterError(f"{what} {name!r} has {size} bytes: sizes must not be negative")
    return -(-size // granularity) * granularity


def dtype_bytes(dtype: object) -> int:
    """Bytes of one element of a dtype: a `torch.dtype`, or its name.

    Raises:
        ClusterError: unknown name.
    """
    name = str(dtype).removeprefix("torch.")
    if name == "bool" or name.startswith("float8"):
        return 1
    bits = name.removeprefix("bfloat").removeprefix("float").removeprefix("uint")
    bits = bits.removeprefix("int").removeprefix("complex")
    if not bits.isdigit() or int(bits) % 8:
        raise ClusterError(f"unknown dtype {name!r}: give torch's name, such as 'bfloat16'")
    return int(bits) // 8


def optimizer_state_bytes(
    optimizer: object,
    numel: int,
    dtype: object = "float32",
    *,
    shape: Sequence[int] | None = None,
    **options: object,
) -> int:
    """Bytes of the states that an optimizer keeps for one parameter (step counters left out).

    Args:
        optimizer: a torch optimizer (instance, class, or `functools.partial` of a class), a name
            such as ``"adamw"`` or ``"sgd(momentum)"``, or None for none; an `Offloaded` one has
            none on the device.
        numel: elements of the (local shard of the) parameter.
        dtype: dtype of the states, which is the parameter's in torch.
        shape: shape of the parameter, for Adafactor's row and column sums; square if None.
        **options: constructor arguments that add states: momentum, amsgrad, centered.

    Returns:
        Bytes; an unknown optimizer counts as two states, with one warning.
    """
    if optimizer is None or isinstance(optimizer, Offloaded):
        return 0
    name, settings = _optimizer_name(optimizer)
    settings = {**settings, **options}
    if name == "adafactor":
        return _adafactor_states(numel, shape) * dtype_bytes(dtype)
    count = _state_count(name, settings)
    if count is None:
        _warn_of_unknown(name)
        count = 2
    return count * numel * dtype_bytes(dtype)


def check_optimizer(optimizer: object) -> None:
    """Refuse a name that is no optimizer's; a class need not be known.

    Raises:
        AutoparError: the name is unknown; suggests the nearest ones.
    """
    known = sorted({*_STATES, "adafactor"})
    name, given = _optimizer_name(optimizer)
    options = _OPTIONS.get(name, ())
    if isinstance(optimizer, str) and (name not in known or not set(given) <= {*options}):
        near = difflib.get_close_matches(name, [k for k in known if k[:1] == name[:1]], n=2)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise AutoparError(
            f"optimizer {optimizer!r} is unknown.{hint} Known are {', '.join(known)}, with options "
            "that add states in parentheses, such as sgd(momentum). Of another optimizer pass the "
            "class, which counts as two states per parameter, as Adam has."
        )


@cache
def _warn_of_unknown(name: str) -> None:
    """Once for each name: the states of every parameter are asked for many times."""
    warnings.warn(
        f"optimizer {name!r} is unknown: counting two states per parameter, as Adam has",
        stacklevel=3,
    )


def optimizer_name(optimizer: object) -> str:
    """Lower-case name of an optimizer, given as for `optimizer_state_bytes`."""
    return _optimizer_name(optimizer)[0]


def optimizer_text(optimizer: object) -> str:
    """An optimizer as text that counts as much: its name and options, ``"sgd(momentum)"``."""
    name, settings = _optimizer_name(optimizer)
    given = [option for option in _OPTIONS.get(name, ()) if settings.get(option)]
    return f"{name}({', '.join(given)})" if given else name


def _optimizer_name(optimizer: object) -> tuple[str, dict[str, object]]:
    """Lower-case name of an optimizer and the options that it was given."""
    if isinstance(optimizer, str):
        name, _, options = optimizer.lower().removesuffix(")").partition("(")
        return name, {option.strip(): True for option in options.split(",") if option}
    partial_of = getattr(optimizer, "func", None)
    if partial_of is not None:
        return _optimizer_name(partial_of)[0], dict(getattr(optimizer, "keywords", {}))
    if isinstance(optimizer, type):
        return optimizer.__name__.lower(), {}
    return type(optimizer).__name__.lower(), dict(getattr(optimizer, "defaults", {}))


def _state_count(name: str, settings: Mapping[str, object]) -> int | None:
    """States of the size of the parameter, from torch.optim's sources; None if unknown."""
    if name not in _STATES:
        return None
    return _STATES[name] + sum(bool(settings.get(option)) for option in _OPTIONS.get(name, ()))


def _adafactor_states(numel: int, shape: Sequence[int] | None) -> int:
    """Row and column second moments of the last two dims (Shazeer and Stern 2018, 1804.04235)."""
    if shape is None:
        return 2 * math.isqrt(max(numel - 1, 0)) + 2 if numel else 0
    if len(shape) < 2:
        return numel
    batch = math.prod(shape[:-2])
    return batch * (shape[-2] + shape[-1])
