"""What is picked of each row, `x[arange(n), i]`, is split as the rows are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.index_ranges import check_indices
from autopar.tracer.trace import trace

_BATCH, _STEPS, _WIDTH = 4, 6, 4
_PLANS = {"data": {"data": 2}, "turns": {"pipeline": {"size": 1, "microbatches": 2}}}


class Picks(nn.Module):
    """A function of states (B, T, D), of places (B,) and (B, 3), and of a weight (D,)."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.read = nn.Linear(_WIDTH, _WIDTH)
        self.weight = nn.Parameter(torch.randn(_WIDTH))
        self.function = function

    def forward(self, x: Tensor, last: Tensor, some: Tensor) -> Tensor:
        found = self.function(self.read(x).tanh(), last, some, self.weight)
        return (found * self.weight).square().sum(-1).mean()


def _rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def _written(x: Tensor, *places: Tensor | slice, value: Tensor, add: bool = False) -> Tensor:
    x = x.clone()
    if add:
        return x.index_put((_rows(x), *places), value, accumulate=True)  # type: ignore[arg-type]
    x[(_rows(x), *places)] = value
    return x


def _added_to_a_part(x: Tensor, last: Tensor, some: Tensor, w: Tensor) -> Tensor:
    x = x.clone()
    x[_rows(x), 0, 1:3] += w[:2]
    return x


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "last": lambda x, last, some, w: x[_rows(x), last],
    "from the end": lambda x, last, some, w: x[_rows(x), last - _STEPS],
    "plain numbers": lambda x, last, some, w: x[range(len(x)), last],
    "several": lambda x, last, some, w: x[_rows(x)[:, None], some],
    "one more dim": lambda x, last, some, w: x[_rows(x)[:, None], last[:, None]],
    "behind a slice": lambda x, last, some, w: x.mT[_rows(x), :, last],
    "two turns": lambda x, last, some, w: x[
        _rows(x)[:, None, None], torch.arange(_STEPS)[:, None], some[:, None] % _WIDTH
    ].sum(-1, keepdim=True),
    "the same of each": lambda x, last, some, w: x[_rows(x)[:, None], torch.tensor([0, -1])],
    "int32": lambda x, last, some, w: x[_rows(x).int(), last.int()],
    "all": lambda x, last, some, w: x[_rows(x)] + x[_rows(x)[:, None]][:, 0],
    "write": lambda x, last, some, w: _written(x, last, value=w),
    "write several": lambda x, last, some, w: _written(x, slice(None), last % 4, value=w[:1]),
    "add": lambda x, last, some, w: _written(x, last, value=w, add=True),
    "add to a part": _added_to_a_part,
}


@pytest.mark.parametrize("plan", _PLANS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_picks_of_each_row(name: str, plan: str) -> None:
    torch.manual_seed(0)
    model = Picks(FUNCTIONS[name]).double()
    x = torch.randn(_BATCH, _STEPS, _WIDTH, dtype=torch.float64)
    some = torch.stack([torch.randperm(_STEPS)[:3] for _ in range(_BATCH)])
    inputs = x, some[:, 0], some
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    planned = autopar.plan(model, cluster, inputs, constraints=_PLANS[plan], cache=False)
    found = autopar.verify(planned, model, inputs)
    assert found.worst[1] < 1e-12, found.worst


def test_rows_in_another_order_are_gathered() -> None:
    def turned(x: Tensor, last: Tensor, some: Tensor, w: Tensor) -> Tensor:
        return x[torch.arange(_BATCH - 1, -1, -1), last]

    model = Picks(turned).double()
    x = torch.randn(_BATCH, _STEPS, _WIDTH, dtype=torch.float64)
    inputs = x, torch.arange(_BATCH), torch.zeros(_BATCH, 3, dtype=torch.long)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints={"data": 2}, cache=False)
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-12
    with pytest.raises(autopar.ConstraintError, match=r"aten\.index\.Tensor"):
        autopar.plan(model, cluster, inputs, constraints=_PLANS["turns"], cache=False)


@pytest.mark.parametrize("value", [_STEPS, -_STEPS - 1])
def test_a_place_beyond_the_row_is_named(value: int) -> None:
    model = Picks(FUNCTIONS["last"]).double()
    x = torch.randn(_BATCH, _STEPS, _WIDTH, dtype=torch.float64)
    inputs = x, torch.tensor([0, 1, value, -_STEPS]), torch.zeros(_BATCH, 3, dtype=torch.long)
    traced = trace(model, inputs, training=True)
    with pytest.raises(
        autopar.AutoparError, match=rf"(?s)holds {value} at \[2\].*: allowed are -6 to 5"
    ):
        check_indices(traced, inputs)
