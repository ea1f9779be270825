"""Models that compute between their blocks, as `x = x + block(x)` does in a loop of the parent.

An op behind a block, up to the next block of the list, counts for the block before it, where all
the blocks of a run have equal ones. So what no module of its own computes, as the pairs of an
`nn.ModuleList` of lists, are blocks like others. So are the children of one number of several lists
that a loop takes together. Their calls cannot be skipped while the model is captured (`fold.py`),
as what goes from one to the next is in a variable of the parent. Here the captured forward is cut:
the equal periods behind the one that stands for them go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx

from autopar.core.blocks import lists_of, number_in
from autopar.core.graph import InputSpec, Repeat
from autopar.tracer.capture import PREFIX
from autopar.tracer.repeats import KEPT_PERIODS, LONGEST_PERIOD, longest_run
from autopar.tracer.segments import Segments, calls_in

__all__ = ["Captured", "Run", "runs_of", "without_equal_periods"]

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

    def placeholders(self) -> list[fx.Node]:
        """In order."""
        return [node for node in self.gm.graph.nodes if node.op == "placeholder"]

    def named(self, values: Mapping[str, Tensor]) -> dict[fx.Node, str]:
        """What a placeholder is to a block: a parameter or buffer by name, a constant by value."""
        found: dict[fx.Node, str] = {}
        for node, spec in zip(self.placeholders(), self.specs, strict=True):
            value = values.get(node.name)
            if spec.kind in ("parameter", "buffer"):
                found[node] = spec.target
            elif value is not None and value.numel() <= _SMALL and not value.is_meta:
                found[node] = f"{value.dtype} {value.tolist()};"
        return found


def runs_of(
    captured: Captured, repeats: Sequence[Repeat], values: Mapping[str, Tensor]
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
    names = [repeat.container for repeat in repeats]
    found: list[Run] = []
    taken: set[str] = set()
    for repeat in repeats:
        segments = Segments(graph, repeat.container, named)
        lists = segments.beside(names) if repeat.container not in taken else None
        if lists is None:
            continue
        if lists != repeat.container:
            segments = Segments(graph, lists, named)
        runs = (_equal_run(each, segments) for each in _candidates(repeat, segments))
        run = next((run for run in runs if run is not None), None)
        if run is not None:
            found.append(run)
            taken.update(lists_of(lists))
    return found


def _candidates(repeat: Repeat, segments: Segments) -> Iterator[Repeat]:
    """What may repeat in a list: what the ops of its blocks say, or of blocks that are skipped."""
    last = repeat.first + repeat.period * (repeat.times + 1)
    if not segments.numbers:
        return
    if segments.numbers == list(range(segments.numbers[-1] + 1)) and last <= len(segments.numbers):
        run = longest_run(segments.container, _kinds(segments))
        if run is not None:
            yield from _multiples(run)
    else:
        yield replace(repeat, container=segments.container)


def _kinds(segments: Segments) -> list[int]:
    """A number for each block, the same for those that compute the same, whatever they read."""
    *numbers, last = segments.numbers
    seen: list[object] = []
    kinds: list[int] = []
    for number in numbers:
        ops = segments.ops(number)
        if ops not in seen:
            seen.append(ops)
        kinds.append(seen.index(ops))
    # behind the last block is the rest of the model
    own = max(i for i, n in enumerate(segments.nodes[last]) if segments.is_own(n)) + 1
    alike = {number: segments.common(last, number) for number in numbers}
    like = max(numbers, key=lambda k: (alike[k], k), default=-1)
    return [*kinds, kinds[like] if like >= 0 and alike[like] >= own else -1]


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
        if gone and not others & gone.keys() and _only_next_reads(run, gone, captured):
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


def _only_next_reads(run: Run, gone: Mapping[fx.Node, fx.Node], captured: Captured) -> bool:
    """True if of what is cut out only the period behind it reads, and that only its last period."""
    repeat = run.repeat
    for node, spec in zip(captured.placeholders(), captured.specs, strict=True):
        if spec.kind in ("parameter", "buffer") and _is_left_out(repeat, spec.target):
            if any(user not in gone and user.op != "output" for user in node.users):
                return False
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
    for each in (node, *calls_in(node)):
        stack = each.meta.get("nn_module_stack") or {}
        each.meta["nn_module_stack"] = {**stack, path: (f"{PREFIX}{path}", "")}


def _equal_run(repeat: Repeat, segments: Segments) -> Run | None:
    """The segments of a repeat, where those of the same place in its periods are equal."""
    period = repeat.period
    ends = range(repeat.first - 2 * period, repeat.first + period * (repeat.times + 1))
    inside = [number for number in segments.numbers if number in ends]
    if len(inside) < KEPT_PERIODS * period:
        return None
    equal = inside[period:-period]  # the first and the last period meet other things
    for one, other in zip(equal, equal[period:], strict=False):
        if segments.ops(one) != segments.ops(other):
            return None
        if segments.operands(one, period) != segments.operands(other, period):
            return None
    found = {number: segments.nodes[number] for number in equal}
    for i, number in enumerate(inside):
        if number not in found:
            like = equal[i % period]
            found[number] = segments.nodes[number][: segments.common(number, like)]
    between = {n: i for i, own in found.items() for n in own if not segments.is_own(n)}
    if any(len(found[i]) < len(found[equal[-period + k]]) for k, i in enumerate(inside[-period:])):
        # what is done in front of a block is none of the last one, where sums of gradients begin
        repeat = replace(repeat, times=repeat.times - 1)
    return Run(repeat, found, between)
