"""Heads that are concatenated onto the batch: split over ranks and microbatches all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.core.strategy import op_call
from autopar.solver.rules.joined import _ALONE, Joined, joined_rows
from tests.bruteforce import Sample, capture, check_rows
from tests.test_handwritten import plan_for
from tests.test_rules import SAMPLES, UNSAMPLED


class Attending(nn.Module):
    """A block of a Set Transformer (Lee et al. 2019, arXiv 1810.00825), with a layer per head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.mixed, self.out = nn.Linear(8 // heads, 8 // heads), nn.Linear(8, 8)
        self.width = 8 // heads

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (
            torch.cat(part.split(self.width, 2), 0)
            for part in (self.query(x), self.key(y), self.value(y))
        )
        weights = torch.softmax(q.bmm(k.transpose(1, 2)) / 8**0.5, 2)
        heads = self.mixed(q + weights.bmm(v))
        joined = torch.cat(heads.split(x.size(0), 0), 2)
        return joined + F.relu(self.out(joined))


class Pooled(nn.Module):
    """Two blocks, the first with learned queries."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.inducing = nn.Parameter(torch.randn(1, 4, 8))
        self.first, self.second = Attending(heads), Attending(heads)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.first(self.inducing.repeat(x.size(0), 1, 1), x)
        return F.cross_entropy(self.head(self.second(x, hidden).mean(1)), target)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize(
    ("mesh", "constraints"),
    [
        ((2,), {"data": 2}),
        ((2,), {"tensor": {"mode": "1d", "size": 2}}),
        ((1,), {"pipeline": {"size": 1, "microbatches": 4}}),
        ((2,), {"data": 2, "pipeline": {"size": 1, "microbatches": 2}}),
    ],
)
def test_heads_on_the_batch_are_split_with_it(
    heads: int, mesh: tuple[int, ...], constraints: Any
) -> None:
    torch.manual_seed(0)
    model = Pooled(heads).double()
    inputs = torch.randn(8, 6, 8, dtype=torch.float64), torch.randint(0, 3, (8,))
    plan = plan_for(model, inputs, mesh, constraints)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-9, found.worst
    if "tensor" not in constraints:  # gradients alone are sent, and the numbers of the loss
        activations = 8 * 6 * 8 * 8
        assert all(
            row.num_bytes < activations / 4
            for row in plan.predicted.comm_bytes
            if row.kind != "all_reduce"
        )


class Masked(nn.Module):
    """Heads on the batch beside an input that is joined alike, and beside positions in it."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = torch.cat(self.read(x).split(4, -1), 0).tanh()
        masks = torch.cat([mask, 2 * mask + mask.mean()], 0)
        places = torch.linspace(0, 1, heads.size(0), dtype=x.dtype)
        return (heads * (masks + places)[:, None, None]).square().mean()


@pytest.mark.parametrize("devices", [1, 2])
def test_what_stands_beside_joined_heads_is_cut_as_they_are(devices: int) -> None:
    """Each microbatch takes its rows of every head: those in a row were taken."""
    torch.manual_seed(0)
    model = Masked().double()
    inputs = torch.randn(8, 3, 8, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    pins: dict[str, Any] = {"pipeline": {"size": 1, "microbatches": 2}}
    if devices > 1:
        pins["data"] = devices
    plan = plan_for(model, inputs, (devices,), pins)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-12, found.worst


ALONE = [s for s in SAMPLES if capture(s).node.target in _ALONE]


def test_ops_behind_a_join_have_samples() -> None:
    assert {capture(s).node.target for s in ALONE} >= _ALONE - UNSAMPLED.keys()


@pytest.mark.parametrize("sample", ALONE, ids=lambda sample: sample.name)
def test_rows_in_runs_are_those_of_each_index(sample: Sample) -> None:
    captured = capture(sample)
    call = op_call(captured.node, 2)
    for node, spec in zip(call.nodes, call.operands, strict=True):
        for dim, size in enumerate(spec.shape):
            if size % 4 == 0:
                node.meta["joined"] = Joined(dim, 2)
                for row in joined_rows(call):
                    check_rows(captured, (row,), (2,))
                del node.meta["joined"]


class Preferring(nn.Module):
    """Scores of two batches of texts in one call, of which the first is to be preferred."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Parameter(torch.randn(6, 8))
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm, self.out = nn.GroupNorm(2, 8), nn.Linear(8, 20)

    def forward(self, chosen: Tensor, rejected: Tensor, keep: Tensor) -> Tensor:
        ids, kept = torch.cat([chosen, rejected]), torch.cat([keep, keep.flip(0)])
        x = self.words(ids) + self.places
        x = self.block(x + self.mix(x.mT).mT, src_key_padding_mask=~kept)
        x = self.norm(x.mT).mT + F.max_pool1d(x.mT, 3, 1, 1).mT
        scores = self.out(x)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        first, second = (scores * kept[:, 1:]).sum(-1).chunk(2)
        texts = self.out(x)[: len(chosen)].flatten(0, 1)
        return F.cross_entropy(texts, chosen.flatten()) - F.logsigmoid(first - second).mean()


@pytest.mark.parametrize(
    "constraints",
    [
        {"data": 2},
        {"pipeline": {"size": 1, "microbatches": 2}},
        {"data": 2, "pipeline": {"size": 1, "microbatches": 2}},
    ],
)
def test_two_batches_in_one_call_are_split_as_each_is(constraints: Any) -> None:
    torch.manual_seed(0)
    model = Preferring().double()
    keep = torch.rand(8, 6) < 0.8
    keep[:, :2] = True
    inputs = torch.randint(0, 20, (8, 6)), torch.randint(0, 20, (8, 6)), keep
    plan = plan_for(model, inputs, (2,), constraints)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-9, found.worst
