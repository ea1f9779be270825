"""The model of `--model module:factory`, on the meta device, and inputs for it."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["DTYPES", "describe", "model_and_inputs"]

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    **{name: name for name in ("bfloat16", "float16", "float32", "float64")},
}


def model_and_inputs(args: argparse.Namespace) -> tuple[nn.Module, Any, bool]:
    """The module, its example inputs, and whether they were made here."""
    import torch
    from torch import nn
    from torch.utils import _pytree as pytree

    made = _call(_factory(args.model), args.factory_args, args.model)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise AutoparError(
            f"{args.model} returned a {type(model).__name__}; it must return an nn.Module, or "
            "(module, example_inputs)"
        )
    if args.dtype is not None:
        dtype: torch.dtype = getattr(torch, DTYPES[args.dtype])
        model.to(dtype)
        inputs = pytree.tree_map_only(
            torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs
        )
    if inputs is None:
        return model, _made_inputs(model, args.batch_size, args.seq_len, args.model), True
    if args.batch_size or args.seq_len:
        print(
            "autopar: the factory gives example inputs; --batch-size and --seq-len are ignored",
            file=sys.stderr,
        )
    return model, inputs, False


def _factory(spec: str) -> Callable[..., Any]:
    """The callable that `module:factory` names; the current directory is searched first."""
    module_name, colon, path = spec.partition(":")
    if not module_name or not colon or not path:
        raise AutoparError(f"--model {spec!r}: write module:factory, such as my_model:build")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise AutoparError(
            f"--model {spec!r}: cannot import {module_name} ({error}); the current directory and "
            "the installed packages were searched"
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            near = difflib.get_close_matches(name, dir(found), n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise AutoparError(f"--model {spec!r}: {module_name} has no {path!r}{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise AutoparError(f"--model {spec!r} is a {type(found).__name__}, not a callable")
    return found


def _call(factory: Callable[..., Any], arguments: Any, spec: str) -> Any:
    """Call a factory on the meta device: shapes without values."""
    import torch

    if not isinstance(arguments, (dict, list, type(None))):
        raise AutoparError(
            f"--factory-args must be a JSON object of keywords or a list, got {arguments!r}"
        )
    keywords = arguments if isinstance(arguments, dict) else {}
    positional = arguments if isinstance(arguments, list) else []
    _check_fits(factory, positional, keywords, spec)
    try:
        with torch.device("meta"):
            return factory(*positional, **keywords)
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        raise AutoparError(
            f"{spec} cannot run on the meta device, where tensors have no values: {error} "
            "Make tensors without a generator, and do not read values from them in the factory."
        ) from error


def _check_fits(
    factory: Callable[..., Any], positional: list[Any], keywords: dict[str, Any], spec: str
) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # of some callables in C
        return
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        raise AutoparError(
            f"{spec}{signature} cannot be called so: {error}. Give its arguments as "
            """--factory-args '[...]' or '{"name": ...}'"""
        ) from None


def _made_inputs(
    model: nn.Module, batch_size: int | None, seq_len: int | None, spec: str
) -> dict[str, torch.Tensor]:
    """Inputs for a model that takes token ids, or images of a size that its config tells."""
    import torch

    names = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    image_size = getattr(config, "image_size", None)
    if batch_size is None:
        raise AutoparError(f"{spec} returns no example inputs: give --batch-size, or {_REMEDY}")
    shape: tuple[int, ...]
    with torch.device("meta"):
        if "pixel_values" in names and image_size is not None:
            size = image_size if isinstance(image_size, (tuple, list)) else (image_size,) * 2
            shape = (batch_size, int(getattr(config, "num_channels", 3)), *map(int, size))
            dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
            inputs = {"pixel_values": torch.empty(shape, dtype=dtype)}
            shape = (batch_size,)
        elif "input_ids" in names:
            if seq_len is None:
                raise AutoparError(f"{spec} takes token ids: give --seq-len, or {_REMEDY}")
            shape = (batch_size, seq_len)
            inputs = {"input_ids": torch.empty(shape, dtype=torch.int64)}
        else:
            raise AutoparError(
                f"no inputs can be made for {type(model).__name__}.forward({', '.join(names)}): "
                f"{_REMEDY}"
            )
        if "labels" in names:
            inputs["labels"] = torch.empty(shape, dtype=torch.int64)
    return inputs


_REMEDY = "return (module, example_inputs) from the factory"


def describe(inputs: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in inputs.items())
