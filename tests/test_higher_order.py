"""Ops that take functions: conditions on tensors, scans, maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan

import autopar
from autopar.tracer.higher_order import _associative_scan, _scan
from autopar.tracer.trace import trace
from tests import handwritten as hw
from tests.test_handwritten import plan_for


def gated(left: Any, right: Any) -> Any:
    """One step of a linear recurrence a h + b."""
    return left[0] * right[0], left[1] * right[0] + right[1]


def multiplied(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


class Recurrence(nn.Module):
    """`form` is what is tested, and `plain` a loop that it equals."""

    def __init__(self, form: Callable[[Any, Tensor], Tensor], plain: Any) -> None:
        super().__init__()
        self.form, self.plain, self.own = form, plain, True
        self.gate, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.form if self.own else self.plain)(self, x).square().mean()


def scanned(reverse: bool) -> tuple[Any, Any]:
    def form(m: Any, x: Tensor) -> Tensor:
        step = lambda h, t: ((h * 0.5 + t).sin(), m.gate(h))  # noqa: E731
        last, every = scan(step, torch.zeros_like(x[:, 0]), m.inner(x), dim=1, reverse=reverse)
        return every + last.unsqueeze(1)

    def plain(m: Any, x: Tensor) -> Tensor:
        h, every, steps = torch.zeros_like(x[:, 0]), [], m.inner(x).unbind(1)
        for t in steps[::-1] if reverse else steps:
            every.append(m.gate(h))
            h = (h * 0.5 + t).sin()
        return torch.stack(every[::-1] if reverse else every, 1) + h.unsqueeze(1)

    return form, plain


def associative() -> tuple[Any, Any]:
    def form(m: Any, x: Tensor) -> Tensor:
        pair = (m.gate(x).sigmoid(), m.inner(x))
        return associative_scan(gated, pair, dim=1, combine_mode="generic")[1]

    def plain(m: Any, x: Tensor) -> Tensor:
        h, every = torch.zeros_like(x[:, 0]), []
        for a, b in zip(m.gate(x).sigmoid().unbind(1), m.inner(x).unbind(1), strict=True):
            h = h * a + b
            every.append(h)
        return torch.stack(every, 1)

    return form, plain


def mapped() -> tuple[Any, Any]:
    return (
        lambda m, x: map_over(lambda row, y: m.inner(row) * y, x, m.gate.bias),
        lambda m, x: m.inner(x) * m.gate.bias,
    )


FORMS = {
    "scan": scanned(False),
    "scan from the end": scanned(True),
    "associative scan": associative(),
    "map": mapped(),
}


@pytest.mark.parametrize("kind", FORMS)
def test_equals_a_loop(kind: str) -> None:
    torch.manual_seed(0)
    model = Recurrence(*FORMS[kind]).double()
    inputs = (torch.randn(4, 6, 8, dtype=torch.float64),)
    traced = trace(model, inputs, training=True)
    plan = plan_for(model, inputs, (2,), {"data": 2})
    model.own = False
    result = autopar.verify(plan, model, inputs, traced=traced)
    assert result.worst[1] < 1e-12, result.worst


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 13])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_tree_of_whole_slices(length: int, reverse: bool) -> None:
    torch.manual_seed(length)
    pair = tuple(torch.rand(2, 3, length, dtype=torch.float64) for _ in range(2))
    found = _associative_scan(gated, pair, -1, reverse=reverse)

    def step(h: Any, t: Any) -> Any:
        h = gated(h, t)
        return h, h

    first = tuple(torch.full((2, 3), x, dtype=torch.float64) for x in (1.0, 0.0))
    torch.testing.assert_close(found, _scan(step, first, pair, dim=2, reverse=reverse)[1])


def test_what_mixes_elements_is_a_loop() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(2, 5, 3, 3, dtype=torch.float64)
    found = _associative_scan(multiplied, matrices, 1)
    wanted = [matrices[:, 0]]
    for i in range(1, 5):
        wanted.append(wanted[-1] @ matrices[:, i])
    torch.testing.assert_close(found, torch.stack(wanted, 1))


class Choosing(hw.Mlp):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        for limit in (-1e9, 1e9):
            x = torch.cond(x.sum() > limit, lambda z: z.sin(), lambda z: z * 2.0, (x,))
        if torch.cond(x.shape[0] > 2, lambda: True, lambda: False):
            x = x + 1.0
        return super().forward(x, labels)


class Chosen(hw.Mlp):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(x.sin() * 2.0 + 1.0, labels)


def test_both_sides_of_a_condition_are_computed() -> None:
    torch.manual_seed(0)
    model, inputs = Choosing().double(), hw.vectors()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    with pytest.warns(autopar.UncheckedWarning, match=r"torch\.cond\((.|\n)*both sides"):
        traced = trace(model, inputs, training=True)
    plan = plan_for(model, inputs, (2,), {"data": 2})
    same = Chosen().double()
    same.load_state_dict(model.state_dict())
    result = autopar.verify(plan, same, inputs, traced=traced)
    assert result.worst[1] < 1e-12, result.worst


class Counting(nn.Module):
    """One side of a condition updates the statistics of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.norm, torch.clone, (x,)).square().mean()


def test_a_side_that_writes_is_refused() -> None:
    with pytest.raises(autopar.TraceError, match=r"side of torch\.cond writes") as caught:
        trace(Counting(), (torch.randn(4, 8),))
    assert "test_higher_order.py" in str(caught.value)
