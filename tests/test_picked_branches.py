"""Branches on whether a mask picks anything are traced as where it does, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import autopar
from autopar.tracer import checks
from tests.test_picked import CLASSES, Head, Model, batch, errors


def _of_all(m: Model, x: Tensor) -> Tensor:
    """Gives all parameters a gradient, which one device leaves out where none is picked."""
    return m.inner(x).sum() + m.classes(x).sum()


def _any(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows, loss = y >= 0, _of_all(m, x)
    if rows.any():
        loss = loss + F.cross_entropy(m.classes(x)[rows], y[rows])
    if rows.sum() > 0:
        loss = loss + m.inner(x)[rows].square().mean()
    return loss


def _size(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """As DeBERTa does."""
    if y.dim() > 1:
        y = y.flatten()
        index = (y >= 0).nonzero()
        if index.size(0) > 0:
            logits = m.classes(x).flatten(0, 1)
            chosen = torch.gather(logits, 0, index.expand(index.size(0), CLASSES))
            y = torch.gather(y, 0, index.view(-1))
            loss = F.cross_entropy(chosen, y.view(-1))
        else:
            loss = torch.tensor(0.0).to(x)
    else:
        loss = F.cross_entropy(m.classes(x), y)
    return loss + _of_all(m, x)


def _skipped(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    out, flat = torch.zeros_like(x), x.flatten(0, 1)
    for kind in range(3):
        rows = mask == kind
        if rows.any():
            out[rows] = m.inner(x[rows]) * (kind + 1)
        (places,) = torch.where(rows.flatten())
        if places.numel() == 0:
            continue
        out = out.flatten(0, 1).index_add(0, places, m.inner(flat[places])).view_as(x)
    return out.square().sum() + _of_all(m, x)


def _focal(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """Functions of rows, and one of a mean that is multiplied by 0 where there are none."""
    rows, loss = y >= 0, _of_all(m, x)
    if rows.any():
        nll = F.cross_entropy(m.classes(x)[rows], y[rows])
        loss = loss + (1 - torch.exp(-nll)) ** 2 * nll
        loss = loss + m.inner(x)[rows].exp().mean() + m.inner(x)[rows].mean(-1).cos().sum()
    return loss


@pytest.mark.parametrize("picked", ["some", "none"])
@pytest.mark.parametrize("head", [_any, _size, _skipped, _focal])
def test_a_branch_on_whether_anything_is_picked(head: Head, picked: str) -> None:
    ids, mask, labels = batch()
    if picked == "none":
        mask, labels = mask + 5, torch.full_like(labels, -100)
    checks._warned.clear()
    with pytest.warns(
        autopar.UncheckedWarning, match="whether a mask picks anything(.|\n)*zeros where"
    ):
        found = errors(head, (ids, mask, labels))
    assert found.worst[1] < 1e-12, found.worst


def _other_side(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = y >= 0
    if rows.any():
        return F.cross_entropy(m.classes(x)[rows], y[rows])
    return m.inner(x).sum()


def _does_more(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = y >= 0
    if (rows.flatten().nonzero()).size(0) > 0:
        loss = F.cross_entropy(m.classes(x)[rows], y[rows])
    else:
        loss = m.inner(x).sum()
    return loss


def _picks_nothing(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = y >= 0
    if rows.any():
        x = m.inner(x)
    return F.cross_entropy(m.classes(x)[rows], y[rows])


def _of_many(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = y >= 0
    if rows.sum() > 2:
        x = x + m.inner(x)[rows].mean()
    return x.square().sum()


def _of_mean(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows, loss = y >= 0, _of_all(m, x)
    if rows.any():
        loss = loss + m.inner(x)[rows].mean().exp()
    return loss


def _of_named_mean(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows, loss = y >= 0, _of_all(m, x)
    if rows.any():
        found = m.inner(x)[rows].mean(0)
        share = torch.sigmoid(found * 2) - 0.0
        loss += share.sum()
    return loss


def _of_rest(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows, loss = y >= 0, _of_all(m, x)
    if rows.any():
        left = 1 - F.cross_entropy(m.classes(x)[rows], y[rows])
        loss = loss + left
    return loss


@pytest.mark.parametrize(
    "head",
    [_other_side, _does_more, _picks_nothing, _of_many, _of_mean, _of_named_mean, _of_rest],
)
def test_a_branch_that_does_something_else_is_refused(head: Head) -> None:
    with pytest.raises(autopar.TraceError, match=f"in {head.__name__}: if") as caught:
        errors(head)
    assert "decides what runs" in str(caught.value)


# --- what is nan of no rows ---------------------------------------------------------------------
def _by_hand(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows, loss = y >= 0, _of_all(m, x)
    if rows.sum() > 0:
        each = F.cross_entropy(m.classes(x)[rows], y[rows], reduction="none")
        loss = (
            loss - each.sum() * 2 / rows.sum() + m.inner(x)[rows].mean() / m.inner(x)[rows].norm()
        )
    return loss


def _smoothed(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows, loss = y >= 0, torch.zeros((), dtype=x.dtype)
    if rows.any():
        loss = F.cross_entropy(m.classes(x)[rows], y[rows], label_smoothing=0.1)
    return loss + _of_all(m, x)


def _greatest(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows, loss = y >= 0, _of_all(m, x)
    if rows.any():
        found = m.inner(x)[rows]
        loss += found.max() + found.logsumexp(0).sum()
    return loss


@pytest.mark.filterwarnings("ignore::autopar.UncheckedWarning")
@pytest.mark.parametrize("picked", ["some", "none"])
@pytest.mark.parametrize("head", [_by_hand, _smoothed, _greatest])
def test_what_is_nan_of_no_rows_is_0_behind_a_branch(head: Head, picked: str) -> None:
    ids, mask, labels = batch()
    if picked == "none":
        labels = torch.full_like(labels, -100)
    found = errors(head, (ids, mask, labels))
    assert found.worst[1] < 1e-12, found.worst


# --- what picking does not undo -----------------------------------------------------------------
def _counted(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows, loss, terms = y >= 0, _of_all(m, x), 1
    if rows.any():
        loss = loss + m.inner(x)[rows].mean()
        terms += 1
    return loss / terms


def _counted_in_turn(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    loss, terms = _of_all(m, x), 0
    for kind in range(3):
        (places,) = torch.where((y == kind).flatten())
        if places.numel() == 0:
            continue
        loss = loss + m.inner(x).flatten(0, 1)[places].mean()
        terms += 1
    return loss / max(terms, 1)


def _collected(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows, losses = y >= 0, [_of_all(m, x)]
    if rows.any():
        losses.append(m.inner(x)[rows].mean())
    return torch.stack(losses).mean()


def _offset(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = y >= 0
    if rows.any():
        loss = 1 - m.inner(x)[rows].mean()
    else:
        loss = torch.tensor(0.0).to(x)
    return loss + _of_all(m, x)


def _replaced(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows, loss = y >= 0, _of_all(m, x)
    if rows.any():
        loss = loss * 2 + m.inner(x)[rows].mean()
    return loss


def _changed(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    rows = y >= 0
    if rows.any():
        out = m.inner(x).clone()
        out[rows] = x[rows]
        x = out
    return x.square().sum()


def _by_numbers(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """Places that are all 0 pick rows, too."""
    places, loss = mask[0], _of_all(m, x)
    if places.sum() > 0:
        loss = loss + m.table.weight[places].sum()
    return loss


OTHERS = [_counted, _counted_in_turn, _collected, _offset, _replaced, _changed, _by_numbers]


@pytest.mark.parametrize("head", OTHERS)
def test_a_branch_that_does_more_than_picking_is_refused(head: Head) -> None:
    with pytest.raises(autopar.TraceError, match=f"in {head.__name__}: if") as caught:
        errors(head)
    assert "decides what runs" in str(caught.value)


def _kept(m: Model, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """A temporary name, a zero that is replaced, rows that are added to and written."""
    loss, out = torch.zeros((), dtype=x.dtype), x.clone()
    for kind in range(3):
        rows = mask == kind
        if rows.any():
            found = m.inner(x)[rows]
            out[rows] = found + 1
        (places,) = torch.where(rows.flatten())
        if places.numel() == 0:
            continue
        found = m.inner(x).flatten(0, 1)[places]
        out.view(-1, x.size(-1)).index_add_(0, places, found)
    for kind in range(2):
        token, place = torch.where(mask == kind)
        if place.numel() > 0:
            out[token, place] = out[token, place] * 2
    if (y >= 0).any():
        loss = F.cross_entropy(m.classes(x)[y >= 0], y[y >= 0])
    return loss + out.square().sum() + _of_all(m, x)


@pytest.mark.filterwarnings("ignore::autopar.UncheckedWarning")
def test_a_branch_may_have_names_of_its_own() -> None:
    found = errors(_kept)
    assert found.worst[1] < 1e-12, found.worst
