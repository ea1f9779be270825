"""What an exported program reads: descriptors of its placeholders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _Namespace

from autopar.core.graph import InputSpec
from autopar.errors import TraceError
from autopar.tracer.between_blocks import BetweenBlocks
from autopar.tracer.capture import PREFIX
from autopar.tracer.cleanup import tied_parameters
from autopar.tracer.effects import drop_dead

__all__ = [
    "apply_between",
    "check_no_input_mutation",
    "cut_skipped",
    "input_specs",
    "lifted_tensors",
    "written_buffer",
]


def check_no_input_mutation(exported: Any) -> None:
    """Refuse a forward that writes to its inputs or parameters.

    Raises:
        TraceError: it does; names what.
    """
    mutated = exported.graph_signature.user_inputs_to_mutate
    if mutated:
        names = ", ".join(sorted(set(mutated.values())))
        raise TraceError(
            f"the forward changes its input {names} in place. Clone it first, so that the "
            "caller's tensor stays as it was on every rank."
        )
    for spec in exported.graph_signature.output_specs:
        if spec.kind.name == "PARAMETER_MUTATION":
            raise TraceError(
                f"the forward changes its parameter {spec.target.removeprefix(PREFIX)} in "
                "place. Compute a new tensor from it (torch.nn.utils.parametrize does), or "
                "change it between steps."
            )


def written_buffer(spec: Any) -> str | None:
    """FQN of the buffer that an output of an exported program is the new value of."""
    return spec.target.removeprefix(PREFIX) if spec.kind.name == "BUFFER_MUTATION" else None


def lifted_tensors(exported: Any) -> dict[str, Tensor]:
    """Tensors that a forward made of plain values, by the name of their placeholder."""
    lifted = exported.graph_signature.inputs_to_lifted_tensor_constants
    return {
        name: exported.constants[target]
        for name, target in lifted.items()
        if isinstance(exported.constants.get(target), Tensor)
    }


def input_specs(exported: Any, model: nn.Module) -> tuple[list[InputSpec], set[str]]:
    """Descriptors of a graph's placeholders, in order, and names of those that are no tensors."""
    signature = exported.graph_signature
    trainable = {
        name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)
    }
    owner = dict(tied_parameters(model))
    specs: list[InputSpec] = []
    plain: set[str] = set()
    buffers = dict(model.named_buffers(remove_duplicate=False))
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    parameters, kept = signature.inputs_to_parameters, signature.inputs_to_buffers
    lifted = signature.inputs_to_lifted_tensor_constants  # each looks through all inputs
    names = _graph_names([node.name for node in placeholders])
    for node, name in zip(placeholders, names, strict=True):
        value = node.meta.get("val")
        is_tensor = isinstance(value, Tensor)
        if not is_tensor:
            plain.add(name)
        shape = tuple(int(s) for s in value.shape) if is_tensor else ()
        dtype = value.dtype if is_tensor else torch.int64
        kind: Any = "input"
        target = node.name
        if node.name in parameters:
            kind = "parameter"
            target = parameters[node.name].removeprefix(PREFIX)
            target = owner.get(target, target)
        elif node.name in kept:
            target = kept[node.name].removeprefix(PREFIX)
            kind = "buffer" if target in buffers else "constant"
        elif node.name in lifted:
            kind = "constant"
            target = lifted[node.name]
        specs.append(
            InputSpec(
                node=name,
                kind=kind,
                target=target,
                shape=shape,
                dtype=dtype,
                trainable=kind == "parameter" and trainable.get(target, False),
            )
        )
    return specs, plain


def cut_skipped(between: BetweenBlocks, model: nn.Module, exported: Any) -> None:
    """Cut calls of blocks that were skipped, with the inputs of what is computed beside them."""
    if not between.lists:
        return
    specs, values = input_specs(exported, model)[0], lifted_tensors(exported)
    _drop_inputs(exported, between.cut_skipped(exported.graph_module, specs, values))


def apply_between(between: BetweenBlocks, model: nn.Module, exported: Any) -> None:
    """Let what is between blocks be part of them, and drop what is cut with its inputs."""
    if not between.lists:
        return
    drop_dead(exported.graph_module)  # as what only a check of values reads, which is left out
    specs, values = input_specs(exported, model)[0], lifted_tensors(exported)
    _drop_inputs(exported, between.apply(exported.graph_module, specs, values))


def _drop_inputs(exported: Any, unread: set[fx.Node]) -> None:
    names = {node.name for node in unread}
    signature = exported.graph_signature
    signature.input_specs[:] = [s for s in signature.input_specs if s.arg.name not in names]
    for node in unread:
        node.graph.erase_node(node)


def _graph_names(names: list[str]) -> list[str]:
    """The names that arguments have in a graph, where `input` or `type` is no name of a node."""
    found: list[str] = []
    for name in names:
        while _Namespace().create_name(name, None) != name or name in found:
            name += "_"
        found.append(name)
    return found
