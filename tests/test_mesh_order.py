"""Meshes whose ranks stand in an order of their own: the same numbers, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.verification import relative_error
from tests.dist import RankError, run_ranks, try_ranks
from tests.test_gloo import whole
from tests.test_training_matrix import build


def error_of_training(rank: int, ranks: Any, pins: dict[str, Any]) -> float:
    """The largest relative error of a gradient, or of a parameter as it was given."""
    (single, batch), (model, _) = build("vit"), build("vit")
    mesh = DeviceMesh("cpu", ranks)
    parallel = autopar.parallelize(model, mesh, batch, constraints=pins, cache=False)
    parallel.train_step(**batch)
    single(**batch).loss.backward()
    expected = dict(single.named_parameters())
    found = [0.0]
    largest = 1e-6 * max(float(p.grad.norm()) for p in expected.values() if p.grad is not None)
    for name, parameter in parallel.named_parameters():
        reference = expected[name]
        assert reference.grad is not None and parameter.grad is not None
        found.append(relative_error(whole(parameter.detach()), reference.detach()))
        found.append(relative_error(whole(parameter.grad), reference.grad, largest))
    return max(found)


@pytest.mark.parametrize("pins", [{"tensor": "1d"}, {"data": 2, "zero": 3}], ids=["1d", "zero3"])
def test_ranks_that_descend_on_an_axis_are_refused(pins: dict[str, Any]) -> None:
    for found in try_ranks(error_of_training, 2, [1, 0], pins):
        assert isinstance(found, RankError)
        assert found.kind == "AutoparError" and "[1, 0]" in found.message, found.message


@pytest.mark.parametrize(
    ("ranks", "pins"),
    [
        ([1, 0], {"pipeline": {"size": 2, "microbatches": 2}}),
        ([[0, 2], [1, 3]], {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3}),
        ([[2, 3], [0, 1]], {"pipeline": {"size": 2, "microbatches": 2}, "tensor": "1d"}),
    ],
    ids=["pipeline", "transposed", "pipeline and 1d"],
)
def test_other_orders_give_the_same_numbers(ranks: Any, pins: dict[str, Any]) -> None:
    count = torch.tensor(ranks).numel()
    assert max(run_ranks(error_of_training, count, ranks, pins)) <= 1e-9
