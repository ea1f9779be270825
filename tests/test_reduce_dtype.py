"""`reduce_dtype`: gradients are summed over ranks in it, whatever compute and parameters are in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.codegen.emit import emit
from autopar.cost_model import Cluster
from autopar.tracer.trace import trace
from tests import handwritten as hw
from tests import zoo
from tests.dist import run_ranks
from tests.test_gloo import whole

FOUR = Cluster.from_profile("cpu-gloo", devices_per_node=4)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DATA = {"data": 4, "zero": 3}
HYBRID = {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3}
# a rounded gradient's error, relative, and those of a few additions
BOUND = {"fp32": 1e-6, "bf16": 2**-6, "fp16": 2**-9}


def mlp() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return hw.Mlp().train(), hw.vectors(16)


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """Its embedding is tied to the head: two gradients are added before they are summed."""
    torch.manual_seed(0)
    model, inputs = zoo.gpt2(layers=1)
    return model.train(), inputs


BUILD = {"mlp": mlp, "gpt2": gpt2}


def summed_gradients(plan: autopar.Plan, model: nn.Module, inputs: Any) -> list[torch.dtype]:
    """Dtypes in which the emitted program reduces what becomes a gradient, by following it up."""
    traced = trace(model, inputs, precision=plan.precision, reduce_dtype=plan.reduce_dtype)
    program = emit(traced, plan, [0] * len(plan.mesh_shape))
    passing = ("view", "reshape", "permute", "transpose", "_to_copy", "convert_element_type",
               "wait_tensor", "slice", "clone", "add.Tensor", "alias", "aten.t.")  # fmt: skip
    found: list[torch.dtype] = []
    results = program.joint.graph.output_node().args[0][program.num_results :]  # type: ignore[index]
    stack, seen = [n for n in results if isinstance(n, torch.fx.Node)], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = node.meta.get("collective", ("",))[0]
        if kind in ("all_reduce", "reduce_scatter"):
            found.append(node.meta["val"].dtype)
        if kind or any(word in str(node.target) for word in passing):
            stack += node.all_input_nodes
    return found


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("name", "pins"),
    [("mlp", DATA), ("mlp", HYBRID), pytest.param("gpt2", HYBRID, marks=pytest.mark.slow)],
    ids=["mlp-data", "mlp-hybrid", "gpt2-hybrid"],
)  # fmt: skip
def test_sums_are_in_it_and_gradients_keep_their_accuracy(
    name: str, reduce_dtype: str, precision: str | None, pins: Any
) -> None:
    model, inputs = BUILD[name]()
    numbers: dict[str, Any] = {"precision": precision, "reduce_dtype": reduce_dtype}
    plan = autopar.plan(model, FOUR, inputs, constraints=pins, cache=False, **numbers)
    assert plan.reduce_dtype == reduce_dtype
    sums = summed_gradients(plan, model, inputs)
    assert set(sums) <= {DTYPES[reduce_dtype]}
    assert sums or precision == "bf16"  # it may gather activations instead, where that is less
    errors = autopar.verify(plan, model, inputs).gradients
    bound = BOUND[reduce_dtype] if precision is None else 0.05
    assert max(errors.values()) <= bound, errors
    if precision is None and reduce_dtype != "fp32":
        assert max(errors.values()) > BOUND["fp32"]  # they were rounded


def test_bytes_and_seconds_are_priced() -> None:
    model = hw.Mlp(width=256).train()
    inputs = {  # so large that gathering activations costs more
        "x": torch.zeros(1 << 16, 256),
        "labels": torch.zeros(1 << 16, dtype=torch.int64),
    }
    cluster = Cluster.from_profile("h100-sxm", devices_per_node=4)
    options: dict[str, Any] = {"constraints": {"data": 4, "zero": 0}, "cache": False}
    found = {}
    for reduce_dtype in (None, "fp32", "bf16"):
        plan = autopar.plan(model, cluster, inputs, reduce_dtype=reduce_dtype, **options)
        reduced = [c.num_bytes for c in plan.predicted.comm_bytes if c.kind == "all_reduce"]
        found[reduce_dtype] = (sum(reduced), plan.predicted.comm_time_s)
    assert found[None] == found["fp32"]
    saved, count = found["fp32"][0] - found["bf16"][0], sum(p.numel() for p in model.parameters())
    assert saved == pytest.approx(2 * count, rel=0.01)  # the loss and the smallest ones aside
    assert found["bf16"][1] < found["fp32"][1]


def test_the_plan_keeps_it(tmp_path: Path) -> None:
    model, inputs = mlp()
    plan = autopar.plan(model, FOUR, inputs, reduce_dtype="bf16", constraints=DATA, cache=False)
    plan.save(tmp_path / "plan.json")
    again = autopar.load_plan(tmp_path / "plan.json")
    assert again.reduce_dtype == "bf16"
    assert autopar.verify(again, model, inputs).worst[1] <= BOUND["bf16"]
    assert autopar.simulate(again, model, inputs).step_s > 0
    with pytest.raises(autopar.AutoparError, match="'fp32', 'bf16', 'fp16'"):
        autopar.plan(model, FOUR, inputs, reduce_dtype="int8")


def trained(rank: int, reduce_dtype: str | None, folder: str) -> dict[str, torch.Tensor]:
    model, inputs = mlp()
    mesh = init_device_mesh("cpu", (2,))
    pins = {"data": 2, "zero": 3}
    given: dict[str, Any] = {"constraints": pins, "reduce_dtype": reduce_dtype}
    parallel = autopar.parallelize(model, mesh, inputs, **given)
    path = f"{folder}/{rank}.json"
    parallel.plan.save(path)
    with pytest.raises(autopar.PlanMismatchError, match="reduce_dtype"):
        autopar.parallelize(model, mesh, inputs, plan=path, reduce_dtype="fp16")
    parallel = autopar.parallelize(model, mesh, inputs, plan=path)
    parallel.train_step(**inputs)
    assert all(p.grad.dtype == torch.float32 for p in parallel.parameters())
    return {n: whole(p.grad) for n, p in parallel.named_parameters()}


def test_training_on_gloo(tmp_path: Path) -> None:
    model, inputs = mlp()
    model(**inputs).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    for reduce_dtype in ("fp32", "bf16"):
        for found in run_ranks(trained, 2, reduce_dtype, str(tmp_path)):
            worst = max(float((found[n] - g).norm() / g.norm()) for n, g in expected.items())
            assert worst <= BOUND[reduce_dtype]
            assert (worst > BOUND["fp32"]) == (reduce_dtype == "bf16")
