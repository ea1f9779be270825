"""`backend="inductor"`: emitted programs compiled, on real gloo ranks, against the plain module.

The first matrix is small; the others compile for minutes and are `slow`.
"""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime import inductor
from tests import handwritten as hw
from tests import zoo
from tests.dist import run_ranks

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="Inductor on the CPU needs a C++ compiler: neither $CXX nor g++ is there",
)

MODELS: dict[str, Any] = {
    "mlp": lambda: (hw.Mlp(), hw.vectors()),
    "gpt2": functools.partial(zoo.gpt2, layers=1),
    "llama": functools.partial(zoo.llama, layers=1),
    "vit": functools.partial(zoo.vit, layers=1),
    "bert": functools.partial(zoo.bert, layers=1),
    "resnet": zoo.resnet,
    "t5": zoo.t5,
}
# logits, RMS norm or rotary embedding in float32, whatever the model's dtype
BOUND = {"gpt2": 1e-6, "llama": 1e-6, "t5": 1e-6}
MODES: dict[str, tuple[int, Any]] = {
    "one": (1, None),
    "dp": (2, {"data": 2, "zero": 0}),
    "zero3": (2, {"data": 2, "zero": 3, "checkpoint": "full"}),
    "host": (2, {"data": 2, "zero": 3, "checkpoint": "host"}),
    "1d": (2, {"tensor": {"mode": "1d", "size": 2}}),
    "megatron-sp": (2, {"tensor": {"mode": "1d", "size": 2}, "sequence": "megatron"}),
    "ulysses": (2, {"sequence": "ulysses"}),
    "ring": (2, {"sequence": "ring"}),
    "2d": (4, {"tensor": {"mode": "2d", "size": 4}}),
    "hybrid": (4, {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 1}),
}
QUICK = [("mlp", "1d"), ("gpt2", "one")]
ALL = [
    (model, mode)
    for model in ("mlp", "gpt2", "llama")
    for mode in MODES
    if model != "mlp" or mode not in ("megatron-sp", "ulysses", "ring")  # it has no attention
] + [(model, mode) for model in ("vit", "bert", "resnet", "t5") for mode in ("zero3", "1d")]

# compiled, the loss of this float64 step is off by 1e-7; why is not known
STAYS_EAGER = [("bert", "zero3")]


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    return model.double().train(), wide


def loss_of(output: Any) -> torch.Tensor:
    found = output if isinstance(output, torch.Tensor) else output.loss
    assert isinstance(found, torch.Tensor)
    return found


def errors_of_steps(rank: int, world: int, name: str, constraints: Any, steps: int) -> list[float]:
    """Largest relative error of the loss and of each gradient, against the plain module."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    model, inputs = build(name)
    mesh = init_device_mesh("cpu", (world,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        parallel = autopar.parallelize(
            model, mesh, inputs, constraints=constraints, backend="inductor"
        )
    assert isinstance(parallel.compiled.compiled, inductor.CompiledProgram)
    return [error_of_a_step(model, parallel, inputs) for _ in range(steps)]


def error_of_a_step(model: nn.Module, parallel: Any, inputs: dict[str, Any]) -> float:
    model.zero_grad()
    parallel.zero_grad()
    expected = loss_of(model(**inputs))
    expected.backward()
    found = parallel.train_step(**inputs)
    for part in (parallel.compiled.forward, parallel.compiled.backward):
        assert part.proved and part.compiled.__name__ != "_eager"
    worst = float((found - expected).abs() / expected.abs())
    gradients = {n: p.grad for n, p in parallel.named_parameters()}
    assert gradients.keys() == {n for n, _ in model.named_parameters()}
    largest = max(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            difference = (gradients[name].full_tensor() - parameter.grad).norm()
            worst = max(worst, float(difference / parameter.grad.norm().clamp(min=1e-6 * largest)))
    return worst


def check(name: str, mode: str) -> None:
    world, constraints = MODES[mode]
    arguments = (world, name, constraints, 2)
    for errors in run_ranks(errors_of_steps, world, *arguments, timeout=580):
        assert len(errors) == 2
        assert max(errors) <= BOUND.get(name, 1e-9)


@needs_compiler
@pytest.mark.parametrize(("name", "mode"), QUICK)
def test_gradients_equal_the_plain_module(name: str, mode: str) -> None:
    check(name, mode)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"), [pair for pair in ALL if pair not in (*QUICK, *STAYS_EAGER)]
)
def test_gradients_equal_the_plain_module_everywhere(name: str, mode: str) -> None:
    check(name, mode)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x)).square().mean()


def small(rank: int, backend: str, world: int = 1, **options: Any) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = (torch.randn(6, 4).t(),)
    mesh = init_device_mesh("cpu", (world,))
    return autopar.parallelize(Small().train(), mesh, x, backend=backend, seed=5, **options), x


def both_backends(rank: int, folder: str) -> None:
    """Dropout's masks, evaluation, a strided batch, low precision, and a measured step."""
    losses: dict[str, list[float]] = {}
    for backend in ("eager", "inductor"):
        parallel, x = small(rank, backend)
        found = [parallel.train_step(*x), parallel.train_step(*x)]
        found.append(parallel.profile_step(Path(folder) / f"{backend}.json", *x))
        parallel.eval()
        found.append(parallel(*x))
        with torch.no_grad():
            found.append(parallel(x[0].contiguous()))
        losses[backend] = [float(value) for value in found]
    assert len(set(losses["eager"][:3])) == 3  # masks of their own
    assert losses["inductor"] == pytest.approx(losses["eager"], rel=1e-6)
    low = [float(small(rank, b, precision="bf16")[0].train_step(*x)) for b in losses]
    assert low[0] == pytest.approx(low[1], rel=2e-2)
    assert low[0] != losses["eager"][0]


@needs_compiler
def test_masks_modes_and_strides_are_those_of_eager(tmp_path: Path) -> None:
    run_ranks(both_backends, 1, str(tmp_path), timeout=400)
    assert (tmp_path / "inductor.json").exists()


def without_compiler(rank: int, world: int) -> list[str]:
    """The last rank has no compiler, so no rank compiles."""
    if rank == world - 1:
        torch._inductor.config.cpp.cxx = ("no-compiler-of-this-name",)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallel, x = small(rank, "inductor", world, constraints={"data": world, "zero": 0})
    assert parallel.compiled.compiled is None
    assert torch.isfinite(parallel.train_step(*x))
    return [str(w.message) for w in caught if "Inductor" in str(w.message)]


@needs_compiler
def test_all_ranks_run_eagerly_where_one_cannot_compile() -> None:
    for texts in run_ranks(without_compiler, 2, 2, timeout=300):
        (text,) = texts
        assert "of rank 1" in text and "runs as it was emitted" in text
        assert "no-compiler-of-this-name" in text or "compiler" in text.lower()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(autopar.AutoparError, match="eager, inductor"):
        autopar.parallelize(hw.Mlp(), _Mesh(), hw.vectors(), backend="xla")  # type: ignore[arg-type]


class _Mesh:
    mesh, device_type = torch.arange(1), "cpu"

    def size(self) -> int:
        return 1


def _part(compiled: Any, boxed: bool) -> inductor.CompiledPart:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.neg, (x,)),))
    module = torch.fx.GraphModule(nn.Module(), graph)
    module.forward = (lambda values: (-values[0],)) if boxed else module.forward
    return inductor.CompiledPart(module, compiled, [torch.empty(2, 3)], boxed)


@pytest.mark.parametrize("boxed", [False, True])
def test_what_fails_at_the_first_call_runs_eagerly(boxed: bool) -> None:
    def compiled(values: list[torch.Tensor]) -> None:
        values.clear()
        raise AssertionError("expected size 2")

    part, x = _part(compiled, boxed), torch.randn(2, 3)
    with pytest.warns(UserWarning, match="AssertionError: expected size 2"):
        (found,) = part([x]) if boxed else part(x)
    assert torch.equal(found, -x)
    values = [x]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = part(values) if boxed else part(x)
    assert torch.equal(found, -x)
    assert not (boxed and values)


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_what_differs_at_the_first_call_runs_eagerly(wrong: float) -> None:
    part, x = _part(lambda values: (-values.pop() * wrong,), False), torch.randn(2, 3)
    part.eps = torch.finfo(torch.float32).eps
    with pytest.warns(UserWarning, match="result 0 is off by"):
        assert torch.equal(part(x)[0], -x)
    assert torch.equal(part(x)[0], -x)
    rounded = _part(lambda values: (-values.pop() * (1 + 1e-7),), False)
    rounded.eps = part.eps
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounded(x)
    assert rounded.compiled.__name__ == "<lambda>"  # still the compiled form


def test_arguments_get_the_strides_that_were_compiled_for() -> None:
    seen = []

    def compiled(values: list[torch.Tensor]) -> tuple[torch.Tensor]:
        seen.append(values[0].stride())
        return (-values.pop(),)

    part, x = _part(compiled, True), torch.randn(3, 2).t()
    for _ in range(2):
        values = [x]
        (found,) = part(values)
        assert torch.equal(found, -x) and not values
    assert seen == [(3, 1), (3, 1)]


def kept_eager(rank: int, name: str, constraints: Any) -> tuple[list[str], float]:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    model, inputs = build(name)
    mesh = init_device_mesh("cpu", (2,))
    options: dict[str, Any] = {"constraints": constraints, "backend": "inductor"}
    parallel = autopar.parallelize(model, mesh, inputs, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = parallel.train_step(**inputs)
    expected = loss_of(model(**inputs))
    texts = [str(w.message) for w in caught if "compiled program" in str(w.message)]
    return texts, float((found - expected).abs() / expected)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), STAYS_EAGER)
def test_a_program_that_inductor_changes_is_run_as_it_was_emitted(name: str, mode: str) -> None:
    for texts, error in run_ranks(kept_eager, 2, name, MODES[mode][1], timeout=580):
        assert any("result 0 is off by" in text for text in texts)
        assert error <= 1e-9
