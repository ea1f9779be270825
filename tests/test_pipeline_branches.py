"""Pipelines of models that read other parameters in other steps: a rank keeps what it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.dist import run_ranks
from tests.test_gloo import whole


class Branches(nn.Module):
    """A table that is also the head, a second head in training alone, and one that is asked for."""

    def __init__(self, width: int = 8, words: int = 12) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.beside = nn.Linear(width, words)
        self.asked = nn.Linear(width, words)

    def forward(
        self,
        labels: Tensor,
        ids: Tensor | None = None,
        embedded: Tensor | None = None,
        asked: bool = False,
    ) -> Tensor:
        x = self.table(ids) if embedded is None else embedded
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = x @ self.table.weight.t()
        if asked:
            logits = logits + self.asked(x)
        loss = F.cross_entropy(logits, labels)
        return loss + F.cross_entropy(self.beside(x), labels) if self.training else loss


def batch(step: int, embedded: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(0, 12, (2, 8), generator=generator)
    rows = torch.randn(8, 8, dtype=torch.float64, generator=generator)
    return {"labels": labels, **({"embedded": rows} if embedded else {"ids": ids})}


def steps(model: nn.Module, kinds: list[tuple[str, bool]]) -> dict[str, Any]:
    """Losses of steps, each with another set of parameters, and what these are after them."""
    found: dict[str, Any] = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    for step, (kind, asked) in enumerate(kinds):
        given = {**batch(step, kind == "embedded"), "asked": asked}
        model.train(kind != "eval")
        with torch.set_grad_enabled(kind != "eval"):
            loss = model(**given)
        if kind != "eval":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    return {**found, **{name: whole(p).detach() for name, p in model.named_parameters()}}


KINDS = [("ids", True), ("ids", False), ("eval", False), ("embedded", True), ("ids", True)]


def compared(rank: int, chunks: int, kinds: list[tuple[str, bool]]) -> None:
    plain, model = Branches().double(), Branches().double()
    torch.manual_seed(0)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.5)
    model.load_state_dict(plain.state_dict())
    pipeline: dict[str, Any] = {"size": 2, "microbatches": 2}
    if chunks > 1:
        pipeline |= {"schedule": "interleaved", "chunks": chunks}
    mesh = init_device_mesh("cpu", (2,))
    example = {**batch(0, kinds[0][0] == "embedded"), "asked": kinds[0][1]}
    parallel = autopar.parallelize(model, mesh, example, constraints={"pipeline": pipeline})
    expected, found = steps(plain, kinds), steps(parallel, kinds)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("chunks", [1, 2])
def test_steps_that_read_fewer_parameters(chunks: int) -> None:
    run_ranks(compared, 2, chunks, KINDS)


def test_steps_that_read_more_parameters() -> None:
    run_ranks(compared, 2, 1, [("ids", False), ("ids", True), ("ids", False)])


def refused(rank: int) -> str:
    """The table is held where the head reads it, and then wanted by the stage before."""
    mesh = init_device_mesh("cpu", (2,))
    example = {**batch(0, True), "asked": False}
    pins = {"pipeline": {"size": 2, "microbatches": 2}}
    parallel = autopar.parallelize(Branches().double(), mesh, example, constraints=pins)
    with pytest.raises(autopar.ConstraintError) as told:
        parallel(**batch(1, False), asked=False)
    return str(told.value)


def test_a_stage_that_would_read_earlier_is_refused_on_every_rank() -> None:
    for told in run_ranks(refused, 2):
        assert "table.weight" in told and "example_inputs" in told
