"""`Cluster`: the devices, links and mesh that a plan is made for, and what collectives cost on it.

Mesh and nodes: ranks are the row-major index of their mesh coordinates (last axis fastest), and
rank ``q`` is on node ``q // devices_per_node``. The cost laws are in `collectives.py`.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.core.axis_geometry import axis_geometry
from autopar.cost_model.catalogue import load_profile, profile_names
from autopar.cost_model.collectives import CollectiveKind, alpha_beta
from autopar.cost_model.host_memory import with_live_memory
from autopar.cost_model.profile import (
    ClusterError,
    DeviceProfile,
    LinkProfile,
    Profile,
    listed,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Cluster", "bucketed_latency"]

_LATENCIES = 4
"""A bucket is closed when its bytes take this many latencies."""


def bucketed_latency(latency: Any, spent: Any, shared: Any) -> Any:
    """A collective's share of the latency of its bucket.

    A full bucket has bytes for κ latencies, so a tensor whose bytes take t seconds pays t / κ; at
    least its part of one bucket with all others, and at most a call of its own::

        min(a, max(a / shared, t / κ))

    Args:
        latency: a, a number or an array.
        spent: t, of the same shape.
        shared: how many tensors may go in one bucket, likewise.
    """
    return np.minimum(latency, np.maximum(latency / shared, spent / _LATENCIES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A mesh of equal devices on equal nodes.

    Attributes:
        profile: name of the profile that the figures come from.
        device: each device.
        intra: the link between devices of a node.
        inter: the link between nodes, per device.
        devices_per_node: devices in a node.
        mesh_shape: the mesh, row-major over ranks.
        axis_names: one name per mesh axis.
        device_type: torch's device type; it says whether ops will be fused.
    """

    profile: str
    device: DeviceProfile
    intra: LinkProfile
    inter: LinkProfile
    devices_per_node: int
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        if not self.mesh_shape or min(self.mesh_shape) < 1:
            raise ClusterError(f"mesh_shape needs sizes of at least 1, got {self.mesh_shape}")
        if len(self.axis_names) != len(self.mesh_shape):
            raise ClusterError(
                f"mesh_shape {self.mesh_shape} has {len(self.mesh_shape)} axes but axis_names "
                f"{self.axis_names} has {len(self.axis_names)}: give one name per axis"
            )
        if len(set(self.axis_names)) != len(self.axis_names):
            raise ClusterError(f"axis_names {self.axis_names} repeats a name: make them distinct")
        if self.devices_per_node < 1:
            raise ClusterError(f"devices_per_node must be at least 1, got {self.devices_per_node}")

    @classmethod
    def from_profile(
        cls,
        name: str | Path,
        *,
        nodes: int = 1,
        devices_per_node: int | None = None,
        mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> Cluster:
        """A cluster of `nodes` nodes of a profile's devices; none of them need be at hand.

        Args:
            name: a profile's name, or the path of a TOML file.
            nodes: number of nodes.
            devices_per_node: devices in each; the profile's default if None.
            mesh_shape: its product must be ``nodes * devices_per_node``; by default
                ``(nodes, devices_per_node)``, or ``(devices_per_node,)`` for one node.
            axis_names: by default ``("node", "device")``, ``("device",)`` or ``axis0, axis1, …``.

        Returns:
            The cluster.

        Raises:
            ClusterError: unknown profile, or a mesh that does not have that many devices.
        """
        profile = load_profile(name)
        per_node = profile.devices_per_node if devices_per_node is None else devices_per_node
        if nodes < 1 or per_node < 1:
            raise ClusterError(
                f"nodes and devices_per_node must be at least 1, got {nodes} and {per_node}"
            )
        _check_load(profile, per_node)
        default = (nodes, per_node) if nodes > 1 else (per_node,)
        default_names = ("node", "device")[-len(default) :]
        cluster = _of(profile, profile.device, per_node, default, default_names)
        if mesh_shape is not None:
            return cluster.with_mesh_shape(mesh_shape, axis_names or _names_for(mesh_shape, ()))
        return replace(cluster, axis_names=tuple(axis_names or default_names))

    @classmethod
    def from_mesh(cls, device_mesh: DeviceMesh, profile: str | Path | None = None) -> Cluster:
        """The cluster of a live `DeviceMesh`.

        The node size is ``LOCAL_WORLD_SIZE`` if set (torchrun does), else all devices share one
        node. Memory is what the device at hand has: on CPU, if ``LOCAL_WORLD_SIZE`` is set, the
        machine's memory over its ranks, else the profile's figure. So is host memory: the machine's
        over the devices of a node, on CPU likewise.

        Args:
            device_mesh: a mesh over consecutive ranks in row-major order.
            profile: name or path; by default found by the mesh's device type and, for CUDA, by
                the name of the device.

        Returns:
            The cluster.

        Raises:
            ClusterError: no profile fits the device (lists the names).
        """
        shape = tuple(int(size) for size in device_mesh.shape)
        given = device_mesh.mesh_dim_names
        names = tuple(given) if given else _names_for(shape, ())
        ranks = [int(rank) for rank in device_mesh.mesh.flatten().tolist()]
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
        per_node = min(local or len(ranks), len(ranks))
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))) or ranks[0] % per_node:
            warnings.warn(
                f"device mesh {shape} over ranks {ranks[:8]}… is not row-major over consecutive "
                "ranks from the start of a node: link costs are estimated as if it were",
                stacklevel=2,
            )
        loaded = profile_for(device_mesh.device_type) if profile is None else load_profile(profile)
        _check_load(loaded, per_node)
        device = with_live_memory(loaded.device, device_mesh.device_type, local, per_node)
        return _of(loaded, device, per_node, shape, names)

    @classmethod
    def measure(
        cls,
        *,
        ranks: int = 1,
        device_type: str = "cpu",
        mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        rounds: int = 5,
    ) -> Cluster:
        """Measure this machine with `ranks` processes at once; takes about a minute on a CPU.

        Call it from the main module behind ``if __name__ == "__main__"``: it starts processes.
        `autopar profile` writes the same figures to a file.

        Args:
            ranks: as many as will train here.
            device_type: "cpu" or "cuda".
            mesh_shape, axis_names: as for `from_profile`.
            rounds: timings of each figure; the median counts.

        Raises:
            ClusterError: no profile fits the device, or a rank failed.
        """
        from autopar.cost_model.measure import measure_profile

        base = profile_for(device_type)
        found = measure_profile(
            "measured", base=base, device_type=device_type, ranks=ranks, rounds=rounds
        )
        cluster = _of(found, found.device, ranks, (ranks,), ("device",))
        if mesh_shape is None:
            return replace(cluster, axis_names=tuple(axis_names or cluster.axis_names))
        return cluster.with_mesh_shape(mesh_shape, axis_names or _names_for(mesh_shape, ()))

    def with_mesh_shape(
        self, shape: Sequence[int], axis_names: Sequence[str] | None = None
    ) -> Cluster:
        """The same devices as a mesh of another shape.

        Args:
            shape: its product must be `num_devices`.
            axis_names: by default the present names if the number of axes is the same, else
                ``axis0, axis1, …``.

        Returns:
            The new cluster.

        Raises:
            ClusterError: the shape has another number of devices.
        """
        new_shape = tuple(int(size) for size in shape)
        if not new_shape or min(new_shape) < 1 or math.prod(new_shape) != self.num_devices:
            raise ClusterError(
                f"mesh_shape {new_shape} has {math.prod(new_shape)} devices but the cluster has "
                f"{self.num_devices} ({self.num_devices / self.devices_per_node:g} node(s) of "
                f"{self.devices_per_node}): choose sizes whose product is {self.num_devices}"
            )
        names = _names_for(new_shape, self.axis_names) if axis_names is None else axis_names
        return replace(self, mesh_shape=new_shape, axis_names=tuple(names))

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return math.prod(self.mesh_shape)

    @property
    def memory_bytes(self) -> int:
        """Memory of each device."""
        return self.device.memory_bytes

    @property
    def host_memory_bytes(self) -> int | None:
        """Each device's share of the memory of its host; None where it is not known."""
        return self.device.host_memory_bytes

    def alpha_beta(self, kind: CollectiveKind, axis: int) -> tuple[float, float]:
        """``(a, b)`` with ``collective_seconds(kind, num_bytes, axis) == a + b * num_bytes``.

        Args:
            kind: the collective.
            axis: index of the mesh axis.

        Returns:
            Seconds and seconds per byte, for any ``num_bytes > 0``; zeros for an axis of one.

        Raises:
            ClusterError: the mesh has no such axis.
        """
        if not 0 <= axis < len(self.mesh_shape):
            raise ClusterError(
                f"mesh {self.mesh_shape} has no axis {axis}: use 0 to {len(self.mesh_shape) - 1}"
            )
        geometry = axis_geometry(self.mesh_shape, axis, self.devices_per_node)
        return alpha_beta(CollectiveKind(kind), geometry, self.intra, self.inter)

    def collective_seconds(self, kind: CollectiveKind, num_bytes: float, axis: int) -> float:
        """Seconds of one collective in all groups of a mesh axis at once.

        Args:
            kind: the collective.
            num_bytes: the FULL buffer of a group: all-gather's output, reduce-scatter's input,
                all-reduce's buffer; for all-to-all, what one rank holds; else the message.
            axis: index of the mesh axis.

        Returns:
            Seconds; 0 for no bytes and on an axis of one rank.

        Raises:
            ClusterError: negative bytes, or no such axis.
        """
        a, b = self.alpha_beta(kind, axis)
        if num_bytes < 0:
            raise ClusterError(f"{kind} of {num_bytes} bytes: num_bytes must not be negative")
        return a + b * num_bytes if num_bytes > 0 else 0.0

    def link(self, axis: int) -> str:
        """What collectives on a mesh axis use: "intra", or "inter" where they leave a node."""
        geometry = axis_geometry(self.mesh_shape, axis, self.devices_per_node)
        return "intra" if geometry.num_nodes == 1 else "inter"

    def compute_share(self, axis: int) -> float:
        """Share of a device's compute that a collective on a mesh axis takes while it runs."""
        if self.link(axis) == "intra":
            return self.intra.compute_share
        return max(self.intra.compute_share, self.inter.compute_share)

    def bucketed_seconds(
        self, kind: CollectiveKind, num_bytes: float, axis: int, shared: int
    ) -> float:
        """Seconds of a collective that may go in one bucket with others.

        Args:
            kind, num_bytes, axis: as for `collective_seconds`.
            shared: how many may share a bucket; 1 for none.

        Returns:
            ``b * num_bytes`` and a share of the latency ``a``; see `bucketed_latency`.
        """
        a, _ = self.alpha_beta(kind, axis)
        whole = self.collective_seconds(kind, num_bytes, axis)
        return whole - a + float(bucketed_latency(a, whole - a, shared)) if whole else 0.0

    def bucket_bytes(self, kind: CollectiveKind, axis: int) -> int:
        """Bytes of a bucket in which latency takes a fifth of the time; 0 on an axis of one."""
        a, b = self.alpha_beta(kind, axis)
        return math.ceil(_LATENCIES * a / b) if b else 0

    def to_dict(self) -> dict[str, Any]:
        """The cluster as JSON types, every figure included: a saved plan needs no profile file."""
        plain: dict[str, Any] = listed(asdict(self))
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """The inverse of `to_dict`.

        Raises:
            ClusterError: a key is missing or unknown, or a figure is out of range.
        """
        values = dict(data)
        shape, names = values.pop("mesh_shape", None), values.pop("axis_names", None)
        if not isinstance(shape, list | tuple) or not isinstance(names, list | tuple):
            raise ClusterError("saved cluster: mesh_shape and axis_names must be lists")
        values["name"] = values.pop("profile", None)
        loaded = Profile.from_dict({"device_type": "cpu", **values})
        return _of(loaded, loaded.device, loaded.devices_per_node, tuple(shape), tuple(names))


def _of(
    profile: Profile,
    device: DeviceProfile,
    devices_per_node: int,
    shape: tuple[int, ...],
    names: tuple[str, ...],
) -> Cluster:
    return Cluster(
        profile=profile.name,
        device=device,
        intra=profile.intra,
        inter=profile.inter,
        devices_per_node=devices_per_node,
        mesh_shape=shape,
        axis_names=names,
        device_type=profile.device_type,
    )


def _check_load(profile: Profile, per_node: int) -> None:
    """Warn where ranks share cores otherwise than while the profile was measured."""
    cores, ranks = profile.device.cores, profile.device.concurrent_ranks
    if cores and max(per_node, cores) != max(ranks, cores):
        warnings.warn(
            f"profile {profile.name!r} was measured with {ranks} ranks on {cores} cores, the "
            f"cluster has {per_node} ranks a node: their compute rate will differ. Measure with "
            f"--ranks {per_node}",
            stacklevel=3,
        )


def _names_for(shape: Sequence[int], present: tuple[str, ...]) -> tuple[str, ...]:
    if len(present) == len(shape):
        return present
    return tuple(f"axis{index}" for index in range(len(shape)))


def profile_for(device_type: str) -> Profile:
    """The profile of the device at hand."""
    found = device_type
    if device_type == "cuda":
        import torch

        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "none visible"
    for name in profile_names():
        profile = load_profile(name)
        if profile.device_type == device_type and re.search(profile.device_name_pattern, found):
            return profile
    raise ClusterError(
        f"no profile matches device {found!r} of type {device_type!r}: pass profile= with one of "
        f"{', '.join(profile_names())}, or the path of your own .toml file"
    )
