"""A model that asks whether it is compiled or exported is told that it is not.

    if torch.compiler.is_compiling():
        return self.exportable_form(x)

A trace is to give the numbers of a plain step. Where the plain form cannot be captured, since it
looks at values for instance, the other one is, and a warning names the lines that asked.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from autopar._tracing import compile_questions
from autopar.errors import UncheckedWarning
from autopar.tracer.sources import described

__all__ = ["telling_eager", "warn_of_compiled"]

_warned: set[str] = set()


@contextmanager
def telling_eager() -> Iterator[dict[str, None]]:
    """While a model is exported, its code hears that it is not; yields the lines that ask."""
    lines: dict[str, None] = {}

    def answer(frame: FrameType) -> bool:
        lines[described(frame)] = None
        return False

    with compile_questions(answer):
        yield lines


def warn_of_compiled(lines: Iterable[str]) -> None:
    """One warning for each line that was told that the model is compiled."""
    for where in lines:
        if where not in _warned:
            _warned.add(where)
            warnings.warn(f"{where}\n  {_COMPILED}", UncheckedWarning, stacklevel=2)


_COMPILED = (
    "asks whether the model is compiled or exported, and what it does if not cannot be traced: the "
    "parallel program computes what it does if it is. Compare a step with that of one device."
)
