"""The solver prices what fusion makes: against the simulator over the emitted fused program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.cache import PlanCache
from autopar.codegen.emit import emit
from autopar.codegen.fusion import Fusion
from autopar.codegen.shares import fused_shares
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.placement import Partial, Replicate
from autopar.core.plan import Plan
from autopar.cost_model import Cluster, OpCost, compute_seconds
from autopar.cost_model.simulator import simulate
from autopar.errors import ConstraintError, InfeasiblePlanError
from autopar.explanation import explain
from autopar.search.pipelining import plan_step
from autopar.search.scheduling import scheduled
from autopar.solver.candidates import Candidate
from autopar.solver.offers import Offers
from autopar.solver.pipelines.ideal import BlockWork
from autopar.solver.read_step import build_step
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from tests import zoo
from tests.test_pipeline_search import stack

ALL = Fusion.parse(True, torch.device("cuda"))


class Norm(nn.Module):
    """A residual stream, its RMS norm, and what reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(512, 512, bias=False)
        self.weight = nn.Parameter(torch.ones(512))
        self.b = nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        h = self.a(x) + residual
        normal = self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
        return (self.b(normal) + h).square().sum()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(512, 1024, bias=False) for _ in range(2))
        self.down = nn.Linear(1024, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x)).square().sum()


class Gelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(512, 1024)
        self.down = nn.Linear(1024, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh")).square().sum()


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 64, 64))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = torch.einsum("bhld,hde->bhle", x, self.weight)
        turned = torch.cat((-q[..., 32:], q[..., :32]), -1)
        return (q * cos + turned * sin).square().sum()


class Chain(nn.Module):
    """Pointwise ops on what every rank holds, whose result every rank needs."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = torch.sin(x) * 1.5
        return x


_X = torch.zeros(4, 128, 512)
_TABLES = {"cos": torch.zeros(128, 64), "sin": torch.zeros(128, 64)}
MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "norm": lambda: (Norm(), {"x": _X, "residual": _X}),
    "gated": lambda: (Gated(), {"x": _X}),
    "gelu": lambda: (Gelu(), {"x": _X}),
    "rotary": lambda: (Rotary(), {"x": torch.zeros(4, 8, 128, 64), **_TABLES}),
}


def gpus(*mesh: int) -> Cluster:
    nodes, devices = (mesh[0], mesh[1]) if len(mesh) > 1 else (1, mesh[0])
    return Cluster.from_profile(
        "h100-sxm", nodes=nodes, devices_per_node=devices, mesh_shape=mesh
    )  # fmt: skip


def simulated(traced: TracedModel, plan: Plan, cluster: Cluster, fusion: Any = True) -> float:
    graph = emit(traced, plan, [0] * len(plan.mesh_shape), fusion=fusion).joint.graph
    return simulate(graph, cluster).compute_s


def both(traced: TracedModel, cluster: Cluster, **pins: Any) -> tuple[Plan, Plan]:
    """Solved with the prices of ops one by one, and with those of fused ones."""
    wanted = Constraints.parse(pins)
    fused = Offers(cluster, fused_shares(traced, ALL))
    return (
        solve(traced, cluster, constraints=wanted),
        solve(traced, cluster, constraints=wanted, offers=fused),
    )


@pytest.mark.parametrize("training", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", MODELS)
def test_as_simulated(name: str, training: bool) -> None:
    """Kernel for kernel what the simulator finds in the emitted program, and less than unfused."""
    model, inputs = MODELS[name]()
    traced, cluster = trace(model.train(training), inputs, training=training), gpus(1)
    plain, fused = both(traced, cluster)
    assert plain.predicted.compute_time_s == pytest.approx(
        simulated(traced, plain, cluster, fusion=False), rel=1e-9
    )
    # one that reads a bias again counts as unfused, which is less
    assert fused.predicted.compute_time_s == pytest.approx(
        simulated(traced, fused, cluster), rel=2e-5
    )
    assert fused.predicted.compute_time_s < 0.97 * plain.predicted.compute_time_s
    alone = {op.name: op.compute_s for op in plain.predicted.timeline.ops}
    for op in fused.predicted.timeline.ops:
        assert 0 <= op.compute_s <= alone[op.name]


@pytest.mark.parametrize(
    ("name", "layers"), [pytest.param("gpt2", 1, marks=pytest.mark.slow), ("llama", 4)]
)
def test_nearer_to_the_simulator(name: str, layers: int) -> None:
    """Transformers, sharded, folded or not: what is left are copies that pack shards."""
    model, inputs = {"gpt2": zoo.gpt2, "llama": zoo.llama}[name](layers=layers)
    traced, cluster = trace(model.train(), inputs, fold=True), gpus(2, 2)
    plain, fused = both(traced, cluster, tensor={"mode": "1d", "size": 2})
    errors = [
        p.predicted.compute_time_s / simulated(traced, p, cluster) - 1 for p in (plain, fused)
    ]
    assert errors[0] > 0.1
    assert abs(errors[1]) < errors[0]


def test_a_choice_that_fusion_flips() -> None:
    """The plan that is chosen then is the faster one.

    Unfused, splitting ten pointwise ops pays for gathering the result; one kernel is soon done.
    """
    x = torch.zeros(1 << 14, 1 << 12)
    traced, cluster = trace(Chain().eval(), {"x": x}, training=False), gpus(8)
    plain, fused = both(traced, cluster)
    assert plain.predicted.comm_time_s > 0
    assert fused.predicted.comm_time_s == 0
    graphs = [emit(traced, plan, [0], fusion=True).joint.graph for plan in (plain, fused)]
    split_s, whole_s = (simulate(graph, cluster).step_s for graph in graphs)
    assert whole_s < split_s
    assert fused.predicted.step_time_s == pytest.approx(whole_s, rel=1e-6)


def test_a_moved_value_breaks_its_kernel() -> None:
    """A norm over a sharded dim reads its operand again behind the reduction of its statistics."""
    model, inputs = MODELS["norm"]()
    traced, cluster = trace(model.eval(), inputs, training=False), gpus(8)
    step = build_step(traced, fused_shares(traced, ALL))
    pricer = Offers(cluster).pricer
    (op,) = (o for o in step.ops.values() if o.call.target is torch.ops.aten.rsqrt.default)
    share = step.shares[op.name]
    assert [x.index for x in share.inside] == [0] and share.inside[0].lost == 512
    whole = Candidate(((Replicate(),),), ((Replicate(),),), ("",), ())
    sources = [(Partial(),), (Replicate(),)]
    broken, kept = pricer.broken(op.call, share, sources, 0, [whole])[:, 0]
    device = cluster.device
    rows = 4 * 128 * 4  # bytes of a number for each row
    moved = 512 * rows / 8 + rows / 8 + rows
    cost = OpCost(op_class="norm", flops=0.0, bytes=0, dtype="float32")
    launch = compute_seconds(device, replace(cost, bytes=1))
    assert broken == pytest.approx(
        launch + moved / device.memory_bandwidth / device.efficiency["memory"].peak_fraction,
        rel=2e-2,
    )
    assert kept == 0


def test_switched_off() -> None:
    model, inputs = MODELS["norm"]()
    cluster = gpus(2)
    pins = {"pipeline": "none", "data": 2, "zero": 0}  # or another program may be faster
    options = {"cache": False, "constraints": pins}
    usual = autopar.plan(model, cluster, inputs, **options)
    plain = autopar.plan(model, cluster, inputs, fusion=False, **options)
    traced = trace(model, inputs)
    old = scheduled(solve(traced, cluster, constraints=Constraints.parse(pins)), traced)
    assert plain.predicted.compute_time_s == old.predicted.compute_time_s
    assert plain.fusion == () and "rms_norm" in usual.fusion
    assert usual.predicted.compute_time_s < plain.predicted.compute_time_s
    assert Plan.from_dict(usual.to_dict()).fusion == usual.fusion


def test_nothing_changes_on_a_cpu() -> None:
    model, inputs = MODELS["gated"]()
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    usual, plain = (
        autopar.plan(model, cluster, inputs, cache=False, **options)
        for options in ({}, {"fusion": False})
    )
    same = [{k: v for k, v in p.to_dict().items() if k != "solver"} for p in (usual, plain)]
    assert same[0] == same[1]


def test_the_cache_knows_the_kernels() -> None:
    model, inputs = MODELS["norm"]()
    traced, cluster = trace(model, inputs), gpus(2)
    keys = [
        PlanCache().key(traced, cluster, Constraints(), None, "adamw", kernels)
        for kernels in ((), ("rms_norm",), ("generated", "rms_norm"))
    ]
    assert len(set(keys)) == 3


def test_explained_with_the_same_prices() -> None:
    """The runner-up is no faster than is proved of all, which other prices would not show."""
    model, inputs = MODELS["norm"]()
    plan = autopar.plan(model, gpus(2), inputs, cache=False, constraints={"pipeline": "none"})
    found = explain(plan, param="a.weight", model=model, example_inputs=inputs)
    assert found.runner_up is not None and found.runner_up.plan is not None
    assert found.runner_up.plan.solver.objective >= plan.solver.bound * (1 - 1e-9)


@cache
def _stack() -> TracedModel:
    return stack(4)[2]


def _planned(**pins: Any) -> Plan | None:
    try:
        return plan_step(_stack(), gpus(2, 4), constraints=Constraints.parse(pins), fusion=ALL)
    except (ConstraintError, InfeasiblePlanError):
        return None


@pytest.mark.parametrize(
    "checkpoint",
    [*(pytest.param(c, marks=pytest.mark.slow) for c in ("none", "full")), "selective"],
)
def test_no_pinned_pipeline_is_below_its_bound(checkpoint: str) -> None:
    """Bounds of blocks have the same prices as stages, cut, in turns and recomputed."""
    best = _planned(pipeline={}, checkpoint=checkpoint)
    assert best is not None and best.solver.bound <= best.solver.objective
    for size, turns in ((2, 2), (2, 4), (4, 4)):
        for schedule in ("1f1b", "zero-bubble"):
            pins = {"size": size, "microbatches": turns, "schedule": schedule}
            plan = _planned(pipeline=pins, checkpoint=checkpoint)
            if plan is not None:
                assert best.solver.bound <= plan.solver.objective * (1 + 1e-6)
                assert plan.solver.bound <= plan.solver.objective


def test_least_work_counts_kernels() -> None:
    model, inputs = zoo.llama()
    traced = trace(model.train(), inputs)
    shares = fused_shares(traced, ALL)
    plain, fused = (BlockWork(traced, gpus(8), f).whole() for f in (None, shares))
    assert (fused < plain).all() and (fused > 0).all()
