"""Models and programs for the tests of fusion: float64 throughout, two short rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from autopar.codegen.emit import emit
from autopar.codegen.fusion import Fusion
from autopar.codegen.fusion.generated import Generated
from autopar.codegen.fusion.options import GENERATED
from autopar.codegen.program import Program
from autopar.codegen.shares import fused_shares
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.kernels.registry import KERNELS
from autopar.solver.offers import Offers
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from autopar.verification import whole_inputs
from tests import zoo

VOCAB = {"params": {"*lm_head.weight": "S0"}, "tensor": {"mode": "1d", "size": 2}}


class PlainRMSNorm(nn.Module):
    """Llama's, without its cast to float32, which would hide float64."""

    def __init__(self, source: LlamaRMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = source.weight, source.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class PlainRotary(nn.Module):
    """Llama's tables, in the dtype of the activations."""

    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids.unsqueeze(-1).to(x.dtype) * self.inv_freq
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()


class Headed(nn.Module):
    """A language model whose logits are read by its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def fewer(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two short rows: the interpreter takes its time."""
    return {k: v[:2, :6] for k, v in inputs.items()}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = zoo.llama(dropout=0.1, layers=1)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LlamaRMSNorm):
                setattr(module, name, PlainRMSNorm(child))
    model.model.rotary_emb = PlainRotary(model.model.rotary_emb.inv_freq)
    return Headed(model), fewer(inputs)


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = zoo.gpt2(dropout=0.1, layers=1)
    return Headed(model), fewer(inputs)


def vit() -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = zoo.vit(dropout=0.1, layers=1)
    return model, {k: v[:2] for k, v in inputs.items()}


class Toy(nn.Module):
    """ReLU with bias and dropout, GeGLU of both forms, and softmax with a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(24, 40), nn.Linear(40, 48)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = F.dropout(F.relu(self.one(self.norm(x))), 0.2, self.training)
        a, b = self.two(h).chunk(2, -1)
        y = F.gelu(a) * b + F.gelu(b, approximate="tanh") * a
        y = x + torch.softmax(y * 0.3, -1)
        return F.mse_loss(self.norm(x + y), target)


def toy() -> tuple[nn.Module, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4, 6, 24, generator=generator)
    return Toy(), {"x": x, "target": y}


HEAD_WIDTH, HEAD_VOCABULARY = 8, 65536


class Head(nn.Module):
    """A large vocabulary, whose logits are best kept where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(HEAD_WIDTH, HEAD_WIDTH)
        self.lm_head = nn.Linear(HEAD_WIDTH, HEAD_VOCABULARY, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.lm_head(torch.tanh(self.one(x)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def head() -> tuple[nn.Module, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, HEAD_VOCABULARY, (2, 24), generator=generator)
    labels[0, 0] = -100
    x = torch.randn(2, 24, HEAD_WIDTH, generator=generator)
    return Head(), {"x": x, "labels": labels}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
    "toy": toy,
    "head": head,
}
EXPECTED = {
    "gpt2": {"layer_norm", "bias_act", "dropout_add", "dropout", "softmax", "token_nll",
             "linear_nll"},
    "llama": {"rms_norm", "gated", "rotary", "softmax", "dropout", "token_nll", "linear_nll"},
    "vit": {"layer_norm", "bias_act", "dropout_add", "dropout", "softmax", "token_nll"},
    "toy": {"bias_act", "gated", "softmax", "layer_norm"},
    "head": {"token_nll", "linear_nll"},
}  # fmt: skip


@cache
def traced_model(name: str) -> tuple[nn.Module, dict[str, Any], TracedModel]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = model.double().train()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    return model, inputs, trace(model, inputs)


@cache
def plan_of(name: str, ranks: int = 1, constraints: str = "") -> Plan:
    chosen = {"": None, "vocab": VOCAB, "1d": {"tensor": {"mode": "1d", "size": ranks}}}
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=ranks)
    parsed = Constraints.parse(chosen[constraints])
    traced = traced_model(name)[2]
    offers = Offers(cluster, fused_shares(traced, Fusion.parse(True, torch.device("cuda"))))
    return solve(traced, cluster, constraints=parsed, memory_limit=None, offers=offers)


def program_of(name: str, fusion: Any) -> Program:
    return emit(traced_model(name)[2], plan_of(name), [0], fusion=fusion)


class OnTriton(fx.Interpreter):
    """Runs fused ops by their Triton kernels."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, Generated):
            return target.triton(*args)
        name = str(target)
        if name.startswith("autopar_kernels."):
            kernel = KERNELS[name.split(".")[1]]
            assert kernel.takes(*args)
            return kernel.triton(*args)
        return super().call_function(target, args, kwargs)


def outputs_of(name: str, program: Program, triton: bool = False) -> list[Tensor]:
    model, inputs, traced = traced_model(name)
    whole = whole_inputs(traced, model, list(inputs.values()), 3)
    feed = [whole[spec.node] for spec, _ in program.inputs]
    runner = OnTriton if triton else fx.Interpreter
    return [x for x in runner(program.joint).run(*feed) if x is not None]


@cache
def unfused(name: str) -> list[Tensor]:
    return outputs_of(name, program_of(name, False))


def kernels_in(program: Program) -> set[str]:
    found = set()
    for node in program.joint.graph.nodes:
        if isinstance(node.target, Generated):
            found.add(GENERATED)
        elif str(node.target).startswith("autopar_kernels."):
            found.add(str(node.target).split(".")[1])
    return found


def same(found: list[Tensor], expected: list[Tensor], bound: float = 1e-9) -> None:
    """Norm-wise; a gradient that is zero but for rounding counts as 1e-6 of the largest."""
    floor = 1e-6 * max(float(y.double().norm()) for y in expected)
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        error = float((x.double() - y.double()).norm())
        assert error <= bound * max(float(y.double().norm()), floor)


UNARY = [torch.exp, torch.tanh, torch.sigmoid, F.silu, F.gelu, F.relu, torch.abs, torch.sin,
         lambda x: x.float().double(), lambda x: x * 0.5 - 2, lambda x: 1 / (x.abs() + 1),
         lambda x: torch.where(x > 0.1, x, -1.0), lambda x: x.masked_fill(x < 0, 0.25),
         lambda x: (x * x + 1).rsqrt(), lambda x: x.clone(), lambda x: x**3]  # fmt: skip
BINARY = [torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: torch.where(a > b, a, b),
          lambda a, b: a / (b.abs() + 1), lambda a, b: a * (a < b)]  # fmt: skip
ROWS = [lambda x: x - x.mean(-1, keepdim=True), lambda x: x / (x.abs().sum(-1, True) + 1),
        lambda x: x - x.amax(-1, keepdim=True), lambda x: torch.softmax(x, -1),
        lambda x: (x * x).mean(-1, keepdim=True).expand(x.shape)]  # fmt: skip


class Chain(nn.Module):
    """A random program over a few operands of one shape and one row."""

    def __init__(self, seed: int, width: int) -> None:
        super().__init__()
        self.seed = seed
        self.row = nn.Parameter(torch.linspace(-1, 1, width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        choose = random.Random(self.seed).choice
        values = [x * self.row, y.transpose(0, 1) + self.row, x]
        for _ in range(10):
            kind = choose("ubbr")
            if kind == "u":
                values.append(choose(UNARY)(choose(values)))
            elif kind == "b":
                values.append(choose(BINARY)(choose(values), choose(values)))
            else:
                values.append(choose(ROWS)(choose(values)))
            values[-1] = values[-1] / (1 + values[-1].abs())
        return (values[-1] + values[-2] * values[-3]).sum()
