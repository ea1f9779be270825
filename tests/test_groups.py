"""Which ops a generated kernel takes: what waits for small values is put off until they join it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import autopar
from autopar.codegen.emit import emit
from autopar.codegen.fusion.generated import Generated
from autopar.codegen.fusion.groups import MAX_OPERANDS, Group, find_groups
from autopar.cost_model import Cluster
from autopar.tracer.trace import trace
from tests import zoo

aten = torch.ops.aten
GENERATED = {"only": ["generated"]}


def _groups(function: Callable[..., object], *shapes: tuple[int, ...]) -> list[list[str]]:
    """Names of the ops of each kernel; what is emitted stands behind all that it reads."""
    graph = make_fx(function, tracing_mode="fake")(*map(torch.randn, shapes)).graph
    order, owner = find_groups(graph)
    seen: set[fx.Node] = set()
    for item in order:
        members = [*item.before, *item.members] if isinstance(item, Group) else [item]
        for node in members:
            inside = members if isinstance(item, Group) else []
            assert all(source in seen or source in inside for source in node.all_input_nodes)
        seen.update(members)
    assert seen == set(graph.nodes)
    assert set(owner) <= seen
    return [[m.name for m in item.members] for item in order if isinstance(item, Group)]


BIG, SMALL = (64, 256), (1, 256)


def test_what_waits_for_small_values_is_put_off() -> None:
    def normed(x: Tensor, y: Tensor, mean: Tensor) -> Tensor:
        centred = x - mean
        scaled = centred * mean.cumsum(1)
        return (y - scaled) * mean.cumsum(0)

    assert _groups(normed, BIG, BIG, SMALL) == [["sub", "mul", "sub_1", "mul_1"]]


def test_what_waits_for_large_values_is_not() -> None:
    def late(x: Tensor, y: Tensor, mean: Tensor) -> Tensor:
        centred = x - mean
        return centred * (x @ y) + mean

    assert _groups(late, BIG, (256, 256), SMALL) == [["mul", "add"]]


def test_what_others_read_is_not() -> None:
    def read(x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        centred = x - mean
        return centred * mean.cumsum(1) + x, centred.sum(0)

    def viewed(x: Tensor, mean: Tensor) -> Tensor:
        centred = x - mean
        return (centred * mean.cumsum(1) + x) * centred.view(64, 256)

    assert _groups(read, BIG, SMALL) == [["mul", "add"]]
    assert _groups(viewed, BIG, SMALL) == [["mul", "add"]]


def test_what_cannot_join_is_emitted_in_front_of_its_reader() -> None:
    def wide(mean: Tensor, *terms: Tensor) -> Tensor:
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total * mean.cumsum(1)

    (group,) = _groups(wide, SMALL, *[BIG] * MAX_OPERANDS)
    assert len(group) == MAX_OPERANDS - 1 and "mul" not in group


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_batch_norms_over_ranks(mesh: tuple[int, ...]) -> None:
    """Their gradients are one kernel behind the sums over ranks, and as on one device."""
    model, inputs = zoo.resnet()
    model = model.double().train()
    inputs = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    ranks = 2 * len(mesh)
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=ranks, mesh_shape=mesh)
    pins = {"data": ranks, "zero": 0}
    plan = autopar.plan(model, cluster, inputs, constraints=pins)
    traced = trace(model, inputs)
    found = autopar.verify(plan, model, inputs, traced=traced, fusion=GENERATED)
    assert found.worst[1] <= 1e-9, found.worst
    graph = emit(traced, plan, [0] * len(mesh), fusion=GENERATED).joint.graph
    assert any(isinstance(node.target, Generated) for node in graph.nodes)
    alone = [n for n in graph.nodes if n.target is aten.sub.Tensor and n.meta["val"].dim() == 4]
    assert not alone
