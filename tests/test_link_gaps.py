"""Gathers that are issued early, and collectives of the same link that ops wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.codegen.emit import emit
from autopar.codegen.passes.lifetimes import Lifetimes
from autopar.codegen.passes.link_gaps import LinkGaps, links
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.cost_model.simulator import simulate
from autopar.solver.solve import solve
from autopar.tracer.trace import trace

c10d = torch.ops._c10d_functional
TENSOR = {"data": 2, "tensor": {"mode": "1d", "size": 2}, "sequence": "megatron", "zero": 3}
ULYSSES = {"data": 2, "sequence": {"mode": "ulysses", "size": 2}, "zero": 3}


class Block:
    """Products, with collectives of axis 0 that they wait for between them, then gathers.

    Args:
        products: how many matmuls there are in front of, between and behind the collectives.
        gathers: rows of each parameter that is gathered.
    """

    def __init__(self, products: Sequence[int], gathers: Sequence[int]) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        weights = [self._given(f"weight_{i}", rows) for i, rows in enumerate(gathers)]
        x = self._given("x", 64)
        self.awaited: list[fx.Node] = []
        for turn, count in enumerate(products):
            if turn:
                self.awaited.append(
                    self._sent(c10d.all_to_all_single.default, x, [32, 32], [32, 32])
                )
                x = self._call(c10d.wait_tensor.default, self.awaited[-1])
            for _ in range(count):
                x = self._call(torch.ops.aten.mm.default, x, x)
        self.end = len(self.graph.nodes)
        self.gathers = [self._sent(c10d.all_gather_into_tensor.default, w, 2) for w in weights]
        read = [self._call(c10d.wait_tensor.default, gather) for gather in self.gathers]
        self.graph.output((self._call(torch.ops.aten.cat.default, [x, *read]),))

    def _given(self, name: str, rows: int) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(rows, 64)
        return node

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        with self.mode:
            shown = fx.map_arg(args, lambda n: n.meta["val"])
            node.meta["val"] = target(*shown)
        return node

    def _sent(self, target: Any, value: fx.Node, *sizes: Any) -> fx.Node:
        node = self._call(target, value, *sizes, "group")
        kind = "all_gather" if len(sizes) == 1 else "all_to_all"
        node.meta["collective"] = (kind, 0, value.meta["val"].nbytes, 1)
        return node

    def gaps(self, shared: Sequence[str] = ("inside",)) -> list[int]:
        """Behind how many of the collectives each gather is issued."""
        order = list(self.graph.nodes)
        begin = next(i for i, node in enumerate(order) if node.op == "call_function")
        places = LinkGaps(self.graph, shared).places(self.gathers, begin, self.end)
        return [
            sum(order.index(a) < places[gather] for a in self.awaited) for gather in self.gathers
        ]


@pytest.mark.parametrize(
    ("products", "gathers", "wanted"),
    [
        ((1, 0, 3), (64, 64, 64, 64), [0, 2, 2, 2]),  # as many bytes as there is work
        ((2, 2), (64, 64), [0, 1]),
        ((1, 8), (512,), [1]),  # nowhere is room for all of it: where most is
        ((3, 1), (64, 512, 64), [0, 0, 1]),
        ((0, 2, 0), (64, 64), [1, 1]),
        ((4,), (64, 64), [0, 0]),  # nothing to give way to
    ],
)
def test_gathers_are_put_where_their_link_is_idle(
    products: Sequence[int], gathers: Sequence[int], wanted: list[int]
) -> None:
    assert Block(products, gathers).gaps() == wanted


def test_axes_inside_nodes_share_a_link_and_so_do_those_between() -> None:
    plan = planned({})[1]
    assert links(plan) == ("inside", "inside")
    for per_node, wanted in ((2, ("between", "inside")), (1, ("between", "between"))):
        cluster = {**plan.cluster, "devices_per_node": per_node}
        assert links(replace(plan, cluster=cluster)) == wanted
    few = replace(plan, mesh_shape=(3, 2), cluster={**plan.cluster, "devices_per_node": 8})
    assert links(few) == ("inside", "inside")  # a part of a node


@cache
def traced_llama() -> TracedModel:
    config = hf.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=1024,
    )
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.zeros(8, 2048, dtype=torch.long)
    return trace(model, {"input_ids": ids, "labels": ids, "use_cache": False})


def planned(constraints: Any) -> tuple[TracedModel, Plan, Cluster]:
    traced = traced_llama()
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=4, mesh_shape=(2, 2))
    return traced, solve(traced, cluster, constraints=Constraints.parse(constraints)), cluster


@pytest.mark.parametrize("mode", [TENSOR, ULYSSES], ids=["tensor", "ulysses"])
def test_less_is_exposed_where_gathers_give_way(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    traced, plan, cluster = planned(mode)
    graphs = [emit(traced, plan, [0, 0]).joint.graph]
    monkeypatch.setattr(
        LinkGaps, "places", lambda _, starts, begin, end: dict.fromkeys(starts, begin)
    )
    graphs.append(emit(traced, plan, [0, 0]).joint.graph)
    giving_way, plain = (simulate(graph, cluster).exposed_s for graph in graphs)
    assert giving_way[0] <= plain[0] and giving_way[1] < plain[1] * 0.95
    peaks = [Lifetimes(graph).peak_bytes for graph in graphs]
    assert peaks[0] <= peaks[1]
