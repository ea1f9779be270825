"""What a plan keeps of its program: the nodes that ranks run, one block of each kind."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

import autopar
from autopar.codegen.emit import emit
from autopar.codegen.listing import argument_text, program_text, target_text
from autopar.core.excerpt import EmittedNode, excerpts_from, excerpts_to
from autopar.core.plan import Plan
from autopar.tracer.trace import trace
from tests.folding import cluster
from tests.test_folding import TEXT, gemma, llama
from tests.test_stage_passes import Tower

PINS: dict[str, dict[str, Any]] = {
    "tensor": {"data": 2, "tensor": {"mode": "2d", "size": 4}},
    "zero3": {"data": 8, "zero": 3},
    "full": {"data": 8, "zero": 3, "checkpoint": "full"},
    "host": {"data": 8, "zero": 3, "checkpoint": "host"},
}


@cache
def plan_of(name: str, layers: int = 9, fusion: bool = False) -> Plan:
    batch = {key: value.repeat(2, 1) for key, value in TEXT.items()}
    return autopar.plan(
        llama(layers), cluster(8), batch, constraints=PINS[name], cache=False, fusion=fusion
    )


@cache
def stages_of(schedule: str) -> Plan:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(16, 8), "labels": torch.arange(16) % 4}
    pins = {"pipeline": {"size": 4, "microbatches": 4, "schedule": schedule}}
    return autopar.plan(Tower(0.0, layers=8), cluster(4), inputs, constraints=pins, cache=False)


def nodes_of(plan: Plan) -> list[EmittedNode]:
    return [node for excerpt in plan.excerpts for node in excerpt.nodes]


def statement(node: EmittedNode) -> str:
    words = (part for pair in zip(node.texts, (*node.operands, ""), strict=True) for part in pair)
    return f"{node.name} = {node.target}({''.join(words)})"


def statement_of(node: fx.Node) -> str:
    texts = [argument_text(a) for a in node.args]
    texts += [f"{key}={argument_text(value)}" for key, value in node.kwargs.items()]
    return f"{node.name} = {target_text(node.target)}({', '.join(texts)})"


@pytest.mark.parametrize("name", ["tensor", "zero3", "full"])
def test_blocks_add_up_to_the_bytes_of_the_plan(name: str) -> None:
    plan = plan_of(name)
    found: Counter[tuple[int, str]] = Counter()
    for excerpt in plan.excerpts:
        for node in excerpt.nodes:
            if node.sends is not None:
                found[node.sends.axis, node.sends.kind] += excerpt.count * node.sends.num_bytes
    assert found and found == {(b.axis, b.kind): b.num_bytes for b in plan.predicted.comm_bytes}


@pytest.mark.parametrize("fusion", [False, True])
def test_they_are_what_is_emitted(fusion: bool) -> None:
    """The program of an unfolded plan has each statement, in this order."""
    batch = {key: value.repeat(2, 1) for key, value in TEXT.items()}
    model = llama(2)
    plan = autopar.plan(
        model, cluster(8), batch, constraints=PINS["zero3"], cache=False, fusion=fusion
    )
    assert not plan.repeats
    traced = trace(model, batch, training=True)
    program = emit(traced, plan, [0], fusion={"only": list(plan.fusion)})
    assert program.backward is not None and len(plan.excerpts) == 3
    for part, graph in (("forward", program.forward.graph), ("backward", program.backward.graph)):
        written = [statement_of(n) for n in graph.nodes if n.op == "call_function"]
        found = [[statement(n) for n in x.nodes if n.part == part] for x in plan.excerpts]
        assert sorted(line for own in found for line in own) == sorted(written)
        for own in found:
            places = [written.index(line) for line in own]
            assert places == sorted(places)
    kinds = {node.kind for node in nodes_of(plan)}
    assert kinds == {"op", "view", "collective", "wait"} | ({"kernel"} if fusion else set())


def test_a_deep_model_keeps_no_more() -> None:
    shallow, deep = plan_of("zero3"), plan_of("zero3", layers=15)
    assert [len(x.nodes) for x in shallow.excerpts] == [len(x.nodes) for x in deep.excerpts]
    blocks = [sum(x.count for x in plan.excerpts if x.block) for plan in (shallow, deep)]
    assert blocks == [9, 15]


def test_unlike_blocks_are_kept_apart() -> None:
    batch = {key: value.repeat(2, 1) for key, value in TEXT.items()}
    plan = autopar.plan(gemma(8), cluster(8), batch, constraints={"data": 8}, cache=False)
    assert sum(x.count for x in plan.excerpts if x.block) == 8
    assert len([x for x in plan.excerpts if x.block]) >= 2


def test_buckets_waits_and_sources_of_values() -> None:
    plan = plan_of("zero3")
    inner = max(plan.excerpts, key=lambda x: x.count)
    known = {node.name for node in inner.nodes}
    for node in inner.nodes:
        assert all(name in known or name in inner.given for name in node.operands)
        assert node.origin in plan.nodes or node.origin.startswith("gradient of ")
    buckets = [node.sends for node in inner.nodes if node.sends and node.sends.members]
    assert buckets and all(len(bucket.members) > 1 for bucket in buckets)
    weight = f"parameter {inner.block}.mlp.up_proj.weight, float32[8, 32]"
    assert weight in inner.given.values()
    sent = [node.name for node in inner.nodes if node.kind == "collective"]
    waited = [node.operands[0] for node in inner.nodes if node.kind == "wait"]
    assert set(waited) == set(sent)
    assert all(node.seconds > 0 for node in inner.nodes if node.kind == "collective")
    assert all(0 <= node.hidden_s <= node.seconds for node in inner.nodes)


def test_copies_with_host_memory_are_there() -> None:
    inner = max(plan_of("host").excerpts, key=lambda x: x.count)
    targets = [node.target for node in inner.nodes if node.kind == "copy"]
    assert "autopar.to_host" in targets and "autopar.from_host" in targets


def test_a_generated_kernel_names_its_ops() -> None:
    kernels = [n for n in nodes_of(plan_of("tensor", fusion=True)) if n.kind == "kernel"]
    assert any(node.inside for node in kernels)
    assert any(node.target.startswith("autopar_kernels.") for node in kernels)


def test_the_printed_program_names_the_ops_of_a_generated_kernel() -> None:
    model, batch = Tower(0.1), {"x": torch.randn(16, 8), "labels": torch.arange(16) % 4}
    plan = autopar.plan(model, cluster(2), batch, constraints={"data": 2}, cache=False)
    traced = trace(model, batch, training=True)
    program = emit(traced, plan, [0], fusion={"only": ["generated"]})
    lines = program_text(program, traced, plan).splitlines()
    kernels = [line for line in lines if line.startswith("fused_") and "getitem" not in line]
    assert kernels and all("], of aten." in line or "], of autopar." in line for line in kernels)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_stages_share_what_is_equal(schedule: str) -> None:
    plan = stages_of(schedule)
    stages = {number for excerpt in plan.excerpts for number in excerpt.stages}
    assert stages == {0, 1, 2, 3}
    assert any(len(excerpt.stages) > 1 for excerpt in plan.excerpts)
    assert sum(x.count for x in plan.excerpts if x.block) == 8
    parts = {node.part for node in nodes_of(plan)}
    assert {"forward", "finish"} <= parts
    assert ({"input", "weight"} <= parts) == (schedule == "zero-bubble")
    assert ("backward" in parts) == (schedule == "1f1b")


@pytest.mark.parametrize("name", ["tensor", "zero3", "host", "stages"])
def test_they_are_saved(name: str) -> None:
    plan = stages_of("1f1b") if name == "stages" else plan_of(name)
    data = json.loads(json.dumps(plan.to_dict()))
    assert excerpts_from(json.loads(json.dumps(excerpts_to(plan.excerpts)))) == plan.excerpts
    assert plan.excerpts and Plan.from_dict(data) == plan
    del data["excerpts"]  # as an older autopar saved it
    assert Plan.from_dict(data).excerpts == ()


@pytest.mark.parametrize("layout", ["whole", "1f1b", "zero-bubble"])
def test_every_operand_can_be_followed(layout: str) -> None:
    """Also where a product takes a bias in place of the sum behind it, and where sums begin."""
    if layout == "whole":
        inputs = {"x": torch.randn(16, 8), "labels": torch.arange(16) % 4}
        pins = {"data": 4, "zero": 3, "checkpoint": "full"}
        plan = autopar.plan(Tower(0.0, layers=8), cluster(4), inputs, constraints=pins, cache=False)
    else:
        plan = stages_of(layout)
    for excerpt in plan.excerpts:
        made: set[str] = set()
        for node in excerpt.nodes:
            assert all(name in made or name in excerpt.given for name in node.operands)
            assert node.name not in made
            made.add(node.name)
        unknown = {text for text in excerpt.given.values() if text.startswith("given")}
        assert not unknown
    joined = [n for n in nodes_of(plan) if n.target == "contract" and len(n.operands) == 3]
    assert joined and all(node.seconds > 0 for node in joined)
    sums = [n for n in nodes_of(plan) if n.target == "add_up"]
    assert bool(sums) == (layout != "whole")
