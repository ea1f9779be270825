"""Collectives in one call with their products: values, forms on CUDA, selection, agreement."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.codegen.emit import emit
from autopar.codegen.listing import program_text
from autopar.codegen.passes import OPTIONAL_PASSES, PASSES, check_passes
from autopar.codegen.passes.alone import cut_out
from autopar.codegen.passes.lifetimes import Lifetimes
from autopar.codegen.passes.sites import Reduction, find_sites, key_of
from autopar.codegen.passes.symmetric import can_be_called, in_one_call, symmetric_memory
from autopar.core.calls import Pieces
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.overlapped import GATHER_MATMUL
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.cost_model.overlapped_calls import call_seconds, pipelined_seconds
from autopar.cost_model.simulator import simulate
from autopar.search.pipelining import plan_step
from autopar.search.scheduling import scheduled
from autopar.search.symmetric_calls import with_symmetric_calls
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from autopar.verification import verify
from tests import zoo
from tests.dist import run_ranks
from tests.pieces import CALLS, Llama, calls, forced, paying, tokens, trained

EINSUM = torch.ops.autopar.einsum.default
ALIAS = torch.ops.aten.alias.default
ALL = (*OPTIONAL_PASSES, *PASSES)
SP = {"tensor": {"mode": "1d", "size": 4}, "sequence": "megatron"}


# --- plans


@cache
def llama(batch: int = 1) -> tuple[nn.Module, dict[str, Tensor], TracedModel]:
    torch.manual_seed(0)
    model, inputs = Llama(1).double().train(), tokens(batch, 20)
    return model, inputs, trace(model, inputs)


@cache
def gpt2() -> tuple[nn.Module, dict[str, Any], TracedModel]:
    torch.manual_seed(0)
    model, inputs = zoo.gpt2(layers=1)
    model = model.double().train()
    return model, inputs, trace(model, inputs)


def near(ranks: int) -> Cluster:
    """A node of CUDA devices where products and collectives take about as long."""
    return replace(paying(ranks), device_type="cuda")


@cache
def solved(name: str, ranks: int = 4) -> Plan:
    pins = {**SP, "tensor": {"mode": "1d", "size": ranks}}
    traced = (llama if name == "llama" else gpt2)()[2]
    return solve(traced, near(ranks), constraints=Constraints.parse(pins))


def with_all_calls(plan: Plan, traced: TracedModel) -> Plan:
    """`plan` with every call that is possible, whether it pays or not."""
    graph = emit(traced, plan, [0] * len(plan.mesh_shape), passes=()).joint.graph
    counts = plan.piece_counts()
    keys = {key_of(site.start) for site in find_sites(graph) if can_be_called(site)}
    rows = [
        Pieces(node=key[0], axis=key[1], kind=key[2], count=counts.get(key, 1), call=key in keys)
        for key in sorted({*counts, *keys})
    ]
    return replace(plan, pieces=tuple(rows))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("passes", [OPTIONAL_PASSES, ALL], ids=["alone", "all"])
def test_gradients(name: str, passes: tuple[str, ...]) -> None:
    """Four ranks, calls where they pay: against one device, and the program without calls."""
    model, inputs, traced = (llama if name == "llama" else gpt2)()
    plan = with_symmetric_calls(solved(name), traced, passes)
    found = calls(emit(traced, plan, [0], passes=passes).joint.graph)
    assert {node.target for node in found} == set(CALLS)
    assert len(found) == len(plan.symmetric_calls()) >= 6
    result = verify(plan, model, inputs, traced=traced, passes=passes)
    plain = verify(plan, model, inputs, traced=traced, passes=())
    assert len(result.gradients) == sum(p.requires_grad for p in model.parameters())
    # the loss of GPT-2 is of float32 logits
    assert result.worst[1] <= (1e-9 if name == "llama" else plain.worst[1] + 1e-9), result.worst
    assert not calls(emit(traced, plan, [0]).joint.graph)


@pytest.mark.parametrize("batch", [1, 3])
def test_calls_beside_pieces(batch: int) -> None:
    """All that can be a call is one, what cannot is cut; batches of several are copied in order."""
    model, inputs, traced = llama(batch)
    plan = solve(traced, near(4), constraints=Constraints.parse(SP))
    plan = with_all_calls(forced(plan, traced, 2), traced)
    result = verify(plan, model, inputs, traced=traced, passes=ALL)
    assert result.worst[1] <= 1e-9, result.worst
    graph = emit(traced, plan, [0], passes=ALL).joint.graph
    assert len(calls(graph)) >= len(plan.symmetric_calls()) - 1  # what is left has no room
    assert any("piece" in node.meta for node in graph.nodes)
    kept = [n for n in calls(graph) if n.target is GATHER_MATMUL and n.args[4]]
    assert kept  # the product for a weight's gradient contracts the gathered tokens


def test_fused_programs() -> None:
    model, inputs, traced = gpt2()
    plan = with_all_calls(solved("gpt2"), traced)
    result = verify(plan, model, inputs, traced=traced, passes=ALL, fusion=True)
    assert result.worst[1] <= 1e-6, result.worst


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
    torch.manual_seed(0)
    model, inputs = Llama(pipeline.get("size", 1)).double().train(), tokens(2, 20)
    traced = trace(model, inputs)
    pins = {**SP, "tensor": {"mode": "1d", "size": 2}, "pipeline": pipeline}
    plan = plan_step(traced, near(2 * pipeline.get("size", 1)), constraints=Constraints.parse(pins))
    marked = with_symmetric_calls(plan, traced, ALL)
    assert marked.pipeline is not None
    assert all(stage.symmetric_calls() for stage in marked.pipeline.stages)
    assert verify(marked, model, inputs, traced=traced, passes=ALL).worst[1] <= 1e-9


CALLED = """\
gather_matmul_default = autopar.gather_matmul(alias_default_3, [alias_default_2],
    ['abk,nk->abn'], 1, False, 2, 'axis0')  # float64[1, 20, 8] all_gather on device, 2.50 KiB,
    in one call
getitem_7 = getitem(gather_matmul_default, 0)  # float64[1, 20, 8]
matmul_reduce_scatter_default = autopar.matmul_reduce_scatter(reshape_default_16,
    alias_default_6, 'abk,nk->abn', 1, 2, 'axis0')  # float64[1, 10, 16] reduce_scatter on
    device, 2.50 KiB, in one call
gather_matmul_default_6 = autopar.gather_matmul(add_tensor_10, [alias_default_6],
    ['abn,nk->abk'], 1, True, 2, 'axis0')  # float64[1, 20, 8], float64[1, 20, 16] all_gather on
    device, 2.50 KiB, in one call
getitem_14 = getitem(gather_matmul_default_6, 0)  # float64[1, 20, 8]
getitem_15 = getitem(gather_matmul_default_6, 1)  # float64[1, 20, 16]"""


def test_printed() -> None:
    """What a program of a Llama-style layer says of its calls: of both phases."""
    traced = llama()[2]
    plan = with_all_calls(solved("llama", 2), traced)
    text = program_text(emit(traced, plan, [0], passes=OPTIONAL_PASSES), traced, plan)
    lines = [x for x in text.splitlines() if re.search("gather_matmul|matmul_reduce_scatter", x)]
    chosen = [*lines[:2], *(x for x in lines if "matmul_reduce" in x)][:3] + lines[-3:]
    found = "\n".join(textwrap.fill(line, 96, subsequent_indent="    ") for line in chosen)
    assert found == CALLED


# --- where it is done


def test_it_is_asked_for_by_name() -> None:
    assert "symmetric_memory" not in check_passes(None)
    assert check_passes(["late", "symmetric_memory"]) == ("symmetric_memory", "late")


def test_only_where_it_is_possible_and_pays() -> None:
    """Not on CPUs, not between nodes, not where gloo's latency rules; never in place of faster."""
    traced = llama()[2]
    plan = solved("llama")
    before = simulate(emit(traced, plan, [0]).joint.graph, near(4)).step_s
    marked = with_symmetric_calls(plan, traced, ALL)
    assert marked.symmetric_calls() and with_symmetric_calls(marked, traced, ALL) is marked
    after = simulate(emit(traced, marked, [0], passes=ALL).joint.graph, near(4)).step_s
    assert after < before
    assert with_symmetric_calls(plan, traced, None) is plan
    for other in (
        paying(4),
        replace(near(4), devices_per_node=2),
        replace(Cluster.from_profile("cpu-gloo", devices_per_node=4), device_type="cuda"),
    ):
        elsewhere = replace(plan, cluster=other.to_dict())
        assert with_symmetric_calls(elsewhere, traced, ALL) == elsewhere
    cut = scheduled(plan, traced)  # into eight pieces, where a call makes four
    faster = simulate(emit(traced, cut, [0]).joint.graph, near(4)).step_s
    chosen = with_symmetric_calls(cut, traced, ALL)
    graph = emit(traced, chosen, [0], passes=ALL).joint.graph
    assert simulate(graph, near(4)).step_s <= faster < after


def test_memory_stays_in_the_budget() -> None:
    """What a call needs inside is counted; without room there is none."""
    traced = llama()[2]
    plan = with_all_calls(solved("llama"), traced)
    graph = emit(traced, plan, [0], passes=()).joint.graph
    peak = Lifetimes(graph).peak_bytes
    keys = plan.symmetric_calls()
    assert symmetric_memory(graph, keys, 0) is graph
    assert symmetric_memory(graph, (), 1 << 40) is graph
    for budget in (peak, 2 * peak):
        made = symmetric_memory(graph, keys, budget)
        assert Lifetimes(made).peak_bytes <= budget
    assert len(calls(made)) == len(keys)
    node = calls(made)[0]
    lifetimes = Lifetimes(made)
    scratch, node.meta["scratch"] = node.meta["scratch"], 0
    less = Lifetimes(made).live[lifetimes.position[node]]
    assert lifetimes.live[lifetimes.position[node]] == less + scratch


def test_law_of_a_call() -> None:
    """The longer of both and a part of the shorter; what is exposed is that less the products."""
    assert pipelined_seconds(8.0, 4.0, 4) == 9.0
    assert pipelined_seconds(4.0, 8.0, 4) == 9.0
    traced = llama()[2]
    plan, cluster = with_all_calls(solved("llama"), traced), near(4)
    graph = emit(traced, plan, [0], passes=OPTIONAL_PASSES).joint.graph
    found = simulate(graph, cluster)
    for node in calls(graph):
        seconds = call_seconds(node, cluster)
        own = [span for span in found.spans if span.name == node.name]
        compute, comm = own
        assert (compute.duration_s, comm.duration_s) == seconds[:2]
        assert comm.duration_s - comm.hidden_s == pytest.approx(seconds.exposed_s)
        assert seconds.comm_s / 4 <= seconds.exposed_s * (1 + 1e-9)
        assert seconds.exposed_s <= seconds.comm_s
    assert found.step_s == pytest.approx(found.compute_s + sum(found.exposed_s))
    plain = emit(traced, plan, [0], passes=()).joint.graph
    assert sum(found.comm_s) == pytest.approx(sum(simulate(plain, cluster).comm_s))
    assert emit(traced, plan, [0], passes=OPTIONAL_PASSES).comm_bytes() == (
        emit(traced, plan, [0], passes=()).comm_bytes()
    )


def test_one_site_alone() -> None:
    """The programs that are compared put out as many values, with the call and without."""
    traced = llama()[2]
    for site in find_sites(emit(traced, solved("llama"), [0], passes=()).joint.graph):
        alone = cut_out(site)
        found = in_one_call(alone)
        assert (found is not None) == can_be_called(site)
        if isinstance(site, Reduction) and len(site.products) > 1:
            assert found is None
        if found is not None:
            assert len(calls(found)) == 1
            ends = (next(iter(reversed(g.nodes))).args[0] for g in (alone, found))
            a, b = ([n.meta["val"].shape for n in end] for end in ends)
            assert a == b


# --- real ranks


def ran(rank: int, passes: Any, backend: str, path: str) -> tuple[int, str, list[Tensor]]:
    """Calls in this rank's program, its text, and the gradients of two steps."""
    parallel, grads = trained(4, passes, backend, path)
    parallel.profile_step(f"{path}.trace", **tokens(1, 20))
    number = len(calls(parallel.compiled.program.joint.graph))
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        parallel.print_program()
    return number, text.getvalue(), grads


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_four_real_ranks(backend: str, tmp_path: Path) -> None:
    """Gradients of two steps on gloo; the plan is marked when the program is made."""
    path = str(tmp_path / "plan.json")
    solved("llama").save(path)
    expected = run_ranks(ran, 4, list(PASSES), "eager", path, timeout=300)
    found = run_ranks(ran, 4, list(ALL), backend, path, timeout=580)
    for (none, _, plain), (number, text, values) in zip(expected, found, strict=True):
        assert none == 0
        assert number > 5
        assert text.count("= autopar.gather_matmul(") > 2
        for a, b in zip(values, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert "gather_matmul" in Path(f"{path}.trace").read_text()
