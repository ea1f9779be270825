"""Compute costs: the roofline's laws, and the array form against the scalar one."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model import (
    Cluster,
    ClusterError,
    OpCost,
    compute_seconds,
    compute_seconds_array,
    load_profile,
    profile_names,
)
from autopar.cost_model.compute import OP_CLASSES
from autopar.cost_model.profile import Efficiency, Profile, dtype_name
from autopar.cost_model.timing import fit_line

_DEVICES = [load_profile(name).device for name in profile_names()]
_flops = st.floats(0, 1e18)
_bytes = st.integers(0, 10**13)
_dtypes = st.sampled_from(("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int64"))


@given(
    device=st.sampled_from(_DEVICES),
    op_class=st.sampled_from(OP_CLASSES),
    dtype=_dtypes,
    flops=_flops,
    num_bytes=_bytes,
    more_flops=_flops,
    more_bytes=_bytes,
)
def test_monotone_and_never_negative(
    device, op_class, dtype, flops, num_bytes, more_flops, more_bytes
) -> None:
    small = OpCost(op_class=op_class, flops=flops, bytes=num_bytes, dtype=dtype)
    large = OpCost(
        op_class=op_class, flops=flops + more_flops, bytes=num_bytes + more_bytes, dtype=dtype
    )
    low, high = compute_seconds(device, small), compute_seconds(device, large)
    assert 0 <= low <= high
    assert (low == 0) == (op_class == "view")


@settings(max_examples=50)
@given(
    device=st.sampled_from(_DEVICES),
    op_class=st.sampled_from(OP_CLASSES),
    dtype=_dtypes,
    ops=st.lists(st.tuples(_flops, _bytes), min_size=1, max_size=5),
)
def test_array_form_gives_the_same_numbers(device, op_class, dtype, ops) -> None:
    flops, num_bytes = np.array([o[0] for o in ops]), np.array([o[1] for o in ops])
    got = compute_seconds_array(device, op_class, dtype, flops, num_bytes)
    for value, (f, b) in zip(got, ops, strict=True):
        cost = OpCost(op_class=op_class, flops=f, bytes=b, dtype=dtype)
        assert value == compute_seconds(device, cost)


def test_embedding_lookup_is_not_free() -> None:
    """Known bug elsewhere: an embedding's compute was priced 0. It has no flops but moves bytes."""
    cluster = Cluster.from_profile("h100-sxm")
    moved = 2 * 8192 * 4096 * 2
    lookup = OpCost(op_class="memory", flops=0, bytes=moved, dtype="bfloat16")
    assert compute_seconds(cluster, lookup) > moved / 3.35e12


def test_roofline_by_hand() -> None:
    device = load_profile("h100-sxm").device
    big = OpCost(op_class="matmul", flops=2 * 8192**3, bytes=3 * 2 * 8192**2, dtype="bfloat16")
    expected = 5e-6 + (2 * 8192**3 / 989.4e12 + 2e-6) / 0.70
    assert compute_seconds(device, big) == pytest.approx(expected)
    copy = OpCost(op_class="memory", flops=0, bytes=2**30, dtype="float32")
    assert compute_seconds(device, copy) == pytest.approx(5e-6 + (2**30 / 3.35e12 + 1e-6) / 0.9)


def test_small_matmuls_are_less_efficient() -> None:
    device = load_profile("a100-80g").device

    def rate(size: int) -> float:
        flops = 2.0 * size**3
        cost = OpCost(op_class="matmul", flops=flops, bytes=6 * size**2, dtype="bfloat16")
        return flops / compute_seconds(device, cost)

    rates = [rate(size) for size in (128, 512, 2048, 8192)]
    assert rates == sorted(rates)
    assert rates[0] < 0.05 * rates[-1]


def test_dtype_names() -> None:
    import torch

    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert dtype_name("float8_e5m2") == "float8"
    assert dtype_name(torch.int64) == dtype_name("bool") == "float32"
    assert dtype_name("complex128") == "float64"


def test_errors() -> None:
    with pytest.raises(ClusterError, match="unknown op class 'gemm'"):
        OpCost(op_class="gemm", flops=1, bytes=1, dtype="float32")
    with pytest.raises(ClusterError, match="negative"):
        OpCost(op_class="matmul", flops=-1, bytes=1, dtype="float32")
    with pytest.raises(ClusterError, match="negative"):
        compute_seconds_array(_DEVICES[0], "conv", "float32", np.array([1.0]), np.array([-1]))
    with pytest.raises(ClusterError, match="peak_fraction"):
        Efficiency(peak_fraction=1.5)
    with pytest.raises(ClusterError, match="peak_fraction"):
        Efficiency(peak_fraction=0.5, dtype_fractions={"float8": 0.0})
    with pytest.raises(ClusterError, match=r"\['int4'\], known dtypes are"):
        Efficiency(peak_fraction=0.5, dtype_fractions={"int4": 0.5})


def test_a_dtype_reaches_its_own_fraction_of_its_peak() -> None:
    device = replace(
        _DEVICES[0],
        curves=(),
        kernel_overhead_s=0.0,
        peak_flops={"float32": 1e12, "bfloat16": 2e12, "float8": 4e12},
        efficiency={
            **_DEVICES[0].efficiency,
            "matmul": Efficiency(peak_fraction=0.8, dtype_fractions={"float8": 0.5}),
        },
    )

    def seconds(dtype: str) -> float:
        cost = OpCost(op_class="matmul", flops=8e12, bytes=0, dtype=dtype)
        return compute_seconds(device, cost)

    assert seconds("bfloat16") == pytest.approx(8 / 2 / 0.8)
    assert seconds("float8_e4m3fn") == pytest.approx(8 / 4 / 0.5)


def test_profiles_keep_their_fractions_in_files() -> None:
    profile = load_profile("h100-sxm")
    efficiency = profile.device.efficiency["matmul"]
    assert efficiency.fraction("float8") < efficiency.fraction("bfloat16")
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_fit_line_recovers_a_line_and_never_a_negative_intercept() -> None:
    x = [1e3, 1e5, 1e7]
    assert fit_line(x, [2e-3 + 1e-9 * v for v in x]) == pytest.approx((2e-3, 1e-9))
    a, b = fit_line([1.0, 2.0], [1.0, 3.0])
    assert a == 0
    assert b > 0
