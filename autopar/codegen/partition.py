"""Splits a joint program into the forward and the backward that autograd calls."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from autopar.codegen.passes.sends import is_start
from autopar.codegen.reuse import write_over_operands
from autopar.core.einsum import contract, takes_bias
from autopar.core.late_module import late_module

__all__ = ["EmptiesItsList", "copy_part", "split_phases", "whole_step"]

# called without torch's dispatcher, which takes longer than a small product
_DIRECT: dict[Any, Any] = {torch.ops.autopar.einsum.default: contract}


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


def whole_step(joint: fx.Graph, outputs: Collection[int]) -> fx.GraphModule:
    """`step(*placeholders) -> outputs`: forward and backward in one, in the order of the graph.

    Args:
        joint: of a training step.
        outputs: positions of those of its outputs that are wanted; nothing is held for others.
    """
    output = next(iter(reversed(joint.nodes)))
    return copy_part(
        [n for n in joint.nodes if n.op == "placeholder"],
        [n for n in joint.nodes if n.op == "call_function"],
        tuple(output.args[0][index] for index in outputs),
    )


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
        env[node].meta.update(node.meta)
    for node in body:
        env[node] = graph.node_copy(node, env.__getitem__)
        if node.target in _DIRECT:
            env[node].target = _DIRECT[node.target]
    graph.output(tuple(env[n] if isinstance(n, fx.Node) else None for n in outputs))
    _add_biases(graph)
    _drop_aliases(graph)
    graph.eliminate_dead_code()
    write_over_operands(graph)
    graph.lint()
    return late_module(graph)


def _drop_aliases(graph: fx.Graph) -> None:
    """Take out aliases, which only mark where the planner may communicate; keep what is put out.

    What a part puts out must not be one of its inputs: autograd writes to what it is given.
    """
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.alias.default:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            node.replace_all_uses_with(source, lambda user: user.op != "output")


def _add_biases(graph: fx.Graph) -> None:
    """Add a bias in the call of the product that it belongs to, where nothing else reads that.

    The call stays where the product is, whose operands would live longer behind it.
    """
    position = {node: float(index) for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        for product, bias in (node.args, reversed(node.args)):
            if not _is_product(product) or not _is_bias(bias, product):
                continue
            behind = _behind(product, bias, position)
            if any(is_start(n) for n in behind):
                continue  # a gather is issued where the passes put it
            for index, moved in enumerate(behind):
                product.prepend(moved)
                position[moved] = position[product] - 1 / (index + 2)
            with graph.inserting_before(product):
                joined = graph.call_function(contract, (*product.args, bias))
            joined.meta = dict(node.meta) | {"instead_of": node.name}
            position[joined] = position[product]
            node.replace_all_uses_with(joined)
            break


def _behind(product: fx.Node, bias: fx.Node, position: dict[fx.Node, float]) -> list[fx.Node]:
    """What a bias is made of behind the product, in order: the wait for its gather, views of it."""
    found: set[fx.Node] = set()
    open_nodes = [bias]
    while open_nodes:
        node = open_nodes.pop()
        if node not in found and position[node] > position[product]:
            found.add(node)
            open_nodes += node.all_input_nodes
    return sorted(found, key=position.__getitem__)


def _is_product(node: Any) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.target is contract
        and len(node.args) == 3
        and len(node.users) == 1
        and takes_bias(str(node.args[0]))
    )


def _is_bias(node: Any, product: fx.Node) -> bool:
    if not isinstance(node, fx.Node):
        return False
    given, made = node.meta.get("val"), product.meta["val"]
    return (
        isinstance(given, torch.Tensor)
        and given.dim() == 1
        and given.shape[0] == made.shape[-1]
        and given.dtype == made.dtype
    )
