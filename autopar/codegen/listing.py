"""A rank's program as text: code, placements as comments, and the user's line of each op."""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autopar.codegen.fusion.generated import Generated
from autopar.codegen.parts import Part
from autopar.codegen.program import Program
from autopar.codegen.stage_program import StageProgram
from autopar.core.graph import InputSpec, NodeInfo, TracedModel
from autopar.core.placement import Layout, format_layout
from autopar.core.plan import Plan
from autopar.core.recompute import recomputed
from autopar.core.units import format_bytes

__all__ = ["argument_text", "program_text", "stage_text", "target_text", "value_text"]

_WIDTH = 100


def program_text(program: Program, traced: TracedModel, plan: Plan) -> str:
    """The program, one statement a line.

    Above what comes from one op of the model stand its module, the user's line and its placements;
    behind a statement stand the local shape, and of a collective the axis and the buffer.

    Args:
        program: of one rank.
        traced: the graph that it was emitted from.
        plan: its plan.
    """
    graph = program.joint.graph
    lines = [
        _mesh(plan),
        *_inputs(graph, program.inputs),
        *_statements(graph, recomputed(traced, plan.checkpoint), plan),
        *_outputs(program),
    ]
    return "\n".join(lines) + "\n"


def stage_text(
    program: StageProgram, titles: Mapping[str, str], traced: TracedModel, plan: Plan
) -> str:
    """The parts of a stage's program, each as `program_text` has it, with what goes in and out.

    Args:
        program: of one rank of the stage.
        titles: of the parts to show, by name, in order.
        traced: the stage's graph at the first turn.
        plan: of the stage.
    """
    traced = recomputed(traced, plan.checkpoint)
    lines = [_mesh(plan), *_inputs(program.joint.graph, program.inputs)]
    for name, title in titles.items():
        part = program.parts[name]
        lines += ["", f"# --- {title}"]
        lines += _part(part, program, traced, plan) if part.writes else ["# nothing"]
    return "\n".join(lines) + "\n"


def _part(part: Part, program: StageProgram, traced: TracedModel, plan: Plan) -> Iterator[str]:
    graph = part.module.graph
    given = [n for n in graph.nodes if n.op == "placeholder"]
    reads = (n if n == node.name else f"{n} as {node.name}"
             for n, node in zip(part.reads, given, strict=True))  # fmt: skip
    yield from _wrapped("reads", reads)
    leaving = {s.target: f"{s.kind} {s.target}" for s, _, _ in program.outputs}
    yield from _statements(graph, traced, plan, leaving)
    yield ""
    (output,) = (n for n in graph.nodes if n.op == "output")
    made = {n: argument_text(node) for n, node in zip(part.writes, output.args[0], strict=True)}
    for spec, layout, name in program.outputs:
        if name in made:
            yield f"{spec.kind} {spec.target} = {made[name]}  # {format_layout(layout)}"
    left = {name for _, _, name in program.outputs}
    kept = (n if n == made[n] else f"{n} as {made[n]}" for n in part.writes if n not in left)
    yield from _wrapped("keeps", kept)


def _wrapped(what: str, names: Iterable[str]) -> list[str]:
    """A comment of some lines."""
    text = ", ".join(names)
    return textwrap.wrap(
        f"{what} {text}" if text else "",
        _WIDTH,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _mesh(plan: Plan) -> str:
    return f"# mesh: {', '.join(map(_axis, plan.axis_names, plan.mesh_shape))}"


def _axis(name: str, size: int) -> str:
    return f"{name} {size}"


def _inputs(graph: fx.Graph, inputs: Sequence[tuple[InputSpec, Layout]]) -> Iterator[str]:
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    for spec, layout in inputs:
        local = value_text(placeholders[spec.node].meta.get("val"))
        yield f"{spec.node} = {spec.kind}({spec.target!r})  # {local} {_of(spec.shape, layout)}"


def _of(shape: tuple[int, ...], layout: Layout) -> str:
    """`of [64, 32] (S0, R)`; the global shape only where it is another."""
    split = any(p.is_shard for p in layout)
    return f"of {list(shape)} {format_layout(layout)}" if split else format_layout(layout)


def _outputs(program: Program) -> Iterator[str]:
    (output,) = (n for n in program.joint.graph.nodes if n.op == "output")
    yield ""
    yield "# results"
    for (spec, layout), node in zip(program.outputs, output.args[0], strict=True):
        yield f"{spec.kind} {spec.target} = {argument_text(node)}  # {format_layout(layout)}"


def _statements(
    graph: fx.Graph, traced: TracedModel, plan: Plan, leaving: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Ops with their headings; those of a part are in one phase, and `leaving` names results."""
    phase = origin = None
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if leaving is None and node.meta.get("phase") != phase:
            phase, origin = node.meta.get("phase"), None
            yield ""
            yield f"# --- {phase}"
        if node.meta.get("origin") != origin:
            origin = node.meta.get("origin")
            info = traced.info.get(str(origin))
            name = str(origin) if info or not leaving else leaving.get(str(origin), str(origin))
            yield from _heading(name, info, plan)
        yield _statement(node, plan)


def _heading(origin: str, info: NodeInfo | None, plan: Plan) -> Iterator[str]:
    yield ""
    where = f"  {info.module}" if info is not None and info.module else ""
    again = "  (computed again)" if info is not None and info.recomputed else ""
    yield f"# {origin}{where}{again}"
    if info is not None and info.source:
        code = _code(info.source)
        yield f"#   {_short(info.source)}" + (f": {code}" if code else "")
    chosen = plan.nodes.get(origin)
    if chosen is not None:
        given = " × ".join(format_layout(x) for x in chosen.inputs)
        made = ", ".join(format_layout(x) for x in chosen.outputs)
        variants = " and ".join(v for v in dict.fromkeys(chosen.variants) if v)
        how = f", as {variants}" if variants else ""
        yield f"#   {given} → {made}{how}"


def _code(source: str) -> str:
    """The user's line, where its file can be read."""
    file, _, number = source.rpartition(":")
    return linecache.getline(file, int(number)).strip() if number.isdecimal() else ""


def _short(source: str) -> str:
    file, colon, number = source.rpartition(":")
    return f"{Path(file).name}{colon}{number}"


def _statement(node: fx.Node, plan: Plan) -> str:
    arguments = [argument_text(a) for a in node.args]
    arguments += [f"{key}={argument_text(value)}" for key, value in node.kwargs.items()]
    text = f"{node.name} = {target_text(node.target)}({', '.join(arguments)})"
    comment = value_text(node.meta.get("val"))
    if "collective" in node.meta:
        kind, axis, num_bytes, _ = node.meta["collective"]
        comment += f" {kind} on {plan.axis_names[axis]}, {format_bytes(num_bytes)}"
    if "overlapped" in node.meta:
        kind, axis, num_bytes, _ = node.meta["overlapped"]
        comment += f" {kind} on {plan.axis_names[axis]}, {format_bytes(num_bytes)}, in one call"
    if "piece" in node.meta:
        piece, count = node.meta["piece"]
        comment += f", piece {piece + 1} of {count}"
    if isinstance(node.target, Generated):
        comment += f", of {', '.join(target_text(member.target) for member in node.target.members)}"
    return f"{text}  # {comment}" if comment else text


def target_text(target: Any) -> str:
    """Name of what a node calls."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def argument_text(value: Any) -> str:
    """An argument, nodes by their names."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(argument_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    return repr(value)


def value_text(value: Any) -> str:
    """`float32[4, 8]` of a tensor, several of them with commas."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return ", ".join(filter(None, map(value_text, value)))
    return ""
