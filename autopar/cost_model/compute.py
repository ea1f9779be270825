"""The seconds of one op on one device: a roofline with saturating efficiency.

For an op with F flops and B bytes read and written, on a device with peak P (FLOP/s for the dtype),
memory bandwidth W, launch overhead c, and efficiency (f, ρ) per op class (f per dtype, too)::

    seconds = c + max((F / P + ρ_class) / f_class, (B / W + ρ_memory) / f_memory)

where a term without flops (or bytes) is 0 and a view costs 0. It is monotone in F and in B.
Class "memory" is every op that is bound by its bytes: pointwise, reductions, embedding, copies.
Its flops run on the vector units, at float32's rate at most.

A copy between the device and host memory ("host") moves B / 2 bytes over the link, if there is one.

Where the device has measured curves (`profile.Curve`), an op takes the larger of its class's curve
over flops and of a curve over bytes; a class without one goes by a plainer class (`PLAINER`).
(Roofline: Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from autopar.core.work import VARIANTS
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.profile import ClusterError, Curve, DeviceProfile, FloatArray

__all__ = [
    "OP_CLASSES",
    "PLAINER",
    "OpCost",
    "compute_seconds",
    "compute_seconds_array",
    "kernel_seconds",
]

# what prices a class that a device has no curve for; the law knows only the last of each chain
PLAINER = {
    **VARIANTS,
    "attention_causal": "attention",
    "attention_backward_causal": "attention_backward",
    "attention_backward": "attention",
    "conv_backward": "conv",
    "tanh": "special",
    "recurrent": "matmul",
    "special": "pointwise",
    "loss": "softmax",
    "softmax": "special",
    "norm": "reduction",
    "reduction": "pointwise",
    "pointwise": "memory",
    "lookup": "memory",
    "transpose": "memory",
    "random": "memory",
    "update": "pointwise",
    "host": "memory",
}
OP_CLASSES = ("matmul", "attention", "conv", "memory", "view", *PLAINER)

NumberArray: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64] | np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """What an op does on one device.

    Attributes:
        op_class: one of `OP_CLASSES`.
        flops: floating-point operations, a multiply-add counting 2.
        bytes: bytes read plus bytes written.
        dtype: name of the dtype that the op computes in.
    """

    op_class: str
    flops: float
    bytes: int
    dtype: str

    def __post_init__(self) -> None:
        _check_class(self.op_class)
        if self.flops < 0 or self.bytes < 0:
            raise ClusterError(
                f"{self.op_class} of {self.flops} flops and {self.bytes} bytes: neither may be "
                "negative"
            )


def compute_seconds(cluster_or_device: Cluster | DeviceProfile, cost: OpCost) -> float:
    """Seconds of one op on one device, launch included.

    Args:
        cluster_or_device: the device, or a cluster of such devices.
        cost: the local op: flops and bytes of the shard that the device has.

    Returns:
        Seconds; 0 for a view.
    """
    device = cluster_or_device
    if isinstance(device, Cluster):
        device = device.device
    flops, num_bytes = np.array(cost.flops, dtype=np.float64), np.array(cost.bytes)
    return float(compute_seconds_array(device, cost.op_class, cost.dtype, flops, num_bytes))


def compute_seconds_array(
    device: DeviceProfile,
    op_class: str,
    dtype: str,
    flops: NumberArray,
    bytes: NumberArray,
    steps: NumberArray | int = 1,
) -> FloatArray:
    """`compute_seconds` of many ops of one class and dtype: the same numbers to the last bit.

    Args:
        device: the device.
        op_class: one of `OP_CLASSES`.
        dtype: name of the dtype that the ops compute in.
        flops: any shape.
        bytes: read plus written, a shape that broadcasts with `flops`.
        steps: equal parts of each op that run one after the other, a shape that broadcasts, too.

    Returns:
        Seconds, of the broadcast shape.

    Raises:
        ClusterError: unknown class, or a negative count.
    """
    _check_class(op_class)
    num_flops, num_bytes = np.broadcast_arrays(
        np.asarray(flops, dtype=np.float64) / steps, np.asarray(bytes, dtype=np.float64) / steps
    )
    if (num_flops < 0).any() or (num_bytes < 0).any():
        raise ClusterError(f"{op_class}: flops and bytes must not be negative")
    if op_class == "view":
        return np.zeros(num_flops.shape)
    if op_class == "host" and device.host_bandwidth:
        seconds = device.kernel_overhead_s + num_bytes / 2.0 / device.host_bandwidth
        return np.asarray(steps * seconds)
    arithmetic_s = _arithmetic(device, op_class, dtype, num_flops)
    curve = _curve(device, op_class, dtype, "bytes") or _curve(device, "memory", dtype, "bytes")
    if curve is not None:
        memory_s = curve.at(num_bytes)
    else:
        memory_s = _ramped(device, "memory", dtype, num_bytes / device.memory_bandwidth)
        memory_s = device.kernel_overhead_s + memory_s
    each = np.maximum(device.kernel_overhead_s, np.maximum(arithmetic_s, memory_s))
    return np.asarray(steps * each)


def kernel_seconds(
    device: DeviceProfile, op_class: str, dtype: str, bytes: NumberArray, launches: NumberArray
) -> FloatArray:
    """Seconds of bytes that are moved in a fused kernel, and of its launch where that counts.

    Parts of a kernel with one launch among them add up to what `compute_seconds` says of the whole.

    Args:
        device: the device.
        op_class: one of `OP_CLASSES`, bound by its bytes.
        dtype: name of the dtype that the kernel computes in.
        bytes: read plus written by each part.
        launches: of each part, a shape that broadcasts with `bytes`.
    """
    nothing = np.zeros(np.shape(bytes))
    # of next to no bytes: what a kernel takes beside them; none at all would leave out the ramp
    start_s = compute_seconds_array(device, op_class, dtype, np.array(0.0), np.array(1e-200))
    seconds = compute_seconds_array(device, op_class, dtype, nothing, bytes)
    return np.asarray(np.maximum(0.0, seconds - start_s) + launches * start_s)


def _arithmetic(device: DeviceProfile, op_class: str, dtype: str, flops: FloatArray) -> FloatArray:
    """Seconds by the flops, launch included."""
    curve = _curve(device, op_class, dtype, "flops")
    if curve is not None:
        return curve.at(flops)
    ideal_s = flops / _peak_flops(device, op_class, dtype)
    return device.kernel_overhead_s + _ramped(device, _law(op_class), dtype, ideal_s)


def _law(op_class: str) -> str:
    while op_class in PLAINER:
        op_class = PLAINER[op_class]
    return op_class


def _curve(device: DeviceProfile, op_class: str, dtype: str, unit: str) -> Curve | None:
    """The curve of a class over `unit`, or of the nearest plainer class that has one."""
    if not device.curves:
        return None
    name: str | None = op_class
    while name is not None:
        found = device.curve(name, dtype)
        if found is not None and found.unit == unit:
            return found
        name = PLAINER.get(name)
    return None


def _peak_flops(device: DeviceProfile, op_class: str, dtype: str) -> float:
    peak = device.peak(dtype)
    return min(peak, device.peak("float32")) if _law(op_class) == "memory" else peak


def _ramped(device: DeviceProfile, op_class: str, dtype: str, ideal_s: FloatArray) -> FloatArray:
    """Seconds at the class's efficiency of work that takes `ideal_s` at peak."""
    efficiency = device.efficiency[op_class]
    return np.where(ideal_s > 0, (ideal_s + efficiency.ramp_s) / efficiency.fraction(dtype), 0.0)


def _check_class(op_class: str) -> None:
    if op_class not in OP_CLASSES:
        raise ClusterError(f"unknown op class {op_class!r}: use one of {', '.join(OP_CLASSES)}")
