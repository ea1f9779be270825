"""Seconds and bytes: the costs that the solver minimises, on a described cluster.

* `Cluster`: devices, links and mesh; `Cluster.collective_seconds`, `Cluster.alpha_beta`.
* `compute_seconds`: one op on one device (roofline).
* `peak_bytes`, `optimizer_state_bytes`: memory.
* `simulate`: a whole step on two streams, from the emitted program.
* `profiles/*.toml`: the figures, each with its source; `measure.py` measures a machine's own.

Seconds, bytes, bytes/s and FLOP/s throughout.
"""

from __future__ import annotations

from autopar.cost_model.catalogue import load_profile, profile_names, register_profile
from autopar.cost_model.cluster import Cluster, bucketed_latency
from autopar.cost_model.collectives import CollectiveKind
from autopar.cost_model.compute import (
    OpCost,
    compute_seconds,
    compute_seconds_array,
    kernel_seconds,
)
from autopar.cost_model.memory import (
    Offloaded,
    PeakMemory,
    ScheduledOp,
    dtype_bytes,
    levels,
    optimizer_name,
    optimizer_state_bytes,
    optimizer_text,
    peak_bytes,
)
from autopar.cost_model.offload import can_offload, host_state_bytes, offload_seconds
from autopar.cost_model.profile import (
    ClusterError,
    CollectiveLine,
    Curve,
    DeviceProfile,
    Efficiency,
    LinkProfile,
    Profile,
)
from autopar.cost_model.update import update_seconds

__all__ = [
    "Cluster",
    "ClusterError",
    "CollectiveKind",
    "CollectiveLine",
    "Curve",
    "DeviceProfile",
    "Efficiency",
    "LinkProfile",
    "Offloaded",
    "OpCost",
    "PeakMemory",
    "Profile",
    "ScheduledOp",
    "bucketed_latency",
    "can_offload",
    "compute_seconds",
    "compute_seconds_array",
    "dtype_bytes",
    "host_state_bytes",
    "kernel_seconds",
    "levels",
    "load_profile",
    "offload_seconds",
    "optimizer_name",
    "optimizer_state_bytes",
    "optimizer_text",
    "peak_bytes",
    "profile_names",
    "register_profile",
    "update_seconds",
]
