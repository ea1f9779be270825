"""Inputs that a forward, or a loss function, cannot be called with: its signature beside them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from autopar.errors import TraceError

__all__ = ["check_loss_fn", "explain_call"]

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_loss_fn(loss_fn: object) -> None:
    """Refuse a loss function that is not callable, or has parameters of its own.

    Raises:
        TraceError: it is one of these; its parameters would never be trained.
    """
    if loss_fn is None:
        return
    if isinstance(loss_fn, type):
        raise TraceError(
            f"loss_fn is the class {loss_fn.__name__}: pass an instance of it, such as "
            f"{loss_fn.__name__}()"
        )
    if not callable(loss_fn):
        raise TraceError(
            f"loss_fn is {loss_fn!r}, a {type(loss_fn).__name__}: pass what is called as "
            "loss_fn(output, target), such as torch.nn.functional.cross_entropy"
        )
    if isinstance(loss_fn, nn.Module) and (own := [n for n, _ in loss_fn.named_parameters()]):
        raise TraceError(
            f"loss_fn has parameters of its own, {', '.join(own)}, which would not be trained: "
            "make it a part of the model, whose forward then returns the loss"
        )


def explain_call(
    model: nn.Module, loss_fn: Callable[..., Any] | None, args: Sequence[Any], kwargs: Any
) -> str | None:
    """Why a model, or its loss function, cannot be called with these inputs; None if it can be.

    Args:
        args, kwargs: of the whole batch, the target of `loss_fn` among them.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if model._forward_pre_hooks:  # they may change what is passed
        return None
    inputs, named, target = list(args), dict(kwargs), ""
    if loss_fn is not None:
        taken = named.pop("target") if "target" in named else inputs.pop() if inputs else None
        target = f", and {_described(taken)} for loss_fn as its target"
    wrong = _mismatch(model.forward, inputs, named)
    if wrong:
        remedy = "Pass a tuple in the order of the signature, or a dict with its names."
        if target and not inputs and not named:
            remedy = "loss_fn gets the last input as its target: pass both, (x, target)."
        given = [_described(x) for x in inputs] + [f"{k}={_described(v)}" for k, v in named.items()]
        shown = _signature(model.forward, f"{type(model).__name__}.forward")
        return (
            f"cannot call {shown}: {wrong}\n"
            f"  given: {', '.join(given) or 'nothing'}{target}\n  {remedy}"
        )
    if loss_fn is None or isinstance(loss_fn, nn.Module):
        return None
    if wrong := _mismatch(loss_fn, [None, None], {}):
        shown = _signature(loss_fn, getattr(loss_fn, "__name__", "loss_fn"))
        return f"cannot call loss_fn {shown} as loss_fn(output, target): {wrong}"
    return None


def _mismatch(function: Callable[..., Any], args: list[Any], kwargs: Mapping[str, Any]) -> str:
    """What is missing or too much, in words; "" where the call fits or nobody can tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
        return ""
    except TypeError as error:
        text = str(error)
    known = signature.parameters.values()
    kinds = {p.kind for p in known}
    by_position = [p.name for p in known if p.kind in _BY_POSITION]
    filled = {*by_position[: len(args)], *kwargs}
    missing = [
        p.name
        for p in known
        if p.kind not in _OPEN and p.default is p.empty and p.name not in filled
    ]
    unknown = [k for k in kwargs if k not in signature.parameters]
    found = [f"misses {', '.join(missing)}"] if missing else []
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        found.append(f"has no input {', '.join(unknown)}")
    if len(args) > len(by_position) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        found.append(f"takes {len(by_position)} by position, and {len(args)} are given")
    return "it " + " and ".join(found) if found else text


def _signature(function: Callable[..., Any], name: str) -> str:
    """`name(x, y=None) at file:line`, without annotations."""
    names = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in inspect.signature(function).parameters.values()
    ]
    code = getattr(function, "__code__", None)
    where = f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    return f"{name}({', '.join(map(str, names))}){where}"


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "None"
