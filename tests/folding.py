"""Whether a folded graph tells what the whole one does."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from autopar.core.constraints import Constraints
from autopar.core.folding import unfolded
from autopar.core.recompute import recomputed
from autopar.cost_model import Cluster
from autopar.solver.candidates import Candidate, expand
from autopar.solver.price import Decision, price
from autopar.solver.read_step import build_step
from autopar.solver.solve import solve
from autopar.tracer.trace import trace

__all__ = ["cluster", "same_costs"]


def cluster(*mesh: int) -> Cluster:
    return Cluster.from_profile("h100-sxm", devices_per_node=math.prod(mesh), mesh_shape=mesh)


def same_costs(model: nn.Module, inputs: Any, period: int, at: Cluster, kind: str) -> None:
    """Check a plan's time, bytes and memory, predicted from the folded graph, on the whole one.

    Args:
        model: has blocks that fold.
        inputs: of a step.
        period: blocks that repeat together.
        at: to plan for.
        kind: of recomputation.
    """
    folded = trace(model, inputs, training=True, fold=True)
    whole = trace(model, inputs, training=True)
    assert {repeat.period for repeat in folded.repeats} == {period}
    assert len(folded.graph.nodes) < len(whole.graph.nodes)
    plan = solve(folded, at, constraints=Constraints(checkpoint=kind))
    full = unfolded(plan, folded, whole)
    step = build_step(recomputed(whole, kind))
    chosen = {
        name: Candidate(n.inputs, n.outputs, n.variants, _inner(name, n, step, at))
        for name, n in full.nodes.items()
    }
    storages = {s.node: full.parameters[s.target] for s in whole.parameters()}
    found = price(step, at, Decision(chosen, storages), "adamw")
    assert found.total_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    assert found.comm_bytes == plan.predicted.comm_bytes
    assert found.peak.peak_bytes == plan.predicted.peak_memory_bytes
    assert list(plan.parameters) == [s.target for s in whole.parameters()]


def _inner(name: str, node: Any, step: Any, at: Cluster) -> Any:
    for candidate in expand(step.ops[name].call, at.mesh_shape):
        if candidate[:3] == (node.inputs, node.outputs, node.variants):
            return candidate.comm
    raise AssertionError(f"no candidate of {name} is the plan's")
