"""Splits a joint program into the forward and the backward that autograd calls; places waits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from autopar.core.einsum import contract
from autopar.core.work import is_view

__all__ = ["EmptiesItsList", "copy_part", "split_phases", "wait_late"]

c10d = torch.ops._c10d_functional
# called without torch's dispatcher, which takes longer than a small product
_DIRECT: dict[Any, Any] = {torch.ops.autopar.einsum.default: contract}


def wait_late(joint: fx.Graph) -> None:
    """Put the wait for each all-reduce in front of the first reader of its result; views go along.

    Gradients are read by nobody but the caller, so their reductions run beside the rest of the
    backward. An all-reduce works on a copy of its operand, hence waiting later keeps no more
    memory; other collectives hold their operand until the wait, and are left where they are.
    """
    late: set[fx.Node] = set()
    for node in joint.nodes:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and (
            source in late
            if is_view(node.target)
            else node.target is c10d.wait_tensor.default
            and source.target is c10d.all_reduce.default
        ):
            late.add(node)
    position = {node: index for index, node in enumerate(joint.nodes)}
    for node in reversed(list(joint.nodes)):
        first = min(node.users, key=position.__getitem__, default=None)
        if node in late and first is not None:
            position[node] = position[first]  # its operand is placed by this
            first.prepend(node)


def split_phases(
    joint: fx.Graph,
    num_results: int,
    tangents: Collection[str],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """`forward(*inputs) -> (*results, *saved)` and `backward([*saved, *tangents]) -> gradients`.

    Saved is every forward value or input that a backward node reads, each once. The backward
    empties the list that it is given, so that an activation goes with its last use.
    """
    output = next(iter(reversed(joint.nodes)))
    results, gradients = output.args[0][:num_results], output.args[0][num_results:]
    saved: dict[fx.Node, None] = {}
    for node in joint.nodes:
        if node.meta.get("phase") == "backward":
            for source in node.all_input_nodes:
                if source.meta.get("phase") != "backward" and source.name not in tangents:
                    saved.setdefault(source)
    for node in gradients:
        if isinstance(node, fx.Node) and node.meta.get("phase") != "backward":
            saved.setdefault(node)
    forward = copy_part(
        [n for n in joint.nodes if n.op == "placeholder" and n.name not in tangents],
        [n for n in joint.nodes if n.meta.get("phase") == "forward"],
        (*results, *saved),
    )
    backward = copy_part(
        [*saved, *(n for n in joint.nodes if n.op == "placeholder" and n.name in tangents)],
        [n for n in joint.nodes if n.meta.get("phase") == "backward"],
        tuple(gradients),
    )
    backward.graph.set_codegen(EmptiesItsList())
    backward.recompile()
    return forward, backward


class EmptiesItsList(CodeGen):
    """Arguments come in one list, which is emptied at once ("boxed")."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        lines = [f"def {self._func_name}(self, values){maybe_return_annotation}:"]
        if names:
            lines.append(f"{', '.join(names)}, = values")
        lines.append("values.clear()")
        return "\n    ".join(lines)


def copy_part(
    inputs: list[fx.Node],
    body: list[fx.Node],
    outputs: tuple[fx.Node | None, ...],
) -> fx.GraphModule:
    """A graph of some nodes of another: `(*inputs) -> outputs`."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in body:
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].target = _DIRECT.get(node.target, node.target)
    graph.output(tuple(env[n] if isinstance(n, fx.Node) else None for n in outputs))
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)
