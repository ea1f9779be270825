"""Tensors that a forward reads past the module's parameters and buffers.

    self.regularised = [layer.weight for layer in self.layers]
    …
    return loss + sum(w.square().sum() for w in self.regularised)

Export puts another tensor into the place of each parameter, and takes what the list holds for a
constant. Where that is the memory of a parameter or buffer, the graph reads this one instead. A
parameter of some other module stays a constant, and is warned of.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar._tracing import has_memory
from autopar.errors import TraceError
from autopar.tracer.diagnose import innermost_line

__all__ = ["OutsideTensors", "refuse_shared_memory", "say_own"]

aten = torch.ops.aten


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


@dataclass
class _Read:
    """Tensors of one memory that are read, with the line that did so first."""

    line: str
    tensors: list[Tensor] = field(default_factory=list)

    def has_parameter(self) -> bool:
        return any(isinstance(x, nn.Parameter) for x in self.tensors)


class OutsideTensors:
    """Real tensors that torch's functions were given while a forward ran, by memory."""

    def __init__(self) -> None:
        self.reads: dict[int, _Read] = {}
        self._running = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While the forward runs."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def note(self, args: Iterable[Any]) -> None:
        """Remember what is no tensor of the trace."""
        if not self._running:
            return
        for arg in args:
            if isinstance(arg, (tuple, list)):
                self.note(arg)
            elif type(arg) in (Tensor, nn.Parameter) and has_memory(arg):
                memory = _memory(arg)
                if memory not in self.reads:
                    self.reads[memory] = _Read(innermost_line(traceback.extract_stack()))
                if not any(arg is x for x in self.reads[memory].tensors):
                    self.reads[memory].tensors.append(arg)


def say_own(exported: Any, model: nn.Module, outside: OutsideTensors, prefix: str) -> list[str]:
    """Let a graph read parameters and buffers where it has their memory as a constant.

    Args:
        exported: the program of a wrapper of `model`.
        model: with real tensors.
        outside: what its forward was given.
        prefix: of names in the wrapper.

    Returns:
        What is said of parameters that are none of the model's.

    Raises:
        TraceError: a constant is a part of a parameter, or may be it or a detached form of it.
    """
    signature, graph = exported.graph_signature, exported.graph_module.graph
    places = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = {
        _memory(state[target.removeprefix(prefix)]): (target.removeprefix(prefix), places[name])
        for name, target in reversed(named.items())
        if target.removeprefix(prefix) in state and name in places
    }
    told = []
    constants = signature.inputs_to_lifted_tensor_constants
    attributes = {target: _attribute(model, target, prefix) for target in constants.values()}
    for name, target in constants.items():
        value = exported.constants.get(target)
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            continue
        read = outside.reads.get(_memory(value))
        if _memory(value) in own:
            said, place = own[_memory(value)]
            found = [] if attributes[target] is None else [value]
            if read is not None and not found:
                found = [x for x in read.tensors if all(x is not a for a in attributes.values())]
            _check_alias(said, state[said], found, read)
            detached = state[said].requires_grad and not isinstance(found[0], nn.Parameter)
            _replace(places[name], place, detached)
            _drop(exported, places[name], target)
        elif read is not None and read.has_parameter() and read.tensors[0].requires_grad:
            told.append(_of_foreign(read))
    return told


def _attribute(model: nn.Module, target: str, prefix: str) -> Tensor | None:
    """The tensor that a constant is called after; None for one without a name."""
    *owners, leaf = target.removeprefix(prefix).split(".")
    found: Any = model
    for name in owners:
        found = getattr(found, name, None)
    value = getattr(found, leaf, None)
    return value if isinstance(value, Tensor) else None


def _check_alias(said: str, own: Tensor, found: list[Tensor], read: _Read | None) -> None:
    """Refuse a part of a parameter, and what may be the parameter or be detached from it."""
    where = "" if read is None else f" at {read.line}"
    for value in found:
        if _geometry(own) != _geometry(value):
            raise TraceError(
                f"cannot trace the read{where}\n  A tensor of shape {tuple(value.shape)} was made "
                f"of {said} before the forward and shares its memory, of which ranks hold shares. "
                f"Make it in the forward, of self.{said}."
            )
    if len({type(value) for value in found}) > 1:
        raise TraceError(
            f"cannot trace the read{where}\n  {said} is read both as a parameter and detached, "
            f"past the module that it belongs to, and a trace cannot tell which is where. Read "
            f"self.{said} and self.{said}.detach() in the forward."
        )


def _replace(constant: fx.Node, own: fx.Node, detached: bool) -> None:
    """Read a parameter, or what is detached from it, in place of a constant."""
    source = own
    if detached:
        last = [n for n in constant.graph.nodes if n.op == "placeholder"][-1]
        with constant.graph.inserting_after(last):
            source = constant.graph.call_function(aten.detach.default, (own,))
        source.meta["val"] = constant.meta["val"]
    constant.replace_all_uses_with(source)


def _drop(exported: Any, constant: fx.Node, target: str) -> None:
    """Take out a constant; as an input beside its memory, torch would refuse writes to either."""
    specs = exported.graph_signature.input_specs
    specs[:] = [spec for spec in specs if getattr(spec.arg, "name", None) != constant.name]
    constant.graph.erase_node(constant)
    exported.constants.pop(target, None)
    exported.graph_module.recompile()


def _of_foreign(read: _Read) -> str:
    return (
        f"forward reads a parameter of shape {tuple(read.tensors[0].shape)} that is none of the "
        f"model's, at {read.line}: every step takes the values that it has now, and it gets no "
        "gradient. Put its module into an nn.ModuleList, or the parameter into an "
        "nn.ParameterList, or pass the values as an input"
    )


def refuse_shared_memory(model: nn.Module) -> None:
    """Refuse a parameter that shares memory with another one, or with a buffer.

    Raises:
        TraceError: two are the same memory without being one tensor.
    """
    kept: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
    for name, tensor in _state(model):
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            continue
        other, first = kept.setdefault((_memory(tensor), _geometry(tensor)), (name, tensor))
        if first is not tensor and any(isinstance(x, nn.Parameter) for x in (first, tensor)):
            raise TraceError(
                f"{other} and {name} share their memory and are two tensors: what an optimizer "
                "does to one changes the other on one device, and would not on several. Let them "
                f"be one, as by `module_b.weight = module_a.weight` (without .data), or let {name} "
                "be a clone()."
            )


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
