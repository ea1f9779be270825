"""Models that are no plain modules are refused by every entry point, with what to pass instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.tracer.accepted import check_model
from tests import handwritten as hw
from tests.dist import try_ranks


def cluster() -> Any:
    return autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)


def scripted() -> nn.Module:
    made: nn.Module = torch.jit.script(nn.Linear(16, 4))
    return made


def traced() -> nn.Module:
    made: nn.Module = torch.jit.trace(nn.Linear(16, 4), torch.randn(8, 16))
    return nn.Sequential(nn.Linear(16, 16), made)


REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "scripted": (scripted, ["the model is a RecursiveScriptModule", "TorchScript"]),
    "traced": (traced, ["module '1' is a", "TorchScript", "Python module"]),
    "function": (lambda: torch.relu, ["builtin_function_or_method", "torch.nn.Module"]),
    "class": (lambda: nn.Linear, ["the class Linear", "instance"]),
    "synced": (
        lambda: nn.Sequential(nn.Linear(16, 4), nn.SyncBatchNorm(4)),
        ["module '1' is a SyncBatchNorm of 4 features", "nn.BatchNorm1d", "whole batch"],
    ),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_plain_module_is_refused(make: Callable[[], Any], words: list[str]) -> None:
    model, inputs = make(), (torch.randn(8, 16),)
    plan = autopar.plan(nn.Linear(16, 4), cluster(), inputs)
    calls: list[Callable[[], Any]] = [
        lambda: autopar.plan(model, cluster(), inputs),
        lambda: autopar.verify(plan, model, inputs),
        lambda: autopar.simulate(plan, model, inputs),
    ]
    for call in calls:
        with pytest.raises(autopar.TraceError) as caught:
            call()
        for word in words:
            assert word in str(caught.value)


def test_a_synced_norm_in_evaluation_mode_is_a_plain_one() -> None:
    check_model(nn.SyncBatchNorm(4).eval())


class Table(nn.Module):
    """Looks rows up, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(32, 16, sparse=True)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        found = self.rows(ids)  # gets a sparse gradient
        return nn.functional.cross_entropy(self.head(found), labels)


def test_sparse_gradients_are_refused_where_there_are_any() -> None:
    inputs = (torch.randint(0, 32, (8,)), torch.randint(0, 4, (8,)))
    with pytest.raises(autopar.TraceError) as caught:
        autopar.plan(Table(), cluster(), inputs)
    for word in ("test_refused_models.py:", "self.rows(ids)", "rows.weight", "(32, 16)", "sparse="):
        assert word in str(caught.value)
    frozen = Table()
    frozen.rows.requires_grad_(False)
    plan = autopar.plan(frozen, cluster(), inputs, constraints={"data": 2}, cache=False)
    assert autopar.verify(plan, frozen, inputs).worst[1] < 1e-5


class Neighbours(nn.Module):
    """Multiplies by a sparse matrix: its own, a given one or one that it makes."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("own", torch.eye(4).to_sparse() if own else None)

    def forward(self, x: Tensor, pairs: Tensor) -> Tensor:
        given = pairs if self.own is None else self.own
        if not given.is_floating_point():
            given = torch.sparse_coo_tensor(pairs, torch.ones(8), (4, 4))
        return torch.sparse.mm(given, self.inner(x)).square().mean()


PAIRS = torch.randint(0, 4, (2, 8))


@pytest.mark.parametrize(
    ("own", "pairs", "words"),
    [
        (True, PAIRS, "buffer own"),
        (False, torch.eye(4).to_sparse_csr(), r"input args\[1\].*csr"),
        (False, PAIRS, r"torch.sparse_coo_tensor\(pairs"),
    ],
)
def test_sparse_matrices_are_refused(own: bool, pairs: Tensor, words: str) -> None:
    with pytest.raises(autopar.TraceError, match=words) as caught:
        autopar.plan(Neighbours(own), cluster(), (torch.randn(4, 4), pairs), cache=False)
    assert "index_add" in str(caught.value)


def test_nested_rows_are_refused() -> None:
    rows = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    with pytest.raises(autopar.TraceError, match="Pad the rows"):
        autopar.plan(nn.Linear(4, 4), cluster(), (rows,), cache=False)


def wrapped(rank: int) -> list[str]:
    """What parallelize says of models that torch has parallelized, or that are none."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2,))
    sharded = hw.Mlp()
    fully_shard(sharded, mesh=mesh)
    found = []
    for model in (DistributedDataParallel(hw.Mlp()), sharded, scripted(), hw.Mlp):
        with pytest.raises(autopar.TraceError) as caught:
            autopar.parallelize(model, mesh, hw.vectors())  # type: ignore[arg-type]
        found.append(str(caught.value))
    return found


def test_what_is_parallel_already_is_refused_on_every_rank() -> None:
    for outcome in try_ranks(wrapped, 2, timeout=100):
        assert isinstance(outcome, list), outcome
        replicated, sharded, script, kind = outcome
        assert "DistributedDataParallel" in replicated and "pass model.module" in replicated
        assert "layers.0.0.weight of shape (32, 16) is a DTensor" in sharded, sharded
        assert "plain module; autopar shards it" in sharded
        assert "TorchScript" in script and "the class Mlp" in kind
