"""Measured profiles: the laws that measured figures must obey too, their file, and a real run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cli import main
from autopar.cost_model import (
    Cluster,
    ClusterError,
    CollectiveKind,
    CollectiveLine,
    Curve,
    Profile,
    collective_timing,
    compute_seconds_array,
    load_profile,
)
from autopar.cost_model.collective_timing import Sample
from autopar.cost_model.compute import OP_CLASSES
from autopar.cost_model.measure import _curves, _link, measure_profile
from autopar.cost_model.ranks import on_ranks
from autopar.cost_model.timing import fit_line
from autopar.cost_model.toml_text import to_toml

BASE = load_profile("cpu-gloo")

_figures = st.floats(1e-9, 1e-2)


@st.composite
def measured_clusters(draw: st.DrawFn) -> Cluster:
    """Clusters whose lines rise with the group, as `Profile` demands."""
    lines = []
    for kind in draw(st.sets(st.sampled_from(list(CollectiveKind)), min_size=1)):
        sizes = sorted(draw(st.sets(st.integers(2, 9), min_size=1, max_size=3)))
        a, b = (sorted(draw(st.lists(_figures, min_size=3, max_size=3))) for _ in range(2))
        lines += [
            CollectiveLine(
                kind=str(kind), group_size=n, latency_s=a[i], seconds_per_byte=b[i] * 1e-6
            )
            for i, n in enumerate(sizes)
        ]
    nodes, node = draw(st.sampled_from([(1, 2), (1, 4), (1, 8), (2, 4), (4, 2)]))
    cluster = Cluster.from_profile("cpu-gloo", nodes=nodes, devices_per_node=node)
    return replace(cluster, intra=replace(cluster.intra, lines=tuple(lines)))


@settings(max_examples=60)
@given(
    cluster=measured_clusters(),
    kind=st.sampled_from(list(CollectiveKind)),
    small=st.integers(1, 1 << 30),
    more=st.integers(1, 1 << 30),
)
def test_measured_collectives_obey_the_laws(cluster, kind, small, more) -> None:
    for axis in range(len(cluster.mesh_shape)):
        low = cluster.collective_seconds(kind, small, axis)
        assert 0 <= low <= cluster.collective_seconds(kind, small + more, axis)
        one_node = replace(cluster, devices_per_node=cluster.num_devices)
        assert low >= one_node.collective_seconds(kind, small, axis) * (1 - 1e-12)
    costs = [
        replace(cluster, mesh_shape=(n,), axis_names=("x",), devices_per_node=n)
        .collective_seconds(kind, small, 0)
        for n in range(1, 17)
    ]  # fmt: skip
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(costs))
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def test_measured_group_has_its_line_and_others_are_scaled_by_the_law() -> None:
    line = CollectiveLine(kind="all_gather", group_size=4, latency_s=1e-3, seconds_per_byte=1e-9)
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=4)
    link = replace(cluster.intra, latency_s=1e-4, base_latency_s=1e-4, lines=(line,))
    four = replace(cluster, intra=link)
    gather = CollectiveKind.ALL_GATHER
    assert four.alpha_beta(gather, 0) == (1e-3, 1e-9)
    eight = replace(four, mesh_shape=(8,), devices_per_node=8)
    # latency c + (n-1) α: 8 against 4; bytes (n-1)/n: 7/8 against 3/4
    assert eight.alpha_beta(gather, 0) == pytest.approx((2e-3, 7 / 6 * 1e-9))
    plain, reduce = replace(four, intra=replace(link, lines=())), CollectiveKind.ALL_REDUCE
    assert four.alpha_beta(reduce, 0) == plain.alpha_beta(reduce, 0)


def test_larger_group_must_not_be_cheaper() -> None:
    lines = tuple(
        CollectiveLine(kind="broadcast", group_size=n, latency_s=a, seconds_per_byte=0)
        for n, a in ((2, 2e-3), (4, 1e-3))
    )
    with pytest.raises(ClusterError, match="larger group must not be cheaper"):
        replace(BASE.intra, lines=lines)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    count = draw(st.integers(1, 5))
    work = sorted(draw(st.sets(st.integers(1, 10**12), min_size=count, max_size=count)))
    seconds = sorted(draw(st.lists(st.floats(1e-7, 10), min_size=count, max_size=count)))
    op_class = draw(st.sampled_from([c for c in OP_CLASSES if c != "view"]))
    unit = "flops" if op_class.startswith(("matmul", "attention", "conv")) else "bytes"
    return Curve(
        op_class=op_class, dtype="float32", unit=unit, work=tuple(map(float, work)),
        seconds=tuple(seconds),
    )  # fmt: skip


@given(
    found=st.lists(curves(), max_size=4, unique_by=lambda c: c.op_class),
    op_class=st.sampled_from(OP_CLASSES),
    flops=st.floats(0, 1e14),
    num_bytes=st.integers(1, 10**11),
    more=st.floats(1, 100),
)
def test_measured_ops_never_get_cheaper_with_work(found, op_class, flops, num_bytes, more) -> None:
    device = replace(BASE.device, curves=tuple(found))

    def seconds(factor: float) -> float:
        work = np.array(flops * factor), np.array(num_bytes * factor)
        return float(compute_seconds_array(device, op_class, "float32", *work))

    assert 0 <= seconds(1.0) <= seconds(more) * (1 + 1e-12)
    assert (seconds(1.0) == 0) == (op_class == "view")


def test_curve_at_its_points_between_and_beyond() -> None:
    curve = Curve(
        op_class="matmul", dtype="float32", unit="flops", work=(1e3, 1e5), seconds=(1e-5, 1e-3)
    )
    at = curve.at(np.array([0.0, 1.0, 1e3, 1e4, 1e5, 1e6]))
    assert at == pytest.approx([0.0, 1e-5, 1e-5, 1e-4, 1e-3, 1e-2])
    with pytest.raises(ClusterError, match="not decrease"):
        replace(curve, seconds=(1e-3, 1e-5))
    with pytest.raises(ClusterError, match="increase"):
        replace(curve, work=(1e5, 1e3))


def test_noise_does_not_make_curves_or_lines_fall() -> None:
    rows = [
        ["matmul", "float32", "flops", group, work, 0, seconds]
        for group, work, seconds in ((0, 1e3, 2e-5), (1, 1e4, 1e-5), (1, 1e4, 4e-5), (2, 1e5, 1e-5))
    ]
    (curve,) = _curves(rows)
    assert curve.seconds == (2e-5, 2e-5, 2e-5)  # the mean of 1e-5 and 4e-5 is geometric
    samples = [
        Sample(str(kind), size, n, (1e-3 if size == 2 else 5e-4) + n * 1e-9)
        for kind in CollectiveKind
        for size in (2, 4)
        for n in (1 << 10, 1 << 16, 1 << 20)
    ]
    link = _link(BASE.intra, samples, "test", 1.0)
    for kind in CollectiveKind:
        two, four = link.lines_of(kind)
        assert (two.latency_s, two.seconds_per_byte) == pytest.approx((1e-3, 1e-9), rel=1e-3)
        assert four.latency_s == two.latency_s


@pytest.mark.parametrize(
    ("cores", "share"),
    [(0.0, 0.0), (0.5, 0.8), (1.0, 0.4), (1.25, 0.15), (2.0, 0.0)],
    ids=["device of its own", "half a core", "one core", "some to spare", "enough to spare"],
)
def test_collectives_take_the_cores_that_a_rank_computes_with(cores: float, share: float) -> None:
    samples = [
        Sample("all_reduce", 2, n, seconds, 0.4 * seconds) for n, seconds in ((8, 1), (9, 3))
    ]
    assert _link(BASE.intra, _all_kinds(samples), "test", cores).compute_share == share


def _all_kinds(samples: list[Sample]) -> list[Sample]:
    return [replace(sample, kind=str(kind)) for kind in CollectiveKind for sample in samples]


def test_fit_has_no_negative_part() -> None:
    a, b = fit_line([1e3, 1e6], [2e-3, 1e-3])
    assert a > 0 and b == 0


def test_toml_reads_back() -> None:
    table = {
        "text": 'quote " and \\ and é',
        "flag": True,
        "number": 1.5e-7,
        "list": [1, 2.5],
        "empty": [],
        "inner": {"a.b": 1, "deep": {"x": "y"}},
        "rows": [{"k": 1}, {"k": 2, "t": {"z": 0.0}}],
    }
    assert tomllib.loads(to_toml(table, "two\nlines")) == table


def _on_a_clock_of_its_own(rank: int, device: str) -> list[list[float]]:
    """Compute takes a second, busy; a collective a nanosecond a byte, a tenth of it busy."""
    now = {"wall": 0.0, "busy": 0.0}

    def takes(seconds: float, busy: float) -> Callable[[], None]:
        def call() -> None:
            now["wall"] += seconds
            now["busy"] += busy

        return call

    clock: Any = collective_timing
    clock.time = SimpleNamespace(perf_counter=lambda: now["wall"], process_time=lambda: now["busy"])
    clock._products = lambda device: takes(1.0, 1.0)
    clock.collective_calls = lambda kind, n, group, device: takes(1e-9 * n, 1e-10 * n)
    found = collective_timing.measure_collectives(device, 2, (1 << 10, 1 << 20), rounds=3)
    return [[sample.num_bytes, sample.seconds, sample.busy_s] for sample in found]


def test_what_a_collective_is_timed_behind_is_taken_off() -> None:
    for rows in on_ranks(_on_a_clock_of_its_own, 2, "cpu"):
        assert len(rows) == 2 * len(CollectiveKind)
        for num_bytes, seconds, busy_s in rows:
            assert seconds == pytest.approx(max(1e-9 * num_bytes, 1e-7), abs=1e-12)
            assert busy_s == pytest.approx(1e-10 * num_bytes, abs=1e-12)


def _fails(rank: int, device: str) -> None:
    if rank == 1:
        raise ValueError("rank one is out of order")


def test_a_failed_rank_is_reported() -> None:
    with pytest.raises(ClusterError, match="rank 1 could not measure"):
        on_ranks(_fails, 2, "cpu")


def test_profile_command_measures_this_machine(tmp_path: Path, capsys) -> None:
    out = tmp_path / "here.toml"
    options = ["--ranks", "2", "--rounds", "1", "--dtypes", "float32", "--device", "cpu"]
    assert main(["profile", "--out", str(out), "--quick", *options]) == 0
    assert str(out) in capsys.readouterr().out
    profile = load_profile(out)
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile
    assert profile.device.concurrent_ranks == profile.devices_per_node == 2
    assert {"date", "torch", "cpu", "cores", "ranks"} <= set(profile.provenance)
    assert {line.kind for line in profile.intra.lines} == set(CollectiveKind)
    classes = {curve.op_class for curve in profile.device.curves}
    assert {"matmul", "attention", "conv", "pointwise", "reduction", "memory", "update"} <= classes
    assert all(name in profile.device.sources for name in ("curves", "cores", "view_overhead_s"))
    cluster = Cluster.from_profile(out)
    assert cluster.num_devices == 2
    line = next(x for x in profile.intra.lines if x.kind == "all_reduce")
    assert cluster.alpha_beta(CollectiveKind.ALL_REDUCE, 0) == (
        line.latency_s,
        line.seconds_per_byte,
    )
    crowded = 4 * (profile.device.cores or 1)
    with pytest.warns(UserWarning, match="was measured with 2 ranks"):
        Cluster.from_profile(out, devices_per_node=crowded)


def test_bad_requests_name_the_numbers(tmp_path: Path, capsys) -> None:
    with pytest.raises(ClusterError, match=r"\[3\] must divide the 4 ranks"):
        measure_profile("x", base=BASE, ranks=4, group_sizes=[3])
    assert main(["profile", "--out", str(tmp_path / "x.json")]) == 2
    assert "x.json" in capsys.readouterr().err
