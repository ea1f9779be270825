"""What a forward changes besides tensors and buffers is undone after a trace, and warned of.

    self.step += 1
    return loss * min(1.0, self.step / 1000)

Such numbers are constants of the traced graph, and so are Python's and NumPy's random numbers. What
the trace has changed is put back, so that another trace of the model finds what this one found.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.errors import FrozenValueWarning

__all__ = ["putting_back", "warn_of_frozen"]

_NUMBERS = (bool, int, float, complex)


@contextmanager
def putting_back(model: nn.Module) -> Iterator[list[str]]:
    """While the forward of a model is traced; what is said of numbers that it changes or draws."""
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    drawn = _states()
    told: list[str] = []
    try:
        yield told
    finally:
        told += _put_back(model, before)
    told += (_of_drawn(n) for n, state in _states().items() if state != drawn.get(n, state))


def warn_of_frozen(told: Sequence[str]) -> None:
    """Warn of each."""
    for text in told:
        warnings.warn(text, FrozenValueWarning, stacklevel=2)


def _put_back(model: nn.Module, before: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Restore attributes; yields what is said of each number."""
    for name, module in model.named_modules():
        known = before.get(name, {})
        for key, value in list(vars(module).items()):
            old = known.get(key)
            if isinstance(value, _NUMBERS) and type(old) in _NUMBERS and value != old:
                yield _of_changed(f"{name}.{key}" if name else key, old, value)
            elif not isinstance(value, FakeTensor) or value is old:
                continue
            if key not in known:
                delattr(module, key)
            else:
                vars(module)[key] = old


def _states() -> dict[str, Any]:
    """Of the generators that torch knows nothing of."""
    found: dict[str, Any] = {"Python's random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy.random"] = (kind, keys.tobytes(), *rest)
    return found


def _of_changed(name: str, old: Any, new: Any) -> str:
    return (
        f"forward changes {name} ({old} to {new}), which a trace does not see: every step takes "
        "the value that it has now. Make it a buffer (register_buffer, and change it in place) for "
        "later steps to see it change"
    )


def _of_drawn(name: str) -> str:
    return (
        f"forward draws random numbers of {name}, which are constants of the traced program: every "
        "step takes those of now. Draw them with torch.rand, or pass them as an input"
    )
