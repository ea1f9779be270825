"""Defects known from other planners, each as a test that it is not here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.core.constraints import Constraints, assign_mesh
from autopar.core.placement import Shard, shard_factor
from autopar.solver.build import build_problem
from autopar.solver.discrete.ilp import solve_problem
from autopar.solver.pins import Pins
from autopar.solver.price import Decision, price
from autopar.solver.read_step import build_step
from autopar.tracer.trace import trace
from tests import handwritten as hw
from tests import zoo
from tests.dist import run_ranks


def cluster(*mesh: int) -> Any:
    return autopar.Cluster.from_profile(
        "cpu-gloo", devices_per_node=math.prod(mesh), mesh_shape=mesh
    )


# 1. Linked layers lost flow constraints: the cost of the placements must equal the objective.
def test_price_of_linked_layers_equals_the_objective() -> None:
    model, inputs = zoo.gpt2(layers=4)
    traced = trace(model.train(), inputs)
    where = cluster(2, 2)
    step = build_step(traced)
    wanted = Constraints()
    pins = Pins(wanted, assign_mesh(wanted, (2, 2)), traced, step)
    built = build_problem(step, where, pins, "adamw")
    ops = len(step.ops) + len(step.parameters)
    assert len(built.problem.costs) < 0.8 * ops  # middle layers share their choice
    full = solve_problem(built.problem)
    classes = built.classes

    def cost(chosen: Any) -> float:
        decision = Decision(
            {n: built.candidates[classes[n]][chosen[classes[n]]] for n in step.ops},
            {n: built.storages[classes[n]][chosen[classes[n]]] for n in step.parameters},
        )
        return price(step, where, decision, "adamw").total_s

    assert cost(full.chosen) == pytest.approx(full.objective, rel=1e-6)
    # every saved activation is an edge: moving one class off its optimum is priced, never free
    from autopar.solver.discrete.problem import evaluate

    generator = torch.Generator().manual_seed(0)
    checked = 0
    for node in list(built.problem.costs)[::7]:
        count = len(built.problem.costs[node])
        other = int(torch.randint(0, count, (), generator=generator))
        changed = {**full.chosen, node: other}
        objective = evaluate(built.problem, changed)
        if math.isfinite(objective):
            assert cost(changed) == pytest.approx(objective, rel=1e-6), node
            checked += 1
    assert checked > 10


# 2. One tensor as two operands.
class Gram(nn.Module):
    """`y yᵀ`-like products in which both operands are the same tensor."""

    def __init__(self, batched: bool) -> None:
        super().__init__()
        self.batched = batched
        self.inner = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        z = torch.bmm(y, y) if self.batched else torch.mm(y, y)
        return z.square().sum()


@pytest.mark.parametrize("batched", [False, True], ids=["mm", "bmm"])
@pytest.mark.parametrize("constraints", [{"tensor": "1d"}, {"tensor": {"mode": "2d", "size": 4}}])
def test_one_tensor_as_two_operands(batched: bool, constraints: Any) -> None:
    torch.manual_seed(0)
    model = Gram(batched).double()
    x = torch.randn(*((16,) if batched else ()), 16, 16, dtype=torch.float64)
    plan = autopar.plan(model, cluster(2, 2), (x,), constraints=constraints)
    result = autopar.verify(plan, model, (x,))
    assert result.worst[1] < 1e-9, result.worst
    traced = trace(model, (x,))
    names = [
        name
        for name, op in build_step(traced).ops.items()
        if len(op.operands) == 2 and op.operands[0] == op.operands[1]
    ]
    twice = [name for name in names if len(plan.nodes[name].inputs) == 2]
    shared = [op for op in build_step(traced).ops.values() if not op.backward]
    assert twice or any("fanout" in str(op.call.target) for op in shared)


# 3. Memory in bytes: a big weight counts by its bytes, not as one tensor among ten.
class Lopsided(nn.Module):
    """One large weight and nine small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(512, 512, bias=False)
        self.small = nn.ParameterList(nn.Parameter(torch.zeros(512)) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        x = self.big(x)
        for bias in self.small:
            x = x + bias
        return x.square().mean()


def test_memory_limit_is_in_bytes() -> None:
    model, where = Lopsided(), cluster(4)
    inputs = (torch.randn(8, 512),)
    free = autopar.plan(model, where, inputs, constraints={"data": 4, "zero": 0})
    weights = sum(p.numel() for p in model.parameters()) * 4
    assert free.predicted.peak_memory_bytes >= 4 * weights  # with gradient and two moments
    limit = int(0.45 * free.predicted.peak_memory_bytes)
    plan = autopar.plan(model, where, inputs, memory_limit=limit)
    in_words = autopar.plan(model, where, inputs, memory_limit=f"{limit / 2**10!r} KiB")
    assert in_words.memory_limit_bytes in (limit - 1, limit)
    for wrong in ("16 gibs", -1, math.nan, True, [1]):
        with pytest.raises(autopar.AutoparError, match=r"memory_limit: .* or 16GiB"):
            autopar.plan(model, where, inputs, memory_limit=wrong)  # type: ignore[arg-type]
    held = sum(
        math.prod(plan.shapes[name]) * 4 // shard_factor(layout, plan.mesh_shape)
        for name, layout in plan.parameters.items()
    )
    assert plan.predicted.peak_memory_bytes <= limit
    assert held < 0.5 * weights
    assert any(p.is_shard for p in plan.parameters["big.weight"])


# 4. Plans for two meshes in one process.
def test_two_meshes_in_one_process() -> None:
    model, inputs = hw.Mlp().double(), hw.vectors()
    inputs["x"] = inputs["x"].double()
    first = autopar.plan(model, cluster(4), inputs, constraints={"data": 4, "zero": 3})
    for mesh in ((2, 2), (2,), (8,), (4,)):
        plan = autopar.plan(model, cluster(*mesh), inputs, constraints={"tensor": "1d"})
        assert math.prod(plan.mesh_shape) == math.prod(mesh)
        assert autopar.verify(plan, model, inputs).worst[1] < 1e-9
    again = autopar.plan(model, cluster(4), inputs, constraints={"data": 4, "zero": 3})
    assert again.nodes == first.nodes and again.parameters == first.parameters
    assert autopar.verify(first, model, inputs).worst[1] < 1e-9


# 5. A Partial value is reduced once.
class Sums(nn.Module):
    """Row-split linears whose partial sums meet in additions, one of them used twice.

    The weights are wide enough for it to be cheaper to reduce the sums than to move the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(1024, 1024, bias=False)
        self.b = nn.Linear(1024, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        y = a + b
        return (y + a).square().sum()


def test_partial_sums_are_reduced_once() -> None:
    torch.manual_seed(0)
    model, x = Sums().double(), torch.randn(64, 1024, dtype=torch.float64)
    pins = {"tensor": "1d", "params": {"*.weight": ["Shard(1)"]}}
    plan = autopar.plan(model, cluster(4), (x,), constraints=pins)
    assert any(p.is_partial for n in plan.nodes.values() for out in n.outputs for p in out)
    assert autopar.verify(plan, model, (x,)).worst[1] < 1e-9


# 6. Shard order over several axes.
def shard_order(rank: int, layout: list[str]) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    pins = {"params": {"layers.*.0.weight": layout, "head.weight": layout}}
    torch.manual_seed(0)
    reference = hw.Mlp()
    torch.manual_seed(rank)
    parallel = autopar.parallelize(
        hw.Mlp() if rank else reference,
        init_device_mesh("cpu", (2, 2)),
        hw.vectors(),
        constraints=pins,
    )
    expected = reference(**hw.vectors())
    expected.backward()
    torch.testing.assert_close(parallel.train_step(**hw.vectors()), expected.detach())
    for name, p in reference.named_parameters():
        mine = parallel.get_parameter(name)
        assert torch.equal(mine.full_tensor(), p), name
        torch.testing.assert_close(mine.grad.full_tensor(), p.grad)
        whole = p.detach().tensor_split(1)[0]
        assert (
            mine.to_local().numel() * shard_factor(parallel.plan.parameters[name], (2, 2))
            == whole.numel()
        )
    layouts = parallel.plan.parameters["head.weight"]
    assert [p.short for p in layouts] == layout


@pytest.mark.parametrize(
    "layout", [["S0", "S0"], ["S1", "S1"], ["S0/2", "S0"], ["S1/2", "S1"], ["S1", "S0"]], ids=str
)
def test_shards_over_two_axes_make_the_whole(layout: list[str]) -> None:
    run_ranks(shard_order, 4, layout)


def test_pinned_placements_are_plain_values() -> None:
    assert Shard(0, 2).short == "S0/2"


# --- volumes of the named modes ------------------------------------------------------------------
M, K, N = 16, 64, 128
"""Rows of the activation (batch × sequence), and the widths of the two linears."""


class Pair(nn.Module):
    """Blocks of two linears without bias."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(K, N, bias=False), "down": nn.Linear(N, K, bias=False)})
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["down"](block["up"](x))
        return x.square().sum()


def received(plan: autopar.Plan) -> float:
    """Elements of float64 that a device receives in a step (for reductions: sends)."""
    total = 0.0
    for row in plan.predicted.comm_bytes:
        size = plan.mesh_shape[row.axis]
        rounds = 2 if row.kind == "all_reduce" else 1
        total += rounds * (size - 1) / size * row.num_bytes / 8
    return total


def linear_volume(mode: str, rows: int, cols: int, q: int, depth: int) -> float:
    """tensor-parallel volumes of one linear, forward and backward, in elements."""
    x, w, y = M * rows, rows * cols, M * cols
    if mode == "2d":
        return 3 * (q - 1) / q**2 * (x + w)
    if mode == "2.5d":
        square = 3 * (q - 1) / q**2 * (x / depth + w)
        return square + 2 * (depth - 1) / depth * w / q**2
    # X and W are saved as blocks (1/q³ of the memory) and gathered once more for the backward
    return 2 * (q - 1) / q**3 * (x + w + y) + (q - 1) / q**3 * (x + w)


@pytest.mark.parametrize(
    ("mode", "mesh", "extra"),
    [("2d", (2, 2), {}), ("2.5d", (2, 2, 2), {"depth": 2}), ("3d", (2, 2, 2), {})],
    ids=["2d", "2.5d", "3d"],
)
def test_volume_of_a_block_of_linears(mode: str, mesh: tuple[int, ...], extra: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, K, dtype=torch.float64)
    plans = {}
    for blocks in (2, 3):
        model = Pair(blocks).double()
        pins = {"tensor": {"mode": mode, "size": math.prod(mesh), **extra}}
        plans[blocks] = autopar.plan(model, cluster(*mesh), (x,), constraints=pins)
        assert autopar.verify(plans[blocks], model, (x,)).worst[1] < 1e-9
    per_block = received(plans[3]) - received(plans[2])  # the ends cancel
    expected = linear_volume(mode, K, N, 2, 2) + linear_volume(mode, N, K, 2, 2)
    assert per_block == pytest.approx(expected, rel=1e-9)


def test_volume_of_1d_column_then_row() -> None:
    x = torch.randn(4, 4, K, dtype=torch.float64)
    size = 4
    per_block = []
    for blocks in (2, 3):
        model = Pair(blocks).double()
        pins = {
            "tensor": "1d",
            "params": {"*.up.weight": ["Shard(0)"], "*.down.weight": ["Shard(1)"]},
        }
        plan = autopar.plan(model, cluster(size), (x,), constraints=pins)
        assert autopar.verify(plan, model, (x,)).worst[1] < 1e-9
        per_block.append(received(plan))
    # all-reduce of dX of the column linear, and of Y of the row linear
    expected = 2 * (size - 1) / size * (M * K + M * K)
    assert per_block[1] - per_block[0] == pytest.approx(expected, rel=1e-9)
