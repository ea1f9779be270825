"""Sums into rows that indices name: of ranks that have some of the indices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar

TWO = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)


class Pooled(nn.Module):
    """The largest score of each segment of tokens, or what tokens add to rows that are there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(30, 8)
        self.score = nn.Linear(8, 1)
        self.base = nn.Parameter(torch.randn(8))
        self.head = nn.Linear(1, 3)

    def forward(self, tokens: Tensor, segments: Tensor, labels: Tensor) -> Tensor:
        scores = self.score(self.embed(tokens)).squeeze(-1)
        if self.kind == "amax":  # its backward adds to what is there
            rows = scores.new_full((8,), -9.0).scatter_reduce(0, segments, scores, "amax")
        elif self.kind == "index_add":
            rows = self.base.index_add(0, segments, scores)
        elif self.kind == "index_put":
            rows = self.base.index_put((segments,), scores, accumulate=True)
        else:
            rows = self.base.scatter_add(0, segments, scores)
        return F.cross_entropy(self.head(rows[:, None]), labels)


@pytest.mark.parametrize("kind", ["amax", "index_add", "index_put", "scatter_add"])
def test_ranks_add_their_rows_to_a_share_of_what_all_have(kind: str) -> None:
    torch.manual_seed(0)
    model = Pooled(kind).double()
    inputs = torch.randint(30, (32,)), torch.arange(32) // 4, torch.randint(3, (8,))
    plan = autopar.plan(model, TWO, inputs, constraints={"data": 2})
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-9


class Counting(nn.Module):
    """How often each row of a table was read, in whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.register_buffer("counts", torch.arange(8))

    def forward(self, rows: Tensor, target: Tensor) -> Tensor:
        self.counts.index_add_(0, rows, torch.ones_like(rows))
        return F.mse_loss(self.embed(rows), target)


def test_whole_numbers_are_added_to_those_of_one_rank() -> None:
    torch.manual_seed(0)
    model = Counting().double()
    inputs = torch.randint(8, (16,)), torch.randn(16, 4, dtype=torch.float64)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=4, mesh_shape=(2, 2))
    plan = autopar.plan(model, cluster, inputs, constraints={"data": 4})
    found = autopar.verify(plan, model, inputs)
    assert found.buffers == {"counts": 0.0}
    assert found.worst[1] < 1e-9


class Flagged(nn.Module):
    """Rows that some token marks, beside one that is marked before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.score = nn.Linear(8, 1)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        scores = self.score(self.embed(tokens)).squeeze(-1)
        marked = torch.arange(8) > 6
        marked = marked.index_put((segments,), scores > 0.5, accumulate=True)
        sums = scores.new_zeros(8).index_add(0, segments, scores)
        return sums.masked_fill(marked, 0.0).square().sum()


def test_flags_stay_flags() -> None:
    torch.manual_seed(0)
    model = Flagged().double()
    inputs = torch.randint(30, (32,)), torch.arange(32) // 4
    plan = autopar.plan(model, TWO, inputs, constraints={"data": 2})
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-9


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("base", torch.randn(20000, 64))
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.base.index_add(0, rows, self.inner(x)).square().sum()


def test_the_share_of_a_table_is_a_copy_of_it_in_memory() -> None:
    """What all have, each rank's share of it, and the sum are there at once."""
    model, inputs = Table(), (torch.randn(64, 64), torch.randint(20000, (64,)))
    plan = autopar.plan(model, TWO, inputs, constraints={"data": 2})
    assert plan.nodes["index_add"].variants == ("share",)
    assert plan.predicted.peak_memory_bytes > 3 * 20000 * 64 * 4
