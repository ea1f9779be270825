"""Unmodified models × pipelines, ZeRO, recomputation, offload: training in bf16 and fp16.

Three SGD steps on four ranks of gloo beside one device in the same precision, which in turn is run
beside fp32. For the loss and every gradient of each step, and for how far each parameter moves:

    ‖ranks − one device‖ <= 2 ‖one device − one device in fp32‖ + 4 units of rounding

Both sides round the same values in another order, so that they are about as far from fp32, and at
most twice that from one another. A sum that lacks a rank's part, or a scale that is off by 2, is
off by a half; the bound is some percent. SGD, unlike Adam, moves by what it is given, so that a
wrong scale is seen in the parameters too. In fp16 the loss is scaled; behind the three steps come
overflows: one of a single microbatch on one stage, seen on one rank, and one of the scale itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.pipeline_run import PipelineRun
from autopar.tracer.precision import call_in, low_dtype
from tests.dist import RankError, run_ranks, try_ranks
from tests.test_gloo import whole
from tests.test_training_matrix import MODELS, PLANS, RANKS, STEPS, build

SCALE = 2.0**10
_QUICK = (("gpt2", "pp2-tp2", "fp16"), ("vit", "pp2-dp2-zero3", "bf16"))
Record = dict[str, Tensor]


def in_float32(name: str, plan: str) -> tuple[nn.Module, dict[str, Any]]:
    """With a mixture of all its experts: which ones of them it takes would turn on rounding."""
    model, batch = build(name, plan)
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = model.config.num_local_experts
    return model.float(), {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def one_device(name: str, plan: str, precision: str | None) -> Record:
    """Losses, gradients by step, and movements of the parameters, eagerly on cast parameters."""
    model, batch = in_float32(name, plan)
    scale = SCALE if precision == "fp16" else 1.0
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = sgd(model.parameters())
    found: Record = {}
    for step in range(STEPS):
        loss = call_in(low_dtype(precision), model, (), batch).loss
        (loss * scale).backward()
        found[f"{step} loss"] = loss.detach()
        for n, p in model.named_parameters():
            if p.grad is not None:
                p.grad /= scale
                found[f"{step} gradient of {n}"] = p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"movement of {n}": p.detach() - start[n] for n, p in model.named_parameters()}


def excess(found: Record, low: Record, exact: Record, precision: str) -> dict[str, float]:
    """Distance from one device, in bounds: 1 is what is allowed."""
    unit = torch.finfo(low_dtype(precision) or torch.float32).eps
    kinds = {key: "gradient" if "gradient" in key else key.partition(" ")[0] for key in exact}
    largest = {kind: max(float(exact[k].norm()) for k in exact if kinds[k] == kind)
               for kind in set(kinds.values())}  # fmt: skip
    errors = {}
    for key, value in found.items():
        # what is 0 but for rounding (a key's bias has no gradient) is measured by the largest
        norm = max(float(exact[key].norm()), 1e-2 * largest[kinds[key]])
        bound = 2 * float((low[key] - exact[key]).norm()) / norm + 4 * unit
        error = float((value - low[key]).norm()) / norm
        errors[key] = error / bound if math.isfinite(error) else math.inf
    return errors


@contextmanager
def infinite_on(rank: int, module: Any) -> Iterator[None]:
    """What the first stage gets back for its second microbatch holds an inf, on rank 0 alone."""
    received, met = PipelineRun._received, []

    def poisoned(run: Any, stage: int, phase: str, turn: int, there: Any) -> dict[str, Any]:
        values = received(run, stage, phase, turn, there)
        if (stage, phase, turn) == (0, "backward", 1) and rank == 0:
            next(v for v in values.values() if v.is_floating_point()).view(-1)[0] = math.inf
            met.append(turn)
        return values

    with mock.patch.object(PipelineRun, "_received", poisoned):
        yield
    if rank == 0 and not met:  # a plan without stages: in its part of a gradient
        module_grads = [p.grad for p in module.parameters() if p.grad is not None]
        module_grads[-1].to_local().view(-1)[0] = math.inf


def locals_of(module: Any, optimizer: Any) -> list[Tensor]:
    """This rank's parts of the parameters and of the momentum."""
    held = [*module.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]
    return [value.to_local().detach().clone() for value in held]


def overflows(rank: int, module: Any, batch: Any, optimizer: Any, scaler: Any) -> list[Any]:
    """For each of three steps: a finite rank, whether anything changed, and the scaler's state."""
    told = []
    for trial in ("microbatch", "scale", "none"):
        if trial == "scale":
            scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**32})
        elif trial == "none":
            scaler.load_state_dict({**scaler.state_dict(), "scale": SCALE})
        before = locals_of(module, optimizer)
        if trial == "microbatch":
            with infinite_on(rank, module):
                module.train_step(**batch)
        else:
            module.train_step(**batch)
        gradients = [p.grad.to_local() for p in module.parameters() if p.grad is not None]
        finite = all(bool(g.isfinite().all()) for g in gradients)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = locals_of(module, optimizer)
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(bool(value.isfinite().all()) for value in after)
        told.append((finite, same, scaler.state_dict()))
    return told


def trained(rank: int, name: str, plan: str, precision: str) -> tuple[dict[str, float], list[Any]]:
    """Distances of what this rank holds, in bounds, and what overflows did."""
    exact, low = (one_device(name, plan, p) for p in (None, precision))
    model, batch = in_float32(name, plan)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    mesh = init_device_mesh("cpu", (RANKS,))
    module = autopar.parallelize(
        model, mesh, batch, constraints=PLANS[plan], precision=precision, optimizer="sgd"
    )
    optimizer = sgd(module.parameters())
    scaler = autopar.LossScaler(module, enabled=precision == "fp16", initial_scale=SCALE)
    found: Record = {}
    for step in range(STEPS):
        found[f"{step} loss"] = whole(module.train_step(**batch)).detach()
        scaler.unscale_(optimizer)
        for n, p in module.named_parameters():
            if p.grad is not None:
                assert p.grad.dtype == p.dtype == torch.float32
                found[f"{step} gradient of {n}"] = whole(p.grad).clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    for n, p in module.named_parameters():
        found[f"movement of {n}"] = whole(p.detach()) - start[n]
    told = overflows(rank, module, batch, optimizer, scaler) if precision == "fp16" else []
    return excess(found, low, exact, precision), told


@pytest.mark.parametrize(
    ("name", "plan", "precision"),
    [
        pytest.param(*case, marks=[] if case in _QUICK else [pytest.mark.slow])
        for case in ((n, p, d) for n in MODELS for p in PLANS for d in ("fp16", "bf16"))
    ],
)
def test_three_steps_are_as_near_as_rounding_allows(name: str, plan: str, precision: str) -> None:
    if name == "t5" and precision == "fp16" and "pipeline" in PLANS[plan]:
        # in fp16 T5 clamps by whether anything in the batch is infinite, which no microbatch knows
        for outcome in try_ranks(trained, RANKS, name, plan, precision, timeout=400.0):
            assert isinstance(outcome, RankError) and outcome.kind == "ConstraintError"
            assert "aten.any" in outcome.message and "needs the whole batch" in outcome.message
        return
    ranks = run_ranks(trained, RANKS, name, plan, precision, timeout=400.0)
    checked = {key for errors, _ in ranks for key in errors}
    names = [n for n, p in build(name, plan)[0].named_parameters() if p.requires_grad]
    assert {f"movement of {n}" for n in names} <= checked
    assert {f"{STEPS - 1} gradient of {n}" for n in names} <= checked
    key, error = max((e for errors, _ in ranks for e in errors.items()), key=lambda e: e[1])
    assert error <= 1, f"{key}: {error:.3g} of its bound"
    if precision == "fp16":
        assert_all_skip([told for _, told in ranks], build(name, plan)[0])


def assert_all_skip(ranks: list[list[Any]], model: nn.Module) -> None:
    """Of one overflow in a microbatch, one of the scale, and none."""
    for told in ranks:
        assert [same for _, same, _ in told] == [True, True, False]
        assert [state for _, _, state in told] == [
            {"scale": SCALE, "growth_tracker": 0, "overflows": 1},
            {"scale": 2.0**31, "growth_tracker": 0, "overflows": 2},
            {"scale": SCALE, "growth_tracker": 1, "overflows": 2},
        ]
    alone = [told[0][0] for told in ranks]
    tied = len([*model.named_parameters(remove_duplicate=False)]) > len([*model.parameters()])
    # a rank of another stage saw nothing by itself, unless it has a weight of this one
    assert not alone[0] and (any(alone) or tied)
    assert not any(told[1][0] for told in ranks) and all(told[2][0] for told in ranks)
