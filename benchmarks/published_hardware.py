"""The hardware of a published row: a profile, with the figures that the row states, as a mesh."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost_model import Cluster, load_profile
from autopar.cost_model.profile import DeviceProfile, LinkProfile

__all__ = ["RowError", "cluster_of"]


class RowError(ValueError):
    """A row lacks what a prediction needs."""


PROFILES = (
    (r"gh200", "h100-sxm"),  # the same compute die
    (r"h200(?!\d)", "h200"),
    (r"h[18]00(?!\d).*hbm2e", "h100-hbm2e"),
    (r"h[18]00(?!\d)", "h100-sxm"),
    (r"a[18]00(?!\d).*40\s*gb", "a100-40g"),
    (r"a[18]00(?!\d)", "a100-80g"),
    (r"v100(?!\d)", "v100"),
    (r"p100(?!\d)", "p100"),
    (r"4090", "rtx4090-pcie"),
)


@dataclass(frozen=True, slots=True)
class _Variant:
    """Where a device differs from its profile, by NVIDIA's data sheets.

    Attributes:
        pattern: of its name.
        rate: of the profile's in 16-bit and 8-bit products.
        memory_bandwidth: bytes/s; 0 for the profile's.
        link: of the profile's rate inside a node.
        multiprocessors: 0 for the profile's.
    """

    pattern: str
    rate: float = 1.0
    memory_bandwidth: float = 0.0
    link: float = 1.0
    multiprocessors: int = 0


_VARIANTS = (
    _Variant(r"a800", link=400 / 600),  # GB/s of NVLink
    _Variant(r"h800", link=400 / 900),
    _Variant(r"gh200", memory_bandwidth=4.0e12),  # 96 GB of HBM3
    _Variant(r"h[18]00.*pcie", rate=756 / 989.4, memory_bandwidth=2.0e12, multiprocessors=114),
    _Variant(r"h100.*nvl(?!ink)", rate=835 / 989.4, memory_bandwidth=3.9e12),
    _Variant(r"a[18]00.*pcie.*80|a[18]00.*80.*pcie", memory_bandwidth=1.935e12),
    _Variant(r"v100.*pcie", rate=112 / 125),
)
# NCCL src/graph/topo.h, PCI_BW: 12 GB/s over third generation's 16 lanes; each doubles the rate
_PCIE_BANDWIDTH, _PCIE_GENERATION = 12e9, 3
_PCIE_OF = ((r"[vp]100", 3), (r"a[18]00|4090", 4), (r"", 5))  # NVIDIA's data sheets
_PCIE_LATENCY_S = 2.5e-6  # NCCL src/graph/tuning.cc, ring: hwLat LL128 PCI
_OF_DATA_SHEET = 0.9  # of a network adapter: assumed, as in the profiles


def cluster_of(hardware: Mapping[str, Any], mesh: tuple[int, int, int]) -> Cluster:
    """A row's cluster.

    Args:
        hardware: of the row.
        mesh: pipeline, data, and ranks that share a stage's tensors.
    """
    name = str(hardware.get("gpu") or "")
    found = next((profile for p, profile in PROFILES if re.search(p, name, re.I)), None)
    if found is None:
        raise RowError(f"no profile for {name!r}")
    devices = math.prod(mesh)
    per_node = min(int(hardware.get("gpus_per_node") or 8), devices)
    profile = load_profile(found)
    cluster = Cluster.from_profile(
        found, nodes=math.ceil(devices / per_node), devices_per_node=per_node
    )
    device, intra = _varied(name, profile.device, profile.intra)
    if (memory := re.search(r"(\d+)(?:/\d+)?\s*GB(?!/)", name)) is not None:
        # what a process can have of the gigabytes on the label
        device = replace(device, memory_bytes=int(float(memory[1]) * 0.99 * 2**30))
    if (speed := re.search(r"([\d.]+)\s*TB/s", name)) is not None:
        device = replace(device, memory_bandwidth=float(speed[1]) * 1e12)
    if (power := re.search(r"(\d+)\s*W\b", name)) is not None:
        device = device.limited(float(power[1]))
    said = f"{hardware.get('intra') or ''} {name}"
    if re.search(r"pcie", said, re.I) and not re.search(r"nvlink|nvswitch", said, re.I):
        intra = _pcie(said, intra)
    return replace(
        cluster,
        device=device,
        intra=intra,
        inter=_inter(hardware, intra, profile.inter),
        mesh_shape=mesh,
        axis_names=("pipeline", "data", "inner"),
    )


def _varied(
    name: str, device: DeviceProfile, intra: LinkProfile
) -> tuple[DeviceProfile, LinkProfile]:
    """The device and its link as `_VARIANTS` has them for this name."""
    for variant in _VARIANTS:
        if re.search(variant.pattern, name, re.I) is None:
            continue
        rates = {
            dtype: rate * (1.0 if dtype == "float64" else variant.rate)
            for dtype, rate in device.peak_flops.items()
        }
        device = replace(
            device,
            peak_flops=rates,
            memory_bandwidth=variant.memory_bandwidth or device.memory_bandwidth,
            multiprocessors=variant.multiprocessors or device.multiprocessors,
        )
        intra = replace(intra, bandwidth=intra.bandwidth * variant.link)
    return device, intra


def _pcie(said: str, intra: LinkProfile) -> LinkProfile:
    """PCIe in a node's link's place; of the device's generation if the row does not say."""
    stated = re.search(r"pcie\s*(?:gen\s*)?([345])(?!\d)", said, re.I)
    own = next(generation for p, generation in _PCIE_OF if re.search(p, said, re.I))
    doublings = (int(stated[1]) if stated else own) - _PCIE_GENERATION
    return replace(
        intra,
        name="PCIe",
        latency_s=_PCIE_LATENCY_S,
        bandwidth=min(intra.bandwidth, _PCIE_BANDWIDTH * 2**doublings),
    )


def _inter(hardware: Mapping[str, Any], intra: LinkProfile, inter: LinkProfile) -> LinkProfile:
    """The link between nodes, at the rate that the row states of it."""
    rate = re.search(r"(\d+)\s*Gb(?:/s|ps|it)", str(hardware.get("inter") or ""))
    node_rate = hardware.get("inter_node_Gbps")
    if rate is not None:
        gigabits = float(rate[1])
    elif node_rate:
        gigabits = float(node_rate) / int(hardware.get("gpus_per_node") or 8)
    else:
        return replace(inter, bandwidth=min(intra.bandwidth, inter.bandwidth))
    return replace(inter, bandwidth=min(intra.bandwidth, gigabits / 8 * _OF_DATA_SHEET * 1e9))
