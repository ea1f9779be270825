"""Blocks inside a `torch.autocast` region of a forward: where they are, and what they compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import autopar
from autopar.tracer.trace import trace

aten = torch.ops.aten
BATCH = (torch.randn(8, 16), torch.randint(0, 4, (8,)))


class Mixed(nn.Module):
    """The second of its blocks computes in fp32, in a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for index, layer in enumerate(self.layers):
                with torch.autocast("cpu", torch.bfloat16, enabled=index != 1):
                    x = x + torch.tanh(layer(x)).float()
            return cross_entropy(self.head(x).float(), labels)


def test_ops_know_their_modules_lines_and_dtypes() -> None:
    traced = trace(Mixed(), BATCH, training=True)
    phases = {aten.addmm.default: "forward", aten.mm.default: "backward"}
    nodes = [n for n in traced.graph.nodes if n.op == "call_function"]
    assert all(traced.info[n.name].source for n in nodes)
    found = set()
    for node in nodes:
        if node.target in phases and node.meta["val"].dtype == torch.bfloat16:
            info = traced.info[node.name]
            assert info.phase == phases[node.target]
            found.add(info.module)
    assert found == {"layers.0.1", "layers.2.1", "head"}


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_are_stages(size: int) -> None:
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    torch.manual_seed(0)
    model = Mixed()
    pins = {"pipeline": {"size": size, "microbatches": 2}}
    plan = autopar.plan(model, cluster, BATCH, constraints=pins, cache=False)
    found = autopar.verify(plan, model, BATCH)
    assert found.worst[1] < 2e-2  # sums of bfloat16 gradients, in another order
    assert all(e < 1e-6 for n, e in found.gradients.items() if n.startswith("layers.1."))


class Positions(nn.Module):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return torch.linspace(-1.0, 1.0, x.shape[1], dtype=x.dtype, device=x.device)


class Shaped(nn.Module):
    """Takes a part of a tensor for its shape alone, into a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.linear = Positions(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.linear(x)
        places = self.positions(x[:, 1:])
        return {"loss": (x[:, 1:] * places + x[:, :1]).square().mean()}


def test_a_region_that_looks_at_a_shape() -> None:
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    model, inputs = Shaped().double(), (torch.randn(8, 16, dtype=torch.float64),)
    plan = autopar.plan(model, cluster, inputs, constraints={"data": 2}, cache=False)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-12, found.worst


class Apart(nn.Module):
    """Computes a part of a region without gradients, and updates a buffer there."""

    def __init__(self, outer: bool) -> None:
        super().__init__()
        self.one, self.two, self.outer = nn.Linear(16, 16), nn.Linear(16, 16), outer
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        with torch.autocast("cpu", enabled=False), torch.autocast("cpu", enabled=False):
            y = self.one(x) * 2
            with torch.set_grad_enabled(self.outer):
                with torch.no_grad():
                    scale = self.two(y).sin()
                    self.mean.mul_(0.9).add_(scale.mean(0))
                y = y + self.two(x)
            y = y * scale
        return (x + y).square().mean()


@pytest.mark.parametrize("outer", [False, True])
def test_a_region_with_a_part_without_gradients(outer: bool) -> None:
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    torch.manual_seed(0)
    model, inputs = Apart(outer).double(), (torch.randn(8, 16, dtype=torch.float64),)
    plan = autopar.plan(model, cluster, inputs, constraints={"data": 2}, cache=False)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-12, found.worst
    assert ("two.weight" in found.gradients) == outer
    assert set(found.buffers) == {"mean"}


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            x.mul_(2)
        return x.square().mean()


def test_a_write_without_a_gradient_in_a_region_is_refused() -> None:
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with pytest.raises(autopar.TraceError, match=r"in forward: x\.mul_(.|\n)*under no_grad"):
        autopar.plan(Written(), cluster, (torch.randn(8, 16),), cache=False)
