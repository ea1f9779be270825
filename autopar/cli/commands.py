"""What each command does."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli import arguments
from autopar.cli.factory import describe, model_and_inputs
from autopar.errors import AutoparError, TraceError

if TYPE_CHECKING:
    from torch import nn

    from autopar.core.plan import Plan

__all__ = ["diff", "explain", "plan", "profile", "profiles", "report", "show", "trace"]


def plan(args: argparse.Namespace) -> None:
    """Plan a model, and print the plan; or price pins; or print the frontier."""
    constraints = dict(arguments.constraints(args.constraints) or {})
    args.fusion = arguments.chosen_fusion(args.fusion)
    cluster = _cluster(args)
    _check_folder("--out", args.out)
    _check_folder("--plot", args.plot)
    if args.plot is not None and args.frontier is None:
        raise AutoparError("--plot draws the plans of --frontier N: give both")
    model, inputs, made = model_and_inputs(args)
    if args.frontier is not None:
        _frontier(args, model, cluster, inputs, constraints)
        return
    if args.pin:
        _price_pins(args, model, cluster, inputs, made, constraints)
        return
    found = _planned(args, model, cluster, inputs, made, constraints)
    if args.out is not None:
        found.save(args.out)
    from autopar.report import render_summary

    print(render_summary(found, args.width), end="")
    if args.out is not None:
        print(f"\nsaved to {args.out}")


def _check_folder(option: str, path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise AutoparError(f"{option} {path}: the folder {path.parent} does not exist")


def _planned(
    args: argparse.Namespace,
    model: nn.Module,
    cluster: Any,
    inputs: Any,
    made: bool,
    constraints: Mapping[str, Any],
) -> Plan:
    from autopar.api import plan

    try:
        return plan(
            model,
            cluster,
            inputs,
            constraints=constraints,
            memory_limit=args.memory_limit,
            optimizer=args.optimizer,
            precision=args.precision,
            reduce_dtype=args.reduce_dtype,
            fusion=args.fusion,
            time_limit=args.time_limit,
        )
    except TraceError as error:
        raise _with_inputs(error, inputs) if made else error from error


def _with_inputs(error: TraceError, inputs: Any) -> TraceError:
    return TraceError(
        f"{error} The inputs were made from --batch-size and --seq-len ({describe(inputs)}): "
        "if the model takes others, return (module, example_inputs) from the factory."
    )


def _price_pins(
    args: argparse.Namespace,
    model: nn.Module,
    cluster: Any,
    inputs: Any,
    made: bool,
    constraints: Mapping[str, Any],
) -> None:
    """One line: the plan with the pins against the plan without them."""
    from autopar.report.differences import render_price_of

    params = {**constraints.get("params", {}), **dict(args.pin)}
    pinned = _planned(args, model, cluster, inputs, made, {**constraints, "params": params})
    free = _planned(args, model, cluster, inputs, made, constraints)
    print(render_price_of(dict(args.pin), pinned, free))
    if args.out is not None:
        pinned.save(args.out)
        print(f"saved to {args.out}")


def _frontier(
    args: argparse.Namespace, model: nn.Module, cluster: Any, inputs: Any, constraints: Any
) -> None:
    from autopar.memory_frontier import frontier, render_frontier
    from autopar.report.frontier_plot import frontier_svg

    others = (args.out, args.memory_limit, args.pin, args.time_limit)
    if args.frontier < 2 or any(other is not None for other in others):
        raise AutoparError(
            "--frontier takes 2 points or more, and none of --out, --memory-limit, --pin and "
            "--time-limit: it prints plans for limits of its own"
        )
    options = {
        "constraints": constraints,
        "optimizer": args.optimizer,
        "precision": args.precision,
        "reduce_dtype": args.reduce_dtype,
        "fusion": args.fusion,
    }
    points = frontier(model, cluster, inputs, points=args.frontier, **options)
    print(render_frontier(points, args.width), end="")
    if args.plot is not None:
        args.plot.write_text(frontier_svg([point.plan for point in points]), "utf-8")
        print(f"\nsaved to {args.plot}")


def show(args: argparse.Namespace) -> None:
    """Print a saved plan."""
    from autopar.core.plan import Plan
    from autopar.report import render_summary

    print(render_summary(Plan.load(args.plan), args.width), end="")


def explain(args: argparse.Namespace) -> None:
    """Print why a saved plan places an op or a parameter as it does."""
    from autopar.core.plan import Plan
    from autopar.explanation import explain as explained
    from autopar.explanation import render_explanation

    found = Plan.load(args.plan)
    model = inputs = None
    if args.model is not None:
        model, inputs, made = model_and_inputs(args)
    try:
        answer = explained(
            found,
            node=args.node,
            param=args.param,
            model=model,
            example_inputs=inputs,
            stage=args.stage,
        )
    except TraceError as error:
        raise _with_inputs(error, inputs) if made else error from error
    print(render_explanation(answer, args.width), end="")


def diff(args: argparse.Namespace) -> None:
    """Print where two saved plans differ."""
    from autopar.core.plan import Plan
    from autopar.report.differences import render_differences

    print(render_differences(Plan.load(args.a), Plan.load(args.b), args.width), end="")


def report(args: argparse.Namespace) -> None:
    """Write a saved plan as a page."""
    from autopar.core.plan import Plan
    from autopar.report.page import render_page

    _check_folder("-o", args.out)
    text = render_page(Plan.load(args.plan))
    args.out.write_text(text, encoding="utf-8")
    print(f"saved to {args.out} ({len(text.encode()) / 1e6:.2f} MB)")


def trace(args: argparse.Namespace) -> None:
    """Write the predicted step of a saved plan as a Chrome trace."""
    from autopar.core.plan import Plan

    _check_folder("-o", args.out)
    found = Plan.load(args.plan)
    if args.ranks is not None and args.ranks > found.num_devices:
        raise AutoparError(f"--ranks {args.ranks}: the plan is for {found.num_devices} devices")
    ranks = found.to_trace(args.out, ranks=args.ranks)
    print(f"saved {ranks} rank{'s' * (ranks != 1)} to {args.out}; open it in ui.perfetto.dev")


def profiles(args: argparse.Namespace) -> None:
    """List the cluster profiles."""
    from autopar.cost_model.catalogue import load_profile, profile_names
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


def profile(args: argparse.Namespace) -> None:
    """Measure this machine, and write what was found as a profile."""
    import torch

    from autopar.cost_model.catalogue import load_profile
    from autopar.cost_model.cluster import profile_for
    from autopar.cost_model.measure import measure_profile, write_profile

    out: Path = args.out
    if out.suffix != ".toml":
        raise AutoparError(f"--out {out}: give a .toml file")
    _check_folder("--out", out)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = measure_profile(
        out.stem,
        base=load_profile(args.base) if args.base else profile_for(device),
        device_type=device,
        ranks=args.ranks,
        group_sizes=args.groups,
        dtypes=args.dtypes,
        rounds=args.rounds,
        quick=args.quick,
    )
    write_profile(found, out)
    print(f"saved to {out}: use it with --cluster {out} or Cluster.from_profile({str(out)!r})")


def _cluster(args: argparse.Namespace) -> Any:
    from autopar.cost_model import Cluster

    return Cluster.from_profile(
        args.cluster,
        nodes=args.nodes,
        devices_per_node=args.devices_per_node,
        mesh_shape=args.mesh,
    )
