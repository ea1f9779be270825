"""Fusion over emitted programs: every kernel alone, without it, and together; in float64.

A rank's program, forward and backward, runs with and without the fusions on the same inputs, as
ATen and as Triton in its interpreter. Gradients may differ by 1e-9 of their norm.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.codegen.emit import emit
from autopar.codegen.fusion import PATTERNS, Fusion
from autopar.codegen.fusion.generated import Generated
from autopar.codegen.fusion.options import GENERATED
from autopar.core.constraints import Constraints
from autopar.core.strategy import op_call
from autopar.core.work import global_flops
from autopar.cost_model import Cluster
from autopar.errors import AutoparError
from autopar.runtime.lockstep import mesh_coords
from autopar.simulation import simulate
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from autopar.verification import verify, whole_inputs
from tests import zoo
from tests.dist import run_ranks
from tests.fusion_programs import (
    EXPECTED,
    HEAD_VOCABULARY,
    HEAD_WIDTH,
    MODELS,
    Chain,
    OnTriton,
    kernels_in,
    outputs_of,
    plan_of,
    program_of,
    same,
    traced_model,
    unfused,
)
from tests.traffic import bytes_of

NAMES = sorted({p.kernel for p in PATTERNS} | {GENERATED})
ALL = {"on": NAMES}


# the whole matrix in the slow run; what is here holds every kernel in some model
QUICK = ("gpt2", "llama")


@pytest.mark.parametrize(
    "model", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in MODELS]
)
@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("side", ["only", "off"])
def test_matrix(model: str, kernel: str, side: str) -> None:
    """Each kernel alone, and all but it."""
    fusion = {"only": [kernel]} if side == "only" else {**ALL, "off": [kernel]}
    program = program_of(model, fusion)
    if side == "only" and (kernel == GENERATED or kernel in EXPECTED[model]):
        assert kernels_in(program), f"{kernel} found nothing in {model}"
    same(outputs_of(model, program), unfused(model))


@pytest.mark.parametrize("model", MODELS)
def test_together_on_triton(model: str) -> None:
    program = program_of(model, ALL)
    assert kernels_in(program) > {GENERATED}
    same(outputs_of(model, program, triton=True), unfused(model))
    same(outputs_of(model, program_of(model, {"only": [GENERATED]}), triton=True), unfused(model))


@pytest.mark.parametrize("model", MODELS)
def test_forward_and_backward_programs(model: str) -> None:
    """The split programs hold the same fused ops, and nothing is left of what they replace."""
    program = program_of(model, ALL)
    assert program.backward is not None
    parts = [program.forward.graph, program.backward.graph]
    fused = [n for g in parts for n in g.nodes if str(n.target).startswith("autopar_kernels.")]
    assert {str(n.target).split(".")[1] for n in fused} | {GENERATED} >= kernels_in(program)
    left = [n for g in parts for n in g.nodes if n.target is torch.ops.autopar.dropout.default]
    assert not left


@pytest.mark.parametrize(("model", "constraints"),
                         [("gpt2", "1d"), ("llama", "1d"), ("head", "vocab")])  # fmt: skip
def test_sharded(model: str, constraints: str) -> None:
    """All ranks, in lockstep, against the module; the collectives stay as they are."""
    plan = plan_of(model, 2, constraints)
    module, inputs, traced = traced_model(model)
    name, error = verify(plan, module, inputs, traced=traced, fusion=ALL).worst
    assert error <= 1e-9, name
    programs = [emit(traced, plan, c, fusion=ALL) for c in mesh_coords(plan.mesh_shape)]
    for program in programs:
        assert bytes_of(program.comm_bytes()) == bytes_of(plan.predicted.comm_bytes)
    if constraints == "vocab":
        assert {"nll_stats", "nll_backward"} <= kernels_in(programs[0])


def train(rank: int, world: int, fusion: Any) -> list[Tensor]:
    """Losses and a gradient of three steps on real processes."""
    torch.manual_seed(0)
    model, inputs = MODELS["toy"]()
    parallel = autopar.parallelize(
        model.train(), init_device_mesh("cpu", (world,)), inputs, seed=3, fusion=fusion
    )
    losses = [parallel.train_step(**inputs) for _ in range(3)]
    weight = dict(parallel.named_parameters())["one.weight"].grad
    return [*losses, weight.full_tensor()]


def test_training_on_processes() -> None:
    plain, fused = (run_ranks(train, 2, 2, fusion)[0] for fusion in (False, True))
    same(fused, plain, 1e-5)


@pytest.mark.parametrize("model", ["gpt2", "llama", "vit"])
def test_bf16_is_as_accurate(model: str) -> None:
    """Against float64: fused programs round less often than plain ones."""
    torch.manual_seed(0)
    module, inputs = {"gpt2": zoo.gpt2, "llama": zoo.llama, "vit": zoo.vit}[model](layers=1)
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=1)
    low = trace(module.train(), inputs, precision="bf16")
    plan = solve(low, cluster, constraints=Constraints.parse(None), memory_limit=None)
    whole = whole_inputs(low, module, list(inputs.values()), 3)
    results = {}
    for fusion in (False, True):
        program = emit(low, plan, [0], fusion=fusion)
        feed = [whole[spec.node] for spec, _ in program.inputs]
        for runner in (fx.Interpreter, OnTriton) if fusion else (fx.Interpreter,):
            results[fusion, runner] = runner(program.joint).run(*feed)
    gradients = [i for i, (s, _) in enumerate(program.outputs) if s.kind == "gradient"]
    module = module.double()
    exact = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    module(**exact).loss.backward()
    parameters = dict(module.named_parameters())
    expected = [parameters[program.outputs[i][0].target].grad for i in gradients]

    def error(found: Any) -> float:
        parts = [(found[i].double() - y).norm() for i, y in zip(gradients, expected, strict=True)]
        return float(torch.stack(parts).norm())

    plain = error(results.pop((False, fx.Interpreter)))
    assert error(results[True, fx.Interpreter]) <= 1.1 * plain
    # the interpreter cuts bfloat16 off where devices round it, which doubles a rounding's error
    assert error(results[True, OnTriton]) <= 2.0 * plain


@pytest.mark.parametrize("model", MODELS)
def test_fusion_is_priced(model: str) -> None:
    """Fewer bytes and fewer ops: the simulator predicts a shorter step; the traffic is the same."""
    module, inputs, traced = traced_model(model)
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=1)
    plain, fused = (
        simulate(plan_of(model), module, inputs, cluster=cluster, traced=traced, fusion=fusion)
        for fusion in (False, True)
    )
    assert fused.compute_s < plain.compute_s
    assert fused.comm_s == plain.comm_s


def test_chunked_loss_is_priced_with_its_matmuls() -> None:
    """Forward one product of the logits, backward three."""
    flops = dict.fromkeys(("linear_nll", "linear_nll_backward"), 0.0)
    for node in program_of("head", {"only": "linear_nll"}).joint.graph.nodes:
        name = str(node.target).split(".")[1] if "autopar_kernels" in str(node.target) else ""
        if name in flops:
            flops[name] = global_flops(op_call(node, 1))
    tokens = traced_model("head")[1]["labels"].numel()
    product = 2.0 * tokens * HEAD_WIDTH * HEAD_VOCABULARY
    assert flops == {"linear_nll": product, "linear_nll_backward": 3 * product}


def test_default_is_off_on_a_cpu() -> None:
    assert not Fusion.parse(None, torch.device("cpu")).kernels
    on_cuda = Fusion.parse(None, torch.device("cuda")).kernels
    assert "rms_norm" in on_cuda and "linear_nll" not in on_cuda


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AutoparError, match=r"rms_norn.*there are .*rms_norm"):
        Fusion.parse({"off": ["rms_norn"]}, torch.device("cpu"))
    with pytest.raises(AutoparError, match="'only'"):
        Fusion.parse({"of": []}, torch.device("cpu"))


@pytest.mark.parametrize("triton", [True, False])
def test_dumped_sources_load_once(tmp_path: Path, triton: bool) -> None:
    """One file a kernel, also on a CPU, which loads each operand and stores each result once."""
    program = program_of("toy", {"only": [GENERATED], "dump": str(tmp_path)})
    outputs_of("toy", program, triton=triton)
    calls = [n for n in program.joint.graph.nodes if isinstance(n.target, Generated)]
    assert len(list(tmp_path.glob("*.py"))) == len(calls) > 1
    for call in calls:
        source = (tmp_path / f"{call.target.__name__}.py").read_text()
        assert source.count("tl.load(in") == len(set(call.args))
        assert source.count("tl.store(out") == len(call.meta["val"])


# --- generated chains -------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(8))
def test_generated_chains(seed: int) -> None:
    shape = [(3, 5), (4, 17), (2, 3, 24), (1, 33)][seed % 4]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    y = torch.randn(shape, generator=generator, dtype=torch.float64).transpose(0, 1).contiguous()
    model, inputs = Chain(seed, shape[-1]).double(), {"x": x, "y": y}
    traced = trace(model, inputs)
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=1)
    plan = solve(traced, cluster, constraints=Constraints.parse(None), memory_limit=None)
    whole = whole_inputs(traced, model, [x, y], 0)
    results = []
    for fusion, runner in ((False, fx.Interpreter), ({"only": GENERATED}, OnTriton)):
        program = emit(traced, plan, [0], fusion=fusion)
        feed = [whole[spec.node] for spec, _ in program.inputs]
        results.append([v for v in runner(program.joint).run(*feed) if v is not None])
        nodes = program.joint.graph.nodes
    fused = [n for n in nodes if isinstance(n.target, Generated)]
    assert fused
    assert sum(len(n.target.members) for n in fused) > 10
    same(results[1], results[0], 1e-9 if not math.isnan(float(results[0][0])) else 0.0)
