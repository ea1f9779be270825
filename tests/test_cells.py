"""Where a model may be cut: nested lists, several lists, wrappers, named children; and the numbers.

Loss and every gradient in float64 against one device, on virtual ranks and on gloo.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import autopar
from autopar.core.cells import Cells, block_order
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.core.recompute import recomputed
from autopar.cost_model import Cluster
from autopar.errors import ConstraintError
from autopar.search.pipelining import plan_step
from autopar.solver.mixture import uniform_checkpoints
from autopar.tracer.trace import trace
from autopar.verification import verify
from tests import zoo
from tests.dist import run_ranks


def swin() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two stages of two blocks each, with stochastic depth."""
    config = hf.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=8,
    )
    return hf.SwinForImageClassification(config), _images()


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=8
    )
    return hf.ResNetForImageClassification(config), _images()


def _images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(8, 3, 32, 32, generator=generator),
        "labels": torch.arange(8),
    }


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _Scored(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.net(x) - y).square().mean()


class _Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(_Residual() for _ in range(4))
        self.last = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def named() -> tuple[nn.Module, dict[str, Tensor]]:
    """A sequence of named children, one of which has numbered ones."""
    inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    parts = {"stem": nn.Linear(16, 16), "a": _Residual(), "b": _Residual(), "c": inner}
    return _Scored(nn.Sequential(OrderedDict(parts | {"head": nn.Linear(16, 16)}))), _vectors()


def wrapper() -> tuple[nn.Module, dict[str, Tensor]]:
    """One numbered child, which holds the list."""
    return _Scored(nn.Sequential(_Trunk())), _vectors()


class _Rows(nn.Module):
    """Lists one behind the other, as `layer1`, `layer2` of many image models."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(_Residual(), _Residual())
        self.layer2 = nn.Sequential(_Residual(), _Residual())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(self.layer1(x))


class _Twice(nn.Module):
    """One module that is called twice stays whole, with what stands in between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.middle = _Residual(), _Residual()

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.middle(self.shared(x)))


class _Experts(nn.Module):
    """Numbered modules in a block that read the same value: nothing is cut between them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + sum((expert(x) for expert in self.experts), torch.zeros_like(x))


def _vectors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 8, 16, generator=generator)
    return {"x": x, "y": y}


BUILDERS = {
    "swin": swin,
    "resnet": resnet,
    "named": named,
    "wrapper": wrapper,
    "twice": lambda: (_Scored(nn.Sequential(nn.Linear(16, 16), _Twice())), _vectors()),
    "linear": lambda: (_Scored(nn.Linear(16, 16)), _vectors()),
}
_SLOW = pytest.mark.slow


@lru_cache(maxsize=4)
def built(name: str) -> tuple[nn.Module, dict[str, Tensor], TracedModel]:
    torch.manual_seed(0)
    model, inputs = BUILDERS[name]()
    model = model.double().train()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    return model, inputs, trace(model, inputs)


def cells(net: nn.Module) -> list[str]:
    return Cells(trace(_Scored(net).train(), _vectors())).names


def numbered(path: str, *numbers: int) -> list[str]:
    return [path.format(n) for n in numbers]


def test_lists_inside_of_blocks_are_opened() -> None:
    blocks = "swin.encoder.layers.{}.blocks.0", "swin.encoder.layers.{}.blocks.1"
    assert Cells(built("swin")[2]).names == [b.format(n) for n in range(2) for b in blocks]
    layers = "resnet.encoder.stages.{}.layers.0", "resnet.encoder.stages.{}.layers.1"
    found = Cells(built("resnet")[2]).names
    head = numbered("classifier.{}", 0, 1)
    assert found == [*(p.format(n) for n in range(2) for p in layers), *head]
    assert Cells(built("wrapper")[2]).names == numbered("net.0.layers.{}", 0, 1, 2, 3)


class _Layers(nn.Module):
    """Layers under names, one behind the other."""

    def __init__(self, norms: int) -> None:
        super().__init__()
        for i in range(4):
            self.add_module(f"linear{i}", nn.Linear(16, 16))
        for i in range(norms):
            self.add_module(f"norm{i}", nn.LayerNorm(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class _Stage(nn.Module):
    """Blocks that are alike by what their forward needs, and not by what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Layers(0), _Layers(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


def test_recomputation_leaves_the_cells_as_they_are() -> None:
    net = _Scored(nn.Sequential(*(_Stage() for _ in range(2))))
    traced = trace(net, (torch.ones(8, 16), torch.ones(8, 16)))
    names = Cells(traced).names
    assert names == [f"net.{stage}.blocks.{block}" for stage in range(2) for block in range(2)]
    for kind in uniform_checkpoints(traced, None):
        assert Cells(recomputed(traced, kind)).names == names


def test_children_of_any_module_where_there_are_no_blocks() -> None:
    found = Cells(built("named")[2]).names
    assert found == ["net.stem", "net.a", "net.b", "net.c.0", "net.c.2", "net.head"]
    found = ["net.layer1.0", "net.layer1.1", "net.layer2.0", "net.layer2.1"]
    assert cells(_Rows()) == found
    assert cells(nn.Sequential(_Residual(), _Residual())) == numbered("net.{}", 0, 1)


def test_what_does_not_follow_each_other_stays_whole() -> None:
    experts = nn.Sequential(nn.Linear(16, 16), _Experts(), _Experts())
    assert cells(experts) == numbered("net.{}", 0, 1, 2)
    assert cells(_Experts()) == numbered("net.experts.{}", 0, 1, 2)  # as numbered children are
    assert "net.shared" not in cells(_Twice())
    assert cells(nn.Linear(16, 16)) == []


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_plain_models_are_cut_between_their_layers(name: str) -> None:
    model, inputs = zoo.MODELS[name]()
    found = Cells(trace(model.train(), inputs))
    assert [f"{b.container}.{b.number}" for b in block_order(found.traced)] == found.names


# --- plans -------------------------------------------------------------------------------------
def planned(name: str, ranks: int, pipeline: dict[str, Any], **pins: Any) -> Plan:
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=ranks)
    wanted = Constraints.parse({"pipeline": pipeline, **pins})
    return plan_step(built(name)[2], cluster, constraints=wanted)


def check(name: str, plan: Plan) -> None:
    model, inputs, traced = built(name)
    found = verify(plan, model, inputs, traced=traced)
    assert len(found.gradients) == sum(1 for _ in model.parameters())
    assert found.worst[1] <= 1e-9, found.worst
    updated = [n for n, _ in model.named_buffers() if "running" in n or "num_batches" in n]
    assert found.buffers.keys() == set(updated)


_SIZES = [(n, p) for n in ("resnet", "named", "wrapper", "twice") for p in (2, 4)]
_SIZES = [s for s in _SIZES if s not in (("resnet", 4), ("twice", 4))]
_SLOWER = [pytest.param(*s, marks=_SLOW) for s in (("swin", 2), ("swin", 4), ("resnet", 4))]


@pytest.mark.parametrize(("name", "size"), [*_SIZES, *_SLOWER])
def test_pinned_size_is_enough(name: str, size: int) -> None:
    plan = planned(name, size, {"size": size})
    assert plan.pipeline is not None and plan.pipeline.size == size
    assert (plan.pipeline.microbatches == 1) == (name == "resnet")
    check(name, plan)


CUTS = [
    ("swin", "swin.encoder.layers.0.blocks.1"),
    ("swin", "swin.encoder.layers.1"),
    ("resnet", "resnet.encoder.stages.1.layers.1"),
    ("resnet", "classifier"),
    ("named", "net.b"),
    ("named", "net.c"),
    ("wrapper", "net.0.layers.1"),
]
_MARKED = [pytest.param(*c, marks=_SLOW) if c[0] == "swin" or c == CUTS[3] else c for c in CUTS]


@pytest.mark.parametrize(("name", "at"), _MARKED)
def test_cuts_may_name_any_of_them(name: str, at: str) -> None:
    turns = 1 if name == "resnet" else 2
    plan = planned(name, 2, {"size": 2, "microbatches": turns, "cuts": [at]}, checkpoint="full")
    assert plan.pipeline is not None
    (found,) = plan.pipeline.cuts
    assert found.startswith(at)
    check(name, plan)


@pytest.mark.parametrize(
    ("name", "pipeline", "message"),
    [
        ("named", {"size": 2, "cuts": ["net.a.up"]}, "inside of, or behind, net.a, and 2 values"),
        ("named", {"size": 2, "cuts": ["net.z"]}, "is no block of the model; its blocks are net.s"),
        ("swin", {"size": 8}, r"needs 8 blocks, the model has 4 \(swin.encoder.layers.0.blocks.0"),
        ("linear", {"size": 2}, "the model has 0: no modules follow each other"),
    ],
)
def test_a_model_that_cannot_be_cut_so(name: str, pipeline: dict[str, Any], message: str) -> None:
    traced = built(name)[2]
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=8)
    with pytest.raises(ConstraintError, match=message):
        plan_step(traced, cluster, constraints=Constraints.parse({"pipeline": pipeline}))


# --- on gloo -----------------------------------------------------------------------------------
def trained(rank: int, name: str, pipeline: dict[str, Any]) -> list[str]:
    """Three steps of SGD beside one device: losses, gradients, parameters and buffers."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    model, inputs = BUILDERS[name]()
    model = model.double().train()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    for part in model.modules():  # its masks are others than those of one device
        if hasattr(part, "drop_prob"):
            part.drop_prob = 0.0
    single = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    options: dict[str, Any] = {"constraints": {"pipeline": pipeline}, "cache": False}
    ours = autopar.parallelize(model, mesh, inputs, **options)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    theirs = torch.optim.SGD(single.parameters(), lr=0.1)
    for _ in range(3):
        loss, expected = ours.train_step(**inputs), _loss(single(**inputs))
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-9, atol=0)
        expected.backward()
        named = dict(single.named_parameters())
        for path, p in ours.named_parameters():
            _close(p.grad.full_tensor(), named[path].grad, path)
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
        for path, p in ours.named_parameters():
            _close(p.full_tensor(), named[path].detach(), path)
        buffers = dict(single.named_buffers())
        for path, value in ours.named_buffers():
            torch.testing.assert_close(value, buffers.pop(path), rtol=1e-9, atol=1e-12, msg=path)
        assert not buffers
    return [path for path, _ in ours.named_parameters()]


def _loss(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def _close(found: Tensor, expected: Any, path: str) -> None:
    assert float((found - expected).norm()) <= 1e-9 * float(expected.norm()) + 1e-15, path


_TRAINED = [n for n in BUILDERS if n not in ("twice", "linear")]
_RUNS = [("named", 2), *(pytest.param(n, p, marks=_SLOW) for n in _TRAINED for p in (2, 4))]


@pytest.mark.parametrize(("name", "size"), _RUNS)
def test_training_on_gloo(name: str, size: int) -> None:
    pipeline = {"size": size} if name == "resnet" else {"size": size, "microbatches": 2}
    held = run_ranks(trained, size, name, pipeline, timeout=300)
    together = [path for paths in held for path in paths]
    assert len(together) == len(set(together)) == sum(1 for _ in BUILDERS[name]()[0].parameters())


class _Watched(nn.Module):
    """Beside the loss, the error of a frozen copy of the net is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(OrderedDict((n, _Residual()) for n in ("first", "then", "last")))
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = (self.net(x) - y).square().mean()
        return {"loss": loss, "watched": (self.average(x) - y).abs().mean()}


@pytest.mark.parametrize("size", [1, 2])
def test_what_only_another_output_needs_is_no_block(size: int) -> None:
    torch.manual_seed(0)
    model = _Watched().double()
    inputs = (torch.randn(8, 16).double(), torch.randn(8, 16).double())
    names = Cells(trace(model, inputs)).names
    assert len(names) > 2 and all(name.startswith("net.") for name in names)
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    pinned = {"pipeline": {"size": size, "microbatches": 2}}
    plan = autopar.plan(model, cluster, inputs, constraints=pinned)
    assert plan.pipeline is not None and len(plan.pipeline.cuts) == size - 1
    found = verify(plan, model, inputs)
    assert found.worst[1] < 1e-9 and len(found.gradients) == 18
