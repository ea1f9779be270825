"""Idle share of pipeline schedules, measured on gloo ranks whose compute takes a known time.

Ranks that share cores slow each other down, and would look idle or busy for the wrong reason. So
the blocks of this model sleep: a linear layer whose product, and each of whose two gradients, takes
a given time by the clock and no core. Programs, schedule, transfers and planner are the real ones.
With S_r the time that rank r slept and T the time of the step, from a barrier to the end of the
last rank::

    measured idle share = 1 - Σ_r S_r / (p T)

What Python and gloo take between the sleeps counts as idle.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cost_model.ranks import on_ranks
from autopar.extend import AxisStrategy, OpCall, by_labels, rule

__all__ = ["measured"]

_WIDTH, _ROUNDS = 8, 3
_slept_s = [0.0]


def _sleep(seconds: float) -> None:
    started = time.perf_counter()
    time.sleep(seconds)
    _slept_s[0] += time.perf_counter() - started


@torch.library.custom_op("autopar_benchmark::product", mutates_args=())
def product(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    """x (B, K) with weight (K, N): (B, N), in `seconds`."""
    _sleep(seconds)
    return x @ weight


@torch.library.custom_op("autopar_benchmark::input_gradient", mutates_args=())
def input_gradient(grad: Tensor, weight: Tensor, seconds: float) -> Tensor:
    """grad (B, N) with weight (K, N): (B, K)."""
    _sleep(seconds)
    return grad @ weight.t()


@torch.library.custom_op("autopar_benchmark::weight_gradient", mutates_args=())
def weight_gradient(x: Tensor, grad: Tensor, seconds: float) -> Tensor:
    """x (B, K) with grad (B, N): (K, N)."""
    _sleep(seconds)
    return x.t() @ grad


@product.register_fake
def _(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@input_gradient.register_fake
def _(grad: Tensor, weight: Tensor, seconds: float) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[0])


@weight_gradient.register_fake
def _(x: Tensor, grad: Tensor, seconds: float) -> Tensor:
    return x.new_empty(x.shape[1], grad.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight, ctx.seconds = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    return input_gradient(grad, weight, ctx.seconds), weight_gradient(x, grad, ctx.seconds), None


product.register_autograd(_gradients, setup_context=_keep)
_ops = torch.ops.autopar_benchmark


@rule(_ops.product.default)
def _product_rule(call: OpCall) -> list[AxisStrategy]:
    return by_labels(call, ["bk", "kn"], ["bn"], summed="k")


@rule(_ops.input_gradient.default)
def _input_rule(call: OpCall) -> list[AxisStrategy]:
    return by_labels(call, ["bn", "kn"], ["bk"], summed="n")


@rule(_ops.weight_gradient.default)
def _weight_rule(call: OpCall) -> list[AxisStrategy]:
    return by_labels(call, ["bk", "bn"], ["kn"], summed="b")


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_WIDTH, _WIDTH) / _WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = product(x, self.weight, self.seconds)
        return found


class Sleeper(nn.Module):
    """Equal blocks; a shift in front of them, so that the first one needs its input's gradient."""

    def __init__(self, blocks: int, seconds: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(_WIDTH))
        self.layers = nn.ModuleList(Block(seconds) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def run_rank(
    rank: int, device: str, cases: list[dict[str, Any]], seconds: float
) -> list[tuple[float, float]]:
    """This rank's seconds asleep and those of the step, for each case: the median round's."""
    found = []
    world = dist.get_world_size()
    for case in cases:
        torch.manual_seed(0)
        blocks = world * case["chunks"]
        model = Sleeper(blocks, seconds / case["chunks"])
        inputs = {"x": torch.randn(2 * case["microbatches"], _WIDTH)}
        pin = {**case, "size": world, "cuts": [f"layers.{i}" for i in range(1, blocks)]}
        parallel = autopar.parallelize(
            model, init_device_mesh("cpu", (world,)), inputs, constraints={"pipeline": pin}
        )
        parallel.train_step(**inputs)
        rounds = []
        for _ in range(_ROUNDS):
            dist.barrier()
            _slept_s[0], started = 0.0, time.perf_counter()
            parallel.train_step(**inputs)
            rounds.append((_slept_s[0], time.perf_counter() - started))
        middle = statistics.median_low([step for _, step in rounds])
        found.append(next(r for r in rounds if r[1] == middle))
    return found


def measured(ranks: int, cases: list[dict[str, Any]], seconds: float) -> list[float]:
    """The idle share of each case.

    Args:
        ranks: of the pipeline.
        cases: each with "schedule", "microbatches" and "chunks".
        seconds: that the forward of a rank takes for a microbatch.
    """
    everyone = on_ranks(run_rank, ranks, "cpu", cases, seconds)
    shares = []
    for row in zip(*everyone, strict=True):
        step_s = max(step for _, step in row)
        shares.append(1.0 - sum(slept for slept, _ in row) / (ranks * step_s))
    return shares
