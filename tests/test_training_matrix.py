"""Unmodified models × pipelines, ZeRO, recomputation, offload: training on four ranks of gloo.

Loss and every gradient of each of three AdamW steps, and every parameter after them, against one
device in float64. Labels are ignored in unequal numbers, so a microbatch that counted for itself
would be seen. What models compute in float32 inside (an upcast loss, RMS norm, rotary
embedding) is in float64 too, on both sides, so that all are bounded alike.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import autopar
from autopar.runtime.offload import is_offloaded
from autopar.verification import relative_error
from tests import zoo
from tests.dist import run_ranks
from tests.test_gloo import whole

RANKS, STEPS, BOUND = 4, 3, 1e-9
MODELS = ("gpt2", "llama", "vit", "t5", "mixtral")
TWO = {"size": 2, "microbatches": 4}
ZERO_BUBBLE = {**TWO, "schedule": "zero-bubble"}
HOST = {"offload": "optimizer"}
PLANS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline": {"size": 2, "microbatches": 2}, "data": 2, "zero": 0},
    "pp4-interleaved": {"pipeline": {"size": 4, "microbatches": 4, "chunks": 2}},
    "pp2-tp2": {"pipeline": TWO, "tensor": "1d"},
    "pp2-dp2-zero1": {"pipeline": {"size": 2, "microbatches": 2}, "data": 2, "zero": 1},
    "pp2-dp2-zero2": {"pipeline": {"size": 2, "microbatches": 2}, "data": 2, "zero": 2},
    "pp2-dp2-zero3": {"pipeline": {"size": 2, "microbatches": 2}, "data": 2, "zero": 3},
    "zero-bubble-tp2": {"pipeline": ZERO_BUBBLE, "tensor": "1d"},
    "automatic-tp2": {"pipeline": {**TWO, "schedule": "automatic"}, "tensor": "1d"},
    "full-zero3": {"data": 4, "zero": 3, "checkpoint": "full"},
    "pp2-full": {"pipeline": TWO, "checkpoint": "full", "tensor": "1d"},
    "offload-zero3": {"data": 4, "zero": 3, **HOST},
    "offload-dp2-tp2": {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 1, **HOST},
    "offload-pp2-dp2": {"pipeline": {"size": 2, "microbatches": 2}, "data": 2, "zero": 1, **HOST},
}
_QUICK = (
    ("gpt2", "offload-dp2-tp2"),
    ("vit", "offload-zero3"),
    ("mixtral", "zero-bubble-tp2"),
    ("gpt2", "automatic-tp2"),
)


class InFloat64(TorchFunctionMode):
    """Computes in float64 what asks for float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = tree_map(
            lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def build(name: str, plan: str = "") -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    deep = plan == "pp4-interleaved"
    if name == "t5":
        model, inputs = zoo.t5(layers=4 if deep else 2)
    else:
        model, inputs = zoo.MODELS[name](layers=8 if deep else 2)
    if inputs["labels"].dim() == 2:
        inputs["labels"][0, 3:] = -100
    if name == "mixtral":
        model.set_experts_implementation("batched_mm")  # a grouped matmul has no float64
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():  # keys' biases have no gradient: of a 0, only rounding would be left
                p.normal_(std=0.1)
    return model.double().train(), inputs


def errors_of_training(rank: int, name: str, plan: str) -> dict[str, float]:
    """Relative errors of what this rank holds, by step and name."""
    (single, batch), (model, _) = build(name, plan), build(name, plan)
    expected = dict(single.named_parameters())
    pins = PLANS[plan]
    mesh = init_device_mesh("cpu", (RANKS,))
    with InFloat64():
        module = autopar.parallelize(model, mesh, batch, constraints=pins)
    assert all(is_offloaded(p) == ("offload" in pins) for p in module.parameters())
    theirs = torch.optim.AdamW(single.parameters(), lr=1e-2)
    ours = torch.optim.AdamW(module.parameters(), lr=1e-2)
    errors: dict[str, float] = {}
    for step in range(STEPS):
        with InFloat64():
            loss = single(**batch).loss
            loss.backward()
        found = whole(module.train_step(**batch)).detach()
        errors[f"{step} loss"] = relative_error(found, loss.detach())
        norms = [float(p.grad.norm()) for p in expected.values() if p.grad is not None]
        for n, p in module.named_parameters():
            reference = expected[n].grad
            assert (p.grad is None) == (reference is None), n
            if reference is not None:
                # a gradient that is 0 but for rounding is measured by the largest, as in `verify`
                error = relative_error(whole(p.grad), reference, 1e-6 * max(norms))
                errors[f"{step} gradient of {n}"] = error
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for n, p in module.named_parameters():
        errors[f"updated {n}"] = relative_error(whole(p.detach()), expected[n].detach())
    return errors


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=[] if (name, plan) in _QUICK else [pytest.mark.slow])
        for name in MODELS
        for plan in PLANS
    ],
)
def test_three_steps_are_those_of_one_device(name: str, plan: str) -> None:
    ranks = run_ranks(errors_of_training, RANKS, name, plan, timeout=400.0)
    checked = {key for errors in ranks for key in errors}
    names = [n for n, p in build(name, plan)[0].named_parameters() if p.requires_grad]
    assert {f"updated {n}" for n in names} <= checked
    assert {f"{STEPS - 1} gradient of {n}" for n in names} <= checked
    key, error = max((e for errors in ranks for e in errors.items()), key=lambda e: e[1])
    assert error <= BOUND, f"{key}: {error:.3g}"
