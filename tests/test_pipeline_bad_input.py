"""Pipelines that do not fit, damaged checkpoints of one: an error on every rank, and no hang."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests import zoo
from tests.dist import run_ranks
from tests.test_gloo import whole

PINS: list[tuple[dict[str, Any], str]] = [
    ({"size": 2, "chunks": 2, "microbatches": 2}, "needs 4 blocks, the model has 2"),
    ({"size": 2, "microbatches": 3}, "3 does not divide its batch"),
    ({"size": 2, "microbatches": 1, "chunks": 2}, "no multiple: use 2"),
    ({"size": 2, "microbatches": 2, "chunks": 2, "schedule": "1f1b"}, "one stage a rank, not 2"),
    ({"size": 4, "microbatches": 4}, "does not divide the 2 devices"),
    ({"size": 2, "microbatches": 2, "cuts": ["transformer.h.2"]}, "is no block"),
]
DAMAGES = {
    "truncated": r"__1_0.distcp has \d+ bytes, \d+ bytes were written",
    "missing file": "__1_0.distcp is missing",
    "cut index": "index.json is damaged",
    "cut state": r"state.pt has 300 bytes, \d+ bytes were written",
    "missing tensor": r"lacks 1 tensors?: transformer.h.1.mlp.c_fc.weight",
    "reshaped": r"transformer.h.1.mlp.c_fc.weight.*shape",
    "a hole": "elements of model/transformer.h.1.mlp.c_fc.weight",
}
_WEIGHT = "model/transformer.h.1.mlp.c_fc.weight"


def refusals(rank: int) -> list[tuple[str, str]]:
    """What each pin raises; a barrier behind it shows that no rank is left behind."""
    model, inputs = zoo.gpt2()
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for pin, _ in PINS:
        try:
            autopar.parallelize(model.train(), mesh, inputs, constraints={"pipeline": pin})
        except autopar.AutoparError as error:
            found.append((type(error).__name__, str(error)))
        dist.barrier()
    return found


def test_pipelines_that_do_not_fit_are_refused_on_every_rank() -> None:
    for found in run_ranks(refusals, 2):
        assert len(found) == len(PINS)
        for (kind, message), (_, expected) in zip(found, PINS, strict=True):
            assert kind == "ConstraintError"
            assert re.search(expected, message), message


def damage(folder: Path, kind: str) -> None:
    data, index = folder / "__1_0.distcp", folder / "index.json"
    if kind == "truncated":
        os.truncate(data, data.stat().st_size // 2)
    elif kind == "missing file":
        data.unlink()
    elif kind == "cut index":
        index.write_text(index.read_text()[:500])
    elif kind == "cut state":
        os.truncate(folder / "state.pt", 300)
    else:
        known = json.loads(index.read_text())
        entry = known["tensors"][_WEIGHT]
        if kind == "missing tensor":
            del known["tensors"][_WEIGHT]
        elif kind == "reshaped":
            entry["shape"] = entry["shape"][::-1]
        else:
            entry["boxes"].pop()
        index.write_text(json.dumps(known))


def loads(rank: int, path: str) -> dict[str, tuple[str, str, bool]]:
    """What loading each damaged checkpoint raises, and whether the parameters stayed."""
    torch.manual_seed(0)
    model, inputs = zoo.gpt2()
    parallel = autopar.parallelize(
        model.train(),
        init_device_mesh("cpu", (2,)),
        inputs,
        constraints={"pipeline": {"size": 2, "microbatches": 2}},
    )
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel.train_step(**inputs)
    optimizer.step()
    good = Path(path) / "good"
    autopar.save_checkpoint(good, parallel, optimizer, step=1)
    found = {}
    for kind in DAMAGES:
        bad = Path(path) / kind
        if rank == 0:
            shutil.copytree(good, bad)
            damage(bad / "step-00000001", kind)
        dist.barrier()
        before = {name: whole(p).detach().clone() for name, p in parallel.named_parameters()}
        try:
            autopar.load_checkpoint(bad, parallel, optimizer)
        except autopar.AutoparError as error:
            stayed = all(torch.equal(before[n], whole(p)) for n, p in parallel.named_parameters())
            found[kind] = (type(error).__name__, str(error), stayed)
    autopar.load_checkpoint(good, parallel, optimizer)
    return found


def test_damaged_checkpoints_of_a_pipeline_are_refused_on_every_rank(tmp_path: Path) -> None:
    for found in run_ranks(loads, 2, str(tmp_path)):
        assert found.keys() == DAMAGES.keys()
        for kind, (error, message, stayed) in found.items():
            assert error == "CheckpointError"
            assert re.search(DAMAGES[kind], message), (kind, message)
            assert stayed or kind == "a hole"


def test_pins_that_no_stage_can_hold_are_refused() -> None:
    """17 tokens cannot be split over 4 devices, whatever the cuts and turns."""
    model, inputs = zoo.vit()
    cluster = autopar.Cluster.from_profile(
        "h100-sxm", nodes=2, devices_per_node=4, mesh_shape=(2, 4)
    )
    pins = {"tensor": {"mode": "1d", "size": 4}, "sequence": "megatron", "pipeline": {"size": 2}}
    with pytest.raises(autopar.ConstraintError, match=r"4 devices of each of 2 pipeline ranks"):
        autopar.plan(model.train(), cluster, inputs, constraints=pins, cache=False)
