"""Numbers of a forward of a model on the meta device, which keeps none of its own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.tracer.trace import trace
from tests.dist import run_ranks
from tests.test_gloo import whole


class Indexed(nn.Module):
    """Reads and writes columns by lists of numbers and of flags."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).clone()
        hidden[:, [1, -1]] = hidden[..., [0, 2]].tanh()
        hidden[[0, 2]] = hidden[[1, 3]] * hidden[([[0, 1], [2, 3]], [0, 2])].sum()
        hidden = hidden + hidden[[[1], [3]]]  # a tuple, to torch
        none = hidden[[False] * 6].sum()
        return x + hidden[:, [3, 1, 2, 0]] + hidden[:, [True, False, False, False]] + none


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Indexed() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_numbers_of_an_index_are_kept_on_the_meta_device() -> None:
    """Blocks that index by equal lists are equal blocks, and the program has the numbers."""
    torch.manual_seed(0)
    real, x = Layers().double(), torch.randn(6, 4).double()
    with torch.device("meta"):
        built = Layers().double()
    on_cpu, on_meta = (
        trace(m, (inputs,), fold=True) for m, inputs in ((real, x), (built, x.to("meta")))
    )
    assert on_meta.repeats == on_cpu.repeats != ()
    kept = {s.target for s in on_meta.inputs if s.kind == "constant"}
    numbers = {str(v.tolist()) for k, v in on_meta.state_values.items() if k in kept}
    assert {"[1, -1]", "[0, 2]", "[[0, 1], [2, 3]]", "[3, 1, 2, 0]"} <= numbers
    torch.manual_seed(0)
    model = Layers().double()
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, (x,), constraints={"data": 2})
    assert autopar.verify(plan, model, (x,)).worst[1] < 1e-9


class Making(nn.Module):
    """Makes tensors of numbers in every way that has a device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        device = self.inner.weight.device
        hidden = self.inner(x) * torch.tensor([0.5, 2.0, 1.0, 3.0], device=device)
        hidden = torch.where(hidden > 0, hidden, torch.tensor(-0.25, device=device))
        hidden = hidden + torch.as_tensor(np.array([1.0, -1.0, 0.5, 0.0]), device=device)
        hidden = hidden @ torch.asarray([[2.0], [1.0], [0.5], [-3.0]], device=device).double()
        return (hidden * self.inner.weight.new_tensor([1.5])).square().mean()


def from_meta(rank: int) -> tuple[float, list[Tensor]]:
    """Loss and gradients of a model that was built on the meta device."""
    with torch.device("meta"):
        model = Making()
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
    parallel = autopar.parallelize(
        model,
        init_device_mesh("cpu", (2,)),
        (x,),
        constraints={"data": 2},
        init_weights=set_weights,
        cache=False,
    )
    loss = parallel(x)
    loss.backward()
    grads = [whole(p.grad).clone() for p in parallel.parameters()]
    return loss.item(), grads


def set_weights(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        with torch.no_grad():
            parameter.copy_(torch.linspace(-1, 2, parameter.numel()).view_as(parameter))


def test_a_model_built_on_meta_trains_with_the_numbers_of_its_forward() -> None:
    model = Making()
    model.apply(set_weights)
    loss = model(torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4))
    loss.backward()
    for found, grads in run_ranks(from_meta, 2):
        assert abs(found - loss.item()) < 1e-12
        for mine, parameter in zip(grads, model.parameters(), strict=True):
            assert torch.allclose(mine, parameter.grad, rtol=1e-12, atol=1e-12)
