"""Safetensors in and out: what transformers wrote, and what it reads."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests import zoo
from tests.dist import run_ranks
from tests.test_gloo import whole

MIXED = {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3}


def tiny(seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    model, inputs = zoo.gpt2(layers=1)
    mesh = init_device_mesh("cpu", (4,))
    return autopar.parallelize(model, mesh, inputs, constraints=MIXED, **options)


def exchanged(rank: int, there: str, here: str, max_file_bytes: int) -> None:
    parallel = tiny(5)
    autopar.load_safetensors(there, parallel)
    torch.manual_seed(1)
    reference, _ = zoo.gpt2(layers=1)
    expected = reference.state_dict()
    for name, value in parallel.state_dict().items():
        assert torch.equal(whole(value), expected[name]), name
    autopar.save_safetensors(here, parallel, max_file_bytes=max_file_bytes)


@pytest.mark.parametrize("shard", ["10GB", "40KB"])
def test_transformers_reads_what_it_wrote_through_four_ranks(tmp_path: Path, shard: str) -> None:
    torch.manual_seed(1)
    reference, inputs = zoo.gpt2(layers=1)
    there, here = tmp_path / "there", tmp_path / "here"
    reference.save_pretrained(there, max_shard_size=shard)
    # of an earlier model, which nobody may read instead
    other = zoo.gpt2(layers=1)[0]
    other.save_pretrained(here, max_shard_size="40KB" if shard == "10GB" else "10GB")
    run_ranks(exchanged, 4, str(there), str(here), 10**10 if shard == "10GB" else 40_000)
    assert (here / "model.safetensors").exists() == (shard == "10GB")
    assert (here / "model.safetensors.index.json").exists() == (shard == "40KB")
    assert not list(here.glob(".*"))
    reference.config.save_pretrained(here)
    loaded = hf.GPT2LMHeadModel.from_pretrained(here)
    for name, value in reference.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert torch.equal(loaded(**inputs).loss, reference(**inputs).loss)


def renamed(rank: int, path: str) -> None:
    parallel = tiny(5)
    autopar.load_safetensors(
        path, parallel, rename=lambda n: n.removeprefix("transformer."), strict=False
    )
    expected = hf.GPT2Model.from_pretrained(path).half().state_dict()
    for name, value in expected.items():
        found = whole(parallel.state_dict()[f"transformer.{name}"])
        assert found.dtype == torch.float32 and torch.equal(found, value.float())


def test_another_prefix_and_another_dtype(tmp_path: Path) -> None:
    model, _ = zoo.gpt2(layers=1)
    model.transformer.half().save_pretrained(tmp_path)
    run_ranks(renamed, 4, str(tmp_path))


MISFITS = {
    "truncated": "cannot be read: SafetensorError",
    "nothing": "neither model.safetensors nor",
    "prefix": r"lacks \d+ tensors of the model: .*its names are like.*rename=",
    "deeper": r"that the model has not: transformer\.h\.1",
    "wider": r"has shape \(32, 64\) in the model and \(48, 64\)",
}


def load_each(rank: int, root: str) -> dict[str, tuple[str, str]]:
    """What the files of each kind raise that do not fit."""
    parallel, found = tiny(5), {}
    for kind in MISFITS:
        try:
            autopar.load_safetensors(f"{root}/{kind}", parallel)
        except Exception as error:  # whatever it is, the test tells it from what is right
            found[kind] = type(error).__name__, str(error)
    return found


def write_misfit(folder: Path, kind: str) -> None:
    model, _ = zoo.gpt2(layers=2 if kind == "deeper" else 1)
    if kind == "wider":
        model.transformer.wpe = torch.nn.Embedding(48, 64)
    (model.transformer if kind == "prefix" else model).save_pretrained(folder)
    file = folder / "model.safetensors"
    if kind == "truncated":
        os.truncate(file, file.stat().st_size - 10)
    if kind == "nothing":
        file.unlink()


def test_files_that_do_not_fit_are_an_error_on_every_rank(tmp_path: Path) -> None:
    for kind in MISFITS:
        write_misfit(tmp_path / kind, kind)
    for found in run_ranks(load_each, 4, str(tmp_path), timeout=90):
        for kind, match in MISFITS.items():
            name, message = found[kind]
            assert name == "CheckpointError", message
            assert re.search(match, message), message
