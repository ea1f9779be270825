"""Rows that a mask picks are planned with all rows: losses, gradients, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.tracer import checks

CLASSES, BATCH, LENGTH, WIDTH = 32, 4, 6, 16
Head = Callable[["Model", Tensor, Tensor, Tensor], Any]


class Model(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.classes = nn.Linear(WIDTH, CLASSES)
        self.head = head

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:
        return self.head(self, self.table(ids), mask, labels)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Two ranks have picked unequal numbers of rows; labels are -100 where none is."""
    torch.manual_seed(0)
    ids, labels = (torch.randint(0, CLASSES, (BATCH, LENGTH)) for _ in range(2))
    mask = torch.randint(0, 2, (BATCH, LENGTH))
    return ids, mask, labels.where(mask != 0, -100)


def errors(head: Head, inputs: tuple[Tensor, ...] | None = None, constraints: Any = None) -> Any:
    torch.manual_seed(1)
    model, inputs = Model(head).double(), inputs or batch()
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=constraints or {"data": 2}, cache=False)
    return autopar.verify(plan, model, inputs)


# --- losses ---------------------------------------------------------------------------------------
def _of_logits(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    shifted = mask[:, 1:]
    logits = m.classes(x)[:, :-1][shifted != 0].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), y[:, 1:][shifted != 0].view(-1))


def _of_hidden(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    found = F.gelu(m.inner(F.layer_norm(x[mask != 0], (WIDTH,))))
    return F.nll_loss(F.log_softmax(m.classes(found), -1), y[mask != 0])


def _weighted(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.1, 1, CLASSES, dtype=x.dtype)
    rows = y != -100
    return F.cross_entropy(m.classes(x)[rows], y[rows], weight=weight, label_smoothing=0.1)


def _by_places(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    batch, token = torch.where(mask != 0)
    flat = (mask != 0).flatten().nonzero().squeeze(1)
    chosen = F.log_softmax(m.classes(x.flatten(0, 1)[flat]), -1).gather(1, y[batch, token][:, None])
    rows = torch.gather(y.flatten(), 0, flat)
    return F.cross_entropy(m.classes(x[batch, token]), rows) - chosen.squeeze(1).mean()


def _elementwise(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    a, b = m.inner(x)[mask != 0], x[mask != 0].detach()  # two masks, one number of rows
    both = F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")
    joined = F.l1_loss(a.view(-1), b.reshape(-1), reduction="sum")
    sure = F.binary_cross_entropy_with_logits(a, torch.ones_like(b))
    return both + joined + sure + F.smooth_l1_loss(F.normalize(a, dim=-1), torch.zeros_like(a))


def _reductions(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    a = m.inner(x)[mask != 0]
    parts = [a.norm(), a.mean(0).square().sum(), a.sum(1).pow(2).mean()]
    count = (mask != 0).sum().item()
    x = x.masked_fill(x > 1, count) * count + count**2 - count / 3 + torch.pow(x, count)
    sizes = a.square().sum() / max(1, a.shape[0]) + x.mean() + a.abs().sum() / a.numel()
    return torch.stack([*parts, sizes]).sum() / count


def _extremes(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """Of no rows there are none, which is an error on one device."""
    a = m.inner(x)[mask != 0]
    return a.amax(0).sum() + a.amin() + a.logsumexp(0).sum()


def _dim_between(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return m.classes(m.inner(x)[:, mask[0] != 0]).log_softmax(-1).square().mean()


def _elements(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    x = m.inner(x)
    losses = F.cross_entropy(m.classes(x).flatten(0, 1), y.flatten(), reduction="none")
    return (x[x > 0] ** 2).mean() + torch.masked_select(losses, mask.flatten() != 0).mean()


def _again(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """Rows picked of picked ones, and what is measured beside the loss."""
    logits, target = m.classes(x)[mask != 0], y[mask != 0]
    late = target > 5
    with torch.no_grad():
        right = (m.classes(x).argmax(-1) == y)[mask != 0].double().mean()
    accuracy = (logits.argmax(-1) == target).double().mean() + right
    return F.cross_entropy(logits[late], target[late]) + accuracy.detach()


# --- what fails on other rows ---------------------------------------------------------------------
def _logarithm(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    found = m.inner(x)[..., 0]
    roots = (m.inner(x) * (mask != 0)[..., None])[mask != 0].square().sum(-1).sqrt()
    return torch.log(found[found > 0]).sum() + roots.mean()


def _look_up(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """-100 is no row of the table."""
    rows = y != -100
    one = F.one_hot(y[rows], CLASSES).to(x.dtype) * m.classes(x)[rows]
    return m.table(y[rows]).square().mean() + m.table.weight[y[rows]].sum() + one.mean()


def _none(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = mask > 5
    total = F.cross_entropy(m.classes(x)[rows], y[rows], reduction="sum")
    return total + torch.log(x.abs()[rows]).sum() + m.inner(x).sum()


# --- rows are written back ------------------------------------------------------------------------
def _put(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows, out = mask != 0, x.clone()
    out[rows] = m.inner(x[rows])
    places = rows[..., None].expand_as(x)
    out = out + x.masked_scatter(places, m.inner(x)[rows])
    return F.cross_entropy(m.classes(out).flatten(0, 1), y.flatten())


def _experts(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    weights, chosen = m.classes(flat)[:, :4].softmax(-1).topk(2, -1)
    out = torch.zeros_like(flat)
    for expert in range(4):
        token, nth = torch.where(chosen == expert)
        out.index_add_(0, token, m.inner(flat[token]) * (expert + 1) * weights[token, nth, None])
    for expert in range(2):
        (token,) = torch.where(mask.flatten() == expert)
        out.index_add_(0, token, m.inner(flat[token]) * (expert + 1))
    return out.square().sum()


def _experts_at_once(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """All masks from one comparison, each a slice of it."""
    flat = x.flatten(0, 1)
    weights, chosen = m.classes(flat)[:, :4].softmax(-1).topk(2, -1)
    masks = chosen.unsqueeze(-1) == torch.arange(4)
    out = torch.zeros_like(flat)
    for expert, mine in enumerate(masks.permute(2, 0, 1)):
        token, nth = torch.where(mine)
        out[token] += weights[token, nth, None] * m.inner(flat[token]) * (expert + 1)
    token, nth = torch.where(masks[..., 1])
    out[token] += weights[token, nth, None] * m.inner(flat[token])
    return out.square().sum()


# --- rows are a batch -----------------------------------------------------------------------------
def _along_rows(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    a = m.inner(x)[mask != 0]
    whitened = (a - a.mean(-1, keepdim=True)) / (a.std(-1, keepdim=True) + a.var(-1, keepdim=True))
    spread, centre = torch.var_mean(a, -1)
    ordered = a.sort(-1).values * torch.arange(WIDTH) + a.flip(-1) + a.roll(1, -1)
    wide = F.pad(a, (1, 2)).tanh() + torch.ones(a.shape[0], WIDTH + 3, dtype=a.dtype)
    both = torch.stack([a, x[mask != 0]], 1).cos().sum() + F.glu(a).sum()
    best = a.topk(2, -1).values.sum() + (spread * centre).sum()
    return whitened.tanh().sum() + ordered.sin().sum() + wide.square().mean() + both + best


def _samples(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    a = m.inner(x)[(mask != 0).any(1) & (mask[:, 0] == 0)]
    mixed = F.scaled_dot_product_attention(a, x[(mask != 0).any(1) & (mask[:, 0] == 0)], a)
    kernel = m.inner.weight[:, :, None] * torch.ones(3, dtype=x.dtype)
    filtered = F.conv1d(mixed.transpose(1, 2), kernel, padding=1)
    return F.group_norm(filtered, 2).tanh().square().sum() + F.dropout(mixed, 0.0).sum()


def _both_by_select(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """One mask, and masks that are made alike."""
    places = (mask != 0)[..., None].expand_as(x)
    found = F.l1_loss(m.inner(x).masked_select(places), x.sin().masked_select(places))
    also = F.mse_loss(
        m.inner(x).masked_select((mask != 0)[..., None]), x.masked_select((mask != 0)[..., None])
    )
    return found + also


# --- memory that is written to --------------------------------------------------------------------
def _mask_changes(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    mask, x = mask.clone(), m.inner(x)
    before = x[mask != 0].square().sum()
    mask[:, 0] = 1
    after = x[mask != 0].abs().sum()
    return before + after


def _source_changes(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    x = m.inner(x)
    before = x[mask != 0]
    x.mul_(2)
    return before.square().sum()


def _added_in_place(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """By the mask itself, whose number of rows the write checks."""
    x = m.inner(x)
    x[mask != 0] = 0.5
    x[mask != 0] += m.table.weight[:1]
    x[mask == 0] *= 2
    x[mask > 1] += m.table.weight[1]
    return x.pow(3).sum()


def _one_of_two(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows, other = m.inner(x)[mask != 0], x[mask != 0]
    chosen = torch.where(rows > other, rows, other * 2)
    chosen = chosen + torch.where(rows > 0, rows, torch.zeros_like(rows)).where(other > 0, 0.5)
    return chosen.square().mean() + torch.where(other > 0, 1.5, rows).sum()


HEADS = [
    _along_rows,
    _samples,
    _both_by_select,
    _one_of_two,
    _added_in_place,
    _of_logits,
    _of_hidden,
    _weighted,
    _by_places,
    _elementwise,
    _reductions,
    _dim_between,
    _elements,
    _again,
    _logarithm,
    _look_up,
    _none,
    _put,
    _experts,
    _experts_at_once,
    _mask_changes,
    _source_changes,
]


@pytest.mark.filterwarnings("error::autopar.UncheckedWarning")
@pytest.mark.parametrize("head", HEADS)
def test_the_step_is_that_of_one_device(head: Head) -> None:
    found = errors(head)
    assert found.worst[1] < 1e-12, found.worst


@pytest.mark.parametrize("head", [_of_logits, _of_hidden, _weighted, _put, _mask_changes])
@pytest.mark.parametrize("constraints", [{"pipeline": {"size": 1, "microbatches": 2}}, {"zero": 3}])
def test_other_plans(head: Head, constraints: dict[str, Any]) -> None:
    """Microbatches have picked unequal numbers of rows, too."""
    found = errors(head, constraints={"data": 2, **constraints})
    assert found.worst[1] < 1e-12, found.worst


def test_extremes_of_picked_rows() -> None:
    checks._warned.clear()
    with pytest.warns(autopar.UncheckedWarning, match="test_picked.py"):
        found = errors(_extremes)
    assert found.worst[1] < 1e-12, found.worst


def _last_of_each(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """As the sentence of BART: the last of equally many picked tokens."""
    ends = mask.eq(2)
    last = m.inner(x)[ends, :].view(x.size(0), -1, WIDTH)[:, -1, :]
    first = m.inner(x)[ends, :].view(x.size(0), -1, WIDTH)[:, 0]
    return m.classes(last).logsumexp(-1).mean() + first.square().sum()


def _ends(places: list[tuple[int, ...]]) -> tuple[Tensor, ...]:
    ids, mask, labels = batch()
    mask = torch.zeros_like(mask)
    for row, columns in zip(mask, places, strict=True):
        row[list(columns)] = 2
    return ids, mask, labels


def test_picked_rows_as_a_matrix() -> None:
    found = errors(_last_of_each, _ends([(1, 3), (2, 4), (0, 5), (4, 5)]))
    assert found.worst[1] < 1e-12, found.worst


def test_rows_that_have_unequal_numbers_fail_when_they_run() -> None:
    """They would be read across rows of the batch."""
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        errors(_last_of_each, _ends([(1,), (2, 4), (0, 3, 5), (4, 5)]))


def _spread(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return m.inner(x)[mask != 0].std(0).sum()


def _in_order(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return m.inner(x)[mask != 0].cumsum(0).square().sum()


def _first(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return m.inner(x)[mask != 0][0].sum()


def _other_mask(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """Equally many rows, but not the same ones."""
    return F.cross_entropy(m.classes(x)[mask != 0], y.clamp(min=0)[(mask != 0).flip(0)])


def _returned(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Any:
    return m.inner(x).mean(), m.inner(x)[mask != 0]


def _nth_of_each(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """The first rows of a table meet the picked ones, in the order in which these are picked."""
    table = m.inner(x).flatten(0, 1)
    return table.gather(1, y[mask != 0][:, None] % WIDTH).sum()


def _first_two(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = m.inner(x)[mask != 0]
    return rows[:2].square().sum()


def _shares(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = m.inner(x)[mask != 0]
    return rows.softmax(0).square().sum()


REFUSED = {
    _spread: "aten.std",
    _in_order: "aten.cumsum",
    _first: "aten.select",
    _first_two: "aten.slice",
    _shares: "aten.softmax",
}


@pytest.mark.parametrize("head", [*REFUSED, _other_mask, _returned, _nth_of_each])
def test_what_needs_to_know_how_many_is_refused(head: Head) -> None:
    # torch 2.11 asks in the trace whether two masks select equally many
    said = r"How many rows are picked|data-dependent expression Ne\(u0, u1\)"
    with pytest.raises(autopar.TraceError, match=said) as caught:
        errors(head)
    assert f"in {head.__name__}" in str(caught.value)
    assert REFUSED.get(head, "") in str(caught.value)
