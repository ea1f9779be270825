"""Peak memory against brute force, and optimizer states against torch's own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model import (
    ClusterError,
    ScheduledOp,
    dtype_bytes,
    optimizer_state_bytes,
    optimizer_text,
    peak_bytes,
)
from autopar.cost_model.memory import check_optimizer
from autopar.errors import AutoparError


@st.composite
def _schedules(draw: st.DrawFn) -> list[ScheduledOp]:
    live: list[str] = []
    ops = []
    for index in range(draw(st.integers(0, 8))):
        sizes = draw(st.lists(st.integers(0, 5000), max_size=3))
        alloc = tuple((f"b{index}.{i}", size) for i, size in enumerate(sizes))
        live += [buffer for buffer, _ in alloc]
        free = tuple(b for b in live if draw(st.booleans()))
        live = [b for b in live if b not in free]
        transient = draw(st.integers(0, 5000))
        ops.append(
            ScheduledOp(name=f"op{index}", alloc=alloc, free=free, transient_bytes=transient)
        )
    return ops


@given(schedule=_schedules(), granularity=st.sampled_from((1, 64, 512)), base=st.integers(0, 9999))
def test_peak_against_brute_force(schedule: list[ScheduledOp], granularity: int, base: int) -> None:
    def rounded(size: int) -> int:
        return (size + granularity - 1) // granularity * granularity

    born = {b: i for i, op in enumerate(schedule) for b, _ in op.alloc}
    size_of = {b: rounded(size) for op in schedule for b, size in op.alloc}
    dies = {b: i for i, op in enumerate(schedule) for b in op.free}
    totals = [
        base
        + rounded(op.transient_bytes)
        + sum(s for b, s in size_of.items() if born[b] <= i <= dies.get(b, len(schedule)))
        for i, op in enumerate(schedule)
    ]
    kinds = {b: f"kind{len(b) % 2}" for b in born}
    got = peak_bytes(
        schedule, resident={"parameters": base}, granularity_bytes=granularity, kinds=kinds
    )
    assert got.peak_bytes == max(totals, default=base)
    assert got.index == (totals.index(max(totals)) if totals else -1)
    assert sum(size for _, size in got.breakdown) == got.peak_bytes


def test_breakdown_by_kind() -> None:
    schedule = [
        ScheduledOp(name="a", alloc=(("x", 100), ("y", 50))),
        ScheduledOp(name="b", alloc=(("z", 600),), free=("x", "y"), transient_bytes=1),
        ScheduledOp(name="c", free=("z",)),
    ]
    got = peak_bytes(
        schedule,
        resident={"parameters": 7},
        granularity_bytes=512,
        kinds={"x": "saved", "y": "saved"},
    )
    assert (got.index, got.name) == (1, "b")
    expected = (("buffer", 1024), ("saved", 1024), ("transient", 512), ("parameters", 7))
    assert got.breakdown == expected
    assert got.peak_bytes == 2567


def test_broken_schedules_are_refused() -> None:
    create = ScheduledOp(name="make", alloc=(("x", 1),))
    with pytest.raises(ClusterError, match=r"op 1 \(make\) creates 'x', which is live"):
        peak_bytes([create, create])
    with pytest.raises(ClusterError, match=r"op 0 \(drop\) frees 'x', which is not live"):
        peak_bytes([ScheduledOp(name="drop", free=("x",))])
    with pytest.raises(ClusterError, match="must not be negative"):
        peak_bytes([ScheduledOp(name="bad", transient_bytes=-1)])


_OPTIMIZERS = [
    torch.optim.AdamW,
    torch.optim.Adam,
    partial(torch.optim.AdamW, amsgrad=True),
    torch.optim.SGD,
    partial(torch.optim.SGD, momentum=0.9),
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
    torch.optim.Adafactor,
]


@pytest.mark.parametrize("make", _OPTIMIZERS, ids=str)
@pytest.mark.parametrize("shape", [(48, 80), (128,)])
def test_optimizer_states_are_torchs_own(make, shape: tuple[int, ...]) -> None:
    parameter = torch.nn.Parameter(torch.ones(shape))
    optimizer = make([parameter], lr=1e-3)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = sum(
        value.numel() * value.element_size()
        for value in optimizer.state[parameter].values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    )
    for form in (make, optimizer):
        got = optimizer_state_bytes(form, parameter.numel(), torch.float32, shape=shape)
        assert got == held


def test_an_optimizer_as_text_counts_as_much() -> None:
    for optimizer in (
        partial(torch.optim.SGD, momentum=0.9),
        partial(torch.optim.SGD, momentum=0.0),
        partial(torch.optim.Adam, amsgrad=True),
        partial(torch.optim.RMSprop, centered=True, momentum=0.1),
        torch.optim.AdamW,
    ):
        text = optimizer_text(optimizer)
        check_optimizer(text)
        assert optimizer_text(text) == text
        assert optimizer_state_bytes(text, 1000) == optimizer_state_bytes(optimizer, 1000)
    assert optimizer_text(partial(torch.optim.SGD, momentum=0.9)) == "sgd(momentum)"
    with pytest.raises(AutoparError, match=r"'sgd\(amsgrad\)' is unknown"):
        check_optimizer("sgd(amsgrad)")


def test_optimizers_by_name() -> None:
    assert optimizer_state_bytes(None, 1000) == 0
    assert optimizer_state_bytes("AdamW", 1000) == 8000
    assert optimizer_state_bytes("adamw", 1000, "bfloat16") == 4000
    assert optimizer_state_bytes("sgd", 1000) == 0
    assert optimizer_state_bytes("sgd", 1000, momentum=0.9) == 4000
    assert optimizer_state_bytes("adafactor", 10_000) == 2 * 100 * 4
    with pytest.warns(UserWarning, match="'mystery' is unknown"):
        assert optimizer_state_bytes("mystery", 10) == 80


def test_dtype_bytes() -> None:
    names = ("float64", "float32", "bfloat16", "float16", "int8", "int64", "bool", "complex64")
    for name in (*names, "float8_e4m3fn", "uint8"):
        dtype = getattr(torch, name)
        assert dtype_bytes(name) == dtype_bytes(dtype) == dtype.itemsize
    with pytest.raises(ClusterError, match="unknown dtype 'half'"):
        dtype_bytes("half")
