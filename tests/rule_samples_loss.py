"""Samples for `tests.bruteforce`: losses with a value for each row or sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import autopar.core.ops  # noqa: F401  (registers ops)
from tests.bruteforce import Sample

aten = torch.ops.aten
autopar_ops = torch.ops.autopar
SAMPLES: list[Sample] = []

_ROWS, _CLASSES = 8, 8  # as many of either: dims are told apart by what they are


def _scores() -> Tensor:
    return torch.randn(_ROWS, _CLASSES, dtype=torch.float64)


def _lists() -> Tensor:
    """Several targets a row, up to the first that is negative."""
    found = torch.stack([torch.randperm(_CLASSES) for _ in range(_ROWS)])
    ends = torch.randint(0, _CLASSES, (_ROWS, 1))
    return torch.where(torch.arange(_CLASSES) < ends, found, -1)


def _margins(reduction: int, weighted: bool) -> None:
    def inputs() -> tuple[Tensor, ...]:
        weight = (torch.rand(_CLASSES, dtype=torch.float64),)
        return _scores(), torch.randint(0, _CLASSES, (_ROWS,)), *(weight if weighted else ())

    def run(x: Any, target: Any, *weight: Any) -> Any:
        given = weight[0] if weight else None
        return aten.multi_margin_loss.default(x, target, 1, 0.7, given, reduction)

    def backward() -> tuple[Tensor, ...]:
        given = inputs()
        return torch.randn_like(run(*given)), *given

    def run_backward(grad: Any, x: Any, target: Any, *weight: Any) -> Any:
        given = weight[0] if weight else None
        return aten.multi_margin_loss_backward.default(grad, x, target, 1, 0.7, given, reduction)

    name = f"multi_margin_loss_{reduction}{'_weighted' if weighted else ''}"
    SAMPLES.append(Sample(name, run, inputs))
    SAMPLES.append(Sample(f"{name}_backward", run_backward, backward))


def _multilabel(reduction: int) -> None:
    def run(x: Any, target: Any) -> Any:
        return aten.multilabel_margin_loss_forward.default(x, target, reduction)

    def backward() -> tuple[Tensor, ...]:
        x, target = _scores(), _lists()
        loss, is_target = run(x, target)
        return torch.randn_like(loss), x, target, is_target

    def run_backward(grad: Any, x: Any, target: Any, is_target: Any) -> Any:
        return aten.multilabel_margin_loss_backward.default(grad, x, target, reduction, is_target)

    name = f"multilabel_margin_loss_{reduction}"
    SAMPLES.append(Sample(name, run, lambda: (_scores(), _lists())))
    SAMPLES.append(Sample(f"{name}_backward", run_backward, backward))


for _reduction in (0, 1):
    for _weighted in (False, True):
        _margins(_reduction, _weighted)
    _multilabel(_reduction)


def _sequences(padded: bool) -> tuple[Tensor, ...]:
    """log-probabilities of 9 steps for 4 samples of 6 classes, targets and lengths."""
    log_probs = torch.randn(9, 4, 6, dtype=torch.float64).log_softmax(-1)
    lengths = torch.tensor([3, 1, 2, 3])
    targets = torch.randint(1, 6, (4, 4) if padded else (int(lengths.sum()),))
    return log_probs, targets, torch.tensor([9, 8, 7, 9]), lengths


for _padded in (True, False):
    SAMPLES.append(
        Sample(
            f"ctc_{'padded' if _padded else 'joined'}",
            lambda *given: autopar_ops.ctc.default(*given, 0, False),
            lambda padded=_padded: _sequences(padded),
        )
    )
    SAMPLES.append(
        Sample(
            f"ctc_backward_{'padded' if _padded else 'joined'}",
            lambda *given: autopar_ops.ctc_backward.default(*given, 0, False),
            lambda padded=_padded: (torch.randn(4, dtype=torch.float64), *_sequences(padded)),
        )
    )
