"""Emitted programs compiled by torch's Inductor: `parallelize(..., backend="inductor")`.

Collectives and the ops of autopar stay calls inside of the compiled code; Inductor keeps the order
of collectives that the graph has, which is the same on every rank. Where it fails on any rank, all
ranks run the graph as it is, with a warning. The first call of each part runs both forms: where
they differ by more than rounding, it stays as it was emitted. Of a pipeline stage, each part is
compiled by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar._compat import fake_mode_of, inductor_compile, symbolic_mode
from autopar.codegen.accumulate import add_up, without_sums
from autopar.codegen.partition import EmptiesItsList
from autopar.codegen.program import Program
from autopar.codegen.stage_program import TURN, StageProgram
from autopar.core.host import copy_at_once
from autopar.errors import AutoparError

__all__ = [
    "CompiledPart",
    "CompiledProgram",
    "check_backend",
    "compile_parts",
    "compile_program",
]

_BACKENDS = ("eager", "inductor")
_Found = TypeVar("_Found")


def check_backend(backend: str) -> None:
    """Refuse a backend that is not known.

    Raises:
        AutoparError: there is no such backend.
    """
    if backend not in _BACKENDS:
        raise AutoparError(f"backend {backend!r} is unknown: choose one of {', '.join(_BACKENDS)}")


class CompiledPart:
    """A forward or a backward in compiled form, called as the graph is that it was made from.

    Args:
        module: the graph, run instead where the first call fails.
        compiled: takes a list, which it empties.
        examples: fake inputs that it was compiled for.
        boxed: the arguments come in one list.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        compiled: Callable[[list[Any]], Sequence[Any]],
        examples: Sequence[Any],
        boxed: bool,
    ) -> None:
        self.module = module
        self.compiled = compiled
        self.strides = [x.stride() if isinstance(x, Tensor) else None for x in examples]
        self.boxed = boxed
        self.proved = False
        self.eps = _coarsest(module)

    def __call__(self, *args: Any) -> Any:
        values = args[0] if self.boxed else list(args)
        if not self.proved:
            return self._first(values)
        fitted = [_fitted(v, s) for v, s in zip(values, self.strides, strict=True)]
        if self.boxed:
            values.clear()
        return self.compiled(fitted)

    def _first(self, values: list[Any]) -> Any:
        """Run the graph too: what fails in compiled form, or differs, stays as it was emitted."""
        fitted = [_fitted(v, s) for v, s in zip(values, self.strides, strict=True)]
        expected = self._eager(list(values))
        try:
            fault = _difference(self.compiled(fitted), expected, self.eps)
        except Exception as error:  # whatever Inductor's code raises
            fault = _reason(error)
        if fault is not None:
            _warn(f"the compiled program failed: {fault}")
            self.compiled = self._eager
        self.proved = True
        if self.boxed:
            values.clear()
        return expected

    def _eager(self, values: list[Any]) -> Any:
        return self.module(values) if self.boxed else self.module(*values)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """Both parts of a program; `backward` is None for inference."""

    forward: CompiledPart
    backward: CompiledPart | None


def compile_program(program: Program) -> CompiledProgram | None:
    """Compile a program on every rank of the world; None, with a warning, where one rank cannot."""
    return _agreed(lambda: _compiled(program))


def compile_parts(
    programs: Mapping[int, StageProgram], names: Sequence[str]
) -> dict[tuple[int, str], SummingPart]:
    """Compile parts of the programs of a rank's stages, on every rank of the world.

    The number of the microbatch, on which dropout's masks depend, is a symbol in compiled code. An
    op that would fix it differs at the first call, which finds it.

    Args:
        programs: by stage.
        names: of the parts that a step runs, in the order in which values flow.

    Returns:
        Compiled parts by stage and name; none, with a warning, where one rank cannot.
    """

    def compiled() -> dict[tuple[int, str], SummingPart]:
        return {
            (stage, name): part
            for stage, program in programs.items()
            for name, part in _compiled_parts(program, names).items()
        }

    return _agreed(compiled) or {}


def _agreed(compiled: Callable[[], _Found]) -> _Found | None:
    """What `compiled` returns, if it does so on all ranks."""
    found: _Found | None = None
    reason: str | None = None
    try:
        found = compiled()
    except Exception as error:  # Inductor raises what its passes and compilers raise
        reason = _reason(error)
    reasons: list[str | None] = [reason]
    if dist.is_initialized() and dist.get_world_size() > 1:
        reasons = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
    for rank, text in enumerate(reasons):
        if text is not None:
            _warn(f"Inductor cannot compile the program of rank {rank}: {text}")
            return None
    return found


def _compiled_parts(program: StageProgram, names: Sequence[str]) -> dict[str, SummingPart]:
    """Parts are run on fake values one after the other, for the strides that they hand on."""
    values: dict[str, Any] = {}
    mode = fake_mode_of(_placeholders(program.joint))
    found: dict[str, SummingPart] = {}
    for name in names:
        part = program.parts[name]
        graph, summed = without_sums(part.module.graph)
        graph.set_codegen(EmptiesItsList())
        module = fx.GraphModule(part.module, graph)
        reads = part.reads[: len(part.reads) - len(summed)]
        given = zip(reads, _placeholders(module), strict=True)
        inputs = [values.get(read, example) for read, example in given]
        with mode:
            results = module(list(inputs))
        values.update(zip(part.writes, results, strict=True))
        if any(node.op == "call_function" for node in graph.nodes):
            compiled = _inductor(module, _symbolic(inputs) if TURN in reads else inputs)
            found[name] = SummingPart(CompiledPart(module, compiled, inputs, True), summed)
    return found


@dataclass(frozen=True, slots=True)
class SummingPart:
    """A compiled part whose contributions to gradients are added up behind it, in place."""

    part: CompiledPart
    summed: tuple[int, ...]

    def __call__(self, values: list[Any]) -> list[Any]:
        totals = values[len(values) - len(self.summed) :]
        del values[len(values) - len(self.summed) :]
        results = list(self.part(values))
        for position, total in zip(self.summed, totals, strict=True):
            results[position] = add_up(total, results[position])
        return results


def _symbolic(inputs: Sequence[Any]) -> list[Any]:
    """Inputs like these, of which integers become symbols."""
    with symbolic_mode():
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            if isinstance(x, Tensor)
            else 2  # 0 and 1 would be taken for constants
            for x in inputs
        ]


def _compiled(program: Program) -> CompiledProgram:
    inputs = _placeholders(program.forward)
    mode = fake_mode_of(inputs)
    with mode:
        results = program.forward(*inputs)
    forward = CompiledPart(program.forward, _inductor(program.forward, inputs), inputs, False)
    if program.backward is None:
        return CompiledProgram(forward=forward, backward=None)
    saved = list(results[program.num_results :])  # as strided as the forward makes them
    values = [*saved, *_placeholders(program.backward)[len(saved) :]]
    compiled = _inductor(program.backward, values)
    backward = CompiledPart(program.backward, compiled, values, True)
    return CompiledProgram(forward=forward, backward=backward)


def _placeholders(module: fx.GraphModule) -> list[Tensor]:
    return [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]


def _inductor(
    module: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[[list[Any]], Sequence[Any]]:
    graph = fx.Graph()  # a copy that takes its arguments one by one
    graph.output(graph.graph_copy(module.graph, {}))
    copy_at_once(graph)
    with torch.no_grad():
        return inductor_compile(fx.GraphModule(torch.nn.Module(), graph), inputs)


def _difference(found: Sequence[Any], expected: Sequence[Any], eps: float) -> str | None:
    """What is beyond rounding between results of a compiled program and of its graph.

    Sums in another order are off by some eps of what they add up, which may cancel: a tensor is
    held against its own largest number, or a tenth of the largest of all.
    """
    floats = [x for x in expected if isinstance(x, Tensor) and x.is_floating_point()]
    largest = max((_largest(x) for x in floats), default=0.0)
    for index, (mine, right) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(right, Tensor):
            continue
        if mine.shape != right.shape or mine.dtype != right.dtype:
            return f"result {index} is {mine.dtype}{list(mine.shape)}, not {right.dtype}"
        if not right.is_floating_point():
            if not torch.equal(mine, right):
                return f"result {index} has other values"
            continue
        apart = torch.where(torch.isfinite(right), mine - right, 0.0).abs()
        away = float(apart.max()) if apart.numel() else 0.0
        if not away <= eps**0.75 * max(_largest(right), 0.1 * largest):
            return f"result {index} is off by {away:.3g}, its largest is {_largest(right):.3g}"
    return None


def _largest(x: Tensor) -> float:
    """The largest magnitude of finite numbers."""
    found = torch.where(torch.isfinite(x), x, 0.0).abs()
    return float(found.max()) if found.numel() else 0.0


def _coarsest(module: fx.GraphModule) -> float:
    """Machine epsilon of the coarsest floating dtype in a graph."""
    values = (node.meta.get("val") for node in module.graph.nodes)
    dtypes = {v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _fitted(value: Any, strides: Sequence[int] | None) -> Any:
    """`value` with the strides that it was compiled for."""
    if strides is None:
        return value
    if all(n <= 1 or a == b for n, a, b in zip(value.shape, value.stride(), strides, strict=True)):
        return value
    laid = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return laid.copy_(value)


def _reason(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"


def _warn(text: str) -> None:
    warnings.warn(f"{text}. The program runs as it was emitted.", stacklevel=3)
