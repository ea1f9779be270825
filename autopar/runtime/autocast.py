"""`torch.autocast` around a parallel module: the step keeps the precision it was planned in.

An autocast context would cast the operands of some emitted ops and not of others. So programs are
traced and run outside of it, and a context that asks for another precision than the plan's is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from autopar.errors import AutoparError

__all__ = ["check_autocast", "outside_autocast"]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_Called = TypeVar("_Called", bound=Callable[..., Any])


def check_autocast(device_type: str, precision: str | None) -> None:
    """Refuse an autocast context that the step does not follow.

    Raises:
        AutoparError: the context computes in another precision than the step.
    """
    if not torch.is_autocast_enabled(device_type):
        return
    dtype = torch.get_autocast_dtype(device_type)
    wanted, has = _NAMES.get(dtype, str(dtype)), precision or "fp32"
    if wanted != has:
        raise AutoparError(
            f"called under torch.autocast({device_type!r}, {dtype}), but the step computes in "
            f"{has}: pass precision={wanted!r} to autopar.parallelize, with which the context may "
            "stay, or leave the context out"
        )


def outside_autocast(function: _Called) -> _Called:
    """A function that runs as it does without an autocast context around it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        inside = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        if not inside:
            return function(*args, **kwargs)
        with torch.autocast(inside[0], enabled=False), torch.autocast(inside[-1], enabled=False):
            return function(*args, **kwargs)

    return cast(_Called, call)
