"""Cost bugs that flipped the plans of other planners, seen where a plan is made.

The laws of single costs are in `test_cost_model.py`; here they are checked on the prices that the
solver adds up: candidates of real ops, redistributions, and whole plans.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.core.constraints import Constraints
from autopar.core.placement import Layout, Partial, Replicate, Shard
from autopar.core.redistribute import path
from autopar.cost_model import Cluster, CollectiveKind
from autopar.solver.candidates import Candidate, Pricer, expand
from autopar.solver.moves import MoveCosts
from autopar.solver.read_step import build_step
from autopar.solver.solve import solve
from autopar.solver.step import ALONE, Bucket
from autopar.tracer.trace import trace

R, P = Replicate(), Partial()
_meshes = st.sampled_from([(2,), (8,), (2, 2), (2, 8), (4, 8), (2, 2, 2), (3, 4)])
_profiles = st.sampled_from(["h100-sxm", "a100-80g", "v100", "cpu-gloo"])
_sizes = st.integers(1 << 10, 1 << 34)


def cluster_of(profile: str, mesh: tuple[int, ...]) -> Cluster:
    """The mesh with its last axis inside a node."""
    nodes = int(np.prod(mesh[:-1]))
    return Cluster.from_profile(profile, nodes=nodes, devices_per_node=mesh[-1], mesh_shape=mesh)


def layouts(num_axes: int, *placements: Any) -> st.SearchStrategy[Layout]:
    return st.tuples(*(st.sampled_from(placements) for _ in range(num_axes)))


@settings(max_examples=60)
@given(profile=_profiles, mesh=_meshes, data=st.data(), small=_sizes, more=_sizes)
def test_moves_grow_with_bytes_and_are_never_negative(profile, mesh, data, small, more) -> None:
    moves = MoveCosts(cluster_of(profile, mesh))
    src = data.draw(layouts(len(mesh), R, P, Shard(0), Shard(1)))
    dst = data.draw(layouts(len(mesh), R, Shard(0), Shard(1)))
    low, high = (float(moves.matrix([src], [dst], n)[0, 0]) for n in (small, small + more))
    assert 0 <= low <= high or low == high == np.inf
    sent = [m for m in path(src, dst, mesh) or () if m.kind != "slice"]
    assert (low > 0) == bool(sent) or low == np.inf


@settings(max_examples=30)
@given(mesh=_meshes, data=st.data(), num_bytes=st.sampled_from([0, 4096]))
def test_a_move_costs_what_its_collectives_do(mesh, data, num_bytes) -> None:
    """Also of an empty tensor, such as a table of as many columns as are missing: nothing."""
    cluster = cluster_of("cpu-gloo", mesh)
    src = data.draw(layouts(len(mesh), R, P, Shard(0)))
    dst = data.draw(layouts(len(mesh), R, Shard(0)))
    for bucket in (ALONE, Bucket(3, ("all_reduce", "all_gather", "reduce_scatter"))):
        found = MoveCosts(cluster).matrix([src], [dst], num_bytes, bucket)
        sent = enumerate(m for m in path(src, dst, mesh) or () if m.kind != "slice")
        seconds = sum(
            Pricer(cluster).collective(
                m.kind, m.axis, num_bytes * m.fraction, bucket.shared(m.kind, i)
            )
            for i, m in sent
        )
        assert found[0, 0] == pytest.approx(seconds, rel=1e-9)


@settings(max_examples=30)
@given(mesh=_meshes, data=st.data())
def test_a_table_of_moves_is_that_of_each_pair(mesh, data) -> None:
    """Pairs of layouts that are priced as one have the same moves, strided splits or not."""
    shards = [Shard(d, split=s) for d in range(3) for s in (1, 2, 3, 8)]
    known = layouts(len(mesh), R, P, *shards)
    found = data.draw(st.lists(known, min_size=2, max_size=12, unique=True))
    cluster = cluster_of("h100-sxm", mesh)
    table = MoveCosts(cluster).matrix(found, found, 1e9)
    for i, src in enumerate(found):
        for j, dst in enumerate(found):
            own = MoveCosts(cluster)._price(src, dst)
            assert table[i, j] == own[0] + 1e9 * own[1], (src, dst)


@settings(max_examples=60)
@given(profile=_profiles, mesh=_meshes, data=st.data(), num_bytes=_sizes)
def test_whole_sum_is_sum_to_shards_and_gather(profile, mesh, data, num_bytes) -> None:
    moves = MoveCosts(cluster_of(profile, mesh))
    axis = data.draw(st.integers(0, len(mesh) - 1))

    def on_axis(placement: Any) -> Layout:
        return tuple(placement if i == axis else R for i in range(len(mesh)))

    def seconds(src: Any, dst: Any) -> float:
        return float(moves.matrix([on_axis(src)], [on_axis(dst)], num_bytes)[0, 0])

    whole, scattered, gathered = seconds(P, R), seconds(P, Shard(0)), seconds(Shard(0), R)
    assert whole == pytest.approx(scattered + gathered, rel=1e-12)
    assert whole > scattered > 0
    # between shards of one tensor all-to-all sends 1/n of what an all-gather does
    a, _ = moves.cluster.alpha_beta(CollectiveKind.ALL_TO_ALL, axis)
    assert 0 < seconds(Shard(0), Shard(1)) <= gathered
    if moves.cluster.devices_per_node >= mesh[axis] and axis == len(mesh) - 1:
        transfer = seconds(Shard(0), Shard(1)) - a
        assert (gathered - a) / transfer == pytest.approx(mesh[axis], rel=1e-6)


class Lookup(nn.Module):
    """Tokens to logits: nothing but an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 64)
        self.head = nn.Linear(64, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids)).square().mean()


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_no_candidate_of_an_embedding_is_free(mesh: tuple[int, ...]) -> None:
    step = build_step(trace(Lookup(), (torch.zeros(8, 16, dtype=torch.int64),)))
    pricer = Pricer(cluster_of("h100-sxm", mesh))
    found = [op for op in step.ops.values() if "embedding" in str(op.call.target)]
    assert len(found) == 2  # forward and backward
    for op in found:
        candidates = expand(op.call, mesh)
        seconds = pricer.compute(op.call, candidates)
        overhead = pricer.cluster.device.kernel_overhead_s
        assert (seconds > overhead).all()
        whole = next(i for i, c in enumerate(candidates) if _is_whole(c))
        # a rank with a part of the rows also clears those of others
        plain = [i for i, c in enumerate(candidates) if not c.copied]
        assert seconds[whole] == seconds[plain].max()


def _is_whole(candidate: Candidate) -> bool:
    return all(p.is_replicate for x in (*candidate.inputs, *candidate.outputs) for p in x)


def test_compute_of_every_op_falls_with_its_shards_and_none_is_negative() -> None:
    step = build_step(trace(Lookup(), (torch.zeros(8, 16, dtype=torch.int64),)))
    pricer = Pricer(cluster_of("h100-sxm", (2, 2)))
    for op in step.ops.values():
        candidates = expand(op.call, (2, 2))
        seconds = pricer.compute(op.call, candidates)
        whole = next((i for i, c in enumerate(candidates) if _is_whole(c)), None)
        assert (seconds >= 0).all()
        if whole is not None:
            plain = [i for i, c in enumerate(candidates) if not c.copied]
            assert (seconds[plain] <= seconds[whole] * (1 + 1e-12)).all(), op.name


def _mlp(width: int, layers: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(width, 4 * width, bias=False),
                    nn.ReLU(),
                    nn.Linear(4 * width, width, bias=False),
                )
                for _ in range(layers)
            )
        )


def test_axes_are_solved_together() -> None:
    """Known bug elsewhere: each mesh axis solved alone gave data parallelism on all of them.

    Weights are 4 · width² a layer, activations rows · width. With `rows` in between, sending the
    gradients of a layer is cheaper than its activations on either axis alone; once one axis has
    split the rows, sending the activations is cheaper on the other. Nothing is hidden here, as
    gradients that travel beside compute would be for nothing.
    """
    width, rows = 2048, 20480
    model = _mlp(width, 2)
    batch = (torch.empty(rows, width, device="meta"), torch.empty(rows, width, device="meta"))

    traced = trace(model, batch, loss_fn=nn.functional.mse_loss)

    def planned(mesh: tuple[int, ...], constraints: Any = None) -> autopar.Plan:
        cluster = Cluster.from_profile(
            "h100-sxm", devices_per_node=int(np.prod(mesh)), mesh_shape=mesh
        )
        return solve(traced, cluster, constraints=Constraints.parse(constraints), exposed=1.0)

    def rows_split(plan: autopar.Plan) -> list[bool]:
        """Per axis: every contraction of the forward has its activation split on the rows."""
        used = [n for name, n in plan.nodes.items() if name.startswith("einsum")][:4]
        assert len(used) == 4
        return [
            all(n.inputs[0][axis] == Shard(0) and n.outputs[0][axis] == Shard(0) for n in used)
            for axis in range(len(plan.mesh_shape))
        ]

    assert all(rows_split(planned((2,)))) and all(rows_split(planned((4,))))
    joint, pure = planned((4, 2)), planned((4, 2), {"data": 8})
    assert not all(rows_split(joint))
    assert joint.predicted.step_time_s < pure.predicted.step_time_s
    assert joint.predicted.comm_time_s < 0.8 * pure.predicted.comm_time_s
