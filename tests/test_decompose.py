"""Products and collectives in pieces: order as printed, values, memory, and where it is done."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autopar
from autopar.codegen.builder import Builder
from autopar.codegen.emit import emit
from autopar.codegen.listing import program_text
from autopar.codegen.partition import split_phases
from autopar.codegen.passes import PASSES
from autopar.codegen.passes.decompose import decompose
from autopar.codegen.passes.lifetimes import Lifetimes
from autopar.codegen.passes.sends import is_start
from autopar.codegen.passes.sites import Gather, Reduction, find_sites, key_of
from autopar.core.constraints import Constraints
from autopar.core.folding import every_piece, unfolded
from autopar.core.graph import TracedModel
from autopar.core.plan import Pieces, Plan
from autopar.cost_model import Cluster
from autopar.cost_model.simulator import simulate
from autopar.planning import traced_for
from autopar.runtime.lockstep import mesh_coords, run_lockstep
from autopar.search.pipelining import plan_step
from autopar.search.scheduling import scheduled
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from autopar.verification import relative_error, verify
from tests import zoo
from tests.dist import run_ranks
from tests.pieces import Llama, behind_a_reader, cut, forced, paying, tokens, trained
from tests.test_passes import outline

EINSUM = torch.ops.autopar.einsum.default
SP = {"tensor": {"mode": "1d", "size": 2}, "sequence": "megatron"}
AROUND = PASSES[1:]


@pytest.fixture(autouse=True)
def few_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.search.decomposing._COUNTS", (2, 4))


# --- one site, written by hand, on two ranks


def written(write: Callable[[Builder, list[fx.Node]], Any], shapes: list[tuple[int, ...]]) -> Any:
    """The graphs of both ranks: `write` gets the builder and one input of each shape."""
    graphs = []
    for rank in range(2):
        graph, mode = fx.Graph(), FakeTensorMode()
        builder = Builder(
            graph,
            mesh_shape=(2,),
            coords=(rank,),
            group_names=("axis0",),
            fake_mode=mode,
            device=torch.device("cpu"),
        )
        inputs = []
        for index, shape in enumerate(shapes):
            node = graph.placeholder(f"x{index}")
            with mode:
                node.meta["val"] = torch.empty(shape, dtype=torch.float64)
            inputs.append(node)
        builder.origin = "op"
        # an activation: what is gathered as it is given would be a parameter
        graph.output(
            write(builder, [builder.call(torch.ops.aten.neg.default, inputs[0]), *inputs[1:]])
        )
        graphs.append(graph)
    return graphs


def same_values(graphs: list[fx.Graph], shapes: list[tuple[int, ...]], count: int) -> None:
    """In pieces, both ranks put out what they put out before."""
    (site,) = find_sites(graphs[0], alone=True)
    key = key_of(site.start)
    pieces = [decompose(graph, {key: count}, 1 << 40) for graph in graphs]
    # alone, a reduction leaves the step, and nothing is done
    if isinstance(site, Reduction):
        assert pieces == graphs
        graphs = [behind_a_reader(graph) for graph in graphs]
        pieces = [decompose(graph, {key: count}, 1 << 40) for graph in graphs]
    starts = [node for node in pieces[0].nodes if is_start(node)]
    assert [node.meta["piece"] for node in starts] == [(j, count) for j in range(count)]
    sent = site.start.meta["collective"][2]
    assert sum(node.meta["collective"][2] for node in starts) == sent
    generator = torch.Generator().manual_seed(0)
    feeds = [
        [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        for _ in graphs
    ]
    results = (run_lockstep(found, feeds, (2,)) for found in (pieces, graphs))
    for mine, plain in zip(*results, strict=True):
        for a, b in zip(mine, plain, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


GATHERS = {
    # shape of a rank's part, dim, runs, equation, shape of the other operand
    "rows": ((6, 4), 0, 1, "mk,kn->mn", (4, 3)),
    "own dim, odd": ((5, 4), 0, 1, "mk,kn->mn", (4, 3)),
    "batch": ((4, 3, 4), 1, 1, "abk,nk->abn", (3, 4)),
    "batch, odd": ((5, 3, 4), 1, 1, "abk,nk->abn", (3, 4)),
    "tokens of one row": ((1, 7, 4), 1, 1, "abk,ktn->abtn", (4, 2, 3)),
    "weight gradient": ((2, 3, 5), 1, 1, "abn,abk->kn", (2, 6, 3)),
    "contracted": ((4, 3), 1, 1, "mk,kn->mn", (6, 5)),
    "runs": ((4, 6), 1, 3, "mk,kn->mn", (12, 5)),
    "batched": ((4, 3, 2), 1, 1, "abk,akn->abn", (4, 2, 3)),
    "transposed result": ((1, 6, 4), 1, 1, "abk,nk->nab", (3, 4)),
}


@pytest.mark.parametrize("name", GATHERS)
@pytest.mark.parametrize("count", [2, 3])
def test_gather(name: str, count: int) -> None:
    """Read by one product, by two and a third reader, and by a product with a bias."""
    local, dim, split, equation, other = GATHERS[name]
    shapes = [local, other]
    swap = name == "weight gradient"

    def multiply(b: Builder, x: fx.Node, w: fx.Node) -> fx.Node:
        return b.call(EINSUM, equation, *((w, x) if swap else (x, w)))

    def one(b: Builder, inputs: list[fx.Node]) -> Any:
        return (multiply(b, b.all_gather(inputs[0], 0, dim, split), inputs[1]),)

    def several(b: Builder, inputs: list[fx.Node]) -> Any:
        whole = b.call(torch.ops.aten.alias.default, b.all_gather(inputs[0], 0, dim, split))
        bias = b.call(torch.ops.aten.sum.dim_IntList, inputs[1], [0, 1])
        first = b.call(torch.ops.aten.add.Tensor, multiply(b, whole, inputs[1]), bias)
        second = multiply(b, whole, b.call(torch.ops.aten.exp.default, inputs[1]))
        return (
            first,
            b.call(torch.ops.aten.exp.default, second),
            b.call(torch.ops.aten.exp.default, whole),
        )

    for write in (one, several) if len(other) == 2 else (one,):
        same_values(written(write, shapes), shapes, count)


SCATTERS = {
    # shapes of the operands, equation, dim, runs
    "rows": ((8, 3), (3, 4), "mk,kn->mn", 0, 1),
    "own dim, odd": ((10, 3), (3, 1), "mk,kn->mn", 0, 1),
    "batch": ((3, 4, 5), (2, 5), "abk,nk->abn", 1, 1),
    "columns": ((1, 8, 3), (6, 3), "abk,nk->abn", 1, 1),
    "other dim": ((3, 4), (4, 6), "mk,kn->mn", 1, 1),
    "runs": ((4, 3), (3, 12), "mk,kn->mn", 1, 3),
    "all-reduce": ((7, 3), (3, 4), "mk,kn->mn", None, 1),
}


@pytest.mark.parametrize("name", SCATTERS)
@pytest.mark.parametrize("count", [2, 3])
def test_reduction(name: str, count: int) -> None:
    """Of a product, and of a sum of products that something else reads too."""
    a, b, equation, dim, split = SCATTERS[name]

    def reduced(builder: Builder, x: fx.Node) -> fx.Node:
        if dim is None:
            return builder.all_reduce(x, 0)
        return builder.reduce_scatter(x, 0, dim, split)

    def one(builder: Builder, inputs: list[fx.Node]) -> Any:
        return (reduced(builder, builder.call(EINSUM, equation, *inputs)),)

    def several(builder: Builder, inputs: list[fx.Node]) -> Any:
        x, w = inputs
        first = builder.call(EINSUM, equation, x, w)
        more = builder.call(EINSUM, equation, builder.call(torch.ops.aten.exp.default, x), w)
        seen = builder.call(torch.ops.aten.alias.default, more)
        total = builder.call(torch.ops.aten.add.Tensor, first, seen)
        return reduced(builder, total), builder.call(torch.ops.aten.exp.default, total)

    for write in (one, several):
        same_values(written(write, [a, b]), [a, b], count)


def test_what_is_no_site() -> None:
    """A maximum, a sum without a product, a gather that none reads, and one of a parameter."""

    def others(b: Builder, inputs: list[fx.Node]) -> Any:
        x, w = inputs
        product = b.call(EINSUM, "mk,kn->mn", x, w)
        gathered = b.all_gather(w, 0, 0)
        return (
            b.all_reduce(product, 0, "max"),
            b.all_reduce(x, 0),
            b.call(torch.ops.aten.exp.default, b.all_gather(x, 0, 0)),
            b.call(EINSUM, "mk,nk->mn", x, b.call(torch.ops.aten.alias.default, gathered)),
        )

    assert find_sites(written(others, [(4, 4), (4, 4)])[0]) == []


GATHER = """\
all_gather: op
    wait all_gather: op
all_gather: op
        op
        op
    wait all_gather: op
all_gather: op
        op
        op
    wait all_gather: op
        op
        op"""

SCATTER = """\
        op
reduce_scatter: op
        op
reduce_scatter: op
        op
    wait reduce_scatter: op
reduce_scatter: op
    wait reduce_scatter: op
    wait reduce_scatter: op"""


def test_printed_order() -> None:
    """A piece is on its way while the one before it, or behind it, is multiplied."""

    def gather(b: Builder, inputs: list[fx.Node]) -> Any:
        whole = b.all_gather(inputs[0], 0, 0)
        return tuple(b.call(EINSUM, "mk,kn->mn", whole, inputs[1]) for _ in range(2))

    (graph, _) = written(gather, [(6, 4), (4, 3)])
    assert outline(decompose(graph, {("op", 0, "all_gather"): 3}, 1 << 40)) == GATHER

    def scatter(b: Builder, inputs: list[fx.Node]) -> Any:
        return (b.reduce_scatter(b.call(EINSUM, "mk,kn->mn", *inputs), 0, 0),)

    (graph, _) = written(scatter, [(12, 4), (4, 3)])
    graph = behind_a_reader(graph)
    assert outline(decompose(graph, {("op", 0, "reduce_scatter"): 3}, 1 << 40)) == SCATTER


def test_a_product_that_nobody_reads() -> None:
    """It is cut with the others: no user, no bias."""

    def gather(b: Builder, inputs: list[fx.Node]) -> Any:
        whole = b.all_gather(inputs[0], 0, 0)
        made = [b.call(EINSUM, "mk,kn->mn", whole, inputs[1]) for _ in range(2)]
        return (made[0],)

    (graph, _) = written(gather, [(6, 4), (4, 3)])
    assert (
        len(cut(decompose(graph, {("op", 0, "all_gather"): 3}, 1 << 40))["op", 0, "all_gather"])
        == 3
    )


# --- plans


@cache
def llama(batch: int = 1, layers: int = 1) -> tuple[nn.Module, dict[str, Tensor], TracedModel]:
    torch.manual_seed(0)
    model, inputs = Llama(layers).double().train(), tokens(batch, 20)
    return model, inputs, trace(model, inputs)


@cache
def gpt2() -> tuple[nn.Module, dict[str, Any], TracedModel]:
    torch.manual_seed(0)
    model, inputs = zoo.gpt2(layers=1)
    model = model.double().train()
    return model, inputs, trace(model, inputs)


@cache
def solved(name: str) -> Plan:
    traced = (llama if name == "llama" else gpt2)()[2]
    return solve(traced, paying(2), constraints=Constraints.parse(SP))


@cache
def chosen(name: str) -> Plan:
    """With the pieces that pay."""
    return scheduled(solved(name), (llama if name == "llama" else gpt2)()[2])


def values(plan: Plan, traced: TracedModel, passes: Any) -> list[Tensor]:
    """Every output of both ranks, on inputs of their own."""
    programs = [emit(traced, plan, coords, passes=passes) for coords in mesh_coords((2,))]
    generator = torch.Generator().manual_seed(0)
    feeds = []
    for program in programs:
        row = []
        for spec, _ in program.inputs:
            node = next(n for n in program.joint.graph.nodes if n.name == spec.node)
            like = node.meta["val"]
            drawn = torch.randint(0, 16, like.shape, generator=generator)
            real = torch.randn(like.shape, dtype=torch.float64, generator=generator)
            row.append((real if like.is_floating_point() else drawn).to(like.dtype))
        feeds.append(row)
    for index, (_, layout) in enumerate(programs[0].inputs):
        if not any(p.is_shard for p in layout):  # what is whole is the same on both
            feeds[1][index] = feeds[0][index]
    results = run_lockstep([p.joint.graph for p in programs], feeds, (2,))
    return [value for row in results for value in row if isinstance(value, Tensor)]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_with_and_without(name: str) -> None:
    """Where it pays: every gradient against one device, and against the plan in one piece."""
    model, inputs, traced = (llama if name == "llama" else gpt2)()
    plan = chosen(name)
    assert {row.kind for row in plan.pieces} == {"all_gather", "reduce_scatter"}
    if name == "llama":
        result = verify(plan, model, inputs, traced=traced)
        assert len(result.gradients) == sum(p.requires_grad for p in model.parameters())
        assert result.worst[1] <= 1e-9, result.worst
    else:  # its loss upcasts logits to float32: to be compared with itself
        with_pieces, without = (values(plan, traced, names) for names in (None, AROUND))
        assert max(relative_error(a, b) for a, b in zip(with_pieces, without, strict=True)) <= 1e-9
    graph = emit(traced, plan, [0]).joint.graph
    assert len(cut(graph)) == len(plan.pieces)
    assert not cut(emit(traced, plan, [0], passes=AROUND).joint.graph)


@pytest.mark.parametrize("count", [3, 4])
def test_pieces_of_odd_sizes(count: int) -> None:
    """Ten tokens a rank and a batch of three, in pieces that differ by a row."""
    model, inputs, traced = llama(3)
    plan = forced(solve(traced, paying(2), constraints=Constraints.parse(SP)), traced, count)
    result = verify(plan, model, inputs, traced=traced)
    assert result.worst[1] <= 1e-9, result.worst
    found = cut(emit(traced, plan, [0]).joint.graph)
    assert {len(pieces) for pieces in found.values()} == {count}
    if count == 4:
        sizes = [[n.meta["collective"][2] for n in pieces] for pieces in found.values()]
        assert any(len(set(row)) > 1 for row in sizes)


def test_fused_programs() -> None:
    model, inputs, traced = gpt2()
    result = verify(forced(solved("gpt2"), traced, 2), model, inputs, traced=traced, fusion=True)
    assert result.worst[1] <= 1e-6, result.worst


def test_starts_and_waits_in_a_program() -> None:
    """The other passes keep what makes pieces overlap, and ranks issue the same in one order."""
    traced = llama()[2]
    plan = forced(solved("llama"), traced, 3)
    for passes in (("decompose",), None):
        graphs = [emit(traced, plan, coords, passes=passes).joint.graph for coords in [[0], [1]]]
        orders = [[n.meta["collective"] for n in g.nodes if is_start(n)] for g in graphs]
        assert orders[0] == orders[1]
        place = {node: i for i, node in enumerate(graphs[0].nodes)}
        sites = {
            key_of(s.start): s for s in find_sites(emit(traced, plan, [0], passes=()).joint.graph)
        }
        for key, starts in cut(graphs[0]).items():
            assert [node.meta["piece"] for node in starts] == [(j, 3) for j in range(3)]
            waits = [next(iter(node.users)) for node in starts]
            for j, k in itertools.pairwise(range(3)):
                between = {
                    n.meta["origin"]
                    for n, at in place.items()
                    if n.target is EINSUM and place[starts[k]] < at < place[waits[k]]
                }
                products = {p.meta["origin"] for p in sites[key].products}
                if isinstance(sites[key], Gather):
                    assert between & products
                elif k < 2:
                    assert place[starts[j]] < place[starts[k]] < place[waits[k]]
                    assert between & products


def test_bytes_stay_what_they_are_and_no_bucket_joins_pieces() -> None:
    traced = llama()[2]
    plan = forced(solved("llama"), traced, 2)

    def sent(passes: Any) -> dict[Any, int]:
        rows = emit(traced, plan, [0], passes=passes).comm_bytes()
        return {(row.axis, row.kind): row.num_bytes for row in rows}

    assert sent(None) == sent(("decompose",)) == sent(())
    for node in emit(traced, plan, [0]).joint.graph.nodes:
        if "members" in node.meta:
            assert "piece" not in node.meta


# --- where it is done


def test_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's latency is larger than these products; without it, the predicted step gets faster."""
    traced = llama()[2]
    slow = solve(traced, Cluster.from_profile("cpu-gloo", devices_per_node=2),
                 constraints=Constraints.parse(SP))  # fmt: skip
    assert scheduled(slow, traced).pieces == ()
    plan = solved("llama")
    found, again = chosen("llama"), scheduled(plan, traced)
    assert found.pieces
    assert found.pieces == again.pieces
    monkeypatch.setattr("autopar.search.decomposing._COUNTS", ())
    whole = scheduled(plan, traced)
    assert whole.pieces == ()
    assert found.predicted.step_time_s < 0.99 * whole.predicted.step_time_s


def test_all_reduces_are_cut_too() -> None:
    """Sites are looked for in programs whose all-reduces work in place."""
    model, inputs, traced = llama()
    whole = solve(traced, paying(2), constraints=Constraints.parse({**SP, "sequence": "none"}))
    plan = scheduled(whole, traced)
    assert "all_reduce" in {row.kind for row in plan.pieces}
    assert verify(plan, model, inputs, traced=traced).worst[1] <= 1e-9


def test_prediction_is_of_what_is_emitted() -> None:
    """Seconds of pieces are in the timeline, and what they add is what the program takes more."""
    traced = llama()[2]
    plan = chosen("llama")
    p, before = plan.predicted, solved("llama").predicted
    assert p.step_time_s == pytest.approx(p.compute_time_s + p.exposed_time_s + p.update_s)
    assert p.comm_bytes == before.comm_bytes
    ops = p.timeline.ops
    assert p.compute_time_s == pytest.approx(sum(op.compute_s * op.times for op in ops), rel=1e-6)
    assert p.comm_time_s == pytest.approx(sum(op.comm_s for op in ops), rel=1e-6)
    assert p.comm_time_s > before.comm_time_s
    cluster = Cluster.from_dict(plan.cluster)
    run = simulate(emit(traced, plan, [0]).joint.graph, cluster)
    kept = simulate(emit(traced, plan, [0], passes=AROUND).joint.graph, cluster)
    assert run.step_s < kept.step_s
    assert sum(p.hidden_comm_s) == pytest.approx(sum(run.hidden_s), rel=0.05)
    moves = {(op.name, m.axis, m.kind): m for op in ops for m in op.moves if m.pieces > 1}
    assert {key: move.pieces for key, move in moves.items()} == plan.piece_counts()
    calls: dict[Any, float] = {}
    for span in run.spans:
        key = (span.origin, span.stream, span.kind)
        if key in moves:
            calls[key] = calls.get(key, 0.0) + span.duration_s
    for key, move in moves.items():
        assert move.seconds == pytest.approx(calls[key], rel=1e-6)


def test_memory_stays_in_the_budget() -> None:
    """No program has a higher peak in pieces; without room there are none."""
    traced = llama()[2]
    plan = forced(solved("llama"), traced, 2)
    graph = emit(traced, plan, [0], passes=()).joint.graph
    allowed = Lifetimes(graph).peak_bytes
    for passes in (("decompose",), None):
        made = emit(traced, plan, [0], passes=passes).joint.graph
        assert cut(made)
        assert Lifetimes(made).peak_bytes <= allowed
    assert decompose(graph, plan.piece_counts(), 0) is graph
    few = decompose(graph, plan.piece_counts(), allowed)
    assert 0 < len(cut(few)) <= len(plan.pieces)


def test_plan_is_saved_and_shown(tmp_path: Path) -> None:
    traced = llama()[2]
    plan = chosen("llama")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    plan.to_trace(tmp_path / "trace.json", ranks=1)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("args", {}).get("pieces", 1) > 1 for event in events)
    text = program_text(emit(traced, plan, [0]), traced, plan)
    assert "reduce_scatter on device" in text
    assert "piece 1 of" in text


def test_pieces_of_a_block_that_stands_for_others() -> None:
    first = Pieces(node="a", axis=0, kind="all_gather", count=2)
    rows = (first, replace(first, node="b", axis=1))
    found = every_piece(rows, {"a0": "a", "a1": "a", "b": "b", "c": "c"})
    assert [(row.node, row.axis) for row in found] == [("a0", 0), ("a1", 0), ("b", 1)]


@pytest.mark.slow
def test_one_block_stands_for_many() -> None:
    """The pieces of a folded plan are those of every block."""
    torch.manual_seed(0)
    model, inputs = Llama(layers=6).double().train(), tokens(1, 20)
    plan = autopar.plan(model, paying(2), inputs, constraints=SP, cache=False)
    assert plan.repeats
    whole = trace(model, inputs)
    assert verify(plan, model, inputs, traced=whole).worst[1] <= 1e-9
    folded = traced_for(
        model, inputs, constraints=Constraints.parse(SP), training=True, loss_fn=None
    )
    every = unfolded(plan, folded, whole)
    assert len(every.pieces) > len(plan.pieces) > 0
    assert len(cut(emit(whole, every, [0]).joint.graph)) == len(every.pieces)


@pytest.mark.parametrize(
    "pipeline",
    [
        {"microbatches": 2},
        pytest.param({"size": 2, "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"size": 2, "microbatches": 2, "schedule": "zero-bubble"}, marks=pytest.mark.slow
        ),
    ],
    ids=["turns", "pipeline", "zero-bubble"],
)
def test_steps_in_microbatches(pipeline: dict[str, Any]) -> None:
    """Parts of a stage are cut like a step, and their predicted seconds fall."""
    model, inputs, traced = llama(2, pipeline.get("size", 1))
    ranks = 2 * pipeline.get("size", 1)
    plain = plan_step(
        traced, paying(ranks), constraints=Constraints.parse({**SP, "pipeline": pipeline})
    )
    plan = scheduled(plain, traced)
    assert plan.pipeline is not None
    assert all(stage.pieces for stage in plan.pipeline.stages)
    assert verify(plan, model, inputs, traced=traced).worst[1] <= 1e-9
    p = plan.predicted
    rest = p.compute_time_s + p.exposed_time_s + p.bubble_s + p.update_s
    assert p.step_time_s == pytest.approx(rest, rel=1e-6)


# --- real ranks


def gradients(rank: int, passes: Any, backend: str, path: str) -> tuple[int, list[Tensor]]:
    """Pieces in this rank's program, and the gradients of two steps."""
    parallel, grads = trained(2, passes, backend, path)
    pieces = cut(parallel.compiled.program.joint.graph)
    return sum(map(len, pieces.values())), grads


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_two_real_ranks(backend: str, tmp_path: Path) -> None:
    """Forced on gloo: gradients of two steps are those of the program in one piece."""
    plan = forced(solved("llama"), llama()[2], 2)
    plan.save(tmp_path / "plan.json")
    path = str(tmp_path / "plan.json")
    expected = run_ranks(gradients, 2, list(AROUND), "eager", path, timeout=300)
    for (whole, plain), (pieces, found) in zip(
        expected, run_ranks(gradients, 2, None, backend, path, timeout=580), strict=True
    ):
        assert whole == 0
        assert pieces == 2 * len(plan.pieces)
        for a, b in zip(found, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_phases_of_a_program_in_pieces() -> None:
    """The joint graph is split in forward and backward as before."""
    traced = llama()[2]
    program = emit(traced, forced(solved("llama"), traced, 2), [0])
    tangents = {s.node for s, _ in program.inputs if s.kind == "tangent"}
    forward, backward = split_phases(program.joint.graph, program.num_results, tangents)
    for part in (forward, backward):
        assert any("piece" in node.meta for node in part.graph.nodes)
