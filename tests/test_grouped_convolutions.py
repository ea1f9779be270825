"""Tensor parallelism of convolutions by their channels: depthwise ones, and sizes that are odd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.core.strategy import op_call
from autopar.solver.candidates import expand
from tests.bruteforce import Sample, capture


class Mixer(nn.Module):
    """Blocks that widen, convolve each channel along the sequence, gate and narrow."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "up": nn.Linear(width, 2 * width),
                    "mix": nn.Conv1d(2 * width, 2 * width, 3, padding=1, groups=2 * width),
                    "down": nn.Linear(2 * width, width),
                }
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            wide = layer["mix"](layer["up"](x).transpose(1, 2)).transpose(1, 2)
            x = x + layer["down"](F.silu(wide))
        return F.mse_loss(x, target)


def test_a_depthwise_convolution_is_split_by_channels() -> None:
    torch.manual_seed(0)
    model = Mixer().double()
    inputs = tuple(torch.randn(4, 6, 8, dtype=torch.float64) for _ in range(2))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    constraints = {"tensor": {"mode": "1d"}, "params": {"*.mix.weight": "S0"}}
    plan = autopar.plan(model, cluster, inputs, constraints=constraints)
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-9
    # channels stay with their rank between the two linears
    assert "all_to_all" not in {c.kind for c in plan.predicted.comm_bytes}


class Cardinal(nn.Module):
    """A block of ResNeXt: groups of several channels between two convolutions of points."""

    def __init__(self, width: int = 8, groups: int = 4) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(width, 4 * groups, 1)
        self.spread = nn.Conv2d(4 * groups, 4 * groups, 3, padding=1, groups=groups)
        self.widen = nn.Conv2d(4 * groups, width, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(x + self.widen(self.spread(self.narrow(x).relu()).relu()), target)


@pytest.mark.parametrize(("ranks", "groups"), [(2, 4), (4, 4), (4, 2)])
def test_groups_of_several_channels_are_split_as_long_as_none_is_cut(
    ranks: int, groups: int
) -> None:
    torch.manual_seed(0)
    model = Cardinal(groups=groups).double()
    inputs = tuple(torch.randn(4, 8, 4, 4, dtype=torch.float64) for _ in range(2))
    shape = (2, 2) if ranks == 4 else (2,)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=ranks, mesh_shape=shape)
    constraints = {"tensor": {"mode": "1d", "size": ranks}, "params": {"spread.weight": "S0"}}
    if groups < ranks:
        with pytest.raises(autopar.ConstraintError, match="2 groups"):
            autopar.plan(model, cluster, inputs, constraints=constraints)
        return
    plan = autopar.plan(model, cluster, inputs, constraints=constraints)
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-9
    assert {c.kind for c in plan.predicted.comm_bytes} == {"all_reduce"}


@pytest.mark.parametrize("groups", [2, 4])
def test_axes_together_cut_no_group(groups: int) -> None:
    window = [[1, 1], [1, 1], [1, 1], False, [0, 0], groups]

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.aten.convolution.default(x, weight, None, *window)

    x, weight = torch.randn(2, 8, 4, 4), torch.randn(8, 8 // groups, 3, 3)
    call = op_call(capture(Sample("grouped", run, lambda: (x, weight))).node, 2)
    variants = {candidate.variants for candidate in expand(call, (2, 2))}
    assert ("groups", "") in variants
    assert (("groups", "groups") in variants) == (groups == 4)


class Odd(nn.Module):
    """Channels in between that four ranks do not divide."""

    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, channels, 2, 2)
        self.last = nn.Linear(channels, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out = self.up(self.second(self.first(x).relu()).relu()).mean((2, 3))
        return F.cross_entropy(out.mean(1, keepdim=True) + self.last(out), labels)


def test_channels_that_ranks_do_not_divide_are_split_on_the_other_side() -> None:
    torch.manual_seed(0)
    model = Odd().double()
    inputs = torch.randn(4, 4, 4, 4, dtype=torch.float64), torch.randint(0, 4, (4,))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=4)
    plan = autopar.plan(model, cluster, inputs, constraints={"tensor": "1d"})
    assert {plan.modes[f"{name}.weight"].split(",")[0] for name in ("first", "up")} == {"1D row"}
    found = autopar.verify(plan, model, inputs)
    assert set(found.gradients) == {name for name, _ in model.named_parameters()}
    assert found.worst[1] < 1e-9, found.worst


class Attended(nn.Module):
    """Blocks with a filter along the channels, of one channel in and one out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv1d(8, 8, 1) for _ in range(2)])
        self.filters = nn.ModuleList([nn.Conv1d(1, 1, 3, padding=1) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block, along in zip(self.blocks, self.filters, strict=True):
            x = block(x).tanh()
            x = x * along(x.mean(-1).unsqueeze(1)).sigmoid().transpose(1, 2)
        return x.square().mean()


def test_a_filter_without_channels_stays_whole() -> None:
    torch.manual_seed(0)
    model, inputs = Attended().double(), (torch.randn(4, 8, 6, dtype=torch.float64),)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints={"tensor": "1d"}, cache=False)
    assert plan.modes["blocks.0.weight"].startswith("1D")
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-9, found.worst
