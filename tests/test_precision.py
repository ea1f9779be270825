"""bf16 and fp16 on fp32 masters: against the same precision on one device, and what plans know."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.core.graph import TracedModel
from autopar.core.ops import REARRANGING
from autopar.runtime.live import LiveBytes
from autopar.tracer.precision import call_in, low_dtype
from autopar.tracer.trace import trace
from tests import handwritten as hw
from tests import zoo
from tests.dist import run_ranks
from tests.test_gloo import traffic_on, whole
from tests.traffic import bytes_of

DATA_TENSOR = {"data": 2, "tensor": {"mode": "1d", "size": 2}}
MIXED = {**DATA_TENSOR, "zero": 3}
CLUSTER = {"h100": autopar.Cluster.from_profile("h100-sxm", devices_per_node=4)}


@functools.cache
def gradients(name: str, precision: str | None) -> dict[str, torch.Tensor]:
    """Loss and gradients of a model in one process, run eagerly on cast parameters."""
    torch.manual_seed(0)
    model, inputs = zoo.MODELS[name]()
    output = call_in(low_dtype(precision), model.train(), (), inputs)
    assert output.loss.dtype == torch.float32
    output.loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert all(g.dtype == torch.float32 for g in found.values())
    return {**found, "loss": output.loss.detach()}


def distance(one: torch.Tensor, other: torch.Tensor, floor: float) -> float:
    return float((one - other).norm() / max(float(other.norm()), floor))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        ("gpt2", MIXED),
        ("vit", {"tensor": {"mode": "2d", "size": 4}}),
        pytest.param("resnet", {"data": 4, "zero": 3}, marks=pytest.mark.slow),
        pytest.param("llama", {"tensor": {"mode": "1d", "size": 4}, "sequence": "megatron"},
                     marks=pytest.mark.slow),
        pytest.param("t5", MIXED, marks=pytest.mark.slow),
        pytest.param("bert", DATA_TENSOR, marks=pytest.mark.slow),
        pytest.param("mixtral", DATA_TENSOR, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_gradient_is_as_near_as_rounding_allows(
    name: str, constraints: Any, precision: str
) -> None:
    """‖parallel − one device‖ ≤ 2 ‖one device in this precision − in fp32‖, tensor by tensor."""
    torch.manual_seed(0)
    model, inputs = zoo.MODELS[name]()
    model.train()
    traced = trace(model, inputs, precision=precision)
    options: dict[str, Any] = {"constraints": constraints, "precision": precision}
    plan = autopar.plan(model, CLUSTER["h100"], inputs, **options)
    assert plan.precision == precision and set(plan.dtypes.values()) == {"float32"}
    found = autopar.verify(plan, model, inputs, traced=traced)
    exact, rounded = gradients(name, None), gradients(name, precision)
    # a gradient that is zero but for rounding (a key's bias) is measured against the largest one
    unit = torch.finfo(low_dtype(precision) or torch.float32).eps
    floor = 1e-2 * max(float(g.norm()) for g in exact.values())
    assert found.gradients.keys() == exact.keys() - {"loss"}
    for target, error in found.gradients.items():
        of_rounding = distance(rounded[target], exact[target], floor)
        norm = float(rounded[target].norm())
        assert error * norm / max(norm, floor) <= 2 * of_rounding + 4 * unit, target
    assert found.outputs["0"] <= 2 * distance(rounded["loss"], exact["loss"], 0.0) + unit


def casts(traced: TracedModel, dtype: torch.dtype) -> dict[str, str]:
    """Module in which each parameter is cast, by FQN."""
    target = {spec.node: spec.target for spec in traced.inputs}
    found = {}
    for node in traced.graph.nodes:
        if node.target is torch.ops.aten._to_copy.default and node.meta["val"].dtype == dtype:
            source = node.args[0]
            while source.target in REARRANGING:
                source = source.args[0]
            if source.op == "placeholder":
                found[target[source.name]] = traced.info[node.name].module
    return found


def test_parameters_are_cast_where_they_are_used() -> None:
    model, inputs = zoo.gpt2(layers=1)
    places = casts(trace(model, inputs, precision="bf16"), torch.bfloat16)
    assert places.keys() == {name for name, _ in model.named_parameters()}  # the tied one once
    for name, module in places.items():
        # an attention module is where its fused projection is taken apart
        assert module and name.startswith(module), name
    assert not casts(trace(model, inputs), torch.bfloat16)


def test_statistics_and_their_norms_stay_in_fp32() -> None:
    model, inputs = zoo.resnet()
    traced = trace(model.train(), inputs, precision="fp16")
    norms = {n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    cast = casts(traced, torch.float16)
    assert norms and not any(name.rpartition(".")[0] in norms for name in cast)
    assert "pixel_values" in cast and len(cast) > 4
    dtypes = {n.name: n.meta["val"].dtype for n in traced.graph.nodes if n.op == "placeholder"}
    for spec in traced.inputs:
        if spec.kind in ("parameter", "buffer") and spec.dtype.is_floating_point:
            assert dtypes[spec.node] == spec.dtype == torch.float32
    for spec in traced.outputs:
        node = next(n for n in traced.graph.nodes if n.name == spec.node)
        if spec.kind == "gradient" or "running" in spec.target:
            assert node.meta["val"].dtype == torch.float32, spec.target


def test_a_folded_plan_stays_folded_and_needs_less() -> None:
    model, inputs = zoo.gpt2(layers=7)
    options: dict[str, Any] = {"constraints": {"data": 4, "zero": 3}, "cache": False}
    low = autopar.plan(model.train(), CLUSTER["h100"], inputs, precision="bf16", **options)
    full = autopar.plan(model, CLUSTER["h100"], inputs, **options)
    assert low.repeats and low.repeats == full.repeats
    assert low.parameters == full.parameters
    assert low.predicted.peak_memory_bytes < full.predicted.peak_memory_bytes
    gathered = [
        sum(c.num_bytes for c in p.predicted.comm_bytes if c.kind == "all_gather")
        for p in (low, full)
    ]
    assert gathered[0] <= 0.55 * gathered[1]  # the shards are cast, then gathered


def test_outputs_without_a_loss_keep_the_dtype_and_a_loss_function_sees_fp32() -> None:
    seen: list[torch.dtype] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(output.dtype)
        return nn.functional.cross_entropy(output, target)

    model, batch = hw.Mlp(), hw.vectors()
    output = trace(model, {"x": batch["x"]}, precision="bf16")
    assert output.graph.output_node().args[0][0].meta["val"].dtype == torch.bfloat16
    trace(model, (batch["x"], batch["labels"]), loss_fn=loss_fn, precision="bf16")
    assert set(seen) == {torch.float32}


class Normed(nn.Module):
    """Gradients of a group norm, and of what the model computes in fp32, are summed in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x)).float() * self.scale.float().view(1, -1, 1, 1)
        return y.sigmoid().square().mean()


def test_a_gradient_in_fp32_is_not_rounded_on_the_way() -> None:
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(8, 3, 8, 8)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    one = {"pipeline": {"size": 1, "microbatches": 2}}
    plan = autopar.plan(model, cluster, (x,), precision="bf16", constraints=one, cache=False)
    assert autopar.verify(plan, model, (x,)).worst[1] < 1e-2


class Shifted(nn.Module):
    """Adds a floating buffer without a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 8)
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.shift).sum()


def test_bad_precisions_are_refused(tmp_path: Path) -> None:
    model, batch = hw.Mlp(), hw.vectors()
    with pytest.raises(autopar.AutoparError, match=r"'fp8' is unknown.*'bf16'"):
        autopar.plan(model, CLUSTER["h100"], batch, precision="fp8")
    with pytest.raises(
        autopar.TraceError, match=r"(?s)in float16.*self\.head.*float16 and float32.*buffer"
    ):
        trace(Shifted(), (batch["x"],), precision="fp16")
    plan = autopar.plan(model, CLUSTER["h100"], batch, precision="bf16")
    plan.save(tmp_path / "plan.json")
    assert autopar.load_plan(tmp_path / "plan.json") == plan
    run_ranks(refused, 4, str(tmp_path / "plan.json"))


def refused(rank: int, path: str) -> None:
    mesh, batch = init_device_mesh("cpu", (4,)), hw.vectors()
    for other in ("fp32", "fp16"):
        with pytest.raises(autopar.PlanMismatchError, match=f"precision bf16, not {other}"):
            autopar.parallelize(hw.Mlp(), mesh, batch, plan=path, precision=other)
    parallel = autopar.parallelize(hw.Mlp(), mesh, batch, plan=path)
    parallel.train_step(**batch)
    assert parallel.plan.precision == "bf16"


STEPS = 6


def one_device(precision: str) -> list[float]:
    """Losses of AdamW on the masters."""
    torch.manual_seed(0)
    model, inputs = zoo.gpt2(layers=1)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=5e-3)
    losses = []
    for _ in range(STEPS):
        loss = call_in(low_dtype(precision), model, (), inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(rank: int, precision: str) -> tuple[list[float], int, int]:
    """Losses on four ranks, predicted and measured peak; what is sent is what was predicted."""
    torch.manual_seed(0)
    model, inputs = zoo.gpt2(layers=1)
    mesh = init_device_mesh("cpu", (4,))
    parallel = autopar.parallelize(
        model.train(), mesh, inputs, constraints=MIXED, precision=precision
    )
    del model
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=5e-3)
    losses, live = [], LiveBytes()
    for step in range(STEPS):
        if step == 1:
            states = [list(state.values()) for state in optimizer.state.values()]
            live.hold([list(parallel.parameters()), list(parallel.buffers()), states, inputs])
            with live:
                losses.append(parallel.train_step(**inputs).item())
        else:
            with traffic_on(parallel) as traffic:
                losses.append(parallel.train_step(**inputs).item())
            sent = bytes_of(traffic.total())
            assert sent == bytes_of(parallel.plan.predicted.comm_bytes)
        for parameter in parallel.parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.float32
        optimizer.step()
        optimizer.zero_grad()
    whole(parallel.get_parameter("lm_head.weight"))
    return losses, parallel.plan.predicted.peak_memory_bytes, live.peak_bytes


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_on_gloo_ranks_in_low_precision(precision: str) -> None:
    expected = one_device(precision)
    unit = torch.finfo(low_dtype(precision) or torch.float32).eps
    assert expected[-1] < 0.9 * expected[0]
    for losses, predicted, measured in run_ranks(trained, 4, precision):
        assert losses == pytest.approx(expected, rel=4 * unit)
        assert 0.98 * measured <= predicted <= 1.05 * measured


class Widened(nn.Module):
    """Reads weights in float32, as norms of Gemma do, of a model in another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            normed = nn.functional.rms_norm(linear(x).float(), (16,))
            x = x + (normed * (1.0 + self.weight.float())).to(x.dtype)
        return x.float().square().mean()


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float64, 1e-6)], ids=["bf16", "double"]
)
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_microbatches_are_rounded_to_the_dtype_of_their_parameter(
    dtype: torch.dtype, bound: float, size: int
) -> None:
    """As torch does that adds them up; elsewhere a sum is rounded once it is whole."""
    torch.manual_seed(0)
    model, inputs = Widened().to(dtype), (torch.randn(8, 4, 16, dtype=dtype),)
    at = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    pins: dict[str, Any] = {"pipeline": {"size": size, "microbatches": 2}, "data": 2 // size}
    plan = autopar.plan(model, at, inputs, constraints=pins, cache=False)
    found = autopar.verify(plan, model, inputs)
    assert set(found.gradients) == {name for name, _ in model.named_parameters()}
    assert found.worst[1] < bound, found.worst
