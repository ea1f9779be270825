"""Bad arguments and wrong use: the error says what, and what to pass instead."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.core.constraints import Constraints, assign_mesh
from autopar.core.placement import Shard
from autopar.core.plan import PLAN_VERSION
from autopar.tracer.diagnose import is_outside
from tests import handwritten as hw
from tests.dist import run_ranks, try_ranks


def cluster(devices: int = 4) -> Any:
    return autopar.Cluster.from_profile("cpu-gloo", devices_per_node=devices)


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        ({"tensor": {"mode": "4d"}}, ["4d", "1d, 2d, 2.5d, 3d"]),
        ({"sequence": "snake"}, ["snake", "megatron, ulysses, ring"]),
        ({"tenser": "1d"}, ["tenser", "tensor"]),
        ({"zero": 7}, ["zero=7"]),
        ({"data": 3}, ["3", "4"]),
        ({"data": 0}, ["data=0"]),
        ({"tensor": {"mode": "2d", "size": 3}}, ["2d", "3"]),
        ({"params": {"nothing.*": ["Shard(0)"]}}, ["nothing.*", "matches no parameter"]),
        ({"params": {"head.bias": ["Shard(1)"]}}, ["head.bias", "(8,)"]),
        ({"params": {"head.bias": ["Shard(0)", "Shard(0)"]}}, ["head.bias", "2 placements"]),
        ({"params": {"head.bias": ["Sliced(0)"]}}, ["Sliced(0)"]),
        ({"params": {"head.bias": 0}}, ["head.bias", "= 0", "['Shard(0)', 'Replicate()']"]),
        ({"params": {"head.bias": Shard(0)}}, ["head.bias", "as text"]),
        ({"params": ["Shard(0)"]}, ["params=['Shard(0)']", "FQN glob"]),
        (["data"], ["constraints=['data']", "give a dict"]),
        ("1d", ["constraints='1d'", "give a dict"]),
    ],
    ids=str,
)
def test_constraints_that_cannot_be_read(constraints: Any, words: list[str]) -> None:
    with pytest.raises((autopar.ConstraintError, autopar.ShardingError)) as caught:
        autopar.plan(hw.Mlp(), cluster(), hw.vectors(), constraints=constraints)
    for word in words:
        assert word in str(caught.value)


def test_an_empty_parameter_stays_whole() -> None:
    model = nn.Linear(16, 8)
    model.register_parameter("none", nn.Parameter(torch.empty(0)))
    plan = autopar.plan(model, cluster(2), (torch.randn(8, 16),), constraints={"zero": 3})
    assert not any(p.is_shard for p in plan.parameters["none"])


@pytest.mark.parametrize("constraints", [{"tensor": "1d"}, {"tensor": "2d"}, {"data": 4}], ids=str)
def test_sizes_that_do_not_divide(constraints: Any) -> None:
    odd = nn.Sequential(nn.ModuleList([nn.Linear(15, 15)])[0], nn.Linear(15, 5))
    with pytest.raises(autopar.ConstraintError) as caught:
        autopar.plan(odd, cluster(), (torch.randn(7, 15),), constraints=constraints)
    assert "15" in str(caught.value) and "divide" in str(caught.value)


@pytest.mark.parametrize("batch", [7, 1, 0])
def test_a_batch_that_data_ranks_do_not_divide(batch: int) -> None:
    with pytest.raises(autopar.ConstraintError) as caught:
        autopar.plan(hw.Mlp(), cluster(), hw.vectors(batch), constraints={"data": 4})
    for word in (f"the batch of {batch} is not divided by 4", f"x [{batch}, 16]", "multiple of 4"):
        assert word in str(caught.value)


def test_no_process_group() -> None:
    mesh = init_device_mesh.__doc__ and _FakeMesh()
    with pytest.raises(autopar.AutoparError, match="torchrun"):
        autopar.parallelize(hw.Mlp(), mesh, hw.vectors())  # type: ignore[arg-type]


class _FakeMesh:
    """Enough of a mesh to get to the check: a real one needs a process group."""

    device_type = "cpu"
    mesh = torch.arange(2)

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("mesh", "limit", "word"), [(2, None, "DeviceMesh"), (None, "3 gigs", "or 16GiB")]
)
def test_arguments_of_another_kind(mesh: Any, limit: Any, word: str) -> None:
    with pytest.raises(autopar.AutoparError, match=word):
        autopar.parallelize(hw.Mlp(), mesh or _FakeMesh(), hw.vectors(), memory_limit=limit)


@pytest.mark.parametrize("given", ["h100-sxm", 4, None])
def test_a_cluster_of_another_kind(given: Any) -> None:
    with pytest.raises(autopar.AutoparError, match=r"cluster is a .*Cluster\.from_profile"):
        autopar.plan(hw.Mlp(), given, hw.vectors())
    if given is not None:
        with pytest.raises(autopar.AutoparError, match="cluster is a"):
            autopar.parallelize(hw.Mlp(), _FakeMesh(), hw.vectors(), cluster=given)  # type: ignore[arg-type]
        plan = autopar.plan(hw.Mlp(), cluster(2), hw.vectors())
        with pytest.raises(autopar.AutoparError, match="cluster is a"):
            autopar.simulate(plan, hw.Mlp(), hw.vectors(), cluster=given)


def test_a_loss_class_instead_of_an_instance() -> None:
    model, batch = nn.Linear(4, 4), (torch.randn(4, 4), torch.randint(0, 4, (4,)))
    with pytest.raises(autopar.TraceError, match=r"the class CrossEntropyLoss: .*instance"):
        autopar.plan(model, cluster(2), batch, loss_fn=nn.CrossEntropyLoss)


def test_a_path_is_no_plan() -> None:
    for call in (autopar.verify, autopar.simulate):
        with pytest.raises(autopar.AutoparError, match=r"plan is a str; .*load_plan"):
            call("plan.json", hw.Mlp(), hw.vectors())  # type: ignore[arg-type]


def test_an_unknown_name_of_an_optimizer_is_refused() -> None:
    with pytest.raises(autopar.AutoparError, match=r"unknown.*mean 'adam' or 'adamw'"):
        autopar.plan(hw.Mlp(), cluster(2), hw.vectors(), optimizer="adamm")
    mesh: Any = _FakeMesh()
    with pytest.raises(autopar.AutoparError, match="'adamm' is unknown"):
        autopar.parallelize(hw.Mlp(), mesh, hw.vectors(), optimizer="adamm")


class Novel(torch.optim.SGD):
    """An optimizer that nobody knows the states of."""


def test_an_unknown_class_of_optimizer_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = autopar.plan(hw.Mlp(), cluster(2), hw.vectors(), optimizer=Novel, cache=False)
        autopar.simulate(plan, hw.Mlp(), hw.vectors())
    told = [w for w in caught if "'novel' is unknown" in str(w.message)]
    assert len(told) == 1


@pytest.mark.parametrize(("mode", "kind"), [("2d", "square"), ("3d", "cube")])
def test_devices_that_make_no_square(mode: str, kind: str) -> None:
    wanted = Constraints.parse({"tensor": {"mode": mode, "size": 6}})
    with pytest.raises(autopar.AutoparError, match=f"the {kind} of a whole number"):
        assign_mesh(wanted, (6,))


def optimizer_first(rank: int) -> tuple[str, list[bool]]:
    model, inputs = hw.Mlp(), hw.vectors()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = init_device_mesh("cpu", (2,))
    module = autopar.parallelize(model, mesh, inputs, constraints={"data": 2})
    module.train_step(**inputs)
    with pytest.raises(autopar.AutoparError) as caught:
        optimizer.step()
    before = [p.clone() for p in model.parameters()]
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    output = model(**inputs)  # the plain module may be trained beside
    (output if isinstance(output, Tensor) else output["loss"]).backward()
    optimizer.step()
    changed = [not a.equal(b) for a, b in zip(before, model.parameters(), strict=True)]
    return str(caught.value), changed


def test_an_optimizer_of_the_plain_module_does_not_train_nothing() -> None:
    for text, changed in run_ranks(optimizer_first, 2):
        assert "layers.0.0.weight is one" in text and "module.parameters()" in text
        assert any(changed)


def unset_and_wrong_mode(rank: int) -> None:
    parallel = autopar.parallelize(hw.Mlp(), init_device_mesh("cpu", (1,)))
    with pytest.raises(autopar.AutoparError, match="example_inputs"):
        _ = parallel.plan
    with pytest.raises(autopar.AutoparError, match=r"nothing to load into.*example_inputs"):
        autopar.load_safetensors("anywhere", parallel)
    placed = autopar.parallelize(hw.Mlp(), init_device_mesh("cpu", (1,)), hw.vectors()).state_dict()
    for state in (placed, hw.Mlp().state_dict()):
        with pytest.raises(autopar.AutoparError, match=r"nothing to load into.*example_inputs"):
            parallel.load_state_dict(state)
    parallel.eval()
    with pytest.raises(autopar.AutoparError, match=r"\.train\(\)"):
        parallel.train_step(**hw.vectors())
    batch = hw.vectors()
    with pytest.raises(autopar.AutoparError, match="parallel already"):
        autopar.parallelize(parallel, init_device_mesh("cpu", (1,)))
    with pytest.raises(autopar.AutoparError, match="by position and by keyword: pass each once"):
        parallel(batch["x"], **batch)


def other_kinds(rank: int, folder: str) -> list[str]:
    """What each wrong call is told."""
    mesh, plain, batch = init_device_mesh("cpu", (1,)), hw.Mlp(), hw.vectors()
    parallel = autopar.parallelize(hw.Mlp(), mesh, batch)
    calls = (
        lambda: autopar.LossScaler(plain),  # type: ignore[arg-type]
        lambda: autopar.save_checkpoint(folder, plain, step=1),  # type: ignore[arg-type]
        lambda: autopar.load_checkpoint(folder, plain),  # type: ignore[arg-type]
        lambda: autopar.save_safetensors(folder, plain),  # type: ignore[arg-type]
        lambda: autopar.load_safetensors(folder, plain),  # type: ignore[arg-type]
        lambda: autopar.save_checkpoint(folder, parallel, step=-1),
        lambda: autopar.save_checkpoint(folder, parallel, step="1"),  # type: ignore[arg-type]
        lambda: autopar.parallelize(hw.Mlp(), mesh, batch, plan={"version": PLAN_VERSION}),  # type: ignore[arg-type]
        lambda: autopar.parallelize(hw.Mlp(), mesh, batch, seed="a"),  # type: ignore[arg-type]
    )
    told = []
    for call in calls:
        with pytest.raises(autopar.AutoparError) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_modules_plans_and_numbers_of_another_kind(tmp_path: Path) -> None:
    (told,) = run_ranks(other_kinds, 1, str(tmp_path))
    expected = [*["the module is a Mlp; pass the one"] * 5, "step=-1", "step='1'", "plan is a dict"]
    for text, words in zip(told, [*expected, "seed='a'"], strict=True):
        assert words in text


def test_wrong_use_of_a_parallel_module() -> None:
    (outcome,) = try_ranks(unset_and_wrong_mode, 1)
    assert outcome is None, outcome


def test_a_line_of_python_itself_is_not_the_users() -> None:
    assert not is_outside(functools.__file__) and not is_outside(json.__file__)
    assert is_outside(pytest.__file__) and is_outside(__file__)
