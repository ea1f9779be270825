"""When collectives are issued, and how many: of inputs at once, of gradients in few buckets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.codegen.emit import emit
from autopar.codegen.passes.bucket import fewest_buckets
from autopar.codegen.passes.sends import is_start
from autopar.core.constraints import Constraints
from autopar.cost_model import Cluster
from autopar.search.scheduling import scheduled
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from tests.test_matrix import traced_model


def test_what_is_made_of_inputs_is_sent_in_front_of_the_first_product() -> None:
    """The number of labels that count: ranks do not stand still for it behind the forward."""
    _, _, traced = traced_model("vit")
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = solve(traced, cluster, constraints=Constraints.parse({"data": 2, "zero": 0}))
    apart = {}
    for names in ((), ("early",)):
        nodes = list(emit(traced, plan, [0], passes=names).joint.graph.nodes)
        product = next(i for i, n in enumerate(nodes) if "einsum" in str(n.target))
        apart[names] = [i for i, n in enumerate(nodes) if is_start(n) and i < product]
        assert any(is_start(n) and n.meta["phase"] == "forward" for n in nodes)
    assert not apart[()] and len(apart["early",]) == 1


@given(
    members=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), max_size=7),
    limit=st.integers(1, 25),
)
def test_buckets_are_as_few_as_fit(members: list[tuple[int, int]], limit: int) -> None:
    """Against all ways to cut a sequence of members: sizes, and room where each is issued."""
    sizes, room = [size for size, _ in members], [most for _, most in members]

    def fits(first: int, end: int) -> bool:
        joined = sum(sizes[first:end])
        return end - first == 1 or (joined <= room[end - 1] and joined - sizes[end - 1] < limit)

    def cuts() -> Iterator[list[int]]:
        inner = range(1, len(members))
        for count in range(len(members)):
            for chosen in itertools.combinations(inner, count):
                ends = [*chosen, len(members)]
                if all(fits(a, b) for a, b in itertools.pairwise([0, *ends])):
                    yield ends

    found = fewest_buckets(sizes, room, limit)
    ways = list(cuts()) if members else [[]]
    assert found in ways
    assert len(found) == min(map(len, ways))


def test_gradients_are_joined_where_they_are_most_of_what_is_held() -> None:
    """With hardly any activations the peak is where gradients are: some buckets shrink, not all."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh()) for _ in range(24)]
    model, x = nn.Sequential(*layers, nn.Linear(32, 1)), torch.randn(8, 32)
    traced = trace(model, (x, torch.randn(8, 1)), loss_fn=nn.functional.mse_loss)
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=8)
    plan = solve(traced, cluster, constraints=Constraints.parse({"data": 8, "zero": 1}))
    sent = {}
    for names in ((), ("bucket",)):
        nodes = emit(traced, plan, [0], passes=names).joint.graph.nodes
        reduced = [n for n in nodes if is_start(n) and "reduce" in str(n.target)]
        sent[names] = len([n for n in reduced if n.meta["phase"] == "backward"])
    assert sent[()] > 90
    assert sent["bucket",] < sent[()] / 4
    # buckets live in a little more than the peak was: that leaves the others where they may go
    predicted = scheduled(plan, traced).predicted
    assert sum(predicted.hidden_comm_s) > 2 * predicted.exposed_time_s
