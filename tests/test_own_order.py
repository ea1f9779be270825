"""Rows in an order of the rank's own: by brute force op by op, and in models that route tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.core.constraints import Constraints
from autopar.core.placement import Placement, Shard, parse_placement
from autopar.core.plan import Plan
from autopar.core.redistribute import path
from autopar.core.strategy import AxisStrategy, op_call
from autopar.cost_model import Cluster
from autopar.search.pipelining import plan_step
from autopar.solver.offers import likeness
from autopar.solver.rules.own_order import Order, own_order_rows
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from autopar.verification import verify
from tests.bruteforce import Captured, Sample, capture, check_rows, describe, offered, rows_of
from tests.test_rules import SAMPLES

OWN = Placement("S", 0, own=True)


# --- op by op
def own_rows(captured: Captured) -> list[AxisStrategy]:
    """The rows that an op gets if those of its operands which a plain row shards are anyhow."""
    found: list[AxisStrategy] = []
    for row in rows_of(captured, 2):
        call = op_call(captured.node, 2)
        if len(set(call.nodes)) < len(call.nodes):
            continue
        for node, held in zip(call.nodes, row.inputs, strict=True):
            node.meta["order"] = Order("keys", "values", held.dim) if held.is_shard else None
        if any(held.is_shard for held in row.inputs):
            found += own_order_rows(call)
    return list(dict.fromkeys(found))


def shuffled(value: Any, placement: Placement) -> Any:
    """The rows of a value in another order, the same for all that have as many."""
    if not isinstance(value, Tensor) or not placement.own:
        return value
    count = value.shape[placement.dim]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    return value.index_select(placement.dim, order)


def plain(row: AxisStrategy) -> AxisStrategy:
    held = [tuple(p._replace(own=False) for p in side) for side in (row.inputs, row.outputs)]
    return AxisStrategy(held[0], held[1])


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_shuffled_rows_give_shuffled_results(sample: Sample) -> None:
    torch.manual_seed(0)
    captured = capture(sample)
    for row in own_rows(captured):
        if not offered(op_call(captured.node, 2), (plain(row),), (2,)):
            continue
        moved = captured._replace(
            operands=tuple(map(shuffled, captured.operands, row.inputs)),
            outputs=tuple(map(shuffled, captured.outputs, row.outputs)),
        )
        try:
            check_rows(moved, (plain(row),), (2,))
        except Exception as error:
            raise AssertionError(describe(captured, (row,), (2,))) from error


def test_most_ops_that_shard_rows_take_them_in_any_order() -> None:
    torch.manual_seed(0)
    names = ("add", "silu", "sum", "split", "einsum")
    found = {
        sample.name
        for sample in SAMPLES
        if any(name in sample.name for name in names) and own_rows(capture(sample))
    }
    assert len(found) > 10


def test_nothing_moves_an_own_order() -> None:
    plain_row, whole = (Shard(0),), (Placement("R"),)
    assert path((OWN,), (OWN,), (2,)) == ()
    for other in (plain_row, whole, (Shard(1),)):
        assert path((OWN,), other, (2,)) is None
        assert path(other, (OWN,), (2,)) is None
    # another axis may still sum or gather
    (move,) = path((OWN, Placement("P")), (OWN, Placement("R")), (2, 2)) or ()
    assert move.kind == "all_reduce"
    assert parse_placement(OWN.short) == OWN


def test_what_makes_an_order_does_not_matter_but_that_it_is_shared() -> None:
    graph = fx.Graph()
    sums = []
    for left, right in (("a", "a"), ("b", "b"), ("a", "b"), ("a", None)):
        nodes = [graph.placeholder(side) for side in "xy"]
        for node, of in zip(nodes, (left, right), strict=True):
            node.meta["val"] = torch.empty(6, 2, device="meta")
            node.meta["order"] = of and Order(of, "values")
        sums.append(graph.call_function(torch.ops.aten.add.Tensor, tuple(nodes)))
        sums[-1].meta["val"] = torch.empty(6, 2, device="meta")
    same, other, mixed, half = (likeness(op_call(node, 2)) for node in sums)
    assert same == other
    assert len({same, mixed, half}) == 3


# --- models
class Routed(nn.Module):
    """Tokens sorted by the expert that a router picks, `choices` of them per token."""

    def __init__(self, experts: int = 4, choices: int = 2, width: int = 8) -> None:
        super().__init__()
        self.choices = choices
        self.router = nn.Linear(width, experts)
        self.weight = nn.Parameter(torch.randn(experts, width, width))
        self.bias = nn.Parameter(torch.randn(experts, width))

    def rows(self, x: Tensor, keys: Tensor, order: Tensor) -> Tensor:
        """What the experts make of their tokens, in the order of the keys."""
        mine = x[order // self.choices]
        return torch.tanh((mine.unsqueeze(1) @ self.weight[keys]).squeeze(1) + self.bias[keys])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        share, picked = self.router(flat).softmax(-1).topk(self.choices)
        keys, order = picked.flatten().sort()
        out = self.rows(flat, keys, order) * share.flatten()[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return (flat + out[inverse].view(*picked.shape, -1).sum(1)).square().mean()


class ByPlace(Routed):
    """What a row is worth depends on where it stands among all: only the whole sort is right."""

    def rows(self, x: Tensor, keys: Tensor, order: Tensor) -> Tensor:
        out = super().rows(x, keys, order)
        return out * torch.linspace(0, 1, len(out), dtype=out.dtype).unsqueeze(1)


class Scanned(Routed):
    def rows(self, x: Tensor, keys: Tensor, order: Tensor) -> Tensor:
        return super().rows(x, keys, order).cumsum(0)


def planned(
    model: nn.Module, devices: int, constraints: dict[str, Any]
) -> tuple[Plan, float, set[str]]:
    """The plan, its worst error against one device, and the ops that hold rows in an own order."""
    torch.manual_seed(0)
    model = model.double()
    x = torch.randn(16, 32, 8, dtype=torch.float64)
    traced = trace(model, (x,))
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=devices)
    # so that even toy sizes are worth splitting
    quick = replace(cluster.intra, latency_s=0.0, base_latency_s=0.0, bandwidth=1e15)
    cluster = replace(cluster, intra=quick)
    parsed = Constraints.parse(constraints)
    make = plan_step if "pipeline" in constraints else solve
    plan = make(traced, cluster, constraints=parsed)
    nodes = dict(plan.nodes)
    for stage in plan.pipeline.stages if plan.pipeline else ():
        nodes |= stage.nodes
    own = {n for n, held in nodes.items() if any(p.own for out in held.outputs for p in out)}
    found = verify(plan, model, (x,), traced=traced)
    assert len(found.gradients) == len(list(model.parameters()))
    return plan, found.worst[1], own


@pytest.mark.parametrize("choices", [1, 2, 3])
@pytest.mark.parametrize(
    ("devices", "constraints"),
    [
        (2, {"data": 2, "zero": 0}),
        (4, {"data": 4, "zero": 3}),
        (4, {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 1}),
    ],
    ids=["2", "4 zero 3", "2x2"],
)
def test_each_rank_sorts_its_own_tokens(
    devices: int, constraints: dict[str, Any], choices: int
) -> None:
    _, error, own = planned(Routed(choices=choices), devices, constraints)
    assert error < 1e-9
    assert any(name.startswith("sort") for name in own)
    assert any(name.startswith("inverse_permutation") for name in own)


def test_each_microbatch_sorts_its_own_tokens() -> None:
    plan, error, _ = planned(Routed(), 2, {"pipeline": {"size": 1, "microbatches": 4}, "data": 2})
    assert plan.pipeline is not None
    assert plan.pipeline.microbatches == 4
    assert error < 1e-9


@pytest.mark.parametrize("kind", [ByPlace, Scanned])
def test_rows_that_need_their_place_are_sorted_whole(kind: type[Routed]) -> None:
    _, error, own = planned(kind(), 2, {"data": 2, "zero": 0})
    assert error < 1e-9
    assert not own


class Ranked(nn.Module):
    """Sorts of many rows at once, whose values and places are read."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.score = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        values, places = self.score(x).sort(dim=1, descending=True)
        return (values + torch.take_along_dim(x, places, 1)).square().mean()


def test_sorts_of_many_rows_have_no_order_in_common() -> None:
    _, error, own = planned(Ranked(), 2, {"data": 2})
    assert error < 1e-9
    assert not own
