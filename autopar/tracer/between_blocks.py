"""What a model computes between its blocks, as `x = x + block(x)` does in a loop of the parent.

An op behind a block, up to the next block of the list, counts for the block before it, where all
the blocks of a run have equal ones. So what no module of its own computes, as the pairs of an
`nn.ModuleList` of lists, are blocks like others. So are the children of one number of several lists
that a loop takes together. In the captured forward the equal periods behind the one that stands for
them are cut out: of blocks whose calls were skipped (`skipped_calls.py`), and of others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx

from autopar.core.blocks import lists_of, number_in
from autopar.core.graph import InputSpec, Repeat
from autopar.tracer.block_calls import (
    calls_of_blocks,
    hand_on,
    inside_of,
    is_skipped,
    left_out_of,
)
from autopar.tracer.capture import PREFIX
from autopar.tracer.cleanup import module_of
from autopar.tracer.regions import calls_in, drop_operands, named_graphs, unread_operands
from autopar.tracer.repeats import (
    LONGEST_PERIOD,
    is_nested,
    longest_run,
    repeat_within,
    run_around,
)
from autopar.tracer.segments import Segments
from autopar.tracer.skipped_calls import LastUnlike

__all__ = ["BetweenBlocks", "Run", "cut_equal_periods", "runs_of"]

_SMALL = 1024  # elements of a constant whose value is looked at


class BetweenBlocks:
    """Counts what a captured forward computes between its blocks for these, and cuts equal ones.

    Attributes:
        lists: of blocks that look alike.
        fold: cut.
        joined: lists whose children of one number are a block.
        repeats: blocks that are there once for many.
    """

    def __init__(self, lists: Sequence[Repeat], fold: bool) -> None:
        self.lists = lists
        self.fold = fold
        self.joined: tuple[str, ...] = ()
        self.repeats: tuple[Repeat, ...] = ()
        self.skipped: list[str] = []  # modules that were not called

    def cut_skipped(
        self, gm: fx.GraphModule, specs: Sequence[InputSpec], values: Mapping[str, Tensor]
    ) -> set[fx.Node]:
        """Cut calls that were skipped, in place; the placeholders that nothing reads any more.

        Args:
            gm: what was captured while blocks were skipped.
            specs: of its placeholders, in order.
            values: tensors that the forward made of plain values, by name of their placeholder.

        Raises:
            Unlike: blocks that are left out are not like those that stand for them.
        """
        calls = calls_of_blocks(gm)
        self.skipped = [str(node.args[2]) for node in calls if is_skipped(node)]
        if not calls:
            return set()
        kinds = _kinds_of(gm.graph, specs)
        read, unread = {node for node in kinds if node.users}, unread_operands(gm.graph)
        for graph, named in named_graphs(gm.graph, _named(kinds, values)):
            hidden = inside_of(graph)
            runs = runs_of(graph, left_out_of(self.lists, graph), named, hidden)
            cut_equal_periods(graph, runs, named, hidden)
            hand_on(graph)
        drop_operands(gm.graph, unread)
        return {node for node in read if not node.users}

    def apply(
        self, gm: fx.GraphModule, specs: Sequence[InputSpec], values: Mapping[str, Tensor]
    ) -> set[fx.Node]:
        """Name, and cut, in place; the placeholders that nothing reads any more.

        Args:
            gm: a captured forward of a model, or of one some of whose blocks were skipped.
            specs: of its placeholders, in order.
            values: tensors that the forward made of plain values, by name of their placeholder.

        Raises:
            LastUnlike: only the last blocks that are left out are not like those in front of them.
        """
        kinds = _kinds_of(gm.graph, specs)
        read, unread = {node for node in kinds if node.users}, unread_operands(gm.graph)
        self.joined, self.repeats = (), ()
        for graph, named in named_graphs(gm.graph, _named(kinds, values)):
            runs = [run for run in runs_of(graph, self.lists, named) if self._is_complete(run)]
            for run in runs:
                run.name_between()
            names = [run.repeat.container for run in runs]
            self.joined += tuple(name for name in names if len(lists_of(name)) > 1)
            if self.fold:
                self.repeats += cut_equal_periods(graph, runs, named)
        if self.fold:
            drop_operands(gm.graph, unread)
            self.repeats += tuple(self._idle(gm, kinds))
        if any(not _is_left_out(self.repeats, path) for path in self.skipped):
            raise LastUnlike("the last blocks that are left out are unlike those in front of them")
        return {
            node
            for node, spec in kinds.items()
            if _is_left_out(self.repeats, spec.target) or (node in read and not node.users)
        }

    def _is_complete(self, run: Run) -> bool:
        """True where blocks that are not in the graph are those whose calls were skipped."""
        missing = {*_extent(run.repeat)} - {*run.segments}
        return missing <= {number_in(path, run.repeat.container) for path in self.skipped}

    def _idle(self, gm: fx.GraphModule, kinds: Mapping[fx.Node, InputSpec]) -> Iterator[Repeat]:
        """Those whose blocks are not called, as of a tower for inputs that are not given."""
        parts = (part for part in gm.modules() if isinstance(part, fx.GraphModule))
        used = {module_of(node) for part in parts for node in part.graph.nodes}
        used.update(spec.target for node, spec in kinds.items() if node.users)
        for repeat in self.lists:
            inside = (name for name in used if number_in(name, repeat.container) is not None)
            if next(inside, None) is None and not is_nested(repeat.container):
                yield repeat


def _kinds_of(graph: fx.Graph, specs: Sequence[InputSpec]) -> dict[fx.Node, InputSpec]:
    """The placeholders of a graph but those of inputs, and what they are."""
    pairs = zip(_placeholders(graph), specs, strict=True)
    return {node: spec for node, spec in pairs if spec.kind != "input"}


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _named(kinds: Mapping[fx.Node, InputSpec], values: Mapping[str, Tensor]) -> dict[fx.Node, str]:
    """What a placeholder is to a block: a parameter or buffer by name, a constant by value."""
    found: dict[fx.Node, str] = {}
    for node, spec in kinds.items():
        value = values.get(node.name)
        if spec.kind in ("parameter", "buffer"):
            found[node] = spec.target
        elif value is not None and value.numel() <= _SMALL and not value.is_meta:
            found[node] = f"{value.dtype} {value.tolist()};"
    return found


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
            if number in self.segments  # others are left out
            for node, twin in zip(
                self.segments[number],
                self.segments[repeat.first + (number - repeat.first) % repeat.period],
                strict=True,
            )
        }


def runs_of(
    graph: fx.Graph,
    repeats: Sequence[Repeat],
    named: Mapping[fx.Node, str],
    hidden: Collection[fx.Node] = (),
) -> list[Run]:
    """The runs of blocks whose segments do the same on what the segments before them yield.

    Args:
        graph: a captured forward.
        repeats: at most one per list. Blocks that look alike may take turns in what is done beside
            them; then more of them repeat together.
        named: what a placeholder is to a block: a parameter or buffer by name, a constant by value.
        hidden: nodes inside of blocks, where those of some are not there.
    """
    for node in list(graph.nodes):
        if node.op == "get_attr" and node.users:
            min(node.users).prepend(node)  # a region is named where it is called
    names = [repeat.container for repeat in repeats]
    found: list[Run] = []
    taken: set[str] = set()
    for repeat in repeats:
        segments = Segments(graph, repeat.container, named, hidden)
        lists = segments.beside(names) if repeat.container not in taken else None
        if lists is None:
            continue
        if lists != repeat.container:
            segments = Segments(graph, lists, named, hidden)
        runs = (_equal_run(each, segments) for each in _candidates(repeat, segments))
        run = next((run for run in runs if run is not None), None)
        if run is not None:
            found.append(run)
            taken.update(lists_of(lists))
    return found


def _candidates(repeat: Repeat, segments: Segments) -> Iterator[Repeat]:
    """What may repeat in a list: what the ops of its blocks say, or of blocks that are skipped."""
    if not segments.numbers:
        return
    is_whole = segments.numbers == list(range(segments.numbers[-1] + 1)) and not segments.hidden
    if is_whole and _extent(repeat).stop <= len(segments.numbers):
        kinds = _kinds(segments)
        found = longest_run(segments.container, kinds)
        if found is not None:
            yield from _multiples(found, run_around(found, kinds))
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


def _multiples(repeat: Repeat, run: range) -> Iterator[Repeat]:
    """The repeat of a run, and those of several of its periods."""
    for more in range(1, LONGEST_PERIOD // repeat.period + 1):
        found = repeat_within(repeat.container, run, repeat.period * more)
        if found is not None:
            yield found


def _extent(repeat: Repeat) -> range:
    """Numbers of the blocks of a repeat, of the period in front and of the blocks beside these."""
    return range(repeat.first - repeat.period - 1, repeat.instances().stop + 1)


def cut_equal_periods(
    graph: fx.Graph,
    runs: Iterable[Run],
    named: Mapping[fx.Node, str],
    hidden: Collection[fx.Node] = (),
) -> tuple[Repeat, ...]:
    """Let one period of a run stand for others, whose nodes go; which of them do.

    Args:
        graph: a captured forward; is changed.
        runs: the blocks of some lists.
        named: what a placeholder is to a block: a parameter or buffer by name, a constant by value.
        hidden: nodes inside of blocks that `runs` say nothing of.
    """
    repeats: list[Repeat] = []
    for run in runs:
        gone = run.removed()
        if not run.repeat.skipped or not _only_next_reads(run, gone, named, hidden):
            continue
        for node, twin in reversed(gone.items()):
            for user in [user for user in node.users if user not in gone]:
                user.replace_input_with(node, twin)
            graph.erase_node(node)
        repeats.append(run.repeat)
    return tuple(repeats)


def _is_left_out(repeats: Iterable[Repeat], name: str) -> bool:
    """True for a parameter or buffer of a block that another one stands for."""
    numbers = ((repeat, number_in(name, repeat.container)) for repeat in repeats)
    return any(n is not None and r.covers(n) and not r.holds(n) for r, n in numbers)


def _only_next_reads(
    run: Run,
    gone: Mapping[fx.Node, fx.Node],
    named: Mapping[fx.Node, str],
    hidden: Collection[fx.Node],
) -> bool:
    """True if of what is cut out only the period behind it reads, and that only its last period."""
    repeat = run.repeat
    own = (node for node, name in named.items() if _is_left_out([repeat], name))
    if any(user not in gone for node in own for user in node.users):
        return False
    end = repeat.instances().stop
    last = {n for i in range(end - repeat.period, end) for n in run.segments.get(i, ())}
    behind = {n for i in range(end, end + repeat.period) for n in run.segments.get(i, ())}
    behind.update(hidden)
    return all(
        user in gone or (node in last and user in behind) for node in gone for user in node.users
    )


def _move(node: fx.Node, path: str) -> None:
    """Let a node, and those of a region that it calls, be of another module."""
    for each in (node, *calls_in(node)):
        stack = each.meta.get("nn_module_stack") or {}
        each.meta["nn_module_stack"] = {**stack, path: (f"{PREFIX}{path}", "")}


def _equal_run(repeat: Repeat, segments: Segments) -> Run | None:
    """The segments of a repeat, where those of the same place in its periods are equal."""
    period, first, stop = repeat.period, repeat.first, repeat.instances().stop
    equal = [number for number in segments.numbers if first - period <= number < stop]
    # the first and the last one meet other things
    if len(equal) < 2 * period or not {first - period - 1, stop} <= segments.nodes.keys():
        return None
    for one, other in zip(equal, equal[period:], strict=False):
        if segments.ops(one) != segments.ops(other):
            return None
        if segments.operands(one, period) != segments.operands(other, period):
            return None
    found = {number: segments.nodes[number] for number in equal}
    around = range(first - 2 * period, stop + period)
    for number in (n for n in segments.numbers if n in around and n not in found):
        like = first + (number - first) % period
        found[number] = segments.nodes[number][: segments.common(number, like)]
    between = {n: i for i, own in found.items() for n in own if not segments.is_own(n)}
    if not segments.hidden and len(found[stop]) < len(segments.nodes[first]):
        # what is done in front of a block is none of the last one, where sums of gradients begin
        repeat = replace(repeat, times=repeat.times - 1)
    return Run(repeat, found, between)
