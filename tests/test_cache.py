"""The plan cache: the same question is answered from it, another one is not."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cache import PlanCache, cache_directory
from autopar.core.constraints import Constraints
from autopar.cost_model import Cluster
from autopar.tracer.trace import trace


class Net(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.up(x).relu())).square().mean()


X = (torch.ones(4, 8),)
TWO = Cluster.from_profile("cpu-gloo", devices_per_node=2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "plans"))
    assert cache_directory() == tmp_path / "plans"
    return tmp_path / "plans"


def forbid(*_: object, **__: object) -> None:
    raise AssertionError("solved again")


def test_the_same_question_is_not_solved_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = autopar.plan(Net(), TWO, X)
    assert len(list(folder.glob("*.json"))) == 1
    assert not list(folder.glob("*.part"))
    monkeypatch.setattr("autopar.search.mesh_searches.StepSearch", forbid)
    assert autopar.plan(Net(), TWO, X) == first
    with pytest.raises(AssertionError, match="solved again"):
        autopar.plan(Net(), TWO, X, cache=False)


def test_whatever_matters_is_in_the_key() -> None:
    cache = PlanCache(Path("unused"))
    traced = trace(Net(), X, training=True)
    base = (traced, TWO, Constraints(), None, "adamw")
    keys = {
        cache.key(*base),
        cache.key(trace(Net(0.2), X, training=True), *base[1:]),
        cache.key(trace(Net(), (torch.ones(8, 8),), training=True), *base[1:]),
        cache.key(trace(Net(), X, training=False), *base[1:]),
        cache.key(traced, Cluster.from_profile("h100-sxm", devices_per_node=2), *base[2:]),
        cache.key(traced, TWO, Constraints.parse({"data": 2}), None, "adamw"),
        cache.key(traced, TWO, Constraints(), 1 << 20, "adamw"),
        cache.key(traced, TWO, Constraints(), None, "sgd"),
        cache.key(traced, TWO, Constraints(), None, partial(torch.optim.SGD, momentum=0.9)),
        cache.key(traced, TWO, Constraints(), None, partial(torch.optim.RAdam, lr=0.1)),
    }
    assert len(keys) == 10
    assert cache.key(*base, several=True) not in keys
    assert cache.key(traced, TWO, Constraints(), None, torch.optim.SGD) in keys  # it is "sgd"
    assert cache.key(trace(Net(), X, training=True), *base[1:]) == cache.key(*base)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 0}'])
def test_a_damaged_entry_is_ignored_with_a_warning(folder: Path, text: str) -> None:
    first = autopar.plan(Net(), TWO, X)
    (entry,) = folder.glob("*.json")
    entry.write_text(text)
    with pytest.warns(UserWarning, match="cannot be read"):
        again = autopar.plan(Net(), TWO, X)
    assert again.parameters == first.parameters
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autopar.plan(Net(), TWO, X)  # the entry was replaced


def test_a_folder_that_cannot_be_made_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "file" / "plans"))
    with pytest.warns(UserWarning, match="not cached"):
        autopar.plan(Net(), TWO, X)
