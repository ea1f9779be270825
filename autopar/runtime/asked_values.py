"""Values that a step was traced for: inputs with others get another step, buffers keep theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.compiled_step import CompiledStep, tensors_in_order
from autopar.runtime.pipeline import PipelinedStep

if TYPE_CHECKING:
    from autopar.runtime.module import ParallelModule

__all__ = ["AskedValues"]


class AskedValues:
    """Inputs and buffers whose values sizes in a step depend on, by what inputs are like."""

    def __init__(self) -> None:
        self._inputs: dict[Any, tuple[tuple[str, ...], tuple[int, ...]]] = {}
        self._buffers: dict[str, tuple[int, str]] = {}

    def note(self, module: ParallelModule, like: Any, step: CompiledStep | PipelinedStep) -> None:
        """Remember what a new step asked for.

        Args:
            module: that the step is of.
            like: structure, shapes and dtypes of its inputs.
            step: just compiled.
        """
        places = [int(known.name) for known in step.traced.known if known.kind == "input"]
        if places:
            _, before = self._inputs.get(like, ((), ()))
            self._inputs[like] = (step.keywords, tuple(sorted({*places, *before})))
        for known in step.traced.known:
            if known.kind == "buffer":
                self._buffers[known.name] = (-1, known.value)
        self.check(module)

    def of(self, like: Any, args: Any, kwargs: Any) -> tuple[str, ...]:
        """The values of inputs that steps for such inputs depend on."""
        if like not in self._inputs:
            return ()
        keywords, places = self._inputs[like]
        tensors = tensors_in_order(keywords, False, args, kwargs)
        return tuple(_written(tensors[place]) for place in places)

    def check(self, module: ParallelModule) -> None:
        """Look at buffers that have been written to.

        Raises:
            AutoparError: one has another value than a step was compiled for.
        """
        for name, (version, value) in self._buffers.items():
            buffer = module.buffer(name)
            if buffer._version == version:
                continue
            if _written(buffer) != value:
                raise AutoparError(
                    f"sizes in the forward depend on the buffer {name!r}, which was {value[:60]} "
                    f"when the step was compiled and is {_written(buffer)[:60]} now: parallelize a "
                    "model that has the new value"
                )
            self._buffers[name] = (buffer._version, value)


def _written(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return repr(whole.tolist())
