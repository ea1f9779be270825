"""Inputs that a forward cannot be called with: the text has its signature, and what was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import autopar
from tests import handwritten as hw

X, Y = torch.randn(8, 16), torch.randint(0, 4, (8,))


class Scored(nn.Module):
    """Needs both of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return cross_entropy(self.linear(x), y) * scale


def one(output: Tensor) -> Tensor:
    return output.mean()


SCORED = "Scored.forward(x, y, scale=1.0) at "
CASES: dict[str, tuple[nn.Module, Any, Callable[..., Any] | None, list[str]]] = {
    "missing": (Scored(), (X,), None, [SCORED, "misses y", "given: float32 [8, 16]"]),
    "none": (Scored(), (), None, [SCORED, "misses x, y", "given: nothing"]),
    "extra": (Scored(), (X, Y, 2.0, Y), None, [SCORED, "takes 3", "4 are given", "a float"]),
    "misnamed": (
        Scored(),
        {"x": X, "labels": Y},
        None,
        [SCORED, "misses y and has no input labels", "x=float32 [8, 16], labels=int64 [8]"],
    ),
    "bare tensor": (
        nn.Linear(16, 16),
        X,
        mse_loss,
        [
            "Linear.forward(input)",
            "misses input",
            "given: nothing, and float32 [8, 16] for loss_fn",
            "(x, tar",
        ],
    ),
    "loss_fn": (nn.Linear(16, 4), (X, Y), one, ["one(output) at ", "takes 1 by position, and 2"]),
    "no function": (nn.Linear(16, 4), (X, Y), "mse", ["loss_fn is 'mse', a str"]),  # type: ignore
}


@pytest.mark.parametrize(("model", "inputs", "loss_fn", "words"), CASES.values(), ids=CASES)
def test_a_call_that_does_not_fit(
    model: nn.Module, inputs: Any, loss_fn: Callable[..., Any] | None, words: list[str]
) -> None:
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with pytest.raises(autopar.TraceError) as caught:
        autopar.plan(model, cluster, inputs, loss_fn=loss_fn)
    for word in words:
        assert word in str(caught.value)
    assert "torch.export" not in str(caught.value)


class Miscalled(hw.Mlp):
    """Calls one of its own modules wrongly: its signature is not at fault."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(x, labels)  # one input too many


def test_a_wrong_call_inside_of_the_forward_names_its_line() -> None:
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with pytest.raises(autopar.TraceError, match=r"test_call_errors\.py:\d+ in forward"):
        autopar.plan(Miscalled(), cluster, hw.vectors())
