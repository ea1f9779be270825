"""Device and link profiles: the figures every cost is computed from, each with its source.

A profile is a TOML file in ``profiles/`` (data, no code): one device, the link between devices of
a node, the link between nodes, and how many devices a node usually has. `catalogue.load_profile`
reads one by name or path; `Profile.to_dict` and `Profile.from_dict` carry it inside a saved plan. A
profile of a machine at hand (`measure.py`) also has measured curves of ops and lines of
collectives, which are used in place of the laws.

Units: seconds, bytes, bytes/s, FLOP/s. Prefixes are decimal: 3.35 TB/s is 3.35e12 bytes/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np

from autopar.errors import AutoparError

__all__ = [
    "ClusterError",
    "CollectiveLine",
    "Curve",
    "DeviceProfile",
    "Efficiency",
    "LinkProfile",
    "Profile",
    "dtype_name",
]

_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8")
_OP_CLASSES = ("matmul", "attention", "conv", "memory")
_T = TypeVar("_T")
FloatArray: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class ClusterError(AutoparError, ValueError):
    """A profile, a mesh shape or a cost query does not make sense (says which, and the fix)."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ClusterError(message)


def dtype_name(dtype: object) -> str:
    """The name that profiles use for a dtype: ``torch.bfloat16`` or ``"bfloat16"`` -> ``bfloat16``.

    Every 8-bit float is ``float8``, a complex dtype is its real part's, and what has no rate of
    its own (integers, bool) counts as ``float32``, the rate of the vector units.
    """
    name = str(dtype).removeprefix("torch.")
    if name.startswith("float8"):
        return "float8"
    if name.startswith("complex"):
        return {"complex32": "float16", "complex128": "float64"}.get(name, "float32")
    return name if name in _DTYPES else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How near an op class comes to the device's peak: ``peak_fraction * t / (t + ramp_s)``.

    ``t`` is the op's time at peak, so an op of `ramp_s` at peak reaches half of `peak_fraction`,
    and the op takes ``(t + ramp_s) / peak_fraction``: affine, hence monotone in the op's size.

    Attributes:
        peak_fraction: fraction of peak that large ops reach, in (0, 1].
        ramp_s: seconds at peak at which half of that is reached (tile and wave quantisation).
        dtype_fractions: in place of `peak_fraction`, by the name of a dtype that reaches another
            part of its own peak.
    """

    peak_fraction: float
    ramp_s: float = 0.0
    dtype_fractions: Mapping[str, float] = field(hash=False, default_factory=dict)

    def __post_init__(self) -> None:
        fractions = (self.peak_fraction, *self.dtype_fractions.values())
        _require(
            all(0 < fraction <= 1 for fraction in fractions) and self.ramp_s >= 0,
            f"efficiency needs 0 < peak_fraction <= 1 and ramp_s >= 0, got {fractions} and "
            f"{self.ramp_s}",
        )
        unknown = sorted(set(self.dtype_fractions) - set(_DTYPES))
        _require(
            not unknown, f"efficiency: dtype_fractions has {unknown}, known dtypes are {_DTYPES}"
        )

    def fraction(self, dtype: object) -> float:
        """Fraction of a dtype's peak that large ops reach."""
        return self.dtype_fractions.get(dtype_name(dtype), self.peak_fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Measured seconds of the ops of one class and dtype over their work, launch included.

    Between points it is linear in the logarithms of both; below the first it is constant, above
    the last the rate stays. So it is monotone.

    Attributes:
        op_class: see `core.work.op_class`.
        dtype: dtype name of the result.
        unit: what the work counts: "flops" or "bytes" (read plus written).
        work: increasing.
        seconds: not decreasing.
    """

    op_class: str
    dtype: str
    unit: str
    work: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        where = f"curve of {self.op_class} {self.dtype}"
        _require(self.unit in ("flops", "bytes"), f"{where}: unit {self.unit!r} is unknown")
        _require(self.dtype in _DTYPES, f"{where}: known dtypes are {_DTYPES}")
        _require(
            0 < len(self.work) == len(self.seconds),
            f"{where}: {len(self.work)} values of work and {len(self.seconds)} of seconds",
        )
        _require(
            self.work[0] > 0 and all(a < b for a, b in pairwise(self.work)),
            f"{where}: work must be positive and increase, got {self.work}",
        )
        _require(
            self.seconds[0] > 0 and all(a <= b for a, b in pairwise(self.seconds)),
            f"{where}: seconds must be positive and not decrease, got {self.seconds}",
        )

    def at(self, work: FloatArray) -> FloatArray:
        """Seconds of ops of that much work; 0 for none."""
        logs = np.log(np.maximum(work, self.work[0]))
        found = np.exp(np.interp(logs, np.log(self.work), np.log(self.seconds)))
        found = found * np.maximum(1.0, work / self.work[-1])
        return np.where(work > 0, found, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLine:
    """Measured cost of a collective inside a node: ``latency_s + seconds_per_byte * num_bytes``.

    Attributes:
        kind: see `CollectiveKind`.
        group_size: ranks of each group; all groups of the node ran at once.
        latency_s: seconds at no bytes.
        seconds_per_byte: of the full buffer, as `Cluster.collective_seconds` counts it.
    """

    kind: str
    group_size: int
    latency_s: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        _require(
            self.group_size > 1 and self.latency_s >= 0 and self.seconds_per_byte >= 0,
            f"line of {self.kind}: needs group_size > 1 and no negative figure, got {self}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device.

    Attributes:
        name: such as ``"H100 SXM5 80GB"``.
        memory_bytes: memory that a process can allocate.
        peak_flops: dense FLOP/s per dtype name. `float32` is required: it is also the rate of
            the vector units and of any dtype that is missing here.
        memory_bandwidth: bytes/s, reads and writes together.
        kernel_overhead_s: seconds that launching one op costs.
        efficiency: per op class: "matmul", "attention", "conv", and "memory" for the bandwidth.
        allocation_granularity_bytes: the allocator rounds every buffer up to a multiple of this.
        view_overhead_s: host seconds of an op that only makes a view.
        host_op_s: host seconds in which an eager program issues one op.
        power_w: power at which it reaches `peak_flops`; 0 where unknown.
        multiprocessors: that work on the tiles of a matrix product; 0 where unknown.
        concurrent_ranks: ranks that ran at once on the machine while it was measured.
        cores: CPU cores that they shared; 0 where every rank has its own device.
        host_bandwidth: bytes/s each way between the device and host memory, while all devices of a
            node use it; 0 where the device's memory is the host's.
        host_memory_bandwidth: bytes/s, the device's share of the host memory's.
        host_memory_bytes: the device's share of the host's memory; None where unknown, and then
            not limited.
        curves: measured ops; the law of `compute.py` where there is none.
        sources: per figure, where it comes from: data sheet, paper, measured, or assumed.
    """

    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    kernel_overhead_s: float
    efficiency: Mapping[str, Efficiency] = field(hash=False)
    allocation_granularity_bytes: int
    view_overhead_s: float = 0.0
    host_op_s: float = 0.0
    power_w: float = 0.0
    multiprocessors: int = 0
    concurrent_ranks: int = 1
    cores: int = 0
    host_bandwidth: float = 0.0
    host_memory_bandwidth: float = 0.0
    host_memory_bytes: int | None = None
    curves: tuple[Curve, ...] = ()
    sources: Mapping[str, str] = field(hash=False, default_factory=dict)

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        _require(
            min(self.view_overhead_s, self.host_op_s, self.cores) >= 0
            and self.concurrent_ranks >= 1,
            f"{where}: view_overhead_s, host_op_s, concurrent_ranks and cores must not be "
            "negative, and a rank is needed",
        )
        _require(
            (self.host_bandwidth > 0) == (self.host_memory_bandwidth > 0)
            and min(self.host_bandwidth, self.host_memory_bandwidth) >= 0,
            f"{where}: host_bandwidth and host_memory_bandwidth must both be positive, or both 0",
        )
        _require(
            self.host_memory_bytes is None or self.host_memory_bytes > 0,
            f"{where}: host_memory_bytes must be positive, or absent where it is not known",
        )
        keys = [(c.op_class, c.dtype) for c in self.curves]
        _require(len(set(keys)) == len(keys), f"{where}: two curves for one class and dtype")
        _require(self.memory_bytes > 0, f"{where}: memory_bytes must be positive")
        _require(self.memory_bandwidth > 0, f"{where}: memory_bandwidth must be positive")
        _require(self.kernel_overhead_s >= 0, f"{where}: kernel_overhead_s must not be negative")
        _require(
            self.allocation_granularity_bytes > 0,
            f"{where}: allocation_granularity_bytes must be positive",
        )
        unknown = sorted(set(self.peak_flops) - set(_DTYPES))
        _require(not unknown, f"{where}: peak_flops has {unknown}, known dtypes are {_DTYPES}")
        _require("float32" in self.peak_flops, f"{where}: peak_flops needs at least float32")
        _require(min(self.peak_flops.values()) > 0, f"{where}: peak_flops must be positive")
        _require(
            set(self.efficiency) == set(_OP_CLASSES),
            f"{where}: efficiency needs exactly {_OP_CLASSES}, got {sorted(self.efficiency)}",
        )

    def peak(self, dtype: object) -> float:
        """FLOP/s for `dtype` (a name or a `torch.dtype`); float32's where the device lacks it."""
        return self.peak_flops.get(dtype_name(dtype), self.peak_flops["float32"])

    def limited(self, power_w: float) -> DeviceProfile:
        """The device under a power limit, which slows its arithmetic and not its memory.

        Switching takes power as clock times voltage squared, and voltage follows the clock, so the
        clock goes as the cube root of the power.
        """
        if not self.power_w or power_w >= self.power_w:
            return self
        share = (power_w / self.power_w) ** (1 / 3)
        slower = {name: rate * share for name, rate in self.peak_flops.items()}
        return replace(self, peak_flops=slower, power_w=power_w)

    def curve(self, op_class: str, dtype: object) -> Curve | None:
        """The measured curve of a class; by bytes, float32's does for a dtype without one."""
        name = dtype_name(dtype)
        plain: Curve | None = None
        for curve in self.curves:
            if curve.op_class == op_class and curve.dtype == name:
                return curve
            if curve.op_class == op_class and curve.unit == "bytes" and curve.dtype == "float32":
                plain = curve
        return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """One kind of link, as each device sees it while all devices use it.

    Attributes:
        name: such as ``"NVLink 4"``.
        latency_s: α, seconds for each step of an algorithm (a hop of the ring).
        bandwidth: bytes/s for each device in one direction. Between nodes it is the device's
            share: a node has ``devices_per_node * bandwidth`` in all.
        base_latency_s: seconds for starting any collective.
        compute_share: of a device's compute, what a collective takes while it runs.
        lines: measured collectives, used in place of the law inside a node.
        sources: per figure, where it comes from.
    """

    name: str
    latency_s: float
    bandwidth: float
    base_latency_s: float
    compute_share: float = 0.0
    lines: tuple[CollectiveLine, ...] = ()
    sources: Mapping[str, str] = field(hash=False, default_factory=dict)

    def __post_init__(self) -> None:
        where = f"link {self.name!r}"
        for kind in {line.kind for line in self.lines}:
            lines = self.lines_of(kind)
            _require(
                all(
                    a.group_size < b.group_size
                    and a.latency_s <= b.latency_s
                    and a.seconds_per_byte <= b.seconds_per_byte
                    for a, b in pairwise(lines)
                ),
                f"{where}: a larger group must not be cheaper, but the lines of {kind} are {lines}",
            )
        _require(self.bandwidth > 0, f"{where}: bandwidth must be positive, got {self.bandwidth}")
        _require(
            min(self.latency_s, self.base_latency_s) >= 0 and 0 <= self.compute_share <= 1,
            f"{where}: latencies must not be negative and compute_share be in [0, 1], got "
            f"{self.latency_s}, {self.base_latency_s} and {self.compute_share}",
        )

    def lines_of(self, kind: str) -> tuple[CollectiveLine, ...]:
        """The measured lines of a collective, by group size."""
        found = [line for line in self.lines if line.kind == kind]
        return tuple(sorted(found, key=lambda line: line.group_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A device with its links.

    Attributes:
        name: the name that `load_profile` knows.
        device: the device.
        intra: the link between devices of one node.
        inter: the link between nodes.
        devices_per_node: the usual size of a node.
        device_type: torch's device type, ``"cuda"`` or ``"cpu"``.
        device_name_pattern: regular expression that finds this device in torch's device name.
        provenance: of a measured profile: machine, versions, date, ranks.
    """

    name: str
    device: DeviceProfile
    intra: LinkProfile
    inter: LinkProfile
    devices_per_node: int
    device_type: str
    device_name_pattern: str = ""
    provenance: Mapping[str, str] = field(hash=False, default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The profile as JSON types."""
        plain: dict[str, Any] = listed(asdict(self))
        return plain

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Profile:
        """The inverse of `to_dict`, and the reader of the TOML files.

        Raises:
            ClusterError: for a missing or unknown key, or a figure out of range.
        """
        values = dict(table)
        where = f"profile {values.get('name', '?')!r}"
        device = dict(_table(values, "device", where))
        device["efficiency"] = {
            op_class: build(Efficiency, row, f"{where}, device.efficiency.{op_class}")
            for op_class, row in _table(device, "efficiency", where).items()
        }
        device["curves"] = tuple(
            build(Curve, {k: _tupled(v) for k, v in row.items()}, f"{where}, device.curves")
            for row in device.get("curves", ())
        )
        values["device"] = build(DeviceProfile, device, f"{where}, device")
        for link in ("intra", "inter"):
            table = dict(_table(values, link, where))
            table["lines"] = tuple(
                build(CollectiveLine, row, f"{where}, {link}.lines")
                for row in table.get("lines", ())
            )
            values[link] = build(LinkProfile, table, f"{where}, {link}")
        return build(cls, values, where)


def _table(values: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    table = values.get(key)
    if not isinstance(table, Mapping):
        raise ClusterError(f"{where}: table {key!r} is missing")
    return table


def listed(value: Any) -> Any:
    """`value` with lists in place of tuples, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: listed(item) for key, item in value.items()}
    return [listed(item) for item in value] if isinstance(value, tuple | list) else value


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def build(cls: type[_T], values: Mapping[str, Any], where: str) -> _T:
    """Builds a dataclass from a mapping, naming keys that are missing or unknown."""
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    _require(not unknown, f"{where}: unknown keys {unknown}; known are {sorted(known)}")
    try:
        return cls(**values)
    except TypeError as error:
        raise ClusterError(f"{where}: {error}") from None
