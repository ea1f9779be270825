"""What a program hands on shares no memory with what is written while it is still wanted.

A program hands on tensors as they are, and its caller then writes the buffers that it updates: what
shares their memory (the old value of another buffer, what the backward reads) is copied first, and
so is a result that a parameter or buffer has the memory of. Any other write to a parameter, buffer,
input or result between a forward and the backward that reads it is the user's, and an error, as it
is in torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor

from autopar._dtensors import local_of
from autopar.errors import AutoparError

__all__ = ["ReadAgain", "address", "copies_of_shared"]


def copies_of_shared(values: Iterable[Any], memory: Collection[int]) -> list[Any]:
    """Values, of which those in some of the memory, by `address`, are copied."""
    return [v.clone() if isinstance(v, Tensor) and address(v) in memory else v for v in values]


def address(value: Tensor) -> int:
    """Where the memory of a tensor starts, the same for all that share it."""
    return value.untyped_storage().data_ptr()


class ReadAgain:
    """Tensors that a backward reads in the memory that their holder has.

    Args:
        held: what a tensor is called, its value on this rank, and the tensor that the user has of
            it, a DTensor or a plain one; None for what the step made.
        saved: what the forward hands to the backward.
    """

    def __init__(
        self, held: Iterable[tuple[str, Tensor, Tensor | None]], saved: Sequence[Any]
    ) -> None:
        kept = {address(v) for v in saved if isinstance(v, Tensor) and v.numel()}
        self.versions = [
            (name, holder, holder._version)
            for name, value, holder in held
            if holder is not None and not holder.is_inference()
            if address(value) in kept and address(local_of(holder)) == address(value)
        ]

    def check(self) -> None:
        """Refuse a backward after one of them was written to.

        Raises:
            AutoparError: names the first.
        """
        for name, holder, version in self.versions:
            if holder._version != version:
                raise AutoparError(
                    f"the {name} of shape {tuple(holder.shape)} was changed in place between the "
                    "forward and its backward, which needs it as it was: step the optimizer after "
                    "the backward, or change a clone()"
                )
