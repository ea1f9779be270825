"""What another package adds to autopar: `tests/extension_package`, installed and used as it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autopar
from autopar.codegen import lowering as lowerings
from autopar.codegen import program_pass as passes
from autopar.codegen.emit import emit
from autopar.core import extensions, work
from autopar.cost_model import Cluster, catalogue, load_profile
from autopar.extend import PassContext, lowering, op_work, program_pass, register_profile, rule
from autopar.solver import candidates
from autopar.solver.rules import registry
from autopar.tracer.trace import trace
from tests.dist import RankError, try_ranks

ROOT = Path(__file__).parents[1]
PACKAGE = Path(__file__).parent / "extension_package"
TWO = Cluster.from_profile("cpu-gloo", devices_per_node=2)
aten = torch.ops.aten


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the package was installed to, as pip does it."""
    target = tmp_path_factory.mktemp("site")
    copy = tmp_path_factory.mktemp("source") / "package"
    subprocess.run(["cp", "-r", str(PACKAGE), str(copy)], check=True)
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--target"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(target), str(copy)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return target


def run_with(folder: Path, code: str, cache: Path) -> dict[str, Any]:
    """`code` in a fresh interpreter that has the package; the dict that it leaves as `out`."""
    paths = [str(folder), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-W", "error::autopar.UnsupportedOpWarning", "-c", MODEL + code + PRINT],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "AUTOPAR_CACHE_DIR": str(cache)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


MODEL = """
import autopar, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(64, 2048) / 8)
        self.down = nn.Linear(2048, 8)
    def forward(self, x):
        import autopar_example
        h, mean = autopar_example.center(autopar_example.project(x, self.up))
        return self.down(h.relu()).square().mean() + 0.1 * mean.sum()

torch.manual_seed(0)
model, x = Net().double(), (torch.randn(4, 6, 64, dtype=torch.float64),)
four = autopar.Cluster.from_profile("example-board", devices_per_node=4)
out = {}
"""
PRINT = "\nimport json; print(json.dumps(out))\n"

RUN = """
split = {"params": {"up": ["S1"], "down.weight": ["S1"]}}
for name, pins, limit in (("data", {"data": 4, "zero": 3}, None), ("split", split, 1_400_000)):
    plan = autopar.plan(model, four, x, constraints=pins, memory_limit=limit)
    found = autopar.verify(plan, model, x)
    out[name] = {
        "error": found.worst[1],
        "tensors": len(found.gradients),
        "center": [list(plan.nodes[n].variants) for n in plan.nodes if n.startswith("center")],
        "project": [p.kind for p in plan.nodes["project"].outputs[0]],
    }
from autopar.codegen.emit import emit
from autopar.tracer.trace import trace
graph = emit(trace(model, x), plan, [0]).joint.graph
calls = [n for n in graph.nodes if n.op == "call_function"]
out["powers"] = sum("pow" in str(n.target) and n.args[1] == 2 for n in calls)
mul = torch.ops.aten.mul.Tensor
out["squares"] = sum(n.target is mul and n.args[0] is n.args[1] for n in calls)
out["device"] = four.device.name
from autopar.core.strategy import op_call
from autopar.core.work import global_flops, op_class
call = op_call(next(n for n in trace(model, x).graph.nodes if n.name == "project"), 1)
out["work"] = [op_class(call), global_flops(call)]
"""


@pytest.fixture(scope="module")
def ran(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_with(installed, RUN, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", ["data", "split"])
def test_ops_of_another_package_give_the_numbers_of_one_device(
    ran: dict[str, Any], name: str
) -> None:
    assert ran[name]["tensors"] == 3
    assert ran[name]["error"] < 1e-12


def test_its_rule_is_what_the_plan_chooses_from(ran: dict[str, Any]) -> None:
    assert ran["data"]["project"] == ["S"]
    assert ran["data"]["center"] == [[""], [""]]
    assert ["split"] in ran["split"]["center"]


def test_its_flops_price_the_op(ran: dict[str, Any]) -> None:
    assert ran["work"] == ["matmul", 2.0 * 4 * 6 * 64 * 2048]


def test_its_pass_edits_programs_that_still_verify(ran: dict[str, Any]) -> None:
    assert (ran["powers"], ran["squares"]) == (0, 1)


def test_its_profile_is_known_by_name(ran: dict[str, Any]) -> None:
    assert ran["device"] == "Example board"


FUSED = """
class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu() ** 2
        return x.mean()

model, x = Squares().double(), (torch.randn(4, 8, dtype=torch.float64),)
two = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
plan = autopar.plan(model, two, x)
from autopar.codegen.emit import emit
from autopar.tracer.trace import trace
for name, fusion in (("fused", {"only": ["example-squared-relu"]}), ("plain", False)):
    graph = emit(trace(model, x), plan, [0], fusion=fusion).joint.graph
    out[name] = sum("squared_relu" in str(n.target) for n in graph.nodes)
out["fusion_error"] = autopar.verify(
    plan, model, x, fusion={"only": ["example-squared-relu"]}).worst[1]
pin = {"size": 2, "microbatches": 4, "schedule": "example-reversed"}
plan = autopar.plan(model, two, x, constraints={"pipeline": pin})
out["schedule"] = plan.pipeline.schedule
out["schedule_error"] = autopar.verify(plan, model, x).worst[1]
"""


def test_its_fused_kernel_and_its_schedule(installed: Path, tmp_path: Path) -> None:
    found = run_with(installed, FUSED, tmp_path / "cache")
    assert (found["fused"], found["plain"]) == (2, 0)
    assert found["schedule"] == "example-reversed"
    assert found["fusion_error"] < 1e-12
    assert found["schedule_error"] < 1e-12


def test_plans_are_kept_apart_by_what_the_package_says(installed: Path, tmp_path: Path) -> None:
    """The same question is in the cache until a source of the package changes."""
    ask = "autopar.plan(model, four, x)\n"
    cache, other = tmp_path / "cache", tmp_path / "other"
    for folder, plans in ((installed, 1), (installed, 1), (other, 2)):
        if folder is other:
            subprocess.run(["cp", "-r", str(installed), str(other)], check=True)
            with (other / "autopar_example" / "ops.py").open("a") as file:
                file.write("# another version\n")
        run_with(folder, ask, cache)
        assert len(list(cache.glob("*.json"))) == plans


def test_a_package_that_cannot_be_imported_is_named(installed: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    subprocess.run(["cp", "-r", str(installed), str(broken)], check=True)
    (broken / "autopar_example" / "rules.py").write_text("import nothing_of_this_name\n")
    code = """
try:
    autopar.plan(model, four, x)
except autopar.AutoparError as error:
    out["error"] = str(error)
"""
    text = run_with(broken, code, tmp_path / "cache")["error"]
    for word in ("autopar-example 0.1", "autopar_example.rules", "nothing_of_this_name"):
        assert word in text


def test_a_profile_without_its_file_is_named(installed: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    subprocess.run(["cp", "-r", str(installed), str(broken)], check=True)
    (broken / "autopar_example" / "profiles" / "example-board.toml").unlink()
    script = (
        "import autopar\ntry: autopar.Cluster.from_profile('example-board')\n"
        "except autopar.AutoparError as error: print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(broken), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert "autopar-example" in done.stdout and "example-board.toml" in done.stdout


def test_lowerings_do_not_bring_in_the_solver(installed: Path) -> None:
    script = (
        "import sys, autopar_example.lowerings, autopar_example.passes, autopar.codegen.emit\n"
        "print([n for n in sys.modules if n.startswith(('autopar.solver', 'pulp'))])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "[]"


# --- in this process: registries are put back afterwards ------------------------------------------
@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(lowerings, "_LOWERINGS", dict(lowerings._LOWERINGS))
    monkeypatch.setattr(passes, "_PASSES", dict(passes._PASSES))
    monkeypatch.setattr(catalogue, "_REGISTERED", dict(catalogue._REGISTERED))
    monkeypatch.setattr(work, "_WORK", dict(work._WORK))
    monkeypatch.setattr(extensions, "_noted", dict(extensions._noted))
    monkeypatch.setattr(candidates, "_warned", set())


@pytest.fixture(scope="module")
def double_op() -> Iterator[Any]:
    """An op that nobody has a rule for."""
    library = torch.library.Library("autopar_test", "FRAGMENT")
    library.define("double(Tensor x, float by=2.0) -> Tensor")
    library.impl("double", lambda x, by=2.0: x * by, "CompositeExplicitAutograd")
    yield torch.ops.autopar_test.double.default
    library._destroy()


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.ops.autopar_test.double(x, 3.0)
        return self.linear(x).square().mean()


def stub_in(text: str) -> str:
    """The code of the warning: from the import to the end."""
    found = re.search(r"^from autopar\.extend.*", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group()


@pytest.mark.parametrize("edited", [False, True])
def test_the_stub_of_the_warning_can_be_pasted(
    registries: None, double_op: Any, edited: bool
) -> None:
    model, x = Doubles().double(), (torch.randn(8, 64, dtype=torch.float64),)
    pins = {"data": 2}
    with pytest.warns(autopar.UnsupportedOpWarning, match="double") as caught:
        plan = autopar.plan(model, TWO, x, constraints=pins, cache=False)
    assert plan.nodes["double"].outputs[0][0].is_replicate
    (text,) = [str(w.message) for w in caught]
    assert "autopar_test::double(Tensor x, float by=2.) -> Tensor" in text
    stub = stub_in(text)
    if edited:
        stub = stub.replace("# AxisStrategy", "AxisStrategy")
    exec(compile(stub, "pasted", "exec"), {"__name__": "pasted"})
    candidates._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = autopar.plan(model, TWO, x, constraints=pins, cache=False)
    assert plan.nodes["double"].outputs[0][0].is_shard == edited
    assert autopar.verify(plan, model, x).worst[1] < 1e-12


def test_a_registration_changes_the_key_of_cached_plans(registries: None) -> None:
    keys = {extensions.digest()}
    for number, decorate in enumerate(
        (rule("lib.a.default"), lowering("lib.a.default"), op_work("lib.a.default"),
         program_pass("a"))
    ):  # fmt: skip
        decorate(_nothing)
        keys.add(extensions.digest())
        assert len(keys) == number + 2
    rule("lib.a.default")(_nothing)  # again: a module that was reloaded
    assert extensions.digest() in keys


def _nothing(*_: Any) -> Any:
    return None


def test_what_is_taken_is_refused(registries: None) -> None:
    for name in (aten.mm.default, "aten.mm.default"):
        with pytest.raises(ValueError, match="already has the rule"):
            rule(name)(_nothing)
    with pytest.raises(ValueError, match="already has the lowering"):
        lowering("autopar.token_nll.default")(_nothing)
    program_pass("a")(_nothing)
    with pytest.raises(ValueError, match="a pass 'a' already"):
        program_pass("a")(lambda graph, context: None)
    op_work("lib.b.default")(_nothing)
    with pytest.raises(ValueError, match="already has its flops"):
        op_work("lib.b.default")(lambda call: 1.0)


def test_a_profile_by_its_file(registries: None, tmp_path: Path) -> None:
    file = tmp_path / "my-board.toml"
    own = PACKAGE / "autopar_example" / "profiles" / "example-board.toml"
    file.write_text(own.read_text().replace("example-board", "my-board"))
    assert register_profile(file) == "my-board"
    assert load_profile("my-board").device.name == "Example board"
    assert register_profile(file) == "my-board"
    with pytest.raises(autopar.AutoparError, match="'h200' already"):
        (tmp_path / "h200.toml").write_text(file.read_text())
        register_profile(tmp_path / "h200.toml")
    with pytest.raises(autopar.AutoparError, match=r"not a \.toml file"):
        register_profile(tmp_path / "none.toml")


class Relu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu().square().mean()


def emitted_with(edit: Any) -> tuple[Any, Relu, Any]:
    """A plan for a small model, and its program behind a pass."""
    program_pass("under-test")(edit)
    model, x = Relu().double(), (torch.randn(4, 8, dtype=torch.float64),)
    return autopar.plan(model, TWO, x, constraints={"data": 2}, cache=False), model, x


def saves_negative(graph: fx.Graph, context: PassContext) -> None:
    """relu(x) becomes −(−relu(x)), the outer one in front of its readers: forward and backward."""
    assert context.plan.mesh_shape == (2,) and len(context.coords) == 1
    for node in graph.find_nodes(op="call_function", target=aten.relu.default):
        with graph.inserting_after(node):
            inner = graph.call_function(aten.neg.default, (node,))
        for user in [user for user in node.users if user is not inner]:
            with graph.inserting_before(user):
                user.replace_input_with(node, graph.call_function(aten.neg.default, (inner,)))


def test_new_nodes_of_a_pass_belong_to_the_phase_they_stand_in(registries: None) -> None:
    plan, model, x = emitted_with(saves_negative)
    assert autopar.verify(plan, model, x).worst[1] < 1e-12
    program = emit(trace(model, x), plan, [1])
    assert program.backward is not None
    phases = [
        n.meta["phase"]
        for n in program.joint.graph.nodes
        if n.target is aten.neg.default and n.args[0].target is aten.neg.default
    ]
    assert {"forward", "backward"} == set(phases)
    for part, phase in ((program.forward, "forward"), (program.backward, "backward")):
        negated = part.graph.find_nodes(op="call_function", target=aten.neg.default)
        assert len(negated) == phases.count(phase) + (phase == "forward")


def wrong_numbers(graph: fx.Graph, context: PassContext) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.relu.default):
        node.target = aten.sigmoid.default


def other_shape(graph: fx.Graph, context: PassContext) -> None:
    (output,) = graph.find_nodes(op="output")
    first, *rest = output.args[0]
    with graph.inserting_before(output):
        output.args = ((graph.call_function(aten.unsqueeze.default, (first, 0)), *rest),)


def raises(graph: fx.Graph, context: PassContext) -> None:
    raise KeyError("lost")


def test_verify_sees_what_a_pass_breaks(registries: None) -> None:
    plan, model, x = emitted_with(wrong_numbers)
    assert autopar.verify(plan, model, x).worst[1] > 1e-3


@pytest.mark.parametrize(("edit", "word"), [(other_shape, "shapes"), (raises, "KeyError: 'lost'")])
def test_a_pass_that_fails_is_named(registries: None, edit: Any, word: str) -> None:
    with pytest.raises(autopar.AutoparError, match=word) as caught:
        emitted_with(edit)
    assert "'under-test' (tests.test_extensions)" in str(caught.value)


def pass_on_one_rank(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    if rank == 1:
        program_pass("alone")(_nothing)
    autopar.parallelize(Relu(), init_device_mesh("cpu", (2,)), (torch.randn(4, 8),))


def test_ranks_that_are_extended_differently_stop() -> None:
    for outcome in try_ranks(pass_on_one_rank, 2):
        assert isinstance(outcome, RankError), outcome
        assert "what extends autopar" in outcome.message
