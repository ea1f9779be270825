"""Passes of other packages over emitted programs, run behind autopar's own.

A pass edits the joint graph of one rank in place, before it is split into forward and backward. Of
a pipeline, each stage has a graph of its own, with the phases "prepare" and "finish" before and
behind the microbatches.
`verify` runs the edited programs, so it checks passes too. Ranks run one program each: a pass makes
the same edits on every rank, and may let only constants depend on the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.core import extensions
from autopar.core.plan import Plan
from autopar.errors import AutoparError

__all__ = ["PassContext", "ProgramPass", "program_pass", "run_passes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """What a pass may want to know.

    Attributes:
        plan: that the program was emitted from.
        coords: the rank's coordinate on each mesh axis.
        group_names: process group of each axis, as collectives take them.
    """

    plan: Plan
    coords: tuple[int, ...]
    group_names: tuple[str, ...]


ProgramPass = Callable[[fx.Graph, PassContext], None]
_PASSES: dict[str, ProgramPass] = {}
_PHASES = ("prepare", "forward", "backward", "finish")  # as they run; most programs have two


def program_pass(name: str) -> Callable[[ProgramPass], ProgramPass]:
    """Register a pass; they run in the order of their names. A name that is taken: ValueError."""

    def register(function: ProgramPass) -> ProgramPass:
        if name in _PASSES and not extensions.is_same(_PASSES[name], function):
            raise ValueError(f"there is a pass {name!r} already: {_PASSES[name].__qualname__}")
        _PASSES[name] = function
        extensions.note("pass", [name], function)
        return function

    return register


def run_passes(graph: fx.Graph, context: PassContext, tangents: Collection[str]) -> None:
    """Run all registered passes on a joint graph, in place.

    Args:
        graph: forward and backward of one rank.
        context: handed to each pass.
        tangents: names of the placeholders that the backward begins with.

    Raises:
        AutoparError: a pass fails, or leaves a graph that is not a program with the same inputs and
            outputs; names the pass.
    """
    extensions.load("autopar.passes")
    for name, function in sorted(_PASSES.items()):
        before = _interface(graph)
        try:
            function(graph, context)
            _complete(graph, tangents)
            graph.lint()
        except Exception as error:
            raise AutoparError(
                f"the pass {name!r} ({function.__module__}) failed: {type(error).__name__}: {error}"
            ) from error
        if _interface(graph) != before:
            raise AutoparError(
                f"the pass {name!r} ({function.__module__}) changed the inputs of a program, or "
                f"the shapes or dtypes of its outputs, from {before} to {_interface(graph)}"
            )


def _interface(graph: fx.Graph) -> tuple[list[str], list[str]]:
    """Names of the inputs; shapes and dtypes of the outputs."""
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    values = [n and n.meta.get("val") for n in next(iter(reversed(graph.nodes))).args[0]]
    return inputs, [
        f"{v.dtype}{list(v.shape)}" if isinstance(v, torch.Tensor) else str(v) for v in values
    ]


def _complete(graph: fx.Graph, tangents: Collection[str]) -> None:
    """Give new nodes a fake value, and the phase and origin of the node that they precede.

    What leaves the program leaves it in the phase in which it is known.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    following: dict[str, str] = {}
    for node in reversed(nodes):
        if "phase" in node.meta:
            following = {key: node.meta[key] for key in ("phase", "origin") if key in node.meta}
        else:
            node.meta.update(following or _last(nodes))
            if any(user.op == "output" for user in node.users):
                known = [n.meta["phase"] for n in node.all_input_nodes if "phase" in n.meta]
                node.meta["phase"] = max(known, key=_PHASES.index, default=node.meta["phase"])
    for node in nodes:
        if "val" not in node.meta:
            mode = _fake_mode(graph)
            args, kwargs = pytree.tree_map_only(
                fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs)
            )
            assert callable(node.target)
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)
        phases = [
            "backward" if n.name in tangents else n.meta.get("phase") for n in node.all_input_nodes
        ]
        known = [_PHASES.index(p) for p in (node.meta.get("phase"), *phases) if p in _PHASES]
        node.meta["phase"] = _PHASES[max(known, default=1)]


def _last(nodes: Sequence[fx.Node]) -> dict[str, str]:
    known = [node.meta for node in nodes if "phase" in node.meta]
    return {key: known[-1][key] for key in ("phase", "origin") if known and key in known[-1]}


def _fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """The mode of the graph's fake values."""
    values = (node.meta.get("val") for node in graph.nodes)
    return next(v.fake_mode for v in values if isinstance(v, FakeTensor))
