"""Loops over the places where a mask picks anything run over all places, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.tracer import checks
from tests.test_picked import Head, Model, batch, errors

EXPERTS, CHOSEN = 4, 2


def _routed(m: Model, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, and two experts with their weights for each; no token chooses the third."""
    flat = x.flatten(0, 1)
    scores = m.classes(flat)[:, :EXPERTS] - torch.tensor([0.0, 0.0, 1e3, 0.0]).to(x)
    weights, chosen = scores.softmax(-1).topk(CHOSEN, -1)
    return flat, weights, chosen


def _expert(m: Model, i: Tensor | int, x: Tensor) -> Tensor:
    """One of several, out of two stacked weights."""
    inner = m.classes.weight.view(EXPERTS, -1, x.shape[-1])[i]
    return m.inner(F.silu(F.linear(x, inner)) @ inner)


def _of_one_hot(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flat, weights, chosen = _routed(m, x)
    out = torch.zeros_like(flat)
    with torch.no_grad():
        of_expert = F.one_hot(chosen, num_classes=EXPERTS + 1).permute(2, 1, 0)
        hit = torch.greater(of_expert.sum(dim=(-1, -2)), 0).nonzero()
    for i in hit:
        i = i[0]
        if i == EXPERTS:
            continue
        nth, token = torch.where(of_expert[i])
        rows = _expert(m, i, flat[token]) * weights[token, nth, None]
        out.index_add_(0, token, rows.to(out.dtype))
    return out.square().sum()


def _by_number(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flat, weights, chosen = _routed(m, x)
    out = torch.zeros_like(flat)
    of_expert = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for place in (of_expert.sum((1, 2)) > 0).nonzero(as_tuple=False):
        i = int(place.item())
        nth, token = torch.where(of_expert[i].squeeze(0))
        if token.numel() == 0:
            continue
        out = out.index_add(0, token, _expert(m, i, flat[token]) * weights[token, nth, None])
    return out.square().sum()


def _of_booleans(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flat, kinds = x.flatten(0, 1), mask.flatten() * 2
    out, loss = m.inner(flat), x.sum()
    of_kind = kinds == torch.arange(3).unsqueeze(1)
    for i in of_kind.any(-1).nonzero().flatten().tolist():
        rows = of_kind[i]
        out[rows] = out[rows] + m.inner(flat[rows]) * (i + 1)
        loss += m.classes(flat)[rows].square().mean() * (i + 1)
    for i in torch.where(of_kind.any(dim=1))[0]:
        (places,) = torch.where(of_kind[i])
        out[places] = out[places] * 0.5
    return loss + out.square().sum()


@pytest.mark.parametrize("head", [_of_one_hot, _by_number, _of_booleans])
def test_a_loop_over_places_that_are_picked(head: Head) -> None:
    checks._warned.clear()
    with pytest.warns(
        autopar.UncheckedWarning, match="runs the loop for all places(.|\n)*zeros where"
    ) as warned:
        found = errors(head, batch())
    assert found.worst[1] < 1e-12, found.worst
    assert any("test_hit_loops.py:" in str(w.message) for w in warned)


def _hits(m: Model, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    flat, _, chosen = _routed(m, x)
    of_expert = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    return flat, of_expert, (of_expert.sum((1, 2)) > 0).nonzero().flatten()


def _adds_a_number(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flat, of_expert, hit = _hits(m, x)
    loss = flat.sum()
    for i in hit:
        _, token = torch.where(of_expert[i])
        loss = loss + m.inner(flat[token]).sum() + m.inner.bias[i]
    return loss


def _collects(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flat, of_expert, hit = _hits(m, x)
    losses = []
    for i in hit:
        _, token = torch.where(of_expert[i])
        losses.append(m.inner(flat[token]).sum())
    return torch.stack(losses).mean()


def _writes_by_place(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flat, of_expert, hit = _hits(m, x)
    out = m.inner(flat)
    for i in hit:
        _, token = torch.where(of_expert[i])
        out[i] += m.inner(flat[token]).sum(0)
        out.index_add_(0, i, m.inner(flat[:1]))
    return out.square().sum()


def _stops(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flat, of_expert, hit = _hits(m, x)
    out = torch.zeros_like(flat)
    for i in hit:
        _, token = torch.where(of_expert[i])
        out.index_add_(0, token, m.inner(flat[token]))
        if i == 1:
            break
    return out.square().sum()


def _of_another_mask(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flat, _, hit = _hits(m, x)
    out = torch.zeros_like(flat)
    other = mask.flatten() == torch.arange(EXPERTS).unsqueeze(1)
    for i in hit:
        (token,) = torch.where(other[i])
        out.index_add_(0, token, m.inner(flat[token]))
    return out.square().sum()


def _of_numbers(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """Sums that are 0 although there are numbers that are not."""
    flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
    signed = (mask.flatten() - 1) * torch.arange(3).unsqueeze(1)
    for i in (signed.sum(1) > 0).nonzero().flatten():
        (token,) = torch.where(signed[i])
        out.index_add_(0, token, m.inner(flat[token]))
    return out.square().sum()


def _of_other_dim(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    same = mask[:, :BATCH].bool()
    out = m.inner(x[:, 0])
    for i in same.any(0).nonzero().flatten():
        (row,) = torch.where(same[i])
        out = out.index_add(0, row, m.inner(x[row, 1]))
    return out.square().sum()


def _sorted(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flat, of_expert, hit = _hits(m, x)
    out = torch.zeros_like(flat)
    for n, i in enumerate(hit):
        _, token = torch.where(of_expert[i])
        out.index_add_(0, token, m.inner(flat[token]) * n)
    return out.square().sum()


def _keeps(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flat, of_expert, hit = _hits(m, x)
    last = flat
    for i in hit:
        _, token = torch.where(of_expert[i])
        last = m.inner(flat[token])
    return last.square().sum()


BATCH = batch()[0].shape[0]
REFUSED = [
    _adds_a_number,
    _collects,
    _writes_by_place,
    _stops,
    _of_another_mask,
    _of_numbers,
    _of_other_dim,
    _sorted,
    _keeps,
]


@pytest.mark.parametrize("head", REFUSED)
def test_a_loop_that_does_more_than_change_picked_rows_is_refused(head: Head) -> None:
    with pytest.raises(autopar.TraceError, match=r"test_hit_loops.py:\d+ in ") as refused:
        errors(head, batch())
    assert "for " in str(refused.value), refused.value


class _Sparse(nn.Module):
    """Layers of experts as a list, on a model that is never allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        of_expert = F.one_hot(chosen, EXPERTS).T
        out = torch.zeros_like(x)
        for i in of_expert.sum(-1).nonzero():
            (token,) = torch.where(of_expert[i].squeeze(0))
            out.index_add_(0, token, self.experts[int(i)](x[token]))
        return out.square().sum()


@pytest.mark.filterwarnings("ignore::autopar.UncheckedWarning")
def test_experts_of_a_list_on_the_meta_device() -> None:
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with torch.device("meta"):
        model, x = _Sparse().double(), torch.empty(12, 8).double()
    plan = autopar.plan(model, cluster, (x,), cache=False)
    real = _Sparse().double()
    assert autopar.verify(plan, real, (torch.randn(12, 8).double(),)).worst[1] < 1e-12


def _added(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flat, weights, chosen = _routed(m, x)
    out = torch.zeros_like(flat)
    for i in range(EXPERTS):
        token, nth = torch.where(chosen == i)
        out[token] += weights[token, nth, None] * _expert(m, i, flat[token])
    return out.square().sum()


def _set(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flat, weights, chosen = _routed(m, x)
    out = flat * 0.5
    token, nth = torch.where(chosen == 1)
    out[token] = weights[token, nth, None] * _expert(m, 1, flat[token])
    rows = flat[token]
    rows.mul_(2).sub_(weights[token, nth, None])
    return out.square().sum() + rows.square().sum()


def _index_added(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flat, weights, chosen = _routed(m, x)
    out = flat.sin()
    for i in range(EXPERTS):
        token, nth = torch.where(chosen == i)
        out.index_add_(0, token, weights[token, nth, None] * _expert(m, i, flat[token]))
    return out.square().sum()


@pytest.mark.parametrize("head", [_added, _set, _index_added])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_rows_that_were_chosen_are_written_in_place(head: Head, microbatches: int) -> None:
    constraints: dict[str, Any] = {"data": 2}
    if microbatches > 1:  # which only takes what is split by its tokens throughout
        constraints["pipeline"] = {"size": 1, "microbatches": microbatches}
    found = errors(head, batch(), constraints)
    assert found.worst[1] < 1e-12, found.worst


def _twice(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    out = m.inner(x).flatten(0, 1)
    token, _ = torch.where(torch.stack([mask.flatten(), mask.flatten()], 1) == 1)
    out[token] += out[token].sin()
    return out.square().sum()


def _looked_at(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = m.inner(x)[mask != 0]
    part = rows[:, :2]
    rows.mul_(2)
    return rows.square().sum() + part.sum()


@pytest.mark.parametrize("head", [_twice, _looked_at])
def test_writes_that_may_meet_or_are_seen_elsewhere_are_refused(head: Head) -> None:
    with pytest.raises(autopar.TraceError, match="How many rows are picked"):
        errors(head, batch())
