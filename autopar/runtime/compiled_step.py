"""A step that is ready to run on this rank, and the inputs that it was compiled for."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar._compat import register_dataclasses
from autopar.codegen.fusion import Fusion
from autopar.codegen.partition import whole_step
from autopar.codegen.program import Program
from autopar.core.graph import TracedModel
from autopar.core.loss import position_of_loss
from autopar.core.plan import Plan
from autopar.errors import AutoparError
from autopar.runtime.index_ranges import Lookup
from autopar.runtime.inductor import CompiledProgram

__all__ = [
    "CompiledStep",
    "in_one_piece",
    "input_signature",
    "kept_outputs",
    "named_inputs",
    "outputs_behind",
    "tensors_in_order",
    "warn_of_many",
]

_MANY = 8  # kinds of inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """A traced step with its plan and this rank's program, for one input signature.

    `compiled` runs in place of the program's graphs, where a backend made it. `keywords` are the
    names of keyword inputs, in the order of the trace. `at_once`: see `in_one_piece`. `shared`:
    lookups whose indices are watched in every batch (`index_ranges`), and `reached_from` is what
    `outputs_behind` finds.
    """

    traced: TracedModel
    plan: Plan
    program: Program
    fusion: Fusion
    keywords: tuple[str, ...] = ()
    compiled: CompiledProgram | None = None
    at_once: fx.GraphModule | None = None
    shared: tuple[Lookup, ...] = ()
    reached_from: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @property
    def communicates(self) -> bool:
        """True if ranks wait for each other in it."""
        return bool(self.plan.predicted.comm_bytes)

    @property
    def forward(self) -> Callable[..., Any]:
        """The program's forward, compiled where it is."""
        return self.program.forward if self.compiled is None else self.compiled.forward

    @property
    def backward(self) -> Callable[..., Any] | None:
        """The program's backward, compiled where it is; None for inference."""
        return self.program.backward if self.compiled is None else self.compiled.backward


def outputs_behind(traced: TracedModel) -> dict[str, frozenset[int]]:
    """Positions of the outputs whose gradients a parameter's is made of, by FQN.

    Empty where all gradients come from one output, as from a loss.
    """
    tangents = {s.node: int(s.target) for s in traced.inputs if s.kind == "tangent"}
    if len(tangents) < 2:
        return {}
    found: dict[str, frozenset[int]] = {}
    for node in traced.graph.nodes:
        own = [frozenset((tangents[node.name],))] if node.name in tangents else []
        found[node.name] = frozenset().union(*own, *(found[x.name] for x in node.all_input_nodes))
    return {s.target: found[s.node] for s in traced.outputs if s.kind == "gradient" and s.node}


def input_signature(args: Any, kwargs: Any) -> Any:
    """What a compiled step is for: structure, shapes, dtypes and constants of the inputs."""
    register_dataclasses((args, kwargs))
    leaves, spec = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
    described = tuple(
        (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves
    )
    return described, str(spec)


def warn_of_many(signatures: Collection[Any], args: Any, kwargs: Any) -> None:
    """Warn where calls bring inputs of ever new kinds, each of which is planned.

    Args:
        signatures: `input_signature` of all kinds, the latest last.
        args, kwargs: of the latest.
    """
    if len(signatures) != _MANY:
        return
    *_, (before, spec), (now, latest) = signatures
    leaves, _ = pytree.tree_flatten_with_path((args, dict(sorted(kwargs.items()))))
    changed = [
        f"{pytree.keystr(path)}, {_kind(a)} and {_kind(b)}"
        for (path, _), a, b in zip(leaves, before, now, strict=False)
        if a != b
    ]
    unlike = f", the last two of which differ in {changed[0]}" if spec == latest and changed else ""
    warnings.warn(
        f"the model has been called with {_MANY} kinds of inputs{unlike}. Each kind is planned and "
        "kept: pad batches to few shapes, and pass numbers that change as tensors",
        stacklevel=4,
    )


def _kind(described: Any) -> str:
    return described if isinstance(described, str) else f"shape {list(described[0])}"


def named_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs given by position beside some by keyword: all under the names that the forward has.

    Raises:
        AutoparError: the forward has no name for one of them, or it is given twice.
    """
    if not args or not kwargs:
        return args, kwargs
    signature = inspect.signature(model.forward)
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        raise AutoparError(
            f"{len(args)} inputs are given by position beside {', '.join(kwargs)}, and "
            f"{type(model).__name__}.forward{signature} has names for {len(names)}: pass all by "
            "keyword (the target of a loss_fn as target=)"
        )
    twice = [name for name in names[: len(args)] if name in kwargs]
    if twice:
        raise AutoparError(
            f"input {twice[0]!r} of {type(model).__name__}.forward{signature} is given by position "
            "and by keyword: pass each once (the target of a loss_fn as target=)"
        )
    return (), {**dict(zip(names, args, strict=False)), **kwargs}


def tensors_in_order(
    keywords: Sequence[str], training: bool, args: Any, kwargs: Any
) -> list[Tensor]:
    """The tensors of a batch as the trace has them: a later call may name its inputs in any order.

    Raises:
        AutoparError: one of them wants a gradient, which no step computes.
    """
    named = {name: kwargs[name] for name in keywords}
    found = [x for x in pytree.tree_leaves((args, named)) if isinstance(x, Tensor)]
    if training and any(x.requires_grad for x in found):
        shapes = ", ".join(str(tuple(x.shape)) for x in found if x.requires_grad)
        raise AutoparError(
            f"an input of shape {shapes} requires a gradient; gradients of inputs are not "
            "produced. Detach it; or, where another module made it, parallelize one module that "
            "calls both; or register it as an nn.Parameter of the model."
        )
    return found


def kept_outputs(program: Program, loss: int) -> list[int]:
    """Positions of a joint program's outputs without results other than the loss."""
    return [
        position
        for position, (spec, _) in enumerate(program.outputs)
        if spec.kind != "output" or int(spec.target) == loss
    ]


def in_one_piece(traced: TracedModel, program: Program) -> fx.GraphModule | None:
    """What `train_step` runs: forward and backward in one, for the loss and the gradients alone.

    The loss is waited for after the backward, and other results are freed at once.
    `step(*placeholders) -> kept outputs`; None where there is no backward or no loss.
    """
    if program.backward is None:
        return None
    try:
        loss = position_of_loss(traced)
    except AutoparError:  # told when train_step is called
        return None
    return whole_step(program.joint.graph, kept_outputs(program, loss))
