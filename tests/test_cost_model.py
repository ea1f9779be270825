"""Collective costs, clusters and profiles: laws that any cost must obey, and known cost bugs."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.core.axis_geometry import axis_geometry
from autopar.cost_model import (
    Cluster,
    ClusterError,
    CollectiveKind,
    LinkProfile,
    Profile,
    load_profile,
    profile_names,
)
from autopar.errors import AutoparError

K = CollectiveKind
_BASE = load_profile("h100-sxm")

_seconds = st.floats(0, 1e-3)
_bandwidths = st.floats(1e8, 1e12)
_links = st.builds(
    LinkProfile,
    name=st.just("link"),
    latency_s=_seconds,
    bandwidth=_bandwidths,
    base_latency_s=_seconds,
)
_shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
_kinds = st.sampled_from(list(K))
_sizes = st.integers(1, 10**11)


def _cluster(
    shape: tuple[int, ...],
    per_node: int,
    intra: LinkProfile = _BASE.intra,
    inter: LinkProfile = _BASE.inter,
) -> Cluster:
    return Cluster(
        profile="test",
        device=_BASE.device,
        intra=intra,
        inter=inter,
        devices_per_node=per_node,
        mesh_shape=shape,
        axis_names=tuple(f"axis{i}" for i in range(len(shape))),
    )


_clusters = st.builds(
    _cluster, shape=_shapes, per_node=st.integers(1, 9), intra=_links, inter=_links
)


@given(cluster=_clusters, kind=_kinds, small=_sizes, more=_sizes)
def test_larger_message_is_never_cheaper(
    cluster: Cluster, kind: CollectiveKind, small: int, more: int
) -> None:
    for axis in range(len(cluster.mesh_shape)):
        low = cluster.collective_seconds(kind, small, axis)
        assert 0 <= low <= cluster.collective_seconds(kind, small + more, axis)
        assert cluster.collective_seconds(kind, 0, axis) == 0
        if cluster.mesh_shape[axis] == 1:
            assert low == 0


@given(cluster=_clusters, kind=_kinds, num_bytes=_sizes)
def test_cost_is_exactly_affine(cluster: Cluster, kind: CollectiveKind, num_bytes: int) -> None:
    for axis in range(len(cluster.mesh_shape)):
        a, b = cluster.alpha_beta(kind, axis)
        assert cluster.collective_seconds(kind, num_bytes, axis) == a + b * num_bytes


@given(cluster=_clusters, num_bytes=_sizes)
def test_all_reduce_is_reduce_scatter_plus_all_gather(cluster: Cluster, num_bytes: int) -> None:
    for axis in range(len(cluster.mesh_shape)):
        gather, scatter, reduce = (
            cluster.collective_seconds(kind, num_bytes, axis)
            for kind in (K.ALL_GATHER, K.REDUCE_SCATTER, K.ALL_REDUCE)
        )
        assert reduce == pytest.approx(gather + scatter, rel=1e-12)


@given(cluster=_clusters, kind=_kinds, num_bytes=_sizes)
def test_spanning_nodes_is_never_cheaper(
    cluster: Cluster, kind: CollectiveKind, num_bytes: int
) -> None:
    one_node = replace(cluster, devices_per_node=cluster.num_devices)
    for axis in range(len(cluster.mesh_shape)):
        far = cluster.collective_seconds(kind, num_bytes, axis)
        near = one_node.collective_seconds(kind, num_bytes, axis)
        assert far >= near * (1 - 1e-12)


@given(
    kind=_kinds,
    num_bytes=_sizes,
    intra=_links,
    inter=_links,
    node=st.sampled_from((1, 2, 4, 8)),
    stride=st.sampled_from((1, 2, 4, 8)),
)
def test_more_ranks_are_never_cheaper(
    kind: CollectiveKind,
    num_bytes: int,
    intra: LinkProfile,
    inter: LinkProfile,
    node: int,
    stride: int,
) -> None:
    costs = [
        _cluster((n, stride), node, intra, inter).collective_seconds(kind, num_bytes, 0)
        for n in (1, 2, 4, 8, 16, 32)
    ]
    for fewer, more in pairwise(costs):
        assert fewer <= more * (1 + 1e-12)


@given(shape=_shapes, per_node=st.integers(1, 40))
def test_geometry_against_enumeration(shape: tuple[int, ...], per_node: int) -> None:
    ranks = np.arange(math.prod(shape)).reshape(shape)
    for axis, size in enumerate(shape):
        counts = [
            np.unique(group // per_node, return_counts=True)[1]
            for group in np.moveaxis(ranks, axis, -1).reshape(-1, size)
        ]
        got = axis_geometry(shape, axis, per_node)
        assert got.group_size == size
        assert got.num_nodes == max(len(c) for c in counts)
        assert got.ranks_per_node == min(int(c.min()) for c in counts)


@given(cluster=_clusters, num_bytes=_sizes)
def test_all_reduce_not_below_reduce_scatter(cluster: Cluster, num_bytes: int) -> None:
    """Known bug elsewhere: ranks per node ignored, so an all-reduce undercut a reduce-scatter."""
    for axis in range(len(cluster.mesh_shape)):
        reduce = cluster.collective_seconds(K.ALL_REDUCE, num_bytes, axis)
        assert reduce >= cluster.collective_seconds(K.REDUCE_SCATTER, num_bytes, axis)


@pytest.mark.parametrize("n", (2, 4, 8))
def test_all_to_all_is_not_priced_as_all_gather(n: int) -> None:
    """Between shards of a tensor of S bytes, all-to-all moves 1/n of what all-gather moves."""
    cluster = _cluster((n,), 8)
    whole = n * 2**30
    a, b = cluster.alpha_beta(K.ALL_TO_ALL, 0)
    assert (a, b) == pytest.approx(cluster.alpha_beta(K.ALL_GATHER, 0))
    transfer = cluster.collective_seconds(K.ALL_TO_ALL, whole // n, 0) - a
    gather = cluster.collective_seconds(K.ALL_GATHER, whole, 0) - a
    assert gather / transfer == pytest.approx(n, rel=1e-9)


def test_ring_formula_inside_a_node() -> None:
    link = LinkProfile(name="l", latency_s=1e-6, bandwidth=1e11, base_latency_s=5e-6)
    cluster = _cluster((4,), 4, intra=link)
    expected = 5e-6 + 3 * 1e-6 + 3 / 4 * 1e9 / 1e11
    assert cluster.collective_seconds(K.ALL_GATHER, 1e9, 0) == pytest.approx(expected)
    assert cluster.collective_seconds(K.ALL_REDUCE, 1e9, 0) == pytest.approx(2 * expected)
    assert cluster.collective_seconds(K.ALL_TO_ALL, 1e9, 0) == pytest.approx(expected)
    assert cluster.collective_seconds(K.BROADCAST, 1e9, 0) == pytest.approx(8e-6 + 0.01)
    assert cluster.collective_seconds(K.SEND_RECV, 1e9, 0) == pytest.approx(6e-6 + 0.01)


def test_groups_of_an_axis_share_the_adapters_of_a_node() -> None:
    near = LinkProfile(name="near", latency_s=0, bandwidth=1e11, base_latency_s=0)
    far = LinkProfile(name="far", latency_s=0, bandwidth=1e9, base_latency_s=0)
    # 4 groups of 2, one rank of each on a node: each has one device's share, 1 GB/s.
    outer = _cluster((2, 4), 4, near, far).collective_seconds(K.ALL_GATHER, 1e9, 0)
    assert outer == pytest.approx(1 / 2)
    # 1 group of 8, four ranks on a node: it has all four shares, 4 GB/s.
    flat = _cluster((8,), 4, near, far).collective_seconds(K.ALL_GATHER, 1e9, 0)
    assert flat == pytest.approx(7 / 8 / 4)
    # All-to-all: half of the 1 GB leaves the node at the rank's own 1 GB/s.
    swap = _cluster((8,), 4, near, far).collective_seconds(K.ALL_TO_ALL, 1e9, 0)
    assert swap == pytest.approx(4 / 8 + 3 / 8 / 100)


def test_latency_between_nodes_is_counted_once_per_node() -> None:
    near = LinkProfile(name="near", latency_s=1e-6, bandwidth=1e11, base_latency_s=0)
    far = LinkProfile(name="far", latency_s=1e-3, bandwidth=1e11, base_latency_s=0)
    a, _ = _cluster((8,), 4, near, far).alpha_beta(K.ALL_GATHER, 0)
    assert a == pytest.approx(6 * 1e-6 + 1e-3)


def test_bad_queries_say_what_is_wrong() -> None:
    cluster = Cluster.from_profile("h100-sxm", nodes=2)
    with pytest.raises(ClusterError, match=r"\(2, 8\) has no axis 2"):
        cluster.alpha_beta(K.ALL_GATHER, 2)
    with pytest.raises(ClusterError, match="must not be negative"):
        cluster.collective_seconds(K.ALL_GATHER, -1, 0)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_loads_and_every_figure_has_a_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    optional = {"view_overhead_s", "concurrent_ranks", "cores", "curves"}
    if profile.device_type == "cpu":  # its memory is the host's
        optional |= {"host_bandwidth", "host_memory_bandwidth"}
    unknown = {"host_op_s", "power_w", "multiprocessors", "host_memory_bytes"}
    optional |= {figure for figure in unknown if not getattr(profile.device, figure)}
    wanted = {f.name for f in fields(profile.device)} - {"name", "sources", "efficiency"}
    wanted -= {f.name for f in fields(profile.device) if f.name in optional}
    wanted |= {f"efficiency.{op_class}" for op_class in profile.device.efficiency}
    assert set(profile.device.sources) == wanted
    for link in (profile.intra, profile.inter):
        assert set(link.sources) == {"latency_s", "bandwidth", "base_latency_s"}
        assert all(link.sources.values())
    assert profile.inter.bandwidth <= profile.intra.bandwidth
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_units_are_decimal() -> None:
    """Known bug elsewhere: TB/s stored as TiB/s."""
    device = load_profile("h100-sxm").device
    assert device.memory_bandwidth == 3.35e12
    assert device.peak("bfloat16") == device.peak(torch.bfloat16) == 989.4e12
    assert load_profile("a100-80g").device.memory_bandwidth == 2.039e12
    assert load_profile("v100").device.peak("bfloat16") == 15.7e12  # no bf16: float32's rate


def test_unknown_profile_lists_the_names() -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.from_profile("h100-sxn")
    assert "Did you mean 'h100-sxm'?" in str(caught.value)
    assert all(name in str(caught.value) for name in profile_names())
    assert isinstance(caught.value, AutoparError)
    assert isinstance(caught.value, ValueError)


def test_profile_from_a_file(tmp_path: Path) -> None:
    text = Path(__file__).parent.parent / "autopar/cost_model/profiles/h200.toml"
    mine = tmp_path / "mine.toml"
    mine.write_text(text.read_text().replace('name = "h200"', 'name = "mine"'))
    assert Cluster.from_profile(mine).profile == "mine"
    mine.write_text(text.read_text().replace("latency_s", "latencies", 1))
    with pytest.raises(ClusterError, match="latencies"):
        load_profile(mine)
    mine.write_text("name = ")
    with pytest.raises(ClusterError, match="not valid TOML"):
        load_profile(str(mine))


def test_from_profile_shapes() -> None:
    assert Cluster.from_profile("h100-sxm").mesh_shape == (8,)
    two = Cluster.from_profile("h100-sxm", nodes=2)
    assert (two.mesh_shape, two.axis_names, two.num_devices) == ((2, 8), ("node", "device"), 16)
    cube = Cluster.from_profile("h100-sxm", nodes=2, devices_per_node=4, mesh_shape=(2, 2, 2))
    assert cube.axis_names == ("axis0", "axis1", "axis2")
    assert cube.memory_bytes == cube.device.memory_bytes
    named = Cluster.from_profile("v100", mesh_shape=[2, 4], axis_names=["dp", "tp"])
    assert (named.mesh_shape, named.axis_names) == ((2, 4), ("dp", "tp"))
    again = named.with_mesh_shape((4, 2))
    assert (again.mesh_shape, again.axis_names) == ((4, 2), ("dp", "tp"))
    assert named.with_mesh_shape((8,)).axis_names == ("axis0",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh_shape": (3, 4)}, r"\(3, 4\) has 12 devices but the cluster has 8"),
        ({"mesh_shape": (2, 4), "axis_names": ("a",)}, "one name per axis"),
        ({"mesh_shape": (2, 4), "axis_names": ("a", "a")}, "repeats a name"),
        ({"mesh_shape": (-2, -4)}, r"\(-2, -4\)"),
        ({"nodes": 0}, "at least 1"),
    ],
)
def test_from_profile_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.from_profile("h100-sxm", **options)  # type: ignore[arg-type]


@settings(max_examples=30)
@given(cluster=_clusters)
def test_json_and_pickle_round_trip(cluster: Cluster) -> None:
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert hash(Cluster.from_dict(cluster.to_dict())) == hash(cluster)


def test_saved_cluster_with_a_missing_table_is_refused() -> None:
    data = Cluster.from_profile("h100-sxm").to_dict()
    del data["intra"]
    with pytest.raises(ClusterError, match="'intra' is missing"):
        Cluster.from_dict(data)


def _mesh(shape: tuple[int, ...], names: tuple[str, ...] | None, start: int = 0) -> SimpleNamespace:
    ranks = torch.arange(start, start + math.prod(shape)).reshape(shape)
    return SimpleNamespace(shape=shape, mesh_dim_names=names, mesh=ranks, device_type="cpu")


def test_from_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cluster = Cluster.from_mesh(_mesh((2, 4), ("dp", "tp")))  # type: ignore[arg-type]
    assert (cluster.profile, cluster.devices_per_node) == ("cpu-gloo", 8)
    assert (cluster.mesh_shape, cluster.axis_names) == ((2, 4), ("dp", "tp"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    cluster = Cluster.from_mesh(_mesh((2, 4), None), "h100-sxm")  # type: ignore[arg-type]
    assert (cluster.devices_per_node, cluster.axis_names) == (4, ("axis0", "axis1"))
    with pytest.warns(UserWarning, match="row-major"):
        Cluster.from_mesh(_mesh((4,), None, start=2))  # type: ignore[arg-type]


def test_from_mesh_of_an_unknown_device_lists_the_profiles() -> None:
    mesh = _mesh((4,), None)
    mesh.device_type = "xpu"
    with pytest.raises(ClusterError, match=r"pass profile= with one of.*h100-sxm"):
        Cluster.from_mesh(mesh)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device_name", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla P100-SXM2-16GB", "p100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-pcie"),
    ],
)
def test_cuda_device_names(monkeypatch: pytest.MonkeyPatch, device_name: str, profile: str) -> None:
    from autopar.cost_model import cluster

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device_name)
    assert cluster.profile_for("cuda").name == profile
