"""A step that is ready to run on this rank, and what it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.codegen.emit import Program
from autopar.codegen.fusion import Fusion
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.runtime.inductor import CompiledProgram

__all__ = ["CompiledStep", "input_signature"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """A traced step with its plan and this rank's program, for one input signature.

    `compiled` runs in place of the program's graphs, where a backend made it.
    """

    traced: TracedModel
    plan: Plan
    program: Program
    fusion: Fusion
    compiled: CompiledProgram | None = None

    @property
    def forward(self) -> Callable[..., Any]:
        """The program's forward, compiled where it is."""
        return self.program.forward if self.compiled is None else self.compiled.forward

    @property
    def backward(self) -> Callable[..., Any] | None:
        """The program's backward, compiled where it is; None for inference."""
        return self.program.backward if self.compiled is None else self.compiled.backward


def input_signature(args: Any, kwargs: Any) -> Any:
    """What a compiled step is for: structure, shapes, dtypes and constants of the inputs."""
    leaves, spec = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
    described = tuple(
        (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves
    )
    return described, str(spec)
