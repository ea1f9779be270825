"""Models that compute between their blocks, as `x = x + block(x)` does in a loop of the parent.

An op behind a block, up to the next block of the list, counts for the block before it, where all
the blocks of a run have equal ones. So what no module of its own computes, as the pairs of an
`nn.ModuleList` of lists, are blocks like others. Their calls cannot be skipped while the model is
captured (`fold.py`), as what goes from one to the next is in a variable of the parent. Here the
captured forward is cut: the equal periods behind the one that stands for them go.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_aggregate

from autopar.core.blocks import MANY, number_in
from autopar.core.graph import InputSpec, Repeat, tensor_meta
from autopar.tracer.capture import PREFIX
from autopar.tracer.cleanup import module_of

__all__ = ["KEPT_PERIODS", "LONGEST_PERIOD", "Captured", "Run", "runs_of", "without_equal_periods"]

KEPT_PERIODS = 4
"""The first two, one that stands for others, and the last."""
LONGEST_PERIOD = 8
_SMALL = 1024  # elements of a constant whose value is looked at


@dataclass(frozen=True, slots=True)
class Run:
    """Equal blocks of a list, each with what follows it.

    Attributes:
        repeat: which of them may stand for the others.
        segments: nodes of each block and those behind it, up to the next block, by number.
        between: those of them that belong to a block, though its modules do not compute them.
    """

    repeat: Repeat
    segments: Mapping[int, Sequence[fx.Node]]
    between: Mapping[fx.Node, int]

    def name_between(self) -> None:
        """Let what is computed behind a block be part of it."""
        for node, number in self.between.items():
            _move(node, f"{self.repeat.container}.{number}")

    def removed(self) -> dict[fx.Node, fx.Node]:
        """The twin in the stand-in of each node of the blocks that it stands for."""
        repeat = self.repeat
        return {
            node: twin
            for number in repeat.instances()[repeat.period :]
            for node, twin in zip(
                self.segments[number],
                self.segments[repeat.first + (number - repeat.first) % repeat.period],
                strict=True,
            )
        }


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured forward, and what its placeholders and outputs are.

    Attributes:
        gm: the graph.
        specs: of its placeholders, in order.
        written: FQN of the buffer that an output is the new value of, in order; None for others.
    """

    gm: fx.GraphModule
    specs: Sequence[InputSpec]
    written: Sequence[str | None]

    def named(self, values: Mapping[str, Tensor]) -> dict[fx.Node, str]:
        """What a placeholder is to a block: a parameter or buffer by name, a constant by value."""
        placeholders = (node for node in self.gm.graph.nodes if node.op == "placeholder")
        found: dict[fx.Node, str] = {}
        for node, spec in zip(placeholders, self.specs, strict=True):
            value = values.get(node.name)
            if spec.kind in ("parameter", "buffer"):
                found[node] = spec.target
            elif value is not None and value.numel() <= _SMALL and not value.is_meta:
                found[node] = f"{value.dtype}{value.tolist()}"
        return found


def runs_of(
    captured: Captured, repeats: Iterable[Repeat], values: Mapping[str, Tensor]
) -> list[Run]:
    """The runs of blocks whose segments do the same on what the segments before them yield.

    Args:
        captured: forward of a model, or of one some of whose blocks are skipped.
        repeats: at most one per list. Blocks that look alike may take turns in what is done beside
            them; then more of them repeat together.
        values: tensors that the forward made of plain values, by the name of their placeholder.
    """
    graph = captured.gm.graph
    for node in list(graph.nodes):
        if node.op == "get_attr" and node.users:
            min(node.users).prepend(node)  # a region is named where it is called
    named = captured.named(values)
    found = []
    for repeat in repeats:
        segments = _segments(graph, repeat.container)
        runs = (_equal_run(each, segments, named) for each in _multiples(repeat))
        found.append(next((run for run in runs if run is not None), None))
    return [run for run in found if run is not None]


def _multiples(repeat: Repeat) -> Iterator[Repeat]:
    """The repeat, and those of several of its periods."""
    start, period = repeat.first - 2 * repeat.period, repeat.period
    times = repeat.times + KEPT_PERIODS - 1
    for more in range(1, LONGEST_PERIOD // period + 1):
        if times // more > KEPT_PERIODS:
            yield Repeat(
                container=repeat.container,
                first=start + 2 * period * more,
                period=period * more,
                times=times // more - KEPT_PERIODS + 1,
            )


def without_equal_periods(
    captured: Captured, runs: Iterable[Run]
) -> tuple[Captured, tuple[Repeat, ...], list[int]]:
    """The forward in which one period stands for others, the repeats, and the outputs it has."""
    (results,) = captured.gm.graph.output_node().args
    assert isinstance(results, (tuple, list))
    removed: dict[fx.Node, fx.Node] = {}
    dropped: set[int] = set()
    repeats: list[Repeat] = []
    for run in runs:
        gone = run.removed()
        own = {
            i
            for i, name in enumerate(captured.written)
            if name is not None and _is_left_out(run.repeat, name)
        }
        others = {result for i, result in enumerate(results) if i not in own}
        if gone and not others & gone.keys() and _only_next_reads(run, gone):
            removed |= gone
            dropped |= own
            repeats.append(run.repeat)
    kept = [i for i in range(len(results)) if i not in dropped]
    if not removed:
        return captured, (), kept
    return _cut(captured, removed, repeats, kept), tuple(repeats), kept


def _is_left_out(repeat: Repeat, name: str) -> bool:
    number = number_in(name, repeat.container)
    return number is not None and repeat.covers(number) and not repeat.holds(number)


def _only_next_reads(run: Run, gone: Mapping[fx.Node, fx.Node]) -> bool:
    """True if of what is cut out only the period behind it reads, and that only its last period."""
    repeat = run.repeat
    end = repeat.instances().stop
    last = {n for i in range(end - repeat.period, end) for n in run.segments[i]}
    behind = {n for i in range(end, end + repeat.period) for n in run.segments.get(i, ())}
    return all(
        user in gone or user.op == "output" or (node in last and user in behind)
        for node in gone
        for user in node.users
    )


def _cut(
    captured: Captured,
    removed: Mapping[fx.Node, fx.Node],
    repeats: Sequence[Repeat],
    kept: Sequence[int],
) -> Captured:
    """Without the nodes that are removed and what only they read."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    specs: list[InputSpec] = []
    waiting = iter(captured.specs)
    for node in captured.gm.graph.nodes:
        if node.op == "placeholder":
            spec = next(waiting)
            of_block = spec.kind in ("parameter", "buffer")
            if of_block and any(_is_left_out(repeat, spec.target) for repeat in repeats):
                continue
            if not of_block and node.users and all(user in removed for user in node.users):
                continue
            specs.append(spec)
        if node.op == "output":
            results = [node.args[0][i] for i in kept]
            graph.output(tuple(copies.get(result, result) for result in results))
        elif node not in removed:
            copies[node] = graph.node_copy(node, lambda n: copies[removed.get(n, n)])
    written = [captured.written[i] for i in kept]
    return Captured(fx.GraphModule(captured.gm, graph), specs, written)


def _move(node: fx.Node, path: str) -> None:
    """Let a node, and those of a region that it calls, be of another module."""
    for each in (node, *_inner(node)):
        stack = each.meta.get("nn_module_stack") or {}
        each.meta["nn_module_stack"] = {**stack, path: (f"{PREFIX}{path}", "")}


def _inner(node: fx.Node) -> Iterator[fx.Node]:
    """The calls in the regions that a node names, or calls."""
    part = _region(node)
    if part is not None:
        for inner in part.graph.nodes:
            if inner.op == "call_function":
                yield inner
            yield from _inner(inner)


def _region(node: fx.Node) -> fx.GraphModule | None:
    if node.op != "get_attr":
        return None
    owner = node.graph.owning_module
    assert owner is not None and isinstance(node.target, str)
    value: Any = owner
    for name in node.target.split("."):
        value = getattr(value, name)
    return value if isinstance(value, fx.GraphModule) else None


def _segments(graph: fx.Graph, container: str) -> dict[int, list[fx.Node]]:
    """Nodes of each block and those behind it; none where the blocks do not run one by one."""
    segments: dict[int, list[fx.Node]] = {}
    current = -1
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        number = _number(node, container)
        if number is not None and number != current:
            if number < current:
                return {}
            current = number
            segments[number] = []
        if segments:
            segments[current].append(node)
    return segments


def _number(node: fx.Node, container: str) -> int | None:
    """Number of the block that a call is in; that of a region is the block of its first op."""
    calls = (node, *node.users) if node.op == "get_attr" else (node, *node.all_input_nodes)
    regions = (inner for call in calls if call.op == "get_attr" for inner in _inner(call))
    own = calls if node.op == "get_attr" else (node,)
    numbers = (number_in(module_of(each), container) for each in (*own, *regions))
    return next((n for n in numbers if n is not None), None)


def _equal_run(
    repeat: Repeat, segments: Mapping[int, list[fx.Node]], named: Mapping[fx.Node, str]
) -> Run | None:
    """The segments of a repeat, where those of the same place in its periods are equal."""
    period = repeat.period
    ends = range(repeat.first - 2 * period, repeat.first + period * (repeat.times + 1))
    inside = [number for number in segments if number in ends]
    if len(inside) < KEPT_PERIODS * period:
        return None
    wiring = _Wiring(repeat, segments, named)
    equal = inside[period:-period]  # the first and the last period meet other things
    pairs = zip(equal, equal[period:], strict=False)
    if any(wiring.described(a) != wiring.described(b) for a, b in pairs):
        return None
    found = {number: segments[number] for number in equal}
    for i, number in enumerate(inside):
        if number not in found:
            found[number] = wiring.like(number, equal[i % period])
    nodes = {node: number for number, own in found.items() for node in own}
    if any(_is_foreign(node, repeat.container) for node in nodes):
        return None
    between = {n: i for n, i in nodes.items() if _number(n, repeat.container) is None}
    if any(len(found[i]) < len(found[equal[-period + k]]) for k, i in enumerate(inside[-period:])):
        # what is done in front of a block is none of the last one, where sums of gradients begin
        repeat = replace(repeat, times=repeat.times - 1)
    return Run(repeat, found, between)


def _is_foreign(node: fx.Node, container: str) -> bool:
    """True for a node of another list's block."""
    path = module_of(node)
    if number_in(path, container) is not None:
        return False
    parts = path.split(".")
    numbered = (".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit())
    return any(not container.startswith(f"{name}.") for name in numbered)


class _Wiring:
    """Says what the nodes of a block compute, in terms that are the same for equal blocks."""

    def __init__(
        self, repeat: Repeat, segments: Mapping[int, list[fx.Node]], named: Mapping[fx.Node, str]
    ) -> None:
        self.repeat = repeat
        self.segments = segments
        self.named = named
        self.rank = {number: i for i, number in enumerate(segments)}
        self.place = {n: (number, i) for number, own in segments.items() for i, n in enumerate(own)}

    def described(self, number: int) -> list[Any]:
        """The ops of a block and what they read, in order."""
        return [
            (*self._op(number, node), self._operands(number, node))
            for node in self.segments[number]
        ]

    def like(self, number: int, other: int) -> list[fx.Node]:
        """The nodes of a block at an end of the list that do as those of another."""
        pairs = zip(self.segments[number], self.segments[other], strict=False)
        same = itertools.takewhile(
            lambda pair: self._op(number, pair[0]) == self._op(other, pair[1]), pairs
        )
        return [node for node, _ in same]

    def _op(self, number: int, node: fx.Node) -> tuple[Any, ...]:
        region = _region(node)
        target = str(node.target) if region is None else _described_region(region)
        value = tensor_meta(node)
        shape = None if value is None else (tuple(value.shape), value.dtype)
        return (node.op, target, self._within(number, module_of(node)), shape)

    def _within(self, number: int, path: str) -> str:
        """A name, without that of the block."""
        return path.removeprefix(f"{self.repeat.container}.{number}")

    def _operands(self, number: int, node: fx.Node) -> str:
        def said(operand: Any) -> Any:
            if not isinstance(operand, fx.Node):
                # rates and scales, which no placement depends on
                return ("float", operand == 0.0) if type(operand) is float else repr(operand)
            if operand in self.named:
                return self._within(number, self.named[operand])
            maker, position = self.place.get(operand, (-1, 0))
            distance = self.rank[number] - self.rank.get(maker, -1)
            far = maker < 0 or distance > self.repeat.period or self._is_shared(operand, maker)
            return operand.name if far else (distance, position)

        return str(map_aggregate((node.args, dict(node.kwargs)), said))

    def _is_shared(self, node: fx.Node, maker: int) -> bool:
        """True for what a block makes for many others, such as a bias of all attention scores."""
        readers = {self.place[user][0] for user in node.users if user in self.place}
        return len(readers - {maker}) >= MANY


def _described_region(region: fx.GraphModule) -> str:
    places = {node: i for i, node in enumerate(region.graph.nodes)}

    def said(operand: Any) -> Any:
        return places[operand] if isinstance(operand, fx.Node) else repr(operand)

    rows = []
    for node in places:
        inner = _region(node)
        target = str(node.target) if inner is None else _described_region(inner)
        target = "" if node.op == "placeholder" else target
        rows.append((node.op, target, str(map_aggregate((node.args, dict(node.kwargs)), said))))
    return str(rows)
