"""Labels and tokens out of range: which input, which value, what is allowed; on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime import lost
from autopar.runtime.index_ranges import check_indices
from autopar.tracer.trace import trace
from tests.dist import RankError, run_ranks, try_ranks


class Tagger(nn.Module):
    """A class for each of the next tokens: the first label of a row is not read."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.words(ids))[:, :-1]
        return F.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())


def batch(**changed: int) -> dict[str, Tensor]:
    """Tokens and labels; `changed`: the value at [3, 2] of an input."""
    torch.manual_seed(0)
    found = {"ids": torch.randint(0, 16, (4, 6)), "labels": torch.randint(0, 10, (4, 6))}
    found["labels"][:, 0] = -7
    for name, value in changed.items():
        found[name][3, 2] = value
    return found


WORDS: dict[tuple[str, int], list[str]] = {
    ("ids", 16): ["input ids holds 16 at [3, 2]", "parameter words.weight has 16 rows", "0 to 15"],
    ("ids", -1): ["input ids holds -1 at [3, 2]", "test_index_ranges.py:"],
    ("labels", 10): ["input labels holds 10 at [3, 2]", "the loss has 10 classes", "0 to 9"],
    ("labels", -5): ["input labels holds -5 at [3, 2]", "-100, which is ignored"],
}


def steps(rank: int, constraints: Any) -> list[str]:
    """What each bad batch raises, in the first step and in a later one."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for when in ("first", "later"):
        torch.manual_seed(0)
        parallel = autopar.parallelize(Tagger(), mesh, batch(), constraints=constraints)
        if when == "later":
            parallel.train_step(**batch())
        for name, value in WORDS:
            with pytest.raises(autopar.AutoparError) as caught:
                parallel.train_step(**batch(**{name: value}))
            found.append(str(caught.value))
        parallel.train_step(**batch(labels=-100))
    return found


@pytest.mark.parametrize(
    "constraints", [{"tensor": {"mode": "1d", "size": 2}}, {"pipeline": {"microbatches": 2}}]
)
def test_all_ranks_are_told_what_is_out_of_range(constraints: Any) -> None:
    for found in run_ranks(steps, 2, constraints):
        for text, words in zip(found, [*WORDS.values()] * 2, strict=True):
            assert all(word in text for word in words), text


class Shares(nn.Module):
    """So many words that a share of their tables, on each rank, is what is looked up in."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(32768, 64), nn.Linear(64, 8192)

    def forward(self, ids: Tensor, labels: Tensor, offset: int = 0) -> Tensor:
        scores = self.head(self.words(ids + offset if offset else ids))[:, :-1]
        return F.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())


def many(**changed: int) -> dict[str, Tensor]:
    """A batch as above with more tokens, so that gathering their scores takes long."""
    found = {name: x.repeat(4, 6).relu() for name, x in batch().items()}
    found["labels"][:, 0] = -7
    for name, value in changed.items():
        found[name][3, 2] = value
    return found


def in_shares(rank: int, pipeline: Any) -> list[str]:
    """What bad batches raise after the first step, with nothing of a table in one piece."""
    tables = {"words.weight": ["Shard(0)"], "head.*": ["Shard(0)"]}
    constraints = {"tensor": {"mode": "1d", "size": 2}, "sequence": "none", "params": tables}
    constraints |= pipeline
    parallel = autopar.parallelize(
        Shares(), init_device_mesh("cpu", (2,)), many(), constraints=constraints, cache=False
    )
    parallel.train_step(**many())
    assert [found.size for found in parallel.first_step.shared] == [32768, 8192]
    found = []
    for name, value in (("ids", 32768), ("ids", -1), ("labels", 8192), ("labels", -5)):
        with pytest.raises(autopar.AutoparError) as caught:
            parallel.train_step(**many(**{name: value}))
        found.append(str(caught.value))
    parallel.train_step(**many(labels=-100))
    parallel.train_step(**many(ids=-1), offset=1)
    with pytest.raises(autopar.AutoparError) as caught:
        parallel.train_step(**many(ids=32767), offset=1)
    return [*found, str(caught.value)]


@pytest.mark.parametrize("pipeline", [{}, {"pipeline": {"size": 1, "microbatches": 2}}])
def test_lookups_in_shares_are_watched_in_every_batch(pipeline: Any) -> None:
    words = [
        "ids holds 32768 at [3, 2]",
        "ids holds -1 at [3, 2]",
        "labels holds 8192 at [3, 2]",
        "labels holds -5 at [3, 2]",
        "32768 is computed from input ids",
    ]
    for found in run_ranks(in_shares, 2, pipeline):
        assert all(word in text for word, text in zip(words, found, strict=True)), found
        assert "parameter words.weight has 32768 rows" in found[0]
        assert "-100, which is ignored" in found[2]


def one_has_it(rank: int, name: str, value: int, shared: bool) -> None:
    """Rank 1 has the index in its half of the batch."""
    lost._INTERVAL_S, lost._SILENCE_S = 0.1, 1.0
    parallel = autopar.parallelize(
        Tagger(), init_device_mesh("cpu", (2,)), batch(), constraints={"data": 2}
    )
    parallel.train_step(**batch())
    given: Any = batch(**{name: value})
    if shared:
        given = next(iter(parallel.shard_dataloader([given])))
    parallel.train_step(**given)


@pytest.mark.parametrize("shared", [False, True])
def test_the_rank_that_looks_nothing_of_it_up_is_told_of_the_other(shared: bool) -> None:
    without, having = try_ranks(one_has_it, 2, "ids", 16, shared)
    assert isinstance(without, RankError) and isinstance(having, RankError)
    place = "[1, 2] of this rank's share" if shared else "[3, 2]"
    assert having.kind == "AutoparError", having.trace
    assert f"input ids holds 16 at {place}" in having.message
    assert without.kind == "LostRankError", without.trace
    assert "rank 1 ended (AutoparError: input ids holds 16" in without.message


def test_a_rank_that_fails_by_another_ones_share_says_so() -> None:
    without, having = try_ranks(one_has_it, 2, "labels", 10, True)  # the loss is of all tokens
    assert isinstance(without, RankError) and isinstance(having, RankError)
    assert "input labels holds 10 at [1, 2]" in having.message
    assert "index 10 is out of bounds" in without.message
    assert "another rank's does" in without.message


class Reads(nn.Module):
    """The sum of what a function makes of a parameter and an index."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 4))
        self.function = function

    def forward(self, index: Tensor) -> Tensor:
        return self.function(self.table, index).sum()


READS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int, str]] = {
    "rows": (lambda t, i: t[i], 6, "allowed are -6 to 5"),
    "rows from the end": (lambda t, i: t[i], -7, "holds -7"),
    "selected": (lambda t, i: t.index_select(1, i), 4, "0 to 3"),
    "gathered": (lambda t, i: t.gather(0, i[:, None].expand(3, 4)), 6, "0 to 5"),
    "added": (lambda t, i: t.new_zeros(5, 4).index_add(0, i, t[:3]), 5, "0 to 4"),
    "bags": (lambda t, i: F.embedding_bag(i[:, None], t), 6, "table has 6 rows"),
    "computed": (lambda t, i: F.embedding(i * 2, t), 3, "6 is computed from input args_0"),
    "masked": (lambda t, i: F.embedding(torch.where(i < 0, 0, i), t), 6, "holds 6 at [1]"),
}


@pytest.mark.parametrize("name", READS)
def test_indices_of_any_lookup(name: str) -> None:
    function, bad, words = READS[name]
    index = torch.tensor([1, 1, 2])
    traced = trace(Reads(function), (index,))
    check_indices(traced, [index])
    index[1] = bad
    with pytest.raises(autopar.AutoparError) as caught:
        check_indices(traced, [index])
    assert words in str(caught.value)
    with pytest.raises((IndexError, RuntimeError)):
        Reads(function)(index)
