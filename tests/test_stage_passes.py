"""Passes, fused kernels and Inductor on the parts of programs that run microbatch by microbatch."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.codegen.passes import PASSES
from autopar.codegen.passes.lifetimes import Lifetimes
from autopar.codegen.passes.sends import is_start
from autopar.codegen.stage_program import TURN, StageProgram, emit_stage
from autopar.core.constraints import Constraints
from autopar.core.einsum import contract
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.core.strategy import op_call
from autopar.core.work import global_flops, op_class
from autopar.cost_model import Cluster
from autopar.runtime.inductor import SummingPart
from autopar.runtime.stage_values import stages_at_turns
from autopar.search.pipelining import plan_step
from autopar.tracer.trace import trace
from autopar.verification import verify
from tests.dist import run_ranks
from tests.pieces import forced


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Tower(nn.Module):
    """Residual blocks with a norm, a GELU and dropout; the loss counts rows unequally."""

    def __init__(self, dropout: float, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), labels)


ZERO3 = {"data": 2, "zero": 3}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "turns-zero0": (2, {"pipeline": {"microbatches": 2}, "data": 2, "zero": 0}),
    "turns-zero1": (2, {"pipeline": {"microbatches": 2}, "data": 2, "zero": 1}),
    "turns-zero3": (2, {"pipeline": {"microbatches": 2}, **ZERO3}),
    "turns-tensor": (2, {"pipeline": {"microbatches": 2}, "tensor": {"mode": "1d", "size": 2}}),
    "pp2-zero0": (4, {"pipeline": {"size": 2, "microbatches": 2}, "data": 2, "zero": 0}),
    "pp2-zero2": (4, {"pipeline": {"size": 2, "microbatches": 2}, "data": 2, "zero": 2}),
    "pp2-zero3": (
        4,
        {"pipeline": {"size": 2, "microbatches": 4, "schedule": "1f1b"}, **ZERO3},
    ),
    "gpipe-zero1": (
        4,
        {
            "pipeline": {"size": 2, "microbatches": 2, "schedule": "gpipe"},
            "data": 2,
            "zero": 1,
            "checkpoint": "full",
        },
    ),
    "zero-bubble-zero3": (
        4,
        {"pipeline": {"size": 2, "microbatches": 2, "schedule": "zero-bubble"}, **ZERO3},
    ),
    "pp2-tensor": (
        4,
        {"pipeline": {"size": 2, "microbatches": 2}, "tensor": {"mode": "1d", "size": 2}},
    ),
}
MOVING = PASSES[1:]
SUBSETS = [
    *(n for count in range(len(MOVING) + 1) for n in itertools.combinations(MOVING, count)),
    (PASSES[0],),
    PASSES,
]
DROPOUTS = {"plain": 0.0, "dropout": 0.25}
QUICK = {
    ("plain", "turns-zero3"): [(), PASSES],
    ("dropout", "zero-bubble-zero3"): [PASSES],
    ("plain", "pp2-zero0"): [("bucket",)],
    ("plain", "turns-tensor"): [PASSES],
}


@cache
def built(name: str) -> tuple[nn.Module, dict[str, Tensor], TracedModel]:
    torch.manual_seed(0)
    model = Tower(DROPOUTS[name]).double().train()
    labels = torch.arange(16) % 4
    labels[:3] = -100
    inputs = {"x": torch.randn(16, 8, dtype=torch.float64), "labels": labels}
    return model, inputs, trace(model, inputs)


@cache
def planned(name: str, mode: str) -> Plan:
    ranks, constraints = MODES[mode]
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=ranks)
    return plan_step(built(name)[2], cluster, constraints=Constraints.parse(constraints))


def worst(name: str, mode: str, **options: Any) -> tuple[str, float]:
    model, inputs, traced = built(name)
    plan = planned(name, mode)
    if "tensor" in mode and PASSES[0] in (options.get("passes") or PASSES):
        plan = forced(plan, traced, 2)
        assert plan.pipeline is not None and any(s.pieces for s in plan.pipeline.stages)
    result = verify(plan, model, inputs, traced=traced, **options)
    assert len(result.gradients) == len(list(model.parameters()))
    return result.worst


def emitted(name: str, mode: str, stage: int = 0, **options: Any) -> StageProgram:
    plan = planned(name, mode)
    assert plan.pipeline is not None
    turns = stages_at_turns(built(name)[2], plan.pipeline)
    models = [t.stages.models[stage] for t in turns]
    return emit_stage(models, plan.pipeline.stages[stage], [0] * len(plan.mesh_shape), **options)


def _matrix() -> list[Any]:
    return [
        pytest.param(
            name,
            mode,
            names,
            marks=[] if names in QUICK.get((name, mode), []) else [pytest.mark.slow],
            id=f"{name}-{mode}-{'+'.join(names) or 'none'}",
        )
        for name, mode, names in itertools.product(DROPOUTS, MODES, SUBSETS)
    ]


@pytest.mark.parametrize(("name", "mode", "names"), _matrix())
def test_passes_keep_gradients(name: str, mode: str, names: tuple[str, ...]) -> None:
    tensor, error = worst(name, mode, passes=names)
    assert error <= 1e-9, tensor


FUSIONS: dict[str, Any] = {
    "all": True,
    "generated": {"only": ["generated"]},
    "written": {"off": ["generated"]},
    "every": {"on": ["linear_nll"]},
}


def _fusions() -> list[Any]:
    quick = [("dropout", "turns-zero3", "all")]
    cases = list(itertools.product(DROPOUTS, MODES, FUSIONS))
    return [pytest.param(*c, marks=[] if c in quick else [pytest.mark.slow]) for c in cases]


@pytest.mark.parametrize(("name", "mode", "fusion"), _fusions())
def test_fused_kernels_keep_gradients(name: str, mode: str, fusion: str) -> None:
    tensor, error = worst(name, mode, fusion=FUSIONS[fusion])
    assert error <= 1e-9, tensor


def kernels(program: StageProgram, part: str) -> list[str]:
    return [
        str(node.target)
        for node in program.parts[part].module.graph.nodes
        if "autopar_kernels" in str(node.target) or "fused_" in str(node.target)
    ]


def test_parts_have_written_and_generated_kernels() -> None:
    program = emitted("dropout", "pp2-zero3", fusion=True)
    for part in ("forward", "backward"):
        assert kernels(program, part), part
        assert not kernels(emitted("dropout", "pp2-zero3"), part)
    random = [n for n in program.joint.graph.nodes if "dropout" in str(n.target)]
    assert random  # its kernel takes the counter of the turn
    assert any(a.meta["val"] == 0 for n in random for a in n.all_input_nodes
               if isinstance(a.meta["val"], int))  # fmt: skip


def test_products_cost_in_a_part_what_they_cost_in_the_whole() -> None:
    """Parts call products directly, with their biases."""
    program = emitted("plain", "turns-zero0")
    whole = [n for n in program.joint.graph.nodes if n.target is torch.ops.autopar.einsum.default]
    for part in ("forward", "backward"):
        nodes = program.parts[part].module.graph.nodes
        called = [op_call(n, 1) for n in nodes if n.target is contract]
        expected = [op_call(n, 1) for n in whole if n.meta["phase"] == part]
        assert {op_class(call) for call in called} == {"matmul"}
        assert sorted(map(global_flops, called)) == sorted(map(global_flops, expected))


def count(program: StageProgram, part: str, kind: str) -> int:
    nodes = program.parts[part].module.graph.nodes
    return sum(is_start(n) and n.meta["collective"][0] == kind for n in nodes)


def test_gradients_share_buckets_in_finish_and_gathers_share_them_in_each_part() -> None:
    plain, bucketed = (emitted("plain", "turns-zero0", passes=names) for names in ((), ("bucket",)))
    assert count(plain, "finish", "all_reduce") > 2 * count(bucketed, "finish", "all_reduce") > 0
    plain, bucketed = (emitted("plain", "turns-zero3", passes=names) for names in ((), ("bucket",)))
    for part in ("forward", "backward"):
        assert count(plain, part, "all_gather") > count(bucketed, part, "all_gather") > 0
    total = sum(row.num_bytes for row in plain.comm_bytes())
    assert total == sum(row.num_bytes for row in bucketed.comm_bytes())


def test_gathers_are_issued_ahead_inside_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.codegen.passes._SCRATCH", 0.0)

    def ahead(names: tuple[str, ...]) -> int:
        nodes = list(
            emitted("plain", "turns-zero3", passes=names).parts["forward"].module.graph.nodes
        )
        place = {node: i for i, node in enumerate(nodes)}
        return sum(place[next(iter(n.users))] - place[n] for n in nodes if is_start(n))

    assert ahead(("prefetch",)) > ahead(())


def peak(program: StageProgram) -> int:
    """Of a microbatch beside the sums of those before it."""
    nodes = {node.name: node for node in program.joint.graph.nodes}
    values = [nodes[name].meta["val"] for name in program.sums]
    sums = sum(value.numel() * value.element_size() for value in values)
    return Lifetimes(program.joint.graph, {"forward": sums, "backward": sums}).peak_bytes


@pytest.mark.parametrize("mode", ["turns-zero3", "pp2-zero0"])
def test_no_pass_raises_the_peak(mode: str) -> None:
    allowed = peak(emitted("plain", mode, passes=()))
    for names in (*((name,) for name in PASSES), PASSES):
        assert peak(emitted("plain", mode, passes=names)) <= allowed


def test_what_another_stage_waits_for_is_in_no_bucket() -> None:
    """Of a tensor-parallel stage, the gradient that goes down is reduced at once."""
    program = emitted("plain", "pp2-tensor", stage=1, passes=("bucket",))
    sent = [name for spec, _, name in program.outputs if spec.kind == "sent"]
    assert sent
    down = program.parts["input"].module.graph
    for node in down.nodes:
        if is_start(node):
            assert all("gradient of" not in origin for origin, _ in node.meta.get("members", ()))


def live_peaks(rank: int, constraints: Any) -> list[tuple[int, int]]:
    """Predicted and measured peak of the second step, without passes and with all of them."""
    from torch.distributed.device_mesh import init_device_mesh

    import autopar
    from autopar.runtime.live import LiveBytes

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Tower(0.0, width=32, layers=4).train()
    inputs = {"x": torch.randn(64, 32), "labels": torch.arange(64) % 4}
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found = []
    for passes in ((), None):
        parallel = autopar.parallelize(
            model, mesh, inputs, constraints=constraints, passes=passes, cache=False
        )
        parallel.train_step(**inputs)
        parallel.zero_grad()
        live = LiveBytes()
        live.hold([list(parallel.parameters()), list(parallel.buffers()), inputs])
        with live:
            parallel.train_step(**inputs)
        pipeline = parallel.plan.pipeline
        assert pipeline is not None
        predicted = pipeline.stages[0].predicted
        # no optimizer has made its states
        found.append((predicted.peak_memory_bytes - predicted.memory["optimizer"], live.peak_bytes))
    return found


@pytest.mark.parametrize(
    "constraints",
    [
        {"pipeline": {"microbatches": 4}, "data": 2, "zero": 0},
        pytest.param({"pipeline": {"microbatches": 4}, **ZERO3}, marks=pytest.mark.slow),
    ],
    ids=["zero0", "zero3"],
)
def test_passes_hold_no_more_than_is_predicted(constraints: Any) -> None:
    for (predicted, without), (same, with_all) in run_ranks(
        live_peaks, 2, constraints, timeout=300
    ):
        assert predicted == same
        assert without <= 1.02 * predicted
        assert with_all <= 1.02 * predicted


# --- Inductor


def compiled_step(rank: int, name: str, constraints: Any) -> tuple[list[str], list[str], float]:
    """Warnings, the parts that run compiled, and the largest error of a gradient of two steps."""
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    model, inputs, _ = built(name)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def parallel(backend: str) -> Any:
        return autopar.parallelize(
            model, mesh, inputs, constraints=constraints, backend=backend, cache=False, seed=3
        )

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, eager = parallel("inductor"), parallel("eager")
        error = 0.0
        for _ in range(2):
            for module in (ours, eager):
                module.zero_grad()
                module.train_step(**inputs)
            for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
                difference = (a.grad._local_tensor - b.grad._local_tensor).norm()
                error = max(error, float(difference / b.grad._local_tensor.norm().clamp(1e-9)))
    compiled = {
        part: found.part if isinstance(found, SummingPart) else found
        for (_, part), found in ours.first_step.compiled.items()
    }
    parts = [p for p, f in compiled.items() if f.proved and f.compiled.__name__ != "_eager"]
    return [str(w.message) for w in caught if "Inductor" in str(w.message)], parts, error


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="Inductor on the CPU needs a C++ compiler: neither $CXX nor g++ is there",
)


def _compiled_cases() -> list[Any]:
    modes = ("turns-zero3", "pp2-zero0", "zero-bubble-zero3", "pp2-tensor")
    quick = {("plain", "pp2-zero0")}
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.slow)
        for case in itertools.product(DROPOUTS, modes)
    ]


@needs_compiler
@pytest.mark.parametrize(("name", "mode"), _compiled_cases())
def test_parts_run_compiled(name: str, mode: str) -> None:
    """Masks of dropout too are those of each microbatch."""
    ranks, constraints = MODES[mode]
    found = run_ranks(compiled_step, ranks, name, constraints, timeout=580)
    for rank, (texts, parts, error) in enumerate(found):
        expected = {"forward", "weight"} if "bubble" in mode else {"forward", "backward"}
        if "bubble" in mode and rank >= ranks // 2:  # no stage waits for the first one's
            expected.add("input")
        assert not texts
        assert expected <= set(parts)
        assert error <= 1e-9


def test_a_part_knows_whether_it_depends_on_the_turn() -> None:
    assert TURN in emitted("dropout", "turns-zero3").parts["forward"].reads
    assert TURN not in emitted("plain", "turns-zero3").parts["forward"].reads
