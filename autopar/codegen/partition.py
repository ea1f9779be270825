"""Splits a joint program into the forward and the backward that autograd calls."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

__all__ = ["split_phases"]


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
    forward = _copy(
        joint,
        [n for n in joint.nodes if n.op == "placeholder" and n.name not in tangents],
        [n for n in joint.nodes if n.meta.get("phase") == "forward"],
        (*results, *saved),
    )
    backward = _copy(
        joint,
        [*saved, *(n for n in joint.nodes if n.op == "placeholder" and n.name in tangents)],
        [n for n in joint.nodes if n.meta.get("phase") == "backward"],
        tuple(gradients),
    )
    backward.graph.set_codegen(_EmptiesItsList())
    backward.recompile()
    return forward, backward


class _EmptiesItsList(CodeGen):
    """Arguments come in one list, which is emptied at once ("boxed")."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        lines = [f"def {self._func_name}(self, values){maybe_return_annotation}:"]
        if names:
            lines.append(f"{', '.join(names)}, = values")
        lines.append("values.clear()")
        return "\n    ".join(lines)


def _copy(
    joint: fx.Graph,
    inputs: list[fx.Node],
    body: list[fx.Node],
    outputs: tuple[fx.Node | None, ...],
) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in body:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[n] if isinstance(n, fx.Node) else None for n in outputs))
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)
