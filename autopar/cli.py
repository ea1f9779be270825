"""The `autopar` command: `plan` a model for a cluster that need not be at hand, `show` a plan.

    autopar plan --model my_model:build --cluster h100-sxm --nodes 4 --batch-size 64 --seq-len 4096
    autopar show plan.json
    autopar profiles

Exit codes: 0; 2 for an `AutoparError` (one paragraph, no traceback) and for wrong usage; 1 for
anything else.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar import __version__
from autopar.errors import AutoparError, ConstraintError, TraceError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["main"]

_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    **{name: name for name in ("bfloat16", "float16", "float32", "float64")},
}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; default: the process's.

    Returns:
        The exit code. A usage error raises `SystemExit(2)`, as argparse does.
    """
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = args.command
    try:
        command(args)
    except AutoparError as error:
        print(f"autopar: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


# --- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autopar", description="Automatic parallelizer for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_plan(commands.add_parser("plan", help="plan a training step; needs no devices"))
    show = commands.add_parser("show", help="print a saved plan")
    show.add_argument("plan", type=Path, help="file that `autopar plan --out` or Plan.save wrote")
    show.add_argument("--width", type=_positive, help="columns (default: the terminal's)")
    show.set_defaults(command=_show)
    profiles = commands.add_parser("profiles", help="list the cluster profiles")
    profiles.add_argument("--width", type=_positive, help="columns (default: the terminal's)")
    profiles.set_defaults(command=_profiles)
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="MODULE:FACTORY",
        help="callable that returns a module, or (module, example inputs); called on the meta "
        "device, so a model of any size works",
    )
    add("--factory-args", type=_json, metavar="JSON", help="object of keywords, or list")
    add("--cluster", required=True, help="profile name (see `autopar profiles`) or .toml file")
    add("--nodes", type=_positive, default=1)
    add("--devices-per-node", type=_positive, help="default: the profile's")
    add("--mesh", type=_mesh, metavar="4x8", help="default: nodes x devices per node")
    add("--batch-size", type=_positive, help="global batch, where the factory gives no inputs")
    add("--seq-len", type=_positive, help="tokens, where the factory gives no inputs")
    add("--dtype", choices=sorted(_DTYPES), help="of the model (default: as the factory makes it)")
    add("--constraints", metavar="JSON|FILE", help="what to pin, such as '{\"data\": 4}'")
    add("--memory-limit", type=_size, metavar="16GiB", help="default: the device's memory")
    add("--optimizer", default="adamw", help="whose states count in memory")
    add("--frontier", type=_positive, metavar="N", help="print N plans of less and less memory")
    add("--out", type=Path, metavar="PLAN.JSON", help="file to write")
    add("--width", type=_positive, help="columns (default: the terminal's)")
    parser.set_defaults(command=_plan)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _mesh(text: str) -> tuple[int, ...]:
    return tuple(_positive(size) for size in re.split("[x×,]", text))


def _size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: write bytes, or 16GiB (2^30 bytes each), or 16GB (10^9)"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None


# --- commands


def _plan(args: argparse.Namespace) -> None:
    constraints = _constraints(args.constraints)
    cluster = _cluster(args)
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise AutoparError(f"--out {args.out}: the folder {args.out.parent} does not exist")
    model, inputs, made = _model_and_inputs(args)

    from autopar.api import plan

    if args.frontier is not None:
        _frontier(args, model, cluster, inputs, constraints)
        return
    try:
        found = plan(
            model,
            cluster,
            inputs,
            constraints=constraints,
            memory_limit=args.memory_limit,
            optimizer=args.optimizer,
        )
    except TraceError as error:
        if not made:
            raise
        raise TraceError(
            f"{error} The inputs were made from --batch-size and --seq-len ({_describe(inputs)}): "
            "if the model takes others, return (module, example_inputs) from the factory."
        ) from error
    if args.out is not None:
        found.save(args.out)
    from autopar.report import render_summary

    print(render_summary(found, args.width), end="")
    if args.out is not None:
        print(f"\nsaved to {args.out}")


def _frontier(
    args: argparse.Namespace, model: nn.Module, cluster: Any, inputs: Any, constraints: Any
) -> None:
    from autopar.frontier import frontier, render_frontier

    if args.frontier < 2 or args.out is not None or args.memory_limit is not None:
        raise AutoparError(
            "--frontier takes 2 points or more, and neither --out nor --memory-limit: it prints "
            "plans for limits of its own"
        )
    options = {"constraints": constraints, "optimizer": args.optimizer}
    points = frontier(model, cluster, inputs, points=args.frontier, **options)
    print(render_frontier(points, args.width), end="")


def _show(args: argparse.Namespace) -> None:
    from autopar.core.plan import Plan
    from autopar.report import render_summary

    print(render_summary(Plan.load(args.plan), args.width), end="")


def _profiles(args: argparse.Namespace) -> None:
    from autopar.cost_model.profile import load_profile, profile_names
    from autopar.report import format_bytes, plain_table, render

    table = plain_table(
        [
            ("name", False),
            ("device", False),
            ("per node", True),
            ("memory", True),
            ("memory TB/s", True),
            ("bf16 TFLOP/s", True),
            ("fp32 TFLOP/s", True),
            ("in node GB/s", True),
            ("between GB/s", True),
        ],
    )
    for name in profile_names():
        profile = load_profile(name)
        device = profile.device
        table.add_row(
            name,
            device.name,
            str(profile.devices_per_node),
            format_bytes(device.memory_bytes),
            f"{device.memory_bandwidth / 1e12:.3g}",
            f"{device.peak('bfloat16') / 1e12:.4g}",
            f"{device.peak('float32') / 1e12:.4g}",
            f"{profile.intra.bandwidth / 1e9:g}",
            f"{profile.inter.bandwidth / 1e9:g}",
        )
    print(render([table, "Links: per device, in one direction."], args.width), end="")


def _cluster(args: argparse.Namespace) -> Any:
    from autopar.cost_model import Cluster

    return Cluster.from_profile(
        args.cluster,
        nodes=args.nodes,
        devices_per_node=args.devices_per_node,
        mesh_shape=args.mesh,
    )


def _constraints(text: str | None) -> Mapping[str, Any] | None:
    """The dict form of constraints, given as JSON or as a file of it."""
    if text is None:
        return None
    source = text
    if not text.lstrip().startswith("{"):
        try:
            source = Path(text).read_text()
        except OSError as error:
            raise ConstraintError(
                f"--constraints {text!r} is neither a JSON object nor a readable file ({error})"
            ) from error
    try:
        value = json.loads(source)
    except json.JSONDecodeError as error:
        raise ConstraintError(f"--constraints {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConstraintError(f"--constraints must be a JSON object, not {type(value).__name__}")
    return value


# --- the model and its inputs


def _model_and_inputs(args: argparse.Namespace) -> tuple[nn.Module, Any, bool]:
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
        dtype: torch.dtype = getattr(torch, _DTYPES[args.dtype])
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


def _describe(inputs: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in inputs.items())
