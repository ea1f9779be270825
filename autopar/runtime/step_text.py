"""What a rank runs, as text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np

from autopar.codegen.emit import emit
from autopar.codegen.listing import program_text, stage_text
from autopar.core.schedule import Action
from autopar.errors import AutoparError
from autopar.runtime.compiled_step import CompiledStep
from autopar.runtime.pipeline import PipelinedStep
from autopar.runtime.pipeline_run import PARTS
from autopar.runtime.stage_values import stages_at_turns

__all__ = ["step_text"]


def step_text(step: CompiledStep | PipelinedStep, rank: int | None = None) -> str:
    """The program of a rank, with placements and the user's lines as comments.

    Args:
        step: in microbatches or not.
        rank: of the mesh, in row-major order; of a pipeline, those of its first rank come first.
            Default: this one, whose process groups then have the names that they have here.

    Raises:
        AutoparError: there is no such rank.
    """
    if isinstance(step, PipelinedStep):
        return _pipelined_text(step, rank)
    program, shape = step.program, step.plan.mesh_shape
    if rank is not None:
        coords = _coordinates(rank, shape, f"the mesh {shape}")
        fusion = replace(
            step.fusion, dump=None
        )  # to look at a program writes no sources of kernels
        program = emit(step.traced, step.plan, coords, passes=program.passes, fusion=fusion)
    return program_text(program, step.traced, step.plan)


def _coordinates(rank: int, shape: tuple[int, ...], mesh: str) -> list[int]:
    if not 0 <= rank < math.prod(shape):
        raise AutoparError(f"rank {rank}: {mesh} has {math.prod(shape)} ranks")
    return [int(c) for c in np.unravel_index(rank, shape)]


def _pipelined_text(step: PipelinedStep, rank: int | None) -> str:
    p, mesh = step.pipeline, step.plan.mesh_shape
    shape = (p.size, *mesh)
    turns = stages_at_turns(step.traced, p)
    if rank is None:
        line, coords, programs = step.mesh.rank, step.coords, dict(step.programs)
    else:
        where = f"the mesh {mesh}" if p.size == 1 else f"the pipeline of {p.size} times {mesh}"
        line, *found = _coordinates(rank, shape, where)
        coords = tuple(found)
        programs = {stage: step.emit(turns, stage, coords) for stage in step.stages_of(line)}
    order, closing = step.orders[line], step.closing_of(line, programs)
    number = int(np.ravel_multi_index((line, *coords), shape))
    place = f"rank {line} of {p.size} of the pipeline, at " if p.size > 1 else ""
    lines = [
        f"# rank {number} of {math.prod(shape)}: {place}{tuple(coords)} of the mesh {mesh}",
        *_order_text(order, closing, p.microbatches),
    ]
    text = "\n".join(lines) + "\n"
    for stage, program in programs.items():
        titles = _titles([a for a in order if a.stage == stage], closing, step.traced.training)
        model, plan = turns[0].stages.models[stage], p.stages[stage]
        text += f"\n# === stage {stage}\n{stage_text(program, titles, model, plan)}"
    return text


def _order_text(
    order: Iterable[Action], closing: Collection[Action], microbatches: int
) -> list[str]:
    """The actions of a rank as they follow each other."""
    names = (f"{action} (last)" if action in closing else str(action) for action in order)
    return textwrap.wrap(
        f"{microbatches} microbatches; stage, action and microbatch: {', '.join(names)}",
        100,
        initial_indent="# ",
        subsequent_indent="#   ",
    )


def _titles(order: Iterable[Action], closing: Collection[Action], training: bool) -> dict[str, str]:
    """Title of each part that a stage runs, by its name.

    Args:
        order: of the stage's actions.
        closing: those that run with the reductions beside them.
        training: gradients are reduced.
    """
    found = {"prepare": "prepare, once"}
    order = list(order)
    ends = [a for a in order if a in closing]
    for kind, name in PARTS.items():
        if any(a.kind == kind and a not in closing for a in order):
            but = " but the last" if any(a.kind == kind for a in ends) else ""
            found[name] = f"{name}, of each microbatch{but} ({kind})"
    if ends:
        kind = ends[0].kind
        found["last"] = f"last: {PARTS[kind]} of the last microbatch ({kind}), with finish"
    elif training:
        found["finish"] = "finish, once"
    return found
