"""Losses of rows and samples: split over data ranks and microbatches, with each reduction."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter
from torch.nn import functional as F

import autopar
from autopar.tracer.trace import trace

_BATCH, _STEPS, _CLASSES = 4, 9, 6
Loss = Callable[[Tensor, Tensor], Tensor]
_WEIGHTS = torch.rand(_CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
_INPUT_LENGTHS = torch.tensor([9, 2, 8, 9])  # the second is too short for its target
_TARGET_LENGTHS = torch.tensor([3, 4, 1, 2])


class Scores(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.inner = nn.Linear(8, _CLASSES)
        self.loss = loss

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.inner(x), targets)


def _margin(x: Tensor, targets: Tensor) -> Tensor:
    return F.multi_margin_loss(x[:, 0], targets[:, 0])


def _weighted(x: Tensor, targets: Tensor) -> Tensor:
    return F.multi_margin_loss(x[:, 0], targets[:, 0], 2, 0.5, _WEIGHTS, reduction="sum")


def _margins(x: Tensor, targets: Tensor) -> Tensor:
    return F.multi_margin_loss(x[:, 0], targets[:, 0], reduction="none").square().mean()


def _labels(x: Tensor, targets: Tensor) -> Tensor:
    listed = F.pad(targets, (0, _CLASSES - targets.shape[1]), value=-1)
    return F.multilabel_margin_loss(x[:, 0], listed) + F.multilabel_margin_loss(
        x[:, 1], listed, reduction="sum"
    )


def _ctc(x: Tensor, targets: Tensor) -> Tensor:
    log_probs = x.log_softmax(-1).transpose(0, 1)
    loss = nn.CTCLoss(zero_infinity=True)
    return loss(log_probs, targets, _INPUT_LENGTHS, _TARGET_LENGTHS)


def _ctcs(x: Tensor, targets: Tensor) -> Tensor:
    """Numbers for lengths, another blank."""
    log_probs = x.log_softmax(-1).transpose(0, 1)
    lengths = [_STEPS] * _BATCH, _TARGET_LENGTHS.tolist()
    losses = F.ctc_loss(log_probs, targets - 1, *lengths, blank=_CLASSES - 1, reduction="none")
    return losses.square().mean() + F.ctc_loss(
        log_probs, targets - 1, *lengths, blank=_CLASSES - 1, reduction="sum"
    )


def _picked(x: Tensor, targets: Tensor) -> Tensor:
    """Targets that a mask picks out of rows, of any length, as transformers joins them."""
    log_probs = x.log_softmax(-1).transpose(0, 1)
    labels = torch.where(targets % 3 != targets[:, :1] % 3, targets, -100)
    mask = labels >= 0
    lengths = torch.full((_BATCH,), _STEPS), mask.sum(-1)
    loss = F.ctc_loss(log_probs, labels.masked_select(mask), *lengths)
    return loss + F.ctc_loss(log_probs, labels[mask], *lengths, reduction="sum")


def _joined(x: Tensor, targets: Tensor) -> Tensor:
    """Targets one behind the other, and a single sample."""
    log_probs = x.log_softmax(-1).transpose(0, 1)
    full = torch.full((_BATCH,), targets.shape[1])
    joined = F.ctc_loss(log_probs, targets.flatten(), torch.full((_BATCH,), _STEPS), full)
    lengths = torch.tensor(_STEPS), torch.tensor(targets.shape[1])
    return joined + F.ctc_loss(log_probs[:, 0], targets[0], *lengths)


def _found(loss: Loss, constraints: Any) -> autopar.Plan:
    torch.manual_seed(0)
    model = Scores(loss).double()
    x = torch.randn(_BATCH, _STEPS, 8, dtype=torch.float64)
    targets = torch.stack([torch.randperm(_CLASSES - 1)[:4] + 1 for _ in range(_BATCH)])
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.UnsupportedOpWarning)
        warnings.simplefilter("error", autopar.UncheckedWarning)
        plan = autopar.plan(model, cluster, (x, targets), constraints=constraints)
    found = autopar.verify(plan, model, (x, targets))
    assert set(found.gradients) == {"inner.weight", "inner.bias"}
    assert found.worst[1] < 1e-9, found.worst
    return plan


_MORE = [pytest.param(loss, marks=pytest.mark.slow) for loss in (_margin, _margins, _ctcs, _picked)]


@pytest.mark.parametrize("loss", [_weighted, _labels, _ctc, *_MORE])
def test_rows_are_split(loss: Loss) -> None:
    plan = _found(loss, {"data": 2})
    gathered = sum(c.num_bytes for c in plan.predicted.comm_bytes if c.kind == "all_gather")
    if loss is not _picked:  # so few scores are sent sooner than labels and losses
        assert gathered <= 8 * 2 * _BATCH  # losses at most, but no scores
    _found(loss, {"pipeline": {"size": 1, "microbatches": 2}})


@pytest.mark.slow
def test_targets_that_are_joined_stay_whole() -> None:
    _found(_joined, {"data": 2})


def test_a_target_that_does_not_fit_has_no_loss() -> None:
    x, targets = torch.randn(_BATCH, _STEPS, _CLASSES), torch.ones(_BATCH, 4, dtype=torch.int64)
    log_probs = x.log_softmax(-1).transpose(0, 1)
    given = log_probs, targets, _INPUT_LENGTHS, _TARGET_LENGTHS
    losses = torch.ops.autopar.ctc(*given, 0, False)
    assert losses.isinf().tolist() == [False, True, False, False]
    torch.testing.assert_close(losses, F.ctc_loss(*given, reduction="none"))
    assert torch.ops.autopar.ctc(*given, 0, True)[1] == 0


def test_lengths_that_do_not_add_up_are_an_error() -> None:
    def loss(x: Tensor, targets: Tensor) -> Tensor:
        log_probs = x.log_softmax(-1).transpose(0, 1)
        steps = torch.full((_BATCH,), _STEPS)
        return F.ctc_loss(log_probs, targets[targets > 0], steps, (targets > 2).sum(-1))

    model = Scores(loss)
    x, targets = torch.randn(_BATCH, _STEPS, 8), torch.full((_BATCH, 4), 3)
    traced = trace(model, (x, targets))

    def run() -> Tensor:
        given = {"input": iter((x, targets)), "parameter": iter(model.parameters())}
        others = {"seed": torch.tensor(0), "tangent": torch.ones(())}
        feeds = [others[s.kind] if s.kind in others else next(given[s.kind]) for s in traced.inputs]
        return Interpreter(traced.graph_module).run(*feeds, enable_io_processing=False)[0]

    torch.testing.assert_close(run(), model(x, targets))
    targets[0, 0] = 1
    for each in (run, lambda: model(x, targets)):
        with pytest.raises(RuntimeError, match="size"):
            each()


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        model = Scores(lambda x, targets: _ctcs(x, targets) + _picked(x, targets))
    inputs = torch.randn(_BATCH, _STEPS, 8), torch.ones(_BATCH, 4, dtype=torch.int64)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    assert autopar.plan(model, cluster, inputs, constraints={"data": 2}).parameters


class Offset(nn.Module):
    """A loss with a parameter that is added to it: its gradient is that of the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.offset = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean() + self.offset


@pytest.mark.parametrize(
    "constraints", [{"data": 2}, {"pipeline": {"size": 1, "microbatches": 2}}], ids=str
)
def test_a_parameter_may_be_added_to_the_loss(constraints: dict[str, Any]) -> None:
    model, inputs = Offset().double(), {"x": torch.randn(8, 8, dtype=torch.float64)}
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=constraints, cache=False)
    assert autopar.verify(plan, model, inputs).worst[1] <= 1e-12
