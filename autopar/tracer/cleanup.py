"""Tidies the joint graph: repeats, what nothing reads, names, and where nodes come from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.core.graph import InputKind, InputSpec, OutputSpec
from autopar.errors import TraceError
from autopar.tracer.capture import PREFIX

__all__ = [
    "clean",
    "drop_unread",
    "join_constants",
    "lift_constants",
    "lift_tangents",
    "module_of",
    "rename",
    "renamed_outputs",
    "source_of",
    "tied_parameters",
]

aten = torch.ops.aten
_PACKAGE = f"{Path(__file__).parents[1]}/"


def renamed_outputs(outputs: tuple[OutputSpec, ...], output: fx.Node) -> tuple[OutputSpec, ...]:
    """Descriptors with the names that the nodes have after the clean-up."""
    values: Any = output.args[0]
    return tuple(
        OutputSpec(
            node=arg.name if isinstance(arg, fx.Node) else None,
            kind=spec.kind,
            target=spec.target,
            constant=spec.constant,
        )
        for spec, arg in zip(outputs, values, strict=True)
    )


def free_names(graph: fx.Graph, names: Iterable[str]) -> None:
    """Rename ops that are called as inputs will be: the op of `x.mean()`, of an input `mean`."""
    wanted = set(names)
    for node in graph.nodes:
        if node.op != "placeholder" and node.name in wanted:
            freed = node.name
            node._rename(f"{freed}_op")
            graph._graph_namespace._used_names.discard(freed)


def rename(node: fx.Node, name: str) -> None:
    node.name = node.graph._graph_namespace.create_name(name, None)
    node.target = node.name
    if node.name != name:
        raise TraceError(f"two inputs of the graph are called {name!r}")


_IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)


def _same_as_input(node: fx.Node) -> fx.Node | None:
    """The input that a call merely repeats, if it does."""
    if node.target in _IDENTITIES or node.target is aten.clone.default:
        return node.args[0]  # type: ignore[return-value]
    source = node.args[0] if node.args else None
    if node.target in (aten.slice.Tensor, aten.expand.default, aten.view.default):
        assert isinstance(source, fx.Node)
        same = tuple(source.meta["val"].shape) == tuple(node.meta["val"].shape)
        return source if same else None
    if node.target is aten.cat.default and isinstance(source, (list, tuple)):
        filled = [x for x in source if x.meta["val"].numel()]
        if len(filled) == 1:
            return filled[0]
        node.args = (filled, *node.args[1:])
    return None


def clean(graph: fx.Graph) -> None:
    """Drop calls that repeat their input, and what nothing uses."""
    for node in list(graph.nodes):
        same = _same_as_input(node) if node.op == "call_function" else None
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def drop_unread(
    graph: fx.Graph, inputs: list[InputSpec], plain: Collection[str] = ()
) -> list[InputSpec]:
    """Drop placeholders that nothing reads: tied names beyond the one in use, unused state.

    User inputs stay, so that they can be bound in order, but for those in `plain`: no tensors.
    """
    by_name = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    read = {s.target for s in inputs if s.kind == "parameter" and by_name[s.node].users}
    kept: list[InputSpec] = []
    seen: set[str] = set()
    for spec in inputs:
        node = by_name[spec.node]
        unread = not node.users
        if spec.kind == "parameter":
            drop = unread and (spec.target in read or spec.target in seen)
            seen.add(spec.target)
        else:
            drop = unread and (spec.kind in ("buffer", "constant") or spec.node in plain)
        if drop:
            graph.erase_node(node)
        else:
            kept.append(spec)
    return kept


def lift_constants(gm: fx.GraphModule) -> list[InputSpec]:
    """Turn `get_attr` tensors into placeholders, so that codegen sees inputs only."""
    specs: list[InputSpec] = []
    graph = gm.graph
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(gm, str(node.target))
        target = str(node.target)
        last = _to_placeholder(node, last, target, node.meta.get("val", value))
        specs.append(_spec(last, "constant", target, value))
    return specs


def join_constants(
    graph: fx.Graph, inputs: Collection[InputSpec], values: Mapping[str, Tensor]
) -> None:
    """Let equal constants be one: blocks that each make the same one are equal blocks.

    Args:
        graph: with placeholders; those of the others are read no more.
        inputs: of the graph.
        values: of constants, by target.
    """
    by_name = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    first: dict[tuple[Any, ...], fx.Node] = {}
    for spec in inputs:
        value = values.get(spec.target) if spec.kind == "constant" else None
        if value is None or type(value) is not Tensor or value.is_meta:
            continue
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        node = by_name[spec.node]
        one = first.setdefault((value.dtype, tuple(value.shape), value.device, content), node)
        if one is not node:
            node.replace_all_uses_with(one)


def lift_tangents(graph: fx.Graph, after: fx.Node) -> list[InputSpec]:
    """Make placeholders, behind a node, of the fresh tensors that stand for tangents."""
    specs: list[InputSpec] = []
    for node in list(graph.nodes):
        if "autopar_tangent" not in node.meta:
            continue
        index, value = node.meta["autopar_tangent"], node.meta["val"]
        after = _to_placeholder(node, after, f"tangent_{index}", value)
        specs.append(_spec(after, "tangent", str(index), value))
    return specs


def _to_placeholder(node: fx.Node, after: fx.Node, name: str, value: Tensor) -> fx.Node:
    """Replace a node by a placeholder that stands behind another one."""
    graph = node.graph
    with graph.inserting_after(after):
        placeholder = graph.placeholder(name)
    placeholder.meta = {"val": value}
    node.replace_all_uses_with(placeholder)
    graph.erase_node(node)
    return placeholder


def _spec(placeholder: fx.Node, kind: InputKind, target: str, value: Tensor) -> InputSpec:
    return InputSpec(
        node=placeholder.name, kind=kind, target=target, shape=tuple(value.shape), dtype=value.dtype
    )


def tied_parameters(model: nn.Module) -> list[tuple[str, str]]:
    """`(alias, owner)` for each name of a parameter beyond its first."""
    owners: dict[int, str] = {}
    tied: list[tuple[str, str]] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        if owner != name:
            tied.append((name, owner))
    return tied


def module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return paths[-1].removeprefix(PREFIX.rstrip(".")).lstrip(".") if paths else ""


def source_of(node: fx.Node) -> str:
    """`file:line` of the innermost frame outside torch and autopar; "" where there is none."""
    trace_text = node.meta.get("stack_trace") or ""
    lines = [line for line in trace_text.splitlines() if line.strip().startswith("File ")]
    for line in reversed(lines):
        if "/torch/" in line or _PACKAGE in line:
            continue
        path, _, rest = line.strip()[5:].partition(", line ")
        return f"{path.strip(chr(34))}:{rest.split(',')[0]}"
    return ""
