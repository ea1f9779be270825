"""The `autopar` command: `plan` a model for a cluster that need not be at hand, and read the plan.

    autopar plan --model my_model:build --cluster h100-sxm --nodes 4 --batch-size 64 --seq-len 4096
    autopar show plan.json
    autopar explain plan.json --param 'layers.0.mlp.up.weight'
    autopar diff a.json b.json
    autopar report plan.json -o plan.html
    autopar trace plan.json -o trace.json.gz
    autopar profiles
    autopar profile --ranks 4 --out here.toml

Exit codes: 0; 2 for an `AutoparError` (one paragraph, no traceback) and for wrong usage; 1 for
anything else.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autopar import __version__
from autopar.cli import commands as commands_
from autopar.cli.arguments import fusion, json_value, mesh, pin, positive, size, whole
from autopar.cli.factory import DTYPES
from autopar.errors import AutoparError

__all__ = ["main"]


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autopar", description="Automatic parallelizer for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_plan(commands.add_parser("plan", help="plan a training step; needs no devices"))
    _add_readers(commands)
    profiles = commands.add_parser("profiles", help="list the cluster profiles")
    _add_width(profiles)
    profiles.set_defaults(command=commands_.profiles)
    _add_profile(commands.add_parser("profile", help="measure this machine, as a profile"))
    return parser


def _add_profile(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE.toml", help="file to write")
    add("--ranks", type=positive, default=1, help="processes at once: as many as will train")
    add("--groups", type=positive, nargs="*", help="of collectives (default: powers of two)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--dtypes", nargs="*", choices=sorted(set(DTYPES.values())), help="first: all op classes")
    add("--rounds", type=positive, default=5, help="timings of each figure (default: 5)")
    add("--quick", action="store_true", help="small shapes only: seconds, and less true")
    add("--base", help="profile that has what is not measured (default: found by the device)")
    parser.set_defaults(command=commands_.profile)


def _add_width(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=positive, help="columns (default: the terminal's)")


def _add_readers(commands: Any) -> None:
    """Commands that read a saved plan."""
    show = commands.add_parser("show", help="print a saved plan")
    show.add_argument("plan", type=Path, help=_PLAN)
    _add_width(show)
    show.set_defaults(command=commands_.show)
    explain = commands.add_parser("explain", help="why an op or a parameter is placed as it is")
    explain.add_argument("plan", type=Path, help=_PLAN)
    subject = explain.add_mutually_exclusive_group(required=True)
    subject.add_argument("--node", help="op, as `autopar report` names it")
    subject.add_argument("--param", help="FQN of a parameter")
    explain.add_argument("--stage", type=whole, help="of a pipeline (default: the first with it)")
    _add_model(explain, required=False)
    _add_width(explain)
    explain.set_defaults(command=commands_.explain)
    diff = commands.add_parser("diff", help="where two saved plans differ")
    diff.add_argument("a", type=Path, help=_PLAN)
    diff.add_argument("b", type=Path, help=_PLAN)
    _add_width(diff)
    diff.set_defaults(command=commands_.diff)
    report = commands.add_parser("report", help="write a saved plan as one HTML file")
    report.add_argument("plan", type=Path, help=_PLAN)
    report.add_argument("-o", "--out", type=Path, required=True, metavar="PLAN.HTML")
    report.set_defaults(command=commands_.report)
    trace = commands.add_parser("trace", help="write the predicted step as a Chrome trace")
    trace.add_argument("plan", type=Path, help=_PLAN)
    trace.add_argument("-o", "--out", type=Path, required=True, metavar="TRACE.JSON.GZ")
    trace.add_argument("--ranks", type=positive, help="first ranks only (default: as many as fit)")
    trace.set_defaults(command=commands_.trace)


_PLAN = "file that `autopar plan --out` or Plan.save wrote"


def _add_model(parser: argparse.ArgumentParser, required: bool) -> None:
    add = parser.add_argument
    add(
        "--model",
        required=required,
        metavar="MODULE:FACTORY",
        help="callable that returns a module, or (module, example inputs); called on the meta "
        "device, so a model of any size works",
    )
    add("--factory-args", type=json_value, metavar="JSON", help="object of keywords, or list")
    add("--batch-size", type=positive, help="global batch, where the factory gives no inputs")
    add("--seq-len", type=positive, help="tokens, where the factory gives no inputs")
    add("--dtype", choices=sorted(DTYPES), help="of the model (default: as the factory makes it)")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_model(parser, required=True)
    add("--cluster", required=True, help="profile name (see `autopar profiles`) or .toml file")
    add("--nodes", type=positive, default=1)
    add("--devices-per-node", type=positive, help="default: the profile's")
    add("--mesh", type=mesh, metavar="4x8", help="default: nodes x devices per node")
    add(
        "--precision", choices=["fp32", "bf16", "fp16"], help="of compute; masters stay as they are"
    )
    add("--reduce-dtype", choices=["fp32", "bf16", "fp16"], help="of sums of gradients")
    add(
        "--fusion",
        type=fusion,
        action="append",
        metavar="on|off|KEY=NAMES",
        help="what will be fused, which ops are priced by: all, nothing, or off=rotary,generated, "
        "on=…, only=… by names of kernels; repeatable (default: on, for CUDA devices)",
    )
    add("--constraints", metavar="JSON|FILE", help="what to pin, such as '{\"data\": 4}'")
    add(
        "--pin",
        type=pin,
        action="append",
        metavar="GLOB=Shard(0),Replicate()",
        help="print what storing these parameters so costs against the plan without; repeatable",
    )
    add("--memory-limit", type=size, metavar="16GiB", help="default: the device's memory")
    add("--optimizer", default="adamw", help="whose states count in memory")
    add("--time-limit", type=float, metavar="SECONDS", help="take the best plan known by then")
    add("--frontier", type=positive, metavar="N", help="print N plans of less and less memory")
    add("--plot", type=Path, metavar="FILE.SVG", help="picture of --frontier to write")
    add("--out", type=Path, metavar="PLAN.JSON", help="file to write")
    _add_width(parser)
    parser.set_defaults(command=commands_.plan)
