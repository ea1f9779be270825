"""Gradients of a captured forward: which outputs they are of, and which op each one belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.core.graph import InputSpec, output_paths
from autopar.errors import TraceError
from autopar.tracer.diagnose import explain_backward
from autopar.tracer.functions import FunctionCalls
from autopar.tracer.replay import Mark, Replay, last_node

__all__ = ["Gradients"]


class Gradients:
    """Of all parameters that what a forward returns depends on.

    Attributes:
        loss_index: position of the loss among the outputs, if they have one.
        beside: positions of outputs beside the loss that depend on parameters.
        targets: FQNs of the parameters.
        marks: the last nodes before those of a backward op, and the forward op it belongs to.
    """

    def __init__(self, model: nn.Module, loss: str, calls: FunctionCalls) -> None:
        self.model = model
        self.loss_mode = loss
        self.calls = calls
        self.loss_index: int | None = None
        self.beside: tuple[int, ...] = ()
        self.targets: list[str] = []
        self.marks: list[Mark] = []

    def of(
        self,
        replay: Replay,
        specs: Sequence[InputSpec],
        flat: list[Tensor],
        outputs: list[Any],
        out_spec: Any,
    ) -> list[Any]:
        """Take the gradients of a forward, which `targets` name then.

        Args:
            replay: has run the forward.
            specs, flat: inputs.
            outputs: what the model returns, with its structure.
            out_spec: pytree structure of the outputs.
        """
        differentiable = [
            (i, r)
            for i, r in enumerate(outputs)
            if isinstance(r, Tensor) and r.requires_grad and r.is_floating_point()
        ]
        scalars = [(i, r) for i, r in differentiable if r.dim() == 0]
        if self.loss_mode == "auto" and (losses := self._losses(scalars, out_spec)):
            self.loss_index = losses[0][0]
            self.beside = tuple(i for i, _ in differentiable if i != self.loss_index)
            differentiable = losses
        trainable = [(s, p) for s, p in zip(specs, flat, strict=True) if s.trainable]
        if not differentiable or not trainable:
            return []
        tangents = []
        for index, result in differentiable:
            # A tangent enters as a fresh tensor; `lift_tangents` turns its node into a placeholder.
            tangent = torch.empty_like(result, requires_grad=False)
            last_node().meta["autopar_tangent"] = index
            tangents.append(tangent)
        self._hook_backward(replay, [r for _, r in differentiable])
        try:
            gradients = torch.autograd.grad(
                [r for _, r in differentiable],
                [p for _, p in trainable],
                tangents,
                allow_unused=True,
            )
        except RuntimeError as error:
            raise TraceError(explain_backward(self.model, error)) from error
        self.calls.check_backward()
        kept = [
            (s.target, g) for (s, _), g in zip(trainable, gradients, strict=True) if g is not None
        ]
        self.targets = [target for target, _ in kept]
        return [g for _, g in kept]

    def _losses(self, scalars: list[tuple[int, Any]], out_spec: Any) -> list[tuple[int, Any]]:
        """The only scalar output, or of several the one that is called `loss`; else none."""
        if len(scalars) <= 1:
            return scalars
        paths = output_paths(out_spec)
        return [(i, r) for i, r in scalars if paths[i] in (".loss", "['loss']")]

    def _hook_backward(self, replay: Replay, roots: list[Tensor]) -> None:
        """Before each autograd node runs, note which forward op it differentiates."""
        owner: dict[int, fx.Node] = {}
        for first, last, node in replay.ranges:
            for number in range(first, last):
                owner[number] = node
        stack = [r.grad_fn for r in roots]
        seen = set(stack)

        def mark(node: fx.Node) -> Any:
            return lambda _grads: self.marks.append((last_node(), node))

        while stack:
            fn = stack.pop()
            if fn is None:
                continue
            origin = owner.get(fn._sequence_nr())
            if origin is not None:
                fn.register_prehook(mark(origin))
            for parent, _ in fn.next_functions:
                if parent is not None and parent not in seen:
                    seen.add(parent)
                    stack.append(parent)
