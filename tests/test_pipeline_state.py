"""State of a pipeline on real gloo ranks: buffers that stages update, files of the whole model.

Each rank holds the parameters of its own stages; a file has those of all.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests import zoo
from tests.dist import run_ranks
from tests.test_gloo import whole

ONE_TURN = {"pipeline": {"size": 2, "microbatches": 1}}


class Running(nn.Module):
    """Batch norms, and buffers of the whole model.

    Blocks of both stages update `level`, none does `table`, and `count` is updated by no block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2)
        )
        self.register_buffer("level", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("odd", torch.zeros(3, dtype=torch.bool), persistent=False)
        self.register_buffer("table", torch.linspace(1, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        level, table = self.get_buffer("level"), self.get_buffer("table")
        for layer in self.layers:
            x = x + layer(x + level) * table
            if self.training:
                with torch.no_grad():
                    level.mul_(0.9).add_(x.mean(0))
        if self.training:
            self.get_buffer("count").add_(1)
            self.get_buffer("odd").logical_not_()
        return x.square().mean()


def running(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Running().double()


def vectors(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=generator, dtype=torch.float64)


def parallel_running(seed: int, constraints: Any) -> tuple[Any, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = autopar.parallelize(
        running(seed), mesh, vectors(0), constraints=constraints, cache=False
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def same_buffers(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


def updated(rank: int, folder: str) -> list[str]:
    """Three steps beside one device; buffers that the stages of this rank update."""
    ours, optimizer = parallel_running(0, ONE_TURN)
    single = running(0)
    theirs = torch.optim.SGD(single.parameters(), lr=0.1)
    for step in range(3):
        loss = ours.train_step(vectors(step))
        expected = single(vectors(step))
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=0)
        expected.backward()
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
        same_buffers(dict(ours.named_buffers()), dict(single.named_buffers()))
    named = dict(single.named_buffers())
    state = {name: value for name, value in ours.state_dict().items() if name in named}
    del named["odd"]
    same_buffers(state, named)
    autopar.save_checkpoint(folder, ours, optimizer, step=3)
    autopar.save_safetensors(folder, ours)
    if rank == 0:
        written = load_file(f"{folder}/model.safetensors")
        same_buffers({name: written[name] for name in named}, named)
        assert written.keys() == named.keys() | dict(single.named_parameters()).keys()
    return [name for name, _ in ours.first_step.updated.get(rank, [])]


def taken_up(rank: int, folder: str, constraints: Any) -> None:
    single = running(0)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    for step in range(3):
        single(vectors(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ours, optimizer = parallel_running(5, constraints)
    autopar.load_checkpoint(folder, ours, optimizer)
    expected = copy.deepcopy(dict(single.named_buffers()))
    found = dict(ours.named_buffers())
    del found["odd"], expected["odd"]
    same_buffers(found, expected)
    ours.eval(), single.eval()
    with torch.no_grad():
        loss, reference = ours(vectors(9)), single(vectors(9))
    torch.testing.assert_close(loss, reference, rtol=1e-9, atol=0)


def test_buffers_are_those_of_the_stage_that_updates_them_on_every_rank(tmp_path: Path) -> None:
    first, last = run_ranks(updated, 2, str(tmp_path))
    assert "layers.0.1.running_mean" in first and "layers.1.1.running_mean" in last
    # of two stages that update one, the last one in the forward has its final value
    assert "level" in last and not {*first} & {*last} and "table" not in {*first, *last}
    run_ranks(taken_up, 1, str(tmp_path), None)


# --- what other stages hold


def gpt2(seed: int) -> Any:
    """Tied embedding and head, one block for each stage."""
    torch.manual_seed(seed)
    return zoo.gpt2(layers=2)[0].train()


def parallel_gpt2(seed: int) -> Any:
    constraints = {"pipeline": {"size": 2, "microbatches": 2}}
    mesh = init_device_mesh("cpu", (2,))
    inputs = zoo.gpt2(layers=2)[1]
    return autopar.parallelize(gpt2(seed), mesh, inputs, constraints=constraints)


LOST = "transformer.h.1.mlp.c_fc.weight"  # of the second stage


def strictly(rank: int, folder: str) -> None:
    ours = parallel_gpt2(5)
    good = gpt2(1).state_dict()
    before = {name: whole(value).clone() for name, value in ours.state_dict().items()}
    assert before.keys() < good.keys() and (LOST in before) == bool(rank)
    extra = {**good, "strange": good[LOST]}
    lacking = {name: value for name, value in good.items() if name != LOST}
    reshaped = {**good, LOST: good[LOST].t()}

    def from_file(name: str) -> Callable[[], Any]:
        return lambda: autopar.load_safetensors(f"{folder}/{name}.safetensors", ours)

    refused: list[tuple[Callable[[], Any], str]] = [
        (from_file("extra"), "has 1 tensors that the model has not: strange"),
        (from_file("lacking"), f"lacks 1 tensors of the model: {LOST}"),
        (lambda: ours.load_state_dict(extra), "does not have 1 name: strange"),
        (lambda: ours.load_state_dict(lacking), f"lacks 1 name: {LOST}"),
        (lambda: ours.load_state_dict(reshaped), LOST),
    ]
    for call, match in refused:
        with pytest.raises(autopar.CheckpointError, match=re.escape(match)):
            call()
        for name, value in ours.state_dict().items():
            assert torch.equal(whole(value), before[name]), name
    for call in (from_file("good"), lambda: ours.load_state_dict(good)):
        call()
        for name, value in ours.state_dict().items():
            assert torch.equal(whole(value), good[name]), name
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.zero_()
    found = ours.load_state_dict({**lacking, "strange": good[LOST]}, strict=False)
    assert found.missing_keys == [LOST] * rank and found.unexpected_keys == ["strange"]


def test_names_of_other_stages_are_no_extras_and_errors_reach_every_rank(tmp_path: Path) -> None:
    gpt2(1).save_pretrained(tmp_path)
    good = load_file(tmp_path / "model.safetensors")
    save_file(good, tmp_path / "good.safetensors")
    save_file(good | {"strange": torch.zeros(2)}, tmp_path / "extra.safetensors")
    del good[LOST]
    save_file(good, tmp_path / "lacking.safetensors")
    run_ranks(strictly, 2, str(tmp_path))


# --- files of the whole model


def exported(rank: int, folder: str) -> None:
    ours = parallel_gpt2(1)
    autopar.save_safetensors(f"{folder}/one", ours)
    autopar.save_safetensors(f"{folder}/many", ours, max_file_bytes=40_000)
    for name in ("file", "index"):
        with pytest.raises(autopar.CheckpointError, match="was not written"):
            autopar.save_safetensors(f"{folder}/{name}", ours, max_file_bytes=40_000)


def test_safetensors_hold_the_tensors_of_all_stages(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "index" / "model.safetensors.index.json").mkdir(parents=True)
    run_ranks(exported, 2, str(tmp_path))
    reference = gpt2(1)
    once = {name for name, _ in reference.named_parameters()}  # the head is the embedding
    assert load_file(tmp_path / "one" / "model.safetensors").keys() == once
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    for folder in (tmp_path / "one", tmp_path / "many"):
        assert not list(folder.glob(".*"))
        reference.config.save_pretrained(folder)
        loaded = hf.GPT2LMHeadModel.from_pretrained(folder).state_dict()
        for name, value in reference.state_dict().items():
            assert torch.equal(loaded[name], value), name
