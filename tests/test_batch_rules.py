"""Ops between parameters and the batch: what they make of either is split with the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar

_BATCH = 4
_IN_TURNS = {"pipeline": {"size": 1, "microbatches": 2}}


def _double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _planned(model: nn.Module, inputs: tuple[Tensor, ...], constraints: object) -> autopar.Plan:
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=constraints, cache=False)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-9, found.worst
    return plan


def _in_turns(model: nn.Module, *inputs: Tensor) -> None:
    """The model runs in microbatches, and with the batch split over ranks."""
    plan = _planned(model.double(), inputs, _IN_TURNS)
    assert plan.pipeline is not None
    assert plan.pipeline.microbatches == 2
    _planned(model, inputs, {"data": 2})


class Bags(nn.Module):
    """Bags that all have as many indices, in the three modes."""

    def __init__(self) -> None:
        super().__init__()
        modes = ("sum", "mean", "max")
        self.tables = nn.ModuleList(nn.EmbeddingBag(16, 8, mode=m, padding_idx=3) for m in modes)

    def forward(self, indices: Tensor, target: Tensor) -> Tensor:
        found = torch.cat([table(indices) for table in self.tables], 1)
        return F.binary_cross_entropy(found.sum(1).sigmoid(), target)


def test_bags_of_equal_length_are_split_with_their_indices() -> None:
    indices, target = torch.randint(0, 16, (_BATCH, 3)), torch.rand(_BATCH, dtype=torch.float64)
    model = Bags()
    _in_turns(model, indices, target)
    plan = _planned(model, (indices, target), {"data": 2, "zero": 0})
    sent = {c.kind: c.num_bytes for c in plan.predicted.comm_bytes}
    tables = sum(8 * p.numel() for p in model.parameters())
    assert sent["all_reduce"] <= tables + 8
    assert sent.get("all_gather", 0) <= 8 * _BATCH


def test_bags_of_given_lengths_are_refused_in_microbatches_with_what_to_pass() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(16, 8, mode="sum")

        def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
            return self.table(indices, offsets).pow(2).mean()

    inputs = torch.randint(0, 16, (12,)), torch.tensor([0, 1, 5, 9])
    with pytest.raises(autopar.ConstraintError, match="2-D indices, padded to it with padding_idx"):
        _planned(Given(), inputs, _IN_TURNS)


def test_no_bags_at_all_are_no_error() -> None:
    model = nn.Sequential(nn.EmbeddingBag(16, 8), nn.Linear(8, 2)).double()
    ids, target = torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 2, dtype=torch.float64)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, (ids, target), loss_fn=_sum_of_squares, cache=False)
    result = autopar.verify(plan, model, (ids, target), loss_fn=_sum_of_squares)
    assert result.worst[1] == 0.0


def _sum_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def test_bags_whose_offsets_are_given_are_not_split() -> None:
    """Beside bags of the same shapes that are."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(16, 8, mode="sum") for _ in range(2))

        def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
            equal = self.tables[0](indices, torch.arange(0, 12, 3))
            return (equal * self.tables[1](indices, offsets)).pow(2).mean()

    offsets = torch.tensor([0, 1, 6, 9])  # only their values tell which indices belong to a bag
    inputs = torch.randint(0, 16, (12,)), offsets
    _planned(Given().double(), inputs, {"data": 2})
    with pytest.raises(autopar.errors.ConstraintError, match="embedding_bag"):
        _planned(Given().double(), inputs, _IN_TURNS)


class Copies(nn.Module):
    """A learned token in front of each sequence, and a weight repeated for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.read = nn.Linear(4, 4)
        self.norm = nn.InstanceNorm1d(4, affine=True)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        joined = self.read(torch.cat([self.token.repeat(len(x), 1, 1), x], 1))
        return self.norm(joined.transpose(1, 2)).pow(3).mean()


def test_copies_of_a_parameter_are_split() -> None:
    _in_turns(Copies(), _double(_BATCH, 6, 4))


class Scaled(nn.Module):
    """A learned temperature with a bound, as in CLIP (Radford et al. 2021, arXiv 2103.00020)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor([0.5, 9.0, 2.0]))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        scaled = self.features(x) * self.scale.exp().clamp(max=100)
        return F.cross_entropy(scaled + torch.where(self.shift > 1, self.shift, 0), target)


def test_the_gradient_of_a_bounded_parameter_is_a_sum_over_the_batch() -> None:
    _in_turns(Scaled(), _double(_BATCH, 4), torch.tensor([0, 2, 1, 1]))


class LowRank(nn.Module):
    """Weights that are made of other parameters: of low rank, merged, and by a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(16, 2)), nn.Parameter(torch.randn(2, 16))
        self.base = nn.Linear(16, 16)
        self.code, self.network = nn.Parameter(torch.randn(4)), nn.Linear(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.base.weight + self.down @ self.up, self.base.bias).tanh()
        return (x @ self.network(self.code).view(16, 2)).pow(2).mean()


def test_gradients_of_factors_are_sums_over_the_batch() -> None:
    _in_turns(LowRank(), _double(_BATCH, 16))


def test_the_gradient_of_a_product_is_not_sent_where_those_of_its_factors_are_smaller() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Parameter(torch.randn(256, 2))
            self.up = nn.Parameter(torch.randn(2, 256))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.down @ self.up).pow(2).mean()

    model = Narrow().double()
    plan = _planned(model, (_double(512, 256),), {"data": 2, "zero": 0})
    sent = {c.kind: c.num_bytes for c in plan.predicted.comm_bytes}
    assert sent["all_reduce"] <= sum(8 * p.numel() for p in model.parameters()) + 8
    assert "reduce_scatter" not in sent


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_the_batch_of_a_recurrent_layer_is_split(layer: type[nn.LSTM] | type[nn.GRU]) -> None:
    """Its rows are (sequence, batch) joined: a share of the batch is a strided shard of them."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer(4, 4, num_layers=2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0].pow(2).mean()

    _in_turns(Recurrent(), _double(_BATCH, 3, 4))
