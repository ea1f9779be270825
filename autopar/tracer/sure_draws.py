"""A random number that is compared with what it is sure to be above or below.

    if torch.rand(1) > self.drop_rate:      # 0.0 unless asked for
    if torch.rand(1).item() <= self.drop_rate:

`torch.rand` is in [0, 1). That it draws 0 exactly, once in 2^24, is left out.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor

from autopar._compat import keep_between
from autopar.tracer.diagnose import innermost_line

__all__ = ["SureDraws"]

_DRAWING = (torch.rand, torch.rand_like)
_ABOVE = ("__gt__", "__ge__", "gt", "ge", "greater", "greater_equal")
_BELOW = ("__lt__", "__le__", "lt", "le", "less", "less_equal")
_LEAST = 2.0**-53


class SureDraws:
    """Single numbers that one forward draws.

    Args:
        lines: filled with the user's line that asks for one of which nothing is sure.
    """

    def __init__(self, lines: dict[str, str]) -> None:
        self.lines = lines
        self.drawn: dict[int, tuple[Tensor, int]] = {}  # with its version

    def note(self, func: object, args: tuple[object, ...], result: object) -> None:
        if func in _DRAWING and isinstance(result, Tensor) and result.numel() == 1:
            self.drawn[id(result)] = result, result._version
        if func is torch.Tensor.item and isinstance(result, torch.SymFloat) and self._is(args[0]):
            keep_between(result, _LEAST, 1.0)  # below it torch 2.11 would check for 0 at most
            self._note_line()

    def compared(self, func: object, args: tuple[object, ...]) -> Tensor | None:
        """The outcome of a comparison that is sure; None for anything else."""
        name = getattr(func, "__name__", "")
        if len(args) != 2 or name not in (*_ABOVE, *_BELOW):
            return None
        drawn, bound = args
        if not isinstance(drawn, Tensor) or not self._is(drawn):
            return None
        if not isinstance(bound, (int, float)) or not (bound <= 0 or bound >= 1):
            self._note_line()
            return None
        truth = (name in _ABOVE) == (bound <= 0)
        if drawn.device.type == "cpu":  # a branch may ask for it
            return torch.tensor([truth] * drawn.numel()).reshape(drawn.shape)
        return torch.full(drawn.shape, truth, device=drawn.device)

    def _note_line(self) -> None:
        self.lines.setdefault("drawn number", innermost_line(traceback.extract_stack()))

    def _is(self, drawn: Any) -> bool:
        """True for a number as it was drawn."""
        _, version = self.drawn.get(id(drawn), (None, None))
        return version is not None and version == drawn._version
