"""What torch's profiler sees of a real step's collectives: the program's, and fewer with passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import autopar
from benchmarks.overlap import exposure, recorded, union
from tests import handwritten as hw
from tests.dist import run_ranks

ZERO = {"data": 4, "zero": 3}

_intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda p: (p[0], p[0] + p[1])),
    max_size=8,
)


@given(flights=_intervals, waits=_intervals)
def test_exposure_counts_each_moment_once(flights: Any, waits: Any) -> None:
    flying = {t for a, b in flights for t in range(a, b)}
    waiting = {t for a, b in waits for t in range(a, b)}
    assert exposure(flights, waits) == (len(flying), len(flying & waiting))
    assert all(a[1] < b[0] for a, b in zip(union(flights), union(flights)[1:], strict=False))


def run(rank: int, passes: Any) -> tuple[float, float, int, int, list[torch.Tensor]]:
    """What one step on this rank is seen to do, the collectives of its program, its gradients."""
    torch.manual_seed(0)
    model = hw.Mlp(width=64, layers=3)
    inputs = {"x": torch.randn(512, 64), "labels": torch.arange(512) % 8}
    parallel = autopar.parallelize(
        model, init_device_mesh("cpu", (4,)), inputs, constraints=ZERO, passes=passes
    )
    parallel.train_step(**inputs)
    grads = [p.grad.full_tensor().clone() for p in parallel.parameters() if p.grad is not None]
    parallel.zero_grad()
    count = sum(row.count for row in parallel.compiled.program.comm_bytes())
    return (*recorded(parallel, inputs), count, grads)


def test_a_real_step_on_four_ranks_runs_the_buckets() -> None:
    """The profiler sees as many collectives as the program has; gradients are the same."""
    found = {passes: run_ranks(run, 4, passes) for passes in ((), ("late",), None)}
    for ranks in found.values():
        for flight_s, exposed_s, seen, count, _ in ranks:
            assert 0 <= exposed_s <= flight_s
            assert flight_s > 0
            assert seen == count
    (*_, without, plain), *_ = found[()]
    for passes in (("late",), None):
        (*_, count, grads), *_ = found[passes]
        assert count == without if passes else count < 0.8 * without
        for a, b in zip(grads, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_ranks_must_agree_on_passes() -> None:
    run_ranks(disagree, 2)


def disagree(rank: int) -> None:
    passes = None if rank else ["late"]
    with pytest.raises(autopar.AutoparError, match="the passes"):
        autopar.parallelize(hw.Mlp(), init_device_mesh("cpu", (2,)), hw.vectors(), passes=passes)
