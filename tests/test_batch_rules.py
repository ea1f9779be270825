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


_ACTIVATIONS = {
    "elu": F.elu,
    "gelu": F.gelu,
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "logit": lambda x: torch.logit(x.square() / 9, eps=1e-3),
    "log_sigmoid": F.logsigmoid,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "tanh": torch.tanh,
}


class Filters(nn.Module):
    """A filter that a network makes of the positions, and a gate of a parameter."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[name]
        self.network = nn.ModuleList((nn.Linear(3, 8), nn.Linear(8, 4)))
        self.gate = nn.Parameter(torch.linspace(-1, 2, 4))
        self.register_buffer("places", torch.linspace(-1, 1, 18).view(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.network
        filters = last(self.activation(first(self.places))).t()
        return (x * filters * self.activation(self.gate)[:, None]).sum(-1).pow(2).mean()


@pytest.mark.parametrize("name", _ACTIVATIONS)
def test_activations_of_what_parameters_make_are_no_hindrance_to_microbatches(name: str) -> None:
    torch.manual_seed(0)
    _in_turns(Filters(name), _double(_BATCH, 4, 6))


def test_poles_of_a_state_space_in_microbatches() -> None:
    class Poles(nn.Module):
        """Outputs (B, C, L) of a filter whose factors are complex."""

        def __init__(self) -> None:
            super().__init__()
            self.pole = nn.Parameter(torch.rand(4, 3))
            self.read = nn.Parameter(torch.randn(4, 3, 2))

        def forward(self, x: Tensor) -> Tensor:
            powers = torch.exp((self.pole * (-1 + 2j))[..., None] * torch.arange(x.shape[-1]))
            filters = torch.einsum("cn,cnl->cl", torch.view_as_complex(self.read), powers).real
            spectrum = torch.fft.rfft(x, n=12) * torch.fft.rfft(filters, n=12)
            return torch.fft.irfft(spectrum, n=12)[..., :6].pow(2).mean()

    torch.manual_seed(0)
    _in_turns(Poles(), _double(_BATCH, 4, 6))


def test_blocks_that_only_parameters_reach_are_planned_in_microbatches() -> None:
    """They run once a step, and no microbatch holds any of their ops."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
            self.places = nn.Buffer(torch.linspace(-1, 1, 18).view(6, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x @ self.network(self.places)).pow(2).mean()

    torch.manual_seed(0)
    _in_turns(Made(), _double(_BATCH, 6))
    _planned(Made().double(), (_double(_BATCH, 6),), {"pipeline": {"size": 2, "microbatches": 2}})


class Weighed(nn.Module):
    """Losses with learned weights, one of them a mean over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.spread = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        scores = self.head(x)
        losses = torch.stack(
            [F.cross_entropy(scores, target, ignore_index=0), scores.pow(2).mean()]
        )
        return (torch.exp(-self.spread) * losses + self.spread).sum()


def test_a_learned_weight_of_a_mean_over_counted_labels() -> None:
    torch.manual_seed(0)
    _in_turns(Weighed(), _double(_BATCH, 6), torch.tensor([0, 1, 2, 1]))


class Solved(nn.Module):
    """Right-hand sides of the batch in systems of parameters, and of parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.more = nn.Parameter(torch.randn(4, 4))
        self.name = name

    def solve(self, right: Tensor) -> Tensor:
        square = self.weight @ self.weight.mT + torch.eye(4)
        if self.name == "triangular":
            lower = torch.linalg.cholesky(square)
            return torch.linalg.solve_triangular(lower, right, upper=False)
        if self.name == "cholesky":
            return torch.cholesky_solve(right, torch.linalg.cholesky(square))
        if self.name == "inverse":
            return torch.linalg.inv(square) @ right
        return torch.linalg.solve(square, right.mT, left=False).mT

    def forward(self, x: Tensor) -> Tensor:
        return self.solve(x.mT).pow(2).sum() + (x @ self.solve(self.more)).pow(2).mean()


@pytest.mark.parametrize("name", ["triangular", "cholesky", "inverse", "right"])
def test_solves_with_right_hand_sides_of_the_batch(name: str) -> None:
    torch.manual_seed(0)
    _in_turns(Solved(name), _double(_BATCH, 4))


def test_boundaries_of_each_row_are_split_with_the_rows() -> None:
    class Bins(nn.Module):
        """What a spline of each row looks up, in bins (B, P) that a network makes."""

        def __init__(self) -> None:
            super().__init__()
            self.widths = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            edges = self.widths(x).softmax(-1).cumsum(-1)
            places = torch.searchsorted(edges.detach(), x[:, :2].sigmoid().contiguous())
            return edges.gather(1, places.clamp(max=3)).pow(2).mean()

    torch.manual_seed(0)
    _in_turns(Bins(), _double(_BATCH, 6))
