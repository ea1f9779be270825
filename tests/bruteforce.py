"""Proves sharding rules against brute force: every row, on every rank, with random inputs.

One op is run whole; then the inputs are cut up as a row says, the local program of each rank is
emitted and run in lockstep, and each rank's output is compared with the part it should hold.
`python -m tests.bruteforce` also reports *missing* rows: placements that would be right (three
draws in a row) but that the rule does not offer.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import autopar.codegen.lowerings
import autopar.solver.rules  # noqa: F401  (registers all rules)
from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lower
from autopar.core.placement import (
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    is_valid,
    local_index_runs,
)
from autopar.core.strategy import AxisStrategy, OpCall, op_call
from autopar.runtime.lockstep import mesh_coords, run_lockstep
from autopar.solver.rules.registry import find_rule, goes_together

RTOL, ATOL = 1e-12, 1e-11  # float64: a wrong scale factor is far outside


class Sample(NamedTuple):
    """One op to test: `function` calls exactly one op on the tensors that `inputs` makes."""

    name: str
    function: Callable[..., Any]
    inputs: Callable[[], tuple[Tensor, ...]]


class Captured(NamedTuple):
    """A call with its real operands, in operand order, and its real outputs."""

    node: fx.Node
    operands: tuple[Tensor, ...]
    outputs: tuple[Any, ...]


# --- capture ----------------------------------------------------------------------------------
def _real_calls(graph: fx.Graph) -> list[fx.Node]:
    return [
        n
        for n in graph.nodes
        if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)
    ]


def _capture_graph(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.Graph:
    """Symbolically where the function calls ATen itself: composite ops then stay as they are."""
    names = [f"x{i}" for i in range(len(inputs))]
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = [fx.Proxy(graph.placeholder(name), tracer) for name in names]
    try:
        function(*proxies)
    except Exception:
        return make_fx(function)(*inputs).graph
    odd = [n for n in graph.nodes if n.op.startswith("call_m")]
    odd += [n for n in graph.nodes if any(isinstance(a, Tensor) for a in n.args)]
    if len(_real_calls(graph)) != 1 or odd:
        return make_fx(function)(*inputs).graph
    return graph


def capture(sample: Sample) -> Captured:
    """The one op that the sample's function calls, with fake values in `meta`.

    What the function makes of no input are operands like its inputs, which a rule may look at.
    """
    inputs = sample.inputs()
    graph = _capture_graph(sample.function, inputs)
    fed: set[fx.Node] = set()
    for n in graph.nodes:
        if n.op == "placeholder" or any(source in fed for source in n.all_input_nodes):
            fed.add(n)
    constants = [n for n in _real_calls(graph) if n not in fed]
    calls = [n for n in _real_calls(graph) if n in fed] or constants
    calls = [n for n in calls if find_rule(n.target) is not None] or calls
    assert len(calls) == 1, f"{sample.name} calls {[str(n.target) for n in calls]}"
    node = calls[0]
    places = [n for n in graph.nodes if n.op == "placeholder"]
    values = dict(zip(places, inputs, strict=True))
    for constant in constants:
        if constant is not node:
            values[constant] = run_call(constant, values.__getitem__)
    with FakeTensorMode() as mode:
        for place, value in values.items():
            place.meta["val"] = mode.from_tensor(value)
    result = run_call(node, values.__getitem__)
    node.meta["val"] = result
    outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    operands = tuple(values[n] for n in op_call(node, 2).nodes)
    return Captured(node, operands, outputs)


def run_call(node: fx.Node, lookup: Callable[[fx.Node], Any]) -> Any:
    target: Any = node.target
    return target(*fx.map_arg(node.args, lookup), **fx.map_arg(node.kwargs, lookup))


# --- cutting up and comparing -----------------------------------------------------------------
def shard_of(
    value: Tensor, layout: Layout, mesh_shape: Sequence[int], coords: Sequence[int]
) -> Tensor:
    """The part that the rank at `coords` holds, Partial counted as Replicate."""
    for dim, size in enumerate(value.shape):
        runs = list(local_index_runs(size, dim, layout, mesh_shape, coords))
        if runs != [(0, size)]:
            value = torch.cat([value.narrow(dim, *run) for run in runs], dim)
    return value.contiguous()


def _summands(value: Tensor, count: int) -> list[Tensor]:
    if value.is_floating_point() or value.is_complex():
        parts = [torch.randn_like(value) for _ in range(count - 1)]
    else:
        parts = [torch.randint_like(value, -9, 9) for _ in range(count - 1)]
    return [*parts, value - sum(parts)] if parts else [value]


def strided(value: Tensor) -> Tensor:
    """The same values with gaps between them, as a slice of a larger tensor has."""
    return torch.stack([value, torch.full_like(value, 1)], dim=-1)[..., 0]


def distribute(value: Tensor, layout: Layout, mesh_shape: Sequence[int]) -> list[Tensor]:
    """Every rank's local tensor, in rank order."""
    axes = [axis for axis, p in enumerate(layout) if p.is_partial]
    keys = list(itertools.product(*(range(mesh_shape[axis]) for axis in axes)))
    summands = dict(zip(keys, _summands(value, len(keys)), strict=True))
    return [
        shard_of(summands[tuple(coords[axis] for axis in axes)], layout, mesh_shape, coords)
        for coords in mesh_coords(mesh_shape)
    ]


def check_output(
    whole: Tensor, parts: Sequence[Tensor], layout: Layout, mesh_shape: Sequence[int]
) -> None:
    """Every rank holds its part; ranks that differ on Partial axes only hold its summands."""
    groups: dict[tuple[int, ...], list[int]] = {}
    all_coords = mesh_coords(mesh_shape)
    for rank, coords in enumerate(all_coords):
        key = tuple(c for c, p in zip(coords, layout, strict=True) if not p.is_partial)
        groups.setdefault(key, []).append(rank)
    for ranks in groups.values():
        expected = shard_of(whole, layout, mesh_shape, all_coords[ranks[0]])
        got = parts[ranks[0]]
        for rank in ranks[1:]:
            got = got + parts[rank]
        torch.testing.assert_close(got, expected, rtol=RTOL, atol=ATOL, equal_nan=True)


# --- running one choice of rows ---------------------------------------------------------------
Rows = tuple[AxisStrategy, ...]
"""One row per mesh axis."""


def layouts(rows: Rows) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Layouts of operands and of outputs."""
    ins = tuple(zip(*(row.inputs for row in rows), strict=True))
    outs = tuple(zip(*(row.outputs for row in rows), strict=True))
    return ins, outs


def offered(call: OpCall, rows: Rows, mesh_shape: tuple[int, ...]) -> bool:
    """Whether the solver would consider these rows."""
    ins, outs = layouts(rows)
    return goes_together(call, rows, mesh_shape) and all(
        is_valid(layout, spec.shape, mesh_shape)
        for layout, spec in (
            *zip(ins, call.operands, strict=True),
            *zip(outs, call.outputs, strict=True),
        )
    )


@cache
def _fake_mode() -> FakeTensorMode:
    """One for all programs, as its cache of shapes is what makes emitting them fast."""
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


def emit(
    captured: Captured, rows: Rows, mesh_shape: tuple[int, ...], rank: int, parts: Sequence[Tensor]
) -> fx.Graph:
    """The local program of one rank; its inputs are one tensor per operand."""
    call = op_call(captured.node, mesh_shape[0])
    graph, mode = fx.Graph(), _fake_mode()
    builder = Builder(
        graph,
        mesh_shape=mesh_shape,
        coords=mesh_coords(mesh_shape)[rank],
        group_names=[f"axis{i}" for i in range(len(mesh_shape))],
        fake_mode=mode,
        device=torch.device("cpu"),
    )
    places = []
    for i, part in enumerate(parts):
        place = graph.placeholder(f"x{i}")
        with mode:
            place.meta["val"] = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype)
        places.append(place)
    following = iter(places)
    args, kwargs = fx.map_arg((call.args, call.kwargs), lambda _: next(following))
    ins, outs = layouts(rows)
    local = LocalCall(
        call=call,
        args=tuple(args),
        kwargs=dict(kwargs),
        inputs=ins,
        outputs=outs,
        variants=tuple(row.variant for row in rows),
        mesh_shape=mesh_shape,
    )
    graph.output(lower(builder, local))
    return graph


def check_rows(
    captured: Captured, rows: Rows, mesh_shape: tuple[int, ...], gaps: bool = False
) -> None:
    """Raise AssertionError unless running these rows gives the outputs of the whole op.

    With `gaps`, no operand is contiguous.
    """
    ins, outs = layouts(rows)
    split = [
        distribute(value, layout, mesh_shape)
        for value, layout in zip(captured.operands, ins, strict=True)
    ]
    if gaps:
        split = [[strided(part) for part in parts] for parts in split]
    num_ranks = len(mesh_coords(mesh_shape))
    by_rank = [[parts[rank] for parts in split] for rank in range(num_ranks)]
    graphs = [emit(captured, rows, mesh_shape, r, by_rank[r]) for r in range(num_ranks)]
    results: list[Any] = run_lockstep(graphs, by_rank, mesh_shape)
    if len(captured.outputs) == 1 and not isinstance(results[0], (tuple, list)):
        results = [(result,) for result in results]
    for i, (whole, layout) in enumerate(zip(captured.outputs, outs, strict=True)):
        if isinstance(whole, Tensor):
            check_output(whole, [result[i] for result in results], layout, mesh_shape)


def describe(captured: Captured, rows: Rows, mesh_shape: tuple[int, ...]) -> str:
    """One line to find a failure by."""
    shapes = ", ".join(str(list(x.shape)) for x in captured.operands)
    sides = [
        " ".join("".join(p.short for p in layout) for layout in side) for side in layouts(rows)
    ]
    variants = "/".join(row.variant for row in rows)
    return (
        f"{captured.node.target} on {shapes} over {mesh_shape}: {sides[0]} -> {sides[1]} {variants}"
    )


def testable(captured: Captured, row: AxisStrategy) -> bool:
    """A Partial of booleans is no sum; rules pass it along, no rule makes one."""
    return not any(
        p.is_partial and x.dtype == torch.bool
        for p, x in zip(row.inputs, captured.operands, strict=True)
    )


def rows_of(captured: Captured, axis_size: int) -> list[AxisStrategy]:
    """The rule's testable rows for an axis of this size, evenness not considered."""
    rule = find_rule(captured.node.target)
    assert rule is not None, f"{captured.node.target} has no rule"
    call = op_call(captured.node, axis_size)
    rows = rule(call)
    for row in rows:
        assert len(row.inputs) == len(call.operands), f"{captured.node.target}: {row}"
        assert len(row.outputs) == len(call.outputs), f"{captured.node.target}: {row}"
    first = (*rows[0].inputs, *rows[0].outputs)
    assert all(p.is_replicate for p in first), f"{captured.node.target}: first row {rows[0]}"
    assert len(set(rows)) == len(rows), f"{captured.node.target} repeats a row"
    return [row for row in rows if testable(captured, row)]


# --- what is missing --------------------------------------------------------------------------
def _candidates(shape: Sequence[int]) -> list[Placement]:
    return [Replicate(), Partial(), *(Shard(dim) for dim in range(len(shape)))]


def missing_rows(sample: Sample, axis_size: int = 2, draws: int = 3) -> Iterator[str]:
    """Rows that are right but not offered, for ops of at most two operands."""
    captured = capture(sample)
    call, mesh_shape = op_call(captured.node, axis_size), (axis_size,)
    if len(call.operands) > 2:
        return
    known = {(row.inputs, row.outputs) for row in rows_of(captured, axis_size)}
    results = _candidates(call.outputs[0].shape)
    for inputs in itertools.product(*(_candidates(spec.shape) for spec in call.operands)):
        if any((inputs, (out,) * len(call.outputs)) in known for out in results):
            continue
        for out in results:
            row = AxisStrategy(inputs, (out,) * len(call.outputs))
            if not testable(captured, row) or not offered(call, (row,), mesh_shape):
                continue
            if all(_is_right(sample, row, mesh_shape) for _ in range(draws)):
                yield describe(captured, (row,), mesh_shape)


def _is_right(sample: Sample, row: AxisStrategy, mesh_shape: tuple[int, ...]) -> bool:
    try:
        check_rows(capture(sample), (row,), mesh_shape)
    except Exception:
        return False
    return True


def varies(sample: Sample) -> bool:
    """False if two draws give one result, as `isnan` does: anything would seem right there."""
    first, second = capture(sample).outputs, capture(sample).outputs
    return any(
        isinstance(a, Tensor) and (a.shape != b.shape or not torch.allclose(a, b, atol=1e-6))
        for a, b in zip(first, second, strict=True)
    )


def _print_missing(sample: Sample) -> None:
    torch.set_num_threads(1)
    if varies(sample):
        for line in missing_rows(sample):
            print(f"{sample.name}: {line}", flush=True)


def main(patterns: Sequence[str]) -> None:
    """Print the missing rows of the samples whose name contains one of `patterns`.

    Each sample has a process of its own: some kernels crash on shapes that do not fit.
    """
    from tests.test_rules import SAMPLES

    context = multiprocessing.get_context("fork")
    for sample in SAMPLES:
        if patterns and not any(pattern in sample.name for pattern in patterns):
            continue
        worker = context.Process(target=_print_missing, args=(sample,))
        worker.start()
        worker.join()
        if worker.exitcode:
            print(f"{sample.name}: crashed with {worker.exitcode}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    main(sys.argv[1:])
