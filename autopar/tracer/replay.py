"""Runs an exported graph under autograd, and notes which op is at work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.errors import TraceError
from autopar.tracer.decompositions import REPLACEMENTS
from autopar.tracer.derivatives import as_leaf, derivative, derived, take_derivative
from autopar.tracer.diagnose import user_line
from autopar.tracer.functions import FunctionCalls, custom_function
from autopar.tracer.no_grad import runs_without_grad
from autopar.tracer.randomness import RandomContext

__all__ = ["Mark", "Replay", "last_node"]

aten = torch.ops.aten
_set_grad = torch.ops.higher_order.wrap_with_set_grad_enabled
_autocast = torch.ops.higher_order.wrap_with_autocast
Mark = tuple[fx.Node, fx.Node]  # the last node of the traced graph before an op's, and the op


class Replay(fx.Interpreter):
    """Runs the exported graph with the replacement calls, noting each op's autograd range."""

    def __init__(
        self,
        gm: fx.GraphModule,
        rng: RandomContext,
        device: torch.device,
        calls: FunctionCalls,
        casts: Mapping[str, torch.dtype] | None = None,
        autocast: bool = False,
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.autocast = autocast  # which casts for torch's calls, and not for what replaces them
        self.casts = dict(casts or {})
        self.rng = rng
        self.device = device
        self.calls = calls
        self.ranges: list[tuple[int, int, fx.Node]] = []
        self.marks: list[Mark] = []
        self.leaves = derived(gm)

    def run_node(self, n: fx.Node) -> Any:
        result = self._run_node(n)
        return as_leaf(result) if n in self.leaves else result

    def _run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            self._cast_operands(n)
            return super().run_node(n)
        first = torch._C._autograd._get_sequence_nr()
        before = last_node()
        self._cast_operands(n)
        with torch.no_grad() if runs_without_grad(n) else nullcontext():
            try:
                result = super().run_node(n)
            except RuntimeError as error:  # shapes or dtypes that export's fakes let pass
                raise TraceError(f"cannot trace {user_line(n)}\n  {error}") from error
        if n.target not in (_set_grad, _autocast):  # the ops in there have marks of their own
            self.ranges.append((first, torch._C._autograd._get_sequence_nr(), n))
            self.marks.append((before, n))
        return result

    def _cast_operands(self, n: fx.Node) -> None:
        """Cast inputs at their first use, so that the casts count for its module."""
        for operand in n.all_input_nodes:
            dtype = self.casts.pop(operand.name, None)
            if dtype is not None:
                self.env[operand] = self.env[operand].to(dtype)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _set_grad:
            enabled, part, *operands = args
            with torch.set_grad_enabled(enabled):
                return self._run_part(part, operands, self.autocast)
        if target is _autocast:
            kind, dtype, enabled, cached, part, *operands = args
            with torch.autocast(kind, dtype, enabled, cached):
                return self._run_part(part, operands, True)
        if target is custom_function:
            return self.calls.run(*args)
        if target is derivative:
            return take_derivative(*args)
        if target is aten._assert_tensor_metadata.default:
            return None  # it may name the meta device
        replacement = None if self.autocast else REPLACEMENTS.get(target)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self.device}
        args = tuple(self.device if isinstance(a, torch.device) else a for a in args)
        if target is aten.view.default:
            target = aten.reshape.default  # a rewrite may have changed the strides
        if replacement is not None:
            return replacement(self.rng, *args, **kwargs)
        return super().call_function(target, args, kwargs)

    def _run_part(self, part: fx.GraphModule, operands: Sequence[Any], autocast: bool) -> Any:
        inner = Replay(part, self.rng, self.device, self.calls, autocast=autocast)
        try:
            return inner.run(*operands)
        finally:
            self.marks += inner.marks
            self.ranges += inner.ranges


def last_node() -> fx.Node:
    mode = get_proxy_mode()
    assert mode is not None
    graph = mode.tracer.graph
    return next(iter(reversed(graph.nodes)), None) or graph._root
