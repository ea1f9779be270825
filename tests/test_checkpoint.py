"""Checkpoints on real gloo ranks: saved on one mesh, taken up on another, damaged, cut off."""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime import storage
from autopar.runtime.storage import Writer
from tests import handwritten as hw
from tests import zoo
from tests.dist import run_ranks, try_ranks
from tests.test_gloo import whole

MIXED = {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3}
BEFORE = AFTER = 3

Run = tuple[Any, torch.optim.Optimizer, Any, dict[str, Any]]


def start(world: int, constraints: Any, seed: int, **options: Any) -> Run:
    """A module with dropout, its optimizer in two groups, a schedule and a batch."""
    torch.manual_seed(seed)
    model, inputs = zoo.gpt2(dropout=0.1, layers=1)
    mesh = init_device_mesh("cpu", (world,))
    parallel = autopar.parallelize(
        model.train(), mesh, inputs, constraints=constraints, seed=seed, **options
    )
    weights = [p for p in parallel.parameters() if p.dim() > 1]
    rest = [p for p in parallel.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, betas=(0.8, 0.95))
    return parallel, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5]), inputs


def steps(run: Run, number: int) -> list[float]:
    parallel, optimizer, schedule, inputs = run
    losses = []
    for _ in range(number):
        losses.append(parallel.train_step(**inputs).item())
        parallel.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses


def everything(run: Run) -> dict[str, torch.Tensor]:
    """Whole parameters, buffers and optimizer states, by name."""
    parallel, optimizer, _, _ = run
    found = {name: whole(value).detach().clone() for name, value in parallel.state_dict().items()}
    for name, parameter in parallel.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = whole(value).detach().clone()
    return found


def unbroken(rank: int, path: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train, save, and train on: the state at the save, and the losses after it."""
    run = start(4, MIXED, seed=3)
    steps(run, BEFORE)
    state = everything(run)
    handle = autopar.save_checkpoint(
        path, run[0], run[1], scheduler=run[2], step=BEFORE, data={"epoch": 2, "seen": [1, 2]}
    )
    assert handle.done() and handle.result() == Path(path) / "step-00000003"
    return state, steps(run, AFTER)


def resumed(
    rank: int, path: str, world: int, constraints: Any
) -> tuple[dict[str, torch.Tensor], list[float], Any]:
    """The state that a run with other weights, seed and plan loads, and its losses."""
    run = start(world, constraints, seed=8)
    steps(run, 1)
    found = autopar.load_checkpoint(path, run[0], run[1], scheduler=run[2])
    return everything(run), steps(run, AFTER), (found.step, found.data)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of four ranks; tests that damage it copy it first."""
    path = tmp_path_factory.mktemp("checkpoints")
    results = run_ranks(unbroken, 4, str(path))
    torch.save(results[0], path / "expected.pt")
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("world", "constraints"),
    [
        (2, {"data": 2, "zero": 3}),
        (1, None),
        (4, {"tensor": {"mode": "2d", "size": 4}}),
        (2, {"tensor": {"mode": "1d", "size": 2}}),
    ],
    ids=["zero3", "one", "2d", "1d"],
)
def test_a_run_goes_on_anywhere_as_if_unbroken(saved: Path, world: int, constraints: Any) -> None:
    state, losses = torch.load(saved / "expected.pt")
    assert len({round(x, 4) for x in losses}) == AFTER
    for found, after, note in run_ranks(resumed, world, str(saved), world, constraints):
        assert found.keys() == state.keys() and any("exp_avg_sq" in name for name in found)
        for name, value in state.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        assert after == pytest.approx(losses, rel=1e-6)
        assert note == (BEFORE, {"epoch": 2, "seen": [1, 2]})


def test_the_files_hold_each_tensor_once_and_no_pickled_index(saved: Path) -> None:
    assert (saved / "latest").read_text() == "step-00000003"
    folder = saved / "step-00000003"
    names = {p.name for p in folder.iterdir()}
    assert names == {"index.json", "state.pt", "plan.json", *(f"__{r}_0.distcp" for r in range(4))}
    index = json.loads((folder / "index.json").read_text())["tensors"]
    assert "model/transformer.wte.weight" not in index or "model/lm_head.weight" not in index
    for name, entry in index.items():
        volume = sum(torch.Size(sizes).numel() for _, sizes, _ in entry["boxes"])
        assert volume == torch.Size(entry["shape"]).numel(), name
    assert any(len(entry["boxes"]) > 4 for entry in index.values())  # strided shards
    assert autopar.load_plan(folder / "plan.json").mesh_shape == (2, 2)
    assert not list(saved.glob(".*"))


# --- what goes wrong


WIDTHS: dict[str, dict[str, int]] = {
    "wider": {"classes": 16}, "deeper": {"layers": 3}, "shallower": {"layers": 1},
}  # fmt: skip


def fitting(kind: str) -> Any:
    """A module that fits, or differs in the way of `kind`."""
    mesh, batch = init_device_mesh("cpu", (2,)), hw.vectors()
    model = hw.Mlp(**WIDTHS.get(kind, {}))
    if kind == "double":
        model.double()
        batch = hw.vectors() | {"x": hw.vectors()["x"].double()}
    return autopar.parallelize(model, mesh, batch, constraints={"data": 2, "zero": 3})


def load_only(path: str, kind: str, made: dict[str, Any]) -> None:
    """Load into a module of some kind; those of the same model share one."""
    model = kind if kind in WIDTHS or kind == "double" else "fits"
    if model not in made:
        made[model] = fitting(kind)
    parallel = made[model]
    before = {n: whole(p).clone() for n, p in parallel.named_parameters()}
    optimizer: Any = torch.optim.AdamW(parallel.parameters())
    if kind == "groups":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    if kind == "fewer":
        optimizer = torch.optim.AdamW(list(parallel.parameters())[1:])
    if kind == "sgd":
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    if kind == "adam":  # it has the options of AdamW, and would decay weights as that does
        optimizer = torch.optim.Adam(parallel.parameters())
    if kind == "two groups":
        first, *rest = parallel.parameters()
        optimizer = torch.optim.AdamW([{"params": [first]}, {"params": rest}])
    schedule: Any = None
    if kind == "schedule":
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, float)
    scaler = autopar.LossScaler(parallel) if kind == "scaler" else None
    step = 7 if kind == "step" else None
    try:
        autopar.load_checkpoint(
            path, parallel, optimizer, scheduler=schedule, scaler=scaler, step=step
        )
    finally:
        if kind not in ("fits", "overwritten", "flipped", "a hole", "schedule"):
            assert all(torch.equal(before[n], whole(p)) for n, p in parallel.named_parameters())


def load_fitting(rank: int, path: str) -> None:
    load_only(path, "fits", {})


def save_small(rank: int, path: str) -> None:
    parallel, optimizer = small()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    autopar.save_checkpoint(path, parallel, optimizer, scheduler=schedule, step=1)


def small() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    parallel = autopar.parallelize(hw.Mlp(), mesh, hw.vectors(), constraints={"data": 2, "zero": 3})
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    parallel.train_step(**hw.vectors())
    optimizer.step()
    optimizer.zero_grad()
    return parallel, optimizer


@pytest.fixture(scope="module")
def small_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    run_ranks(save_small, 2, str(path))
    return path


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/autopar-evil",)


def forget_checksums(path: Path) -> None:
    """Make an index what earlier versions wrote."""
    index = json.loads(path.read_text())
    del index["files"]
    for entry in index["tensors"].values():
        entry["boxes"] = [[*box[:2], box[2][:3]] for box in entry["boxes"]]
    path.write_text(json.dumps(index))


def damage(folder: Path, kind: str) -> None:
    data = folder / "__1_0.distcp"
    if kind == "truncated":
        os.truncate(data, data.stat().st_size - 100)
    elif kind == "overwritten":  # where an earlier version wrote no checksums
        data.write_bytes(b"x" * data.stat().st_size)
        forget_checksums(folder / "index.json")
    elif kind == "missing file":
        data.unlink()
    elif kind == "cut index":
        text = (folder / "index.json").read_text()
        (folder / "index.json").write_text(text[: len(text) // 2])
    elif kind == "cut state":
        os.truncate(folder / "state.pt", 300)
    elif kind == "flipped state":
        content = bytearray((folder / "state.pt").read_bytes())
        content[len(content) // 2] ^= 1
        (folder / "state.pt").write_bytes(content)
    elif kind == "longer state":
        with (folder / "state.pt").open("ab") as stream:
            stream.write(b"more")
    elif kind == "another plan":
        (folder / "plan.json").write_text("{}")
    elif kind == "code":  # by someone who puts the checksum right
        (folder / "state.pt").write_bytes(pickle.dumps({"step": Evil()}))
        forget_checksums(folder / "index.json")
    elif kind == "flipped":  # in the values of the first box
        path = folder / "__1_0.distcp"
        (box,) = (b for t in json.loads((folder / "index.json").read_text())["tensors"].values()
                  for b in t["boxes"] if b[2][0] == path.name and b[2][1] == 0)  # fmt: skip
        content = bytearray(path.read_bytes())
        content[box[2][2] // 2] ^= 1
        path.write_bytes(content)
    elif kind == "no latest":
        (folder.parent / "latest").unlink()
    elif kind == "a hole":
        index = json.loads((folder / "index.json").read_text())
        index["tensors"]["model/head.weight"]["boxes"].pop()
        (folder / "index.json").write_text(json.dumps(index))


MISFITS = {
    "truncated": r"__1_0.distcp has \d+ bytes, \d+ bytes were written",
    "overwritten": "was not read from.*something else than tensors",
    "flipped": r"__1_0.distcp is damaged: its \d+ bytes from 0 on are not those that were written",
    "missing file": "__1_0.distcp is missing",
    "cut index": "index.json is damaged",
    "cut state": r"state.pt has 300 bytes, \d+ bytes were written",
    "flipped state": r"state.pt is damaged: its \d+ bytes from 0 on are not those",
    "longer state": "state.pt is damaged: it has grown",
    "another plan": r"plan.json has 2 bytes, \d+ bytes were written",
    "code": "state.pt is damaged",
    "no latest": "no complete checkpoint",
    "a hole": "elements of model/head.weight",
    "wider": r"head.* is torch.float32 of shape .*16.* in the model and .*8",
    "double": "torch.float64.*torch.float32",
    "deeper": r"lacks 4 tensors: layers\.2",
    "shallower": r"has not, 4 tensors: layers\.1",
    "groups": "not the module's",
    "fewer": r"optimizer state of layers\.0\.0\.weight",
    "sgd": "is of AdamW, and the optimizer is SGD",
    "adam": "is of AdamW, and the optimizer is Adam",
    "two groups": "has 2 parameter groups, the checkpoint 1",
    "schedule": "the LambdaLR does not take the state of the scheduler that was saved",
    "scaler": "saved without scaler=",
    "step": "no checkpoint of step 7",
}


def load_each(rank: int, root: str) -> dict[str, tuple[str, str]]:
    """What each of the checkpoints that do not fit raises, by kind."""
    found: dict[str, tuple[str, str]] = {}
    made: dict[str, Any] = {}
    for kind in MISFITS:
        try:
            load_only(f"{root}/{kind}", kind, made)
        except Exception as error:  # whatever it is, the test tells it from what is right
            found[kind] = type(error).__name__, str(error)
    return found


@pytest.fixture(scope="module")
def misfits(
    small_saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, tuple[str, str]]]:
    """What every rank raises, by kind."""
    root = tmp_path_factory.mktemp("misfits")
    for kind in MISFITS:
        shutil.copytree(small_saved, root / kind)
        damage(root / kind / "step-00000001", kind)
    Path("/tmp/autopar-evil").unlink(missing_ok=True)
    return run_ranks(load_each, 2, str(root))


@pytest.mark.parametrize(("kind", "match"), MISFITS.items())
def test_what_does_not_fit_is_an_error_on_every_rank(
    misfits: list[dict[str, tuple[str, str]]], kind: str, match: str
) -> None:
    for found in misfits:
        name, message = found[kind]
        assert name == "CheckpointError", message
        assert re.search(match, message), message
    assert not Path("/tmp/autopar-evil").exists()


def breaking(rank: int, path: str, kind: str) -> None:
    """The first save works; the second one breaks on rank 1 while it writes."""
    parallel, optimizer = small()
    autopar.save_checkpoint(path, parallel, optimizer, step=1)
    write = Writer.write_data

    def broken(self: Writer, plan: Any, planner: Any) -> Any:
        if rank == 1:
            if kind == "dies":
                os._exit(1)
            raise OSError(28, "No space left on device")
        return write(self, plan, planner)

    Writer.write_data = broken  # type: ignore[method-assign]
    for parameter in parallel.parameters():
        parameter.data.add_(1.0)
    handle = autopar.save_checkpoint(
        path, parallel, optimizer, step=2, asynchronous=kind == "later"
    )
    assert kind == "later"
    handle.result()


@pytest.mark.parametrize("kind", ["dies", "full", pytest.param("later", marks=pytest.mark.slow)])
def test_a_crash_while_saving_leaves_the_last_good_one(tmp_path: Path, kind: str) -> None:
    outcomes = try_ranks(breaking, 2, str(tmp_path), kind, timeout=90)
    assert outcomes[0].kind == "CheckpointError", outcomes[0].trace
    assert outcomes[1].kind == ("Died" if kind == "dies" else "CheckpointError")
    if kind != "dies":
        assert all("rank 1: OSError: [Errno 28]" in o.message for o in outcomes)
    assert (tmp_path / "latest").read_text() == "step-00000001"
    run_ranks(load_fitting, 2, str(tmp_path))
    run_ranks(save_small, 2, str(tmp_path))  # and what is left over is in nobody's way


def replacing(rank: int, path: str) -> None:
    parallel, optimizer = small()
    kept = []
    for step, asynchronous in ((1, False), (2, True), (2, True), (1, False)):
        kept.append({n: whole(p).clone() for n, p in parallel.named_parameters()})
        handle = autopar.save_checkpoint(
            path, parallel, optimizer, step=step, asynchronous=asynchronous,
            data={"number": len(kept)},
        )  # fmt: skip
        parallel.train_step(**hw.vectors())  # while the files are written
        optimizer.step()
        optimizer.zero_grad()
        for parameter in parallel.parameters():
            parameter.data.mul_(1.5)
    handle.result()
    for step, number in ((None, 4), (1, 4), (2, 3)):
        found = autopar.load_checkpoint(path, parallel, optimizer, step=step)
        assert found.data == {"number": number}
        for name, parameter in parallel.named_parameters():
            assert torch.equal(whole(parameter), kept[number - 1][name])
    with pytest.raises(autopar.CheckpointError, match=r"'data' holds more than tensors"):
        autopar.save_checkpoint(path, parallel, step=9, data={"position": Evil()})


def test_saving_meanwhile_and_saving_again(tmp_path: Path) -> None:
    run_ranks(replacing, 2, str(tmp_path))
    folders = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert folders == ["step-00000001.2", "step-00000002.2"]
    assert (tmp_path / "latest").read_text() == "step-00000001.2"


def loading_at_once(rank: int, path: str) -> list[int]:
    """Steps that are loaded behind a save that has just begun."""
    parallel, optimizer = small()
    found = []
    for step in (1, 2, 2):
        autopar.save_checkpoint(path, parallel, optimizer, step=step, asynchronous=True)
        found.append(autopar.load_checkpoint(path, parallel, optimizer).step)
    return found


def in_own_folders(rank: int, path: str) -> list[str]:
    """Errors of saves, each rank's to a folder of its own, and of what is no optimizer."""
    storage._DELAY_S = 0.5
    parallel, optimizer = small()
    found = []
    for given in (
        lambda: autopar.save_checkpoint(f"{path}/{rank}", parallel, optimizer, step=1),
        lambda: autopar.save_checkpoint(
            f"{path}/{rank}", parallel, optimizer, step=2, asynchronous=True
        ).result(),
        lambda: autopar.save_checkpoint(path, parallel, [optimizer], step=1),  # type: ignore[arg-type]
    ):
        with pytest.raises(autopar.CheckpointError) as caught:
            given()
        found.append(str(caught.value))
    autopar.save_checkpoint(path, parallel, optimizer, step=3)  # and what has failed is said once
    return found


def test_what_not_all_ranks_see_is_no_checkpoint(tmp_path: Path) -> None:
    for own, later, unlike in run_ranks(in_own_folders, 2, str(tmp_path)):
        assert "__1_0.distcp is missing, another rank has written" in own and own == later.replace(
            "step-00000002", "step-00000001"
        )
        assert "optimizer= is a list" in unlike
    assert not (tmp_path / "0" / "latest").exists()
    assert (tmp_path / "latest").read_text() == "step-00000003"


def test_loading_waits_for_a_save(tmp_path: Path) -> None:
    (tmp_path / "step-00000002.bak").mkdir()  # somebody's own
    assert run_ranks(loading_at_once, 2, str(tmp_path)) == [[1, 2, 2]] * 2
    assert (tmp_path / "step-00000002.bak").exists()


OPTIMIZERS: dict[str, Any] = {
    "adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
    "momentum": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True, foreach=True),
}


def with_optimizer(
    rank: int, path: str, name: str, world: int, load: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses behind a save, or behind loading it, and the states; batch norm and scaling along."""
    torch.manual_seed(1 if load else 0)
    inputs = {"x": torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
              "target": torch.zeros(8, 2, 8, 8)}  # fmt: skip
    mesh = init_device_mesh("cpu", (world,))
    pins = {"data": world, "zero": 3}
    parallel = autopar.parallelize(hw.UNet().train(), mesh, inputs, constraints=pins)
    optimizer = OPTIMIZERS[name](parallel.parameters())
    scaler = autopar.LossScaler(parallel, initial_scale=4.0, growth_interval=2)

    def train(number: int) -> list[float]:
        losses = []
        for _ in range(number):
            losses.append(parallel.train_step(**inputs).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return losses

    if load:
        autopar.load_checkpoint(path, parallel, optimizer)
        assert scaler.state_dict() == {"scale": 8.0, "growth_tracker": 1, "overflows": 0}
    else:
        train(3)
        autopar.save_checkpoint(path, parallel, optimizer, step=3)
    states = {}
    for parameter_name, parameter in parallel.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if key != "step" and value is not None:
                sharded = {p.dim for p in parameter.placements if p.is_shard()}
                kept = {p.dim for p in value.placements if p.is_shard()}
                assert kept == {d for d in sharded if value.shape[d] == parameter.shape[d]}
                states[f"{parameter_name}/{key}"] = whole(value).clone()
    parallel.eval()  # first: a bias in front of a norm has gradients of rounding alone
    with torch.no_grad():
        evaluated = parallel(**inputs).item()
    parallel.train()
    return [evaluated, *train(2)], states


@pytest.mark.parametrize(
    "name",
    ["momentum", *(pytest.param(n, marks=pytest.mark.slow) for n in ("adafactor", "amsgrad"))],
)
def test_any_optimizer_buffers_and_the_scaler(tmp_path: Path, name: str) -> None:
    expected, states = run_ranks(with_optimizer, 4, str(tmp_path), name, 4, False)[0]
    assert len(set(expected)) == 3 and states
    for world in (2, 1):
        for losses, loaded in run_ranks(with_optimizer, world, str(tmp_path), name, world, True):
            assert losses == pytest.approx(expected, rel=1e-5)
            assert loaded.keys() == states.keys()
            assert all(torch.equal(loaded[key], states[key]) for key in states)


def test_an_index_without_checksums_is_read(small_saved: Path, tmp_path: Path) -> None:
    shutil.copytree(small_saved, tmp_path / "old")
    forget_checksums(tmp_path / "old" / "step-00000001" / "index.json")
    run_ranks(load_fitting, 2, str(tmp_path / "old"))
