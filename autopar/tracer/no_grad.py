"""Keeps `torch.no_grad` through the removal of in-place ops.

`torch.export` puts what runs under `no_grad` into a subgraph; its `run_decompositions`, which
takes the writes out, dissolves the subgraph and the mode with it. A mark that torch copies to every
node made from a marked one tells afterwards what ran without gradients, and in which subgraph. Of
the nodes in there torch then knows the line of generated code alone, so the user's is put back.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx, nn

from autopar.errors import TraceError
from autopar.tracer.diagnose import user_line

__all__ = ["keep_written_gradients", "mark_no_grad", "restore_lines", "runs_without_grad"]

Lines = dict[tuple[str, str], str]
"""Stack trace of each node in a subgraph, by name of the subgraph and of the node."""

aten = torch.ops.aten
_MARK = "autopar_no_grad"
_GENERATED = re.compile(r'File "<eval_with_key>[^\n]*\n\s*(\w+) =')
_set_grad = torch.ops.higher_order.wrap_with_set_grad_enabled
_autocast = torch.ops.higher_order.wrap_with_autocast
_CUTTING = (aten.detach.default, _set_grad)  # pass no gradient on


def runs_without_grad(node: fx.Node) -> bool:
    """True for a node that comes from a `no_grad` part of the forward."""
    return bool(node.meta.get("custom", {}).get(_MARK))


def mark_no_grad(model: nn.Module, exported: Any) -> Lines:
    """Mark the subgraphs of an exported program that run without gradients; their lines.

    Raises:
        TraceError: one of them writes to a tensor that has a gradient: autograd would pass the
            gradient by the write, a program without writes cannot.
    """
    graph = exported.graph_module.graph
    differentiable = _differentiable(exported, model)
    lines: Lines = {}
    for node in graph.nodes:
        if node.target is not _set_grad or node.args[0]:
            continue
        name = str(node.args[1].target)
        node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: name}
        part, outer = _region(exported.graph_module, node)
        lines |= {(name, n.name): n.meta.get("stack_trace") or "" for n in part.graph.nodes}
        for write, written in _writes_inside(part):
            if outer.get(written) in differentiable:
                raise TraceError(
                    f"cannot trace {type(model).__name__} at {user_line(write)}\n  "
                    f"{write.target} writes under no_grad to a tensor that has a gradient. "
                    "Make a new tensor there, or write to x.detach().clone()."
                )

    return lines


def keep_written_gradients(model: nn.Module, exported: Any) -> None:
    """Let `p = table.detach(); p += weight` keep the gradient of the weight.

    Without writes, `p` is detached anew from the table that the sum was written to, and its
    gradient with it. Where the table has no gradient, and is not read later, nothing is detached.

    Raises:
        TraceError: it has one, or it is; or what is written has none, and that of what is read
            later would be lost.
    """
    graph = exported.graph_module.graph
    differentiable = _differentiable(exported, model)
    for region in graph.find_nodes(op="call_function", target=_autocast):
        _refuse_detached_writes(model, exported.graph_module, region, differentiable)
    for write, written in _writes(graph):
        _copy_made_without_grad(exported, written)
        if written.name in exported.graph_signature.inputs_to_parameters:
            continue  # refused as any write to a parameter
        detached = _detached(write)
        values = [n for n in write.all_input_nodes if n is not write.args[0]]
        kept = bool(differentiable.intersection(values))
        if _is_handed_out_detached(exported, written, kept, differentiable):
            raise TraceError(_shared(model, write, kept))
        if not detached or not (kept or written in differentiable):
            continue
        read = _read_later(write, written, () if kept else _CUTTING)
        others = not all(_comes_from(x, detached) for x in read)
        if others or (kept and written in differentiable):
            raise TraceError(_shared(model, write, kept))
        for node in detached if kept else ():
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


def _refuse_detached_writes(
    model: nn.Module,
    module: fx.GraphModule,
    node: fx.Node,
    differentiable: set[Any],
    nested: bool = False,
) -> None:
    """As above, in an autocast region, where nothing is kept: what is written must not be read.

    Who reads what a `nested` one writes is not followed out of the region around it.
    """
    part, outer = _region(module, node)
    inside = _spread(part.graph, {place for place, x in outer.items() if x in differentiable})
    for write, written in _writes(part.graph):
        given = outer.get(written)
        kept = any(n in inside for n in write.all_input_nodes if n is not write.args[0])
        is_cut, has_gradient = bool(_detached(write)), kept or written in inside
        if given is not None:
            is_cut = is_cut or _is_detached(given)
            has_gradient = has_gradient or _owner(given) in differentiable
        if is_cut and has_gradient and (nested or _is_lost(write, written, node, given, kept)):
            raise TraceError(_shared(model, write, kept))
    for inner in part.graph.find_nodes(op="call_function", target=_autocast):
        _refuse_detached_writes(model, part, inner, inside, nested=True)


def _is_lost(
    write: fx.Node, written: fx.Node, region: fx.Node, given: fx.Node | None, kept: bool
) -> bool:
    """True if a gradient is, of a write to memory, maybe `given` to the region around it.

    One that is written is lost to what comes from there, one of before to all others.
    """
    detached, but = _detached(write), () if kept else _CUTTING
    of_written = kept and bool(detached)
    if any(_comes_from(x, detached) == of_written for x in _read_later(write, written, but)):
        return True
    return given is not None and not of_written and bool(_read_later(region, _owner(given), but))


def _is_handed_out_detached(
    exported: Any, written: fx.Node, kept: bool, differentiable: set[Any]
) -> bool:
    """True for what an autocast region detached of memory that others read, with a gradient."""
    call = written.args[0] if written.target is operator.getitem else None
    if not isinstance(call, fx.Node) or call.target is not _autocast:
        return False
    part, _ = _region(exported.graph_module, call)
    results: Any = part.graph.output_node().args[0]
    result = results[written.args[1]]
    owner = _owner(result)
    others = [n for n in results if isinstance(n, fx.Node) and n is not result]
    is_shared = owner.op == "placeholder" or any(_owner(n) is owner for n in others)
    has_gradient = kept or not differentiable.isdisjoint(call.all_input_nodes)
    return is_shared and has_gradient and _is_detached(result)


def _shared(model: nn.Module, write: fx.Node, kept: bool) -> str:
    value = " a value that has a gradient" if kept else ""
    sharer = "another tensor" if kept else "a tensor that has a gradient"
    return (
        f"cannot trace {type(model).__name__} at {user_line(write)}\n  "
        f"{write.target} writes{value} to memory that {sharer} shares by detach(). "
        "Make a new tensor there, or write to x.detach().clone()."
    )


def _read_later(write: fx.Node, written: fx.Node, but: tuple[Any, ...] = ()) -> set[fx.Node]:
    """What shows memory that is written, and is read behind the write, `but` by some ops."""
    order = {node: i for i, node in enumerate(write.graph.nodes)}
    later = [n for n in order if order[n] > order[write] and n.target not in but]
    return {x for n in later for x in n.all_input_nodes if _owner(x) is written}


def _is_detached(node: fx.Node) -> bool:
    """True for what is detached from its memory, or comes from a part without gradients."""
    while node is not _owner(node):
        if node.target is aten.detach.default:
            return True
        node = _source(node)
    call = node.args[0] if node.target is operator.getitem else None
    return isinstance(call, fx.Node) and call.target is _set_grad


def _copy_made_without_grad(exported: Any, written: fx.Node) -> None:
    """Let what a part without gradients made, and detached, be memory of its own."""
    call = written.args[0] if written.target is operator.getitem else None
    if not isinstance(call, fx.Node) or call.target is not _set_grad or call.args[0]:
        return
    part, _ = _region(exported.graph_module, call)
    results: Any = part.graph.output_node().args[0]
    result = results[written.args[1]]
    same = [n for n in results if isinstance(n, fx.Node) and _owner(n) is _owner(result)]
    if result.target is aten.detach.default and same == [result]:
        if _owner(result).op != "placeholder":
            result.target = aten.clone.default
            part.recompile()


def _detached(write: fx.Node) -> list[fx.Node]:
    """The calls of `detach` between what is written to and its memory."""
    found, node = [], write
    owner = _owner(write)
    while node is not owner:
        node = _source(node)
        found += [node] if node.target is aten.detach.default else []
    return found


def _comes_from(node: fx.Node, sources: list[fx.Node]) -> bool:
    """True for a view of one of some nodes, or what was written to one."""
    owner = _owner(node)
    while node not in sources and node is not owner:
        node = _source(node)
    return node in sources


def _source(node: fx.Node) -> fx.Node:
    """What a view or a write is of."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def restore_lines(graph: fx.Graph, lines: Lines) -> None:
    """Give nodes from subgraphs the stack traces that they had in there."""
    for node in graph.nodes:
        part = node.meta.get("custom", {}).get(_MARK)
        found = _GENERATED.search(node.meta.get("stack_trace") or "")
        if part and found and (trace := lines.get((part, found[1]))):
            node.meta["stack_trace"] = trace


def _region(module: fx.GraphModule, call: fx.Node) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """What a call of `_set_grad` or `_autocast` runs; what it is given, by placeholder."""
    called, *operands = call.args[1 if call.target is _set_grad else 4 :]
    assert isinstance(called, fx.Node)
    part = module.get_submodule(str(called.target))
    assert isinstance(part, fx.GraphModule)
    places = part.graph.find_nodes(op="placeholder")
    given = zip(places, operands, strict=True)
    return part, {place: x for place, x in given if isinstance(x, fx.Node)}


def _differentiable(exported: Any, model: nn.Module) -> set[Any]:
    """The nodes that may have a gradient: parameters, and what is computed from them with one."""
    names = exported.graph_signature.inputs_to_parameters
    found: set[Any] = set()
    for node in exported.graph_module.graph.nodes:
        if node.op == "placeholder":
            parameter = names.get(node.name)
            if parameter is not None and exported.state_dict[parameter].requires_grad:
                found.add(node)
    return _spread(exported.graph_module.graph, found)


def _spread(graph: fx.Graph, found: set[Any]) -> set[Any]:
    """The nodes with a gradient, if some have one."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target not in (aten.detach.default, _set_grad):
            if any(operand in found for operand in node.all_input_nodes):
                found.add(node)
    return found


def _writes(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Each in-place op with the placeholder or op whose memory it writes to."""
    found = []
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            found.append((node, _owner(node)))
    return found


def _writes_inside(part: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """Writes of a part of a graph, and of autocast regions in it."""
    found = _writes(part.graph)
    for node in part.graph.find_nodes(op="call_function", target=_autocast):
        inner, outer = _region(part, node)
        inside = [(write, outer.get(owner)) for write, owner in _writes_inside(inner)]
        found += [(write, _owner(operand)) for write, operand in inside if operand is not None]
    return found


def _owner(node: fx.Node) -> fx.Node:
    """Where the memory of a node comes from, through views and earlier writes."""
    while isinstance(node.target, torch._ops.OpOverload) and node.args:
        source = node.args[0]
        shares = node.target._schema.arguments[0].alias_info is not None
        if not shares or not isinstance(source, fx.Node):
            break
        node = source
    return node
