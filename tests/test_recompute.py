"""Recomputation: the same numbers, less memory, and chosen when the limit asks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.core.constraints import Constraints
from autopar.core.recompute import recomputed
from autopar.cost_model import Cluster
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from tests import zoo

FOUR = Cluster.from_profile("cpu-gloo", devices_per_node=4)
ONE = Cluster.from_profile("cpu-gloo", devices_per_node=1)


def dropped_out() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=16, resid_pdrop=0.2
    )
    ids = torch.arange(64).reshape(4, 16) % 96
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize(
    "name", ["gpt2", "vit", *(pytest.param(n, marks=pytest.mark.slow) for n in ("resnet", "t5"))]
)
def test_gradients_are_those_of_the_module(name: str, kind: str) -> None:
    torch.manual_seed(0)
    model, inputs = zoo.MODELS[name]()
    model = model.double().train()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    traced = trace(model, inputs)
    peaks = {}
    for recomputation in ("none", kind):
        wanted = Constraints.parse({"data": 4, "zero": 3, "checkpoint": recomputation})
        plan = solve(traced, FOUR, constraints=wanted)
        assert plan.checkpoint == recomputation
        peaks[recomputation] = plan.predicted.peak_memory_bytes
    if name == "vit":  # two blocks hold less than the patches in front of them
        assert peaks[kind] <= peaks["none"]
    else:
        assert peaks[kind] < peaks["none"]
    found = autopar.verify(plan, model, inputs, traced=traced)
    assert len(found.gradients) == sum(p.requires_grad for p in model.parameters())
    assert found.worst[1] <= (1e-6 if name == "gpt2" else 1e-9)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_dropout_masks_are_drawn_again(kind: str) -> None:
    model, inputs = dropped_out()
    wanted = {"checkpoint": kind, "data": 2, "tensor": {"mode": "1d", "size": 2}}
    plan = autopar.plan(model, FOUR, inputs, constraints=wanted)
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-5


@pytest.mark.parametrize("mode", ["1d", "2d"])
def test_modes_hold_for_what_is_repeated(mode: str) -> None:
    model, inputs = zoo.MODELS["llama"]()
    traced = trace(model.train(), inputs)
    wanted = Constraints.parse({"tensor": {"mode": mode, "size": 4}, "checkpoint": "full"})
    plan = solve(traced, FOUR, constraints=wanted)
    graph = recomputed(traced, "full").graph
    copies = [n.name for n in graph.nodes if n.name in plan.nodes and n.name not in _names(traced)]
    einsums = [n for n in copies if "einsum" in n]
    assert einsums
    for name in einsums:
        node = plan.nodes[name]
        for axis in range(len(plan.mesh_shape)):
            assert any(layout[axis].is_shard for layout in node.inputs)


def _names(traced: Any) -> set[str]:
    return {n.name for n in traced.graph.nodes}


def test_a_smaller_limit_gives_a_slower_plan() -> None:
    model, inputs = dropped_out()
    traced = trace(model, inputs)
    free = solve(traced, ONE)
    assert free.checkpoint == "none"
    full = solve(traced, ONE, constraints=Constraints(checkpoint="full"))
    assert full.predicted.peak_memory_bytes < free.predicted.peak_memory_bytes
    limit = full.predicted.peak_memory_bytes
    tight = solve(traced, ONE, memory_limit=limit)
    assert tight.checkpoint != "none"
    assert tight.predicted.peak_memory_bytes <= limit
    assert tight.predicted.step_time_s > free.predicted.step_time_s
    kept = Constraints(checkpoint="none")
    with pytest.raises(autopar.InfeasiblePlanError):
        solve(traced, ONE, memory_limit=limit, constraints=kept)


def test_selective_repeats_no_contraction() -> None:
    traced = trace(*dropped_out())
    for kind, repeated in (("selective", 0), ("full", 3)):
        graph = recomputed(traced, kind)
        again = [
            n for n in graph.graph.nodes if graph.info.get(n.name) and graph.info[n.name].recomputed
        ]
        assert again
        einsums = [n for n in again if n.target is torch.ops.autopar.einsum.default]
        assert bool(einsums) == bool(repeated)
    assert recomputed(traced, "none") is traced


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(autopar.ConstraintError, match="none, selective, full"):
        Constraints.parse({"checkpoint": "some"})
