"""The batch where a model does not have it first: data parallel, microbatches and pipelines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar

_BATCH, _LENGTH = 4, 6


class Encoder(nn.Module):
    """torch's own encoder, which turns to (sequence, batch, features) inside, or is given it so."""

    def __init__(self, batch_first: bool, length: int = _LENGTH) -> None:
        super().__init__()
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.tokens = nn.Parameter(torch.randn(1, length, 8))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.tokens + x
        y = self.layers(y) if self.batch_first else self.layers(y.transpose(0, 1)).transpose(0, 1)
        return F.mse_loss(y, target)


class Latents(nn.Module):
    """A few learned vectors that read the input: an odd number of them, in front of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, 8))
        self.read = nn.MultiheadAttention(8, 2, batch_first=True)  # returns its weights too
        self.mix = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        held = self.latents.unsqueeze(0).repeat(len(x), 1, 1)
        held = held + self.read(held, x, x)[0]
        turned = held.transpose(0, 1)
        mixed = self.mix(turned, turned, turned)[0]
        return F.mse_loss(mixed.mean(0), target.mean(1))


class Timed(nn.Module):
    """Scaled and shifted by an embedding of one number, which all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.shift = nn.Embedding(9, 8), nn.Linear(8, 16)
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor, target: Tensor, step: Tensor) -> Tensor:
        scale, shift = self.shift(F.silu(self.embed(step))).chunk(2)
        return F.mse_loss(self.mix(x) * (1 + scale) + shift, target)


def _planned(model: nn.Module, constraints: Any) -> autopar.Plan:
    torch.manual_seed(0)
    inputs = tuple(torch.randn(_BATCH, _LENGTH, 8, dtype=torch.float64) for _ in range(2))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=constraints)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-9, found.worst
    return plan


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_batch_is_split_where_it_stands(batch_first: bool) -> None:
    model = Encoder(batch_first).double()
    plan = _planned(model, {"data": 2, "zero": 0})
    # nothing but gradients and the loss, from its squares on, goes over the axis
    sent = {c.kind: c.num_bytes for c in plan.predicted.comm_bytes}
    gradients = sum(8 * p.numel() for p in model.parameters())
    squares = 8 * _BATCH * _LENGTH * 8
    assert set(sent) <= {"all_reduce", "all_gather"}
    assert sent["all_reduce"] <= gradients + 8
    assert sent.get("all_gather", 0) <= squares


def test_latents_in_front_of_the_batch() -> None:
    plan = _planned(Latents().double(), {"data": 2})
    assert "all_to_all" not in {c.kind for c in plan.predicted.comm_bytes}


class Steps(nn.Module):
    """A language model of (steps, batch), whose state goes from one batch to the next."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.layers = (
            nn.LSTM(8, 8, 2)
            if recurrent
            else nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        )
        self.recurrent = recurrent

    def forward(self, ids: Tensor, target: Tensor, state: Any) -> Any:
        x = self.embed(ids)
        y, state = self.layers(x, state) if self.recurrent else (self.layers(x), state)
        logits = y @ self.embed.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()), state


@pytest.mark.parametrize("recurrent", [True, False])
def test_the_batch_behind_the_steps_is_split(recurrent: bool) -> None:
    torch.manual_seed(0)
    model = Steps(recurrent).double()
    ids, target = torch.randint(0, 12, (2, 5, _BATCH))
    state = tuple(torch.randn(2, _BATCH, 8, dtype=torch.float64) for _ in range(2))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, (ids, target, state), constraints={"data": 2})
    found = autopar.verify(plan, model, (ids, target, state))
    assert found.worst[1] < 1e-9, found.worst
    sent = {c.kind: c.num_bytes for c in plan.predicted.comm_bytes}
    gradients = sum(8 * p.numel() for p in model.parameters())
    assert "all_to_all" not in sent
    assert sum(sent.values()) <= 2 * gradients + 8


class OneByOne(nn.Module):
    """Calls its layer with one sample at a time, to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(torch.cat([self.mix(part) for part in x.split(1)]), target)


def test_a_layer_called_with_one_sample_at_a_time_is_named() -> None:
    inputs = tuple(torch.randn(_BATCH, 8) for _ in range(2))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with pytest.raises(autopar.ConstraintError, match=r"mix\.weight: .* with 1 of the batch of 4"):
        autopar.plan(OneByOne(), cluster, inputs, constraints={"data": 2}, cache=False)


def test_what_is_made_of_one_number_has_no_batch() -> None:
    torch.manual_seed(0)
    inputs = (*(torch.randn(_BATCH, 8, dtype=torch.float64) for _ in range(2)), torch.tensor(3))
    model = Timed().double()
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints={"data": 2}, cache=False)
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-9


@pytest.mark.parametrize(
    "constraints", [{"pipeline": 2}, {"data": 2, "pipeline": {"size": 1, "microbatches": 2}}]
)
def test_heads_joined_and_flattened_at_once_are_split_over_microbatches(constraints: Any) -> None:
    plan = _planned(Encoder(True).double(), constraints)
    assert plan.pipeline is not None
    assert plan.pipeline.microbatches > 1
