"""Bad input: every rank stops, soon, with an error that says what is wrong."""

from __future__ import annotations

import functools
import json
import os
import time
import warnings
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.core.constraints import Constraints, assign_mesh
from autopar.core.plan import Plan
from autopar.runtime.same_batch import check_same_batch
from autopar.tracer.diagnose import is_outside
from tests import handwritten as hw
from tests.dist import RankError, run_ranks, try_ranks


def cluster(devices: int = 4) -> Any:
    return autopar.Cluster.from_profile("cpu-gloo", devices_per_node=devices)


class Branching(nn.Module):
    """Its control flow depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if x.sum() > 0:  # the line that the error must name
            x = x + 1
        return nn.functional.cross_entropy(self.linear(x), labels)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


def test_data_dependent_control_flow_names_the_line() -> None:
    with pytest.raises(autopar.TraceError) as caught:
        autopar.plan(Branching(), cluster(), hw.vectors())
    line = line_of("the line that the error must " + "name")
    assert f"test_errors.py:{line}" in str(caught.value)


class Listing(nn.Module):
    """Makes a tensor from a list: on meta nothing is left of its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scale = torch.tensor([0.5, 2.0], device=self.linear.weight.device)  # numbers on meta
        return nn.functional.cross_entropy(self.linear(x) * scale.sum(), labels)


def list_on_meta(rank: int) -> None:
    with torch.device("meta"):
        model = Listing()
    mesh = init_device_mesh("cpu", (2,))
    inputs = hw.vectors()
    autopar.parallelize(model, mesh, inputs, cache=False)(**inputs)


def test_numbers_that_are_lost_on_meta_are_not_made_up() -> None:
    for error in try_ranks(list_on_meta, 2):
        assert isinstance(error, RankError)
        assert "test_errors.py:" in str(error)
        assert "numbers on the meta device" in str(error)


class Choosing(nn.Module):
    """Export captures this, with a size that is known only at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x[labels > 0]  # rows chosen by data
        return self.linear(x).cumsum(0).mean()


def test_data_dependent_shape_names_the_line() -> None:
    with pytest.raises(autopar.TraceError, match="depends on values") as caught:
        autopar.plan(Choosing(), cluster(), hw.vectors())
    line = line_of("rows chosen " + "by data")
    assert f"test_errors.py:{line}" in str(caught.value)


class Looking(nn.Module):
    """Takes a number out of a tensor and does nothing with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.linear(x), labels)
        self.seen = 2 * x.mean().item()
        return loss


def test_a_number_that_nothing_depends_on_is_no_data_dependence() -> None:
    autopar.plan(Looking(), cluster(), hw.vectors())


class Marking(nn.Module):
    """Writes one learned vector to places that data chooses: all shapes are known."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.mark = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x.clone()
        x[labels > 0] = self.mark
        return nn.functional.cross_entropy(self.linear(x), labels)


def test_a_masked_assignment_is_no_data_dependence() -> None:
    model, inputs = Marking(), hw.vectors()
    plan = autopar.plan(model, cluster(), inputs, constraints={"data": 4})
    name, error = autopar.verify(plan, model, inputs).worst
    assert error < 1e-5, name


class Checked(nn.Module):
    """Checks values, as models that merge images into text and distributions do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        torch._check_tensor_all(labels >= 0, lambda: "labels are negative")
        found = torch.distributions.Categorical(logits=self.linear(x))
        return -found.log_prob(labels).mean()


def test_a_check_of_values_is_no_data_dependence() -> None:
    model, inputs = Checked(), hw.vectors()
    plan = autopar.plan(model, cluster(), inputs, constraints={"data": 4}, cache=False)
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-5
    with pytest.raises(ValueError):  # asked for again behind the trace
        torch.distributions.Normal(torch.tensor(0.0), torch.tensor(-1.0))


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
    ],
    ids=str,
)
def test_constraints_that_cannot_be_read(constraints: Any, words: list[str]) -> None:
    with pytest.raises((autopar.ConstraintError, autopar.ShardingError)) as caught:
        autopar.plan(hw.Mlp(), cluster(), hw.vectors(), constraints=constraints)
    for word in words:
        assert word in str(caught.value)


def test_dtypes_that_do_not_fit_name_the_line() -> None:
    batch = hw.vectors()
    with pytest.raises(autopar.TraceError, match=r"handwritten\.py:\d+ in forward.*\n.*dtype"):
        autopar.plan(hw.Clamped(), cluster(2), {**batch, "x": batch["x"].double()})


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


# --- plan files --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = autopar.plan(hw.Mlp(), cluster(2), hw.vectors(), constraints={"data": 2})
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    return path


def test_plan_file_is_truncated(saved: Path, tmp_path: Path) -> None:
    text = saved.read_text()
    for cut in (0, 1, len(text) // 2, len(text) - 2):
        path = tmp_path / "cut.json"
        path.write_text(text[:cut])
        with pytest.raises(autopar.PlanMismatchError, match="cut short"):
            autopar.load_plan(path)


def test_plan_file_is_damaged(saved: Path, tmp_path: Path) -> None:
    data = json.loads(saved.read_text())
    path = tmp_path / "plan.json"
    optional = {f.name for f in fields(Plan) if f.default is not MISSING}
    optional |= {f.name for f in fields(Plan) if f.default_factory is not MISSING}
    optional.remove("version")
    for key in data:
        broken = {k: v for k, v in data.items() if k != key}
        path.write_text(json.dumps(broken))
        if key in optional:
            continue
        with pytest.raises(autopar.PlanMismatchError):
            autopar.load_plan(path)
    for value in ([], 3, "plan"):
        path.write_text(json.dumps(value))
        with pytest.raises(autopar.PlanMismatchError):
            autopar.load_plan(path)


def test_plan_of_another_version(saved: Path, tmp_path: Path) -> None:
    data = json.loads(saved.read_text())
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**data, "version": 99}))
    with pytest.raises(autopar.PlanMismatchError, match="version 99"):
        autopar.load_plan(path)


def use_plan(rank: int, path: str, layers: int, width: int) -> None:
    autopar.parallelize(
        hw.Mlp(layers=layers, width=width),
        init_device_mesh("cpu", (2,)),
        hw.vectors(width=width),
        plan=path,
    )


@pytest.mark.parametrize(
    ("layers", "width", "word"), [(3, 16, "layers.2.0.bias"), (2, 32, "(8, 32)")]
)
def test_plan_of_another_model(saved: Path, layers: int, width: int, word: str) -> None:
    for outcome in try_ranks(use_plan, 2, str(saved), layers, width):
        assert isinstance(outcome, RankError) and outcome.kind == "PlanMismatchError"
        assert word in outcome.message


class Block(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(8, 16), activation, nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(x)))


class Blocks(nn.Module):
    """So many equal blocks that they are folded; parameters do not tell activations apart."""

    def __init__(self, activation: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(activation()) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


OTHERS = [(nn.ReLU, 8), (nn.GELU, 16)]  # another graph of the same parameters, another batch


@pytest.fixture(scope="module", params=[{"data": 2}, {"pipeline": {"size": 2, "microbatches": 2}}])
def folded(request: pytest.FixtureRequest) -> Plan:
    plan = autopar.plan(Blocks(), cluster(2), (torch.randn(8, 8),), constraints=request.param)
    assert plan.repeats
    return plan


@pytest.mark.parametrize(("activation", "batch"), OTHERS)
def test_folded_plan_of_another_graph(
    folded: Plan, activation: type[nn.Module], batch: int
) -> None:
    model, inputs = Blocks(activation), (torch.randn(batch, 8),)
    with pytest.raises(autopar.PlanMismatchError, match="or plan again"):
        autopar.verify(folded, model, inputs)
    if folded.pipeline is None:
        with pytest.raises(autopar.PlanMismatchError, match="or plan again"):
            autopar.simulate(folded, model, inputs)


def use_folded_plan(rank: int, path: str, activation: type[nn.Module], batch: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    autopar.parallelize(Blocks(activation), mesh, (torch.ones(batch, 8),), plan=path)


@pytest.mark.parametrize(("activation", "batch"), OTHERS)
def test_folded_plan_of_another_graph_on_ranks(
    folded: Plan, tmp_path: Path, activation: type[nn.Module], batch: int
) -> None:
    path = tmp_path / "plan.json"
    folded.save(path)
    for outcome in try_ranks(use_folded_plan, 2, str(path), activation, batch):
        assert isinstance(outcome, RankError) and outcome.kind == "PlanMismatchError"
        assert "or plan again" in outcome.message


# --- ranks -------------------------------------------------------------------------------------
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


def half_mesh(rank: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    autopar.parallelize(hw.Mlp(), DeviceMesh("cpu", [0, 1]), hw.vectors())


def different_width(rank: int) -> None:
    autopar.parallelize(
        hw.Mlp(classes=8 + 4 * (rank == 2)), init_device_mesh("cpu", (3,)), hw.vectors()
    )


class Twist(hw.Mlp):
    """The same parameters, another computation on one rank."""

    def __init__(self, twisted: bool) -> None:
        super().__init__()
        self.twisted = twisted

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(x.tanh() if self.twisted else x, labels)


def different_code(rank: int) -> None:
    autopar.parallelize(Twist(rank == 1), init_device_mesh("cpu", (3,)), hw.vectors())


def different_batch(rank: int) -> None:
    autopar.parallelize(hw.Mlp(), init_device_mesh("cpu", (3,)), hw.vectors(8 + 4 * (rank == 1)))


def own_labels(rank: int) -> None:
    """Each rank passes what a DistributedSampler would give it."""
    batch = hw.vectors()
    module = autopar.parallelize(hw.Mlp(), init_device_mesh("cpu", (3,)), batch)
    batch["labels"] = (batch["labels"] + (rank == 2)) % 4
    module.train_step(**batch)


class Failing(hw.Mlp):
    """Raises an error of its own on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.rank == 1:
            raise KeyError("no such feature")
        return super().forward(x, labels)


def failing_trace(rank: int) -> None:
    autopar.parallelize(Failing(rank), init_device_mesh("cpu", (3,)), hw.vectors())


def mixed_devices(rank: int) -> None:
    model = hw.Mlp()
    if rank == 0:
        model.head.to("meta")
    autopar.parallelize(model, init_device_mesh("cpu", (3,)), hw.vectors())


def different_constraints(rank: int) -> None:
    autopar.parallelize(
        hw.Mlp(),
        init_device_mesh("cpu", (3,)),
        hw.vectors(),
        constraints={"data": 1} if rank == 1 else None,
    )


def impossible_plan(rank: int) -> None:
    autopar.parallelize(hw.Mlp(), init_device_mesh("cpu", (3,)), hw.vectors(), memory_limit=1000)


def pipelined_lbfgs(rank: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    pins = {"pipeline": {"size": 3, "microbatches": 2}}
    model, batch = hw.Mlp(layers=3), hw.vectors()
    module = autopar.parallelize(model, mesh, batch, constraints=pins)
    torch.optim.LBFGS(module.parameters()).step(lambda: module.train_step(**batch))


def frozen_lbfgs(rank: int) -> None:
    model, batch = hw.Mlp(), hw.vectors()
    model.head.bias.requires_grad_(False)
    module = autopar.parallelize(model, init_device_mesh("cpu", (3,)), batch)
    trained = [p for p in module.parameters() if p.requires_grad]
    torch.optim.LBFGS(trained, max_iter=2).step(lambda: module.train_step(**batch))
    torch.optim.LBFGS(module.parameters()).step(lambda: module.train_step(**batch))


def foreign_adafactor(rank: int) -> None:
    from transformers.optimization import Adafactor

    model, batch = hw.Mlp(), hw.vectors()
    module = autopar.parallelize(model, init_device_mesh("cpu", (3,)), batch)
    module.train_step(**batch)
    Adafactor(module.parameters()).step()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (half_mesh, ["2 devices", "3 ranks"]),
        (different_width, ["head.weight", "(8, 16)", "(12, 16)", "0 and 2"]),
        (different_code, ["ops", "0 and 1"]),
        (different_batch, ["(8, 16)", "(12, 16)", "0 and 1"]),
        (own_labels, ["rank 2 passes another batch", "labels", "DistributedSampler"]),
        (different_constraints, ["constraints", "0 and 1"]),
        (failing_trace, ["no such feature"]),
        (mixed_devices, ["layers.0.0.weight", "head.weight", "meta"]),
        (pipelined_lbfgs, ["LBFGS", "pipeline", "none"]),
        (frozen_lbfgs, ["LBFGS", "1 frozen", "requires_grad"]),
        (foreign_adafactor, ["transformers.optimization.Adafactor", "torch.optim.Adafactor"]),
        (impossible_plan, ["no plan fits", "smallest limit"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_all_ranks_stop_and_say_why(function: Any, words: list[str]) -> None:
    outcomes = try_ranks(function, 3, timeout=100)
    for outcome in outcomes:
        assert isinstance(outcome, RankError), "a rank went on"
        assert outcome.kind in ("AutoparError", "TraceError", "InfeasiblePlanError"), outcome.trace
        for word in words:
            assert word in outcome.message, outcome.message


def batches(rank: int) -> list[str]:
    """Which of these the check takes for batches that differ from the first rank's."""
    rounding = 1 + 1e-6 * rank
    x = torch.arange(1.0, 10.0)
    twice = torch.ones(3, 20000)
    twice[1, 7] += rank * 1e6  # between the elements that are compared
    same = {
        "rounding": x * rounding,
        "nan": torch.where(x > 4, torch.nan, x * rounding),
        "infinite": torch.full((3,), torch.inf),
        "empty": torch.empty(0, 4),
        "whole": torch.arange(9) - 4,
        "mask": x > 4,
        "complex": torch.complex(x, x * rounding),
        "half": x.to(torch.bfloat16).expand(2, 9),
    }
    other = {
        "values": x + rank,
        "one id of many": torch.arange(50000) + rank * (torch.arange(50000) == 77),
        "mask": x > 4 + rank,
        "one element": twice,
        "nan": torch.where(x > 4 + rank, torch.nan, x),
    }
    found = []
    for name, value in (*same.items(), *other.items()):
        try:
            check_same_batch((), {"x": value})
        except autopar.AutoparError as error:
            assert "rank 1 passes another batch" in str(error)
            found.append(name)
    return found


def test_which_batches_differ() -> None:
    differ = ["values", "one id of many", "mask", "one element", "nan"]
    assert try_ranks(batches, 2) == [differ, differ]


def different_batch_later(rank: int) -> None:
    """The second batch of one rank has another shape, and the other one is busy elsewhere."""
    os.environ["AUTOPAR_TIMEOUT_S"] = "5"
    pins = {"data": 2}
    mesh = init_device_mesh("cpu", (2,))
    module = autopar.parallelize(hw.Mlp(), mesh, hw.vectors(), constraints=pins)
    module.train_step(**hw.vectors())
    if rank == 1:
        module.train_step(**hw.vectors(12))
    time.sleep(10)


def test_a_rank_that_plans_alone_does_not_wait_for_ever() -> None:
    stayed, left = try_ranks(different_batch_later, 2, timeout=100)
    assert isinstance(left, RankError) and left.kind == "AutoparError", left
    for word in ("rank 1 waited 5 s for ranks 0", "another shape"):
        assert word in left.message
    assert isinstance(stayed, RankError) and stayed.kind != "Timeout", stayed


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


def different_batch_at_first(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    module = autopar.parallelize(hw.Mlp(), mesh, hw.vectors(), constraints={"data": 2})
    module.train_step(**hw.vectors(8 + 4 * (rank == 1)))


def test_no_rank_waits_where_one_alone_has_a_step_to_plan() -> None:
    """All know at once: the timeout of five minutes is not waited for."""
    first, second = try_ranks(different_batch_at_first, 2, timeout=100)
    for outcome, did, other in (
        (first, "compare their batches", "rank 1 to plan a step"),
        (second, "plan a step", "rank 0 to compare their batches"),
    ):
        assert isinstance(outcome, RankError) and outcome.kind == "AutoparError", outcome
        for word in (f"came to {did}", other, "another shape"):
            assert word in outcome.message


def solved_on_each_rank(rank: int) -> bool:
    """Every rank makes the plan itself; how long the solver took is no difference."""
    mesh = init_device_mesh("cpu", (2,))
    plan = autopar.plan(hw.Mlp(), autopar.Cluster.from_mesh(mesh), hw.vectors(), cache=False)
    return autopar.parallelize(hw.Mlp(), mesh, hw.vectors(), plan=plan).plan == plan


def test_ranks_may_each_plan() -> None:
    assert try_ranks(solved_on_each_rank, 2) == [True, True]


@pytest.mark.parametrize(
    ("mesh", "limit", "word"), [(2, None, "DeviceMesh"), (None, "3 gigs", "or 16GiB")]
)
def test_arguments_of_another_kind(mesh: Any, limit: Any, word: str) -> None:
    with pytest.raises(autopar.AutoparError, match=word):
        autopar.parallelize(hw.Mlp(), mesh or _FakeMesh(), hw.vectors(), memory_limit=limit)


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


def unset_and_wrong_mode(rank: int) -> None:
    parallel = autopar.parallelize(hw.Mlp(), init_device_mesh("cpu", (1,)))
    with pytest.raises(autopar.AutoparError, match="example_inputs"):
        _ = parallel.plan
    parallel.eval()
    with pytest.raises(autopar.AutoparError, match=r"\.train\(\)"):
        parallel.train_step(**hw.vectors())
    batch = hw.vectors()
    with pytest.raises(autopar.AutoparError, match="parallel already"):
        autopar.parallelize(parallel, init_device_mesh("cpu", (1,)))
    with pytest.raises(autopar.AutoparError, match="by position and by keyword: pass each once"):
        parallel(batch["x"], **batch)


def test_wrong_use_of_a_parallel_module() -> None:
    (outcome,) = try_ranks(unset_and_wrong_mode, 1)
    assert outcome is None, outcome


def test_a_line_of_python_itself_is_not_the_users() -> None:
    assert not is_outside(functools.__file__) and not is_outside(json.__file__)
    assert is_outside(pytest.__file__) and is_outside(__file__)
