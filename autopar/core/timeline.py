"""The predicted step op by op: seconds, collectives, live bytes, and what else could have been.

Ops are those of the planned graph, in the order in which they run. Where the graph stands for
repeated blocks, an op is stored once with how often it runs (`times`), so a deep model's timeline
is as short as a shallow one's. `executed` unrolls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

from autopar.core.placement import Layout, parse_placement

__all__ = [
    "Alternative",
    "Execution",
    "Packing",
    "PipelineSlot",
    "PlannedMove",
    "PlannedOp",
    "PlannedSpan",
    "Timeline",
    "executed",
    "is_once",
    "rounded",
]

OpPhase = Literal["forward", "recompute", "backward"]
_DIGITS = 9


def rounded(seconds: float) -> float:
    """Nine significant digits: what a stored plan keeps of a time."""
    return float(f"{seconds:.{_DIGITS}g}")


class PlannedMove(NamedTuple):
    """A collective that belongs to an op.

    Attributes:
        axis: mesh axis.
        kind: such as `"all_gather"`.
        num_bytes: full buffer of one execution, as in `CommBytes`.
        times: executions in one step.
        seconds: of one execution.
        of: the operand that arrives by it, as in `PlannedOp.operands`; `"gradient of FQN"` or
            `"result"` or `"sent"` for what leaves by it; `""` for a collective inside the op.
        hidden_s: of `seconds`, what runs beside compute.
        pieces: that it is cut into, each with a latency of its own in `seconds`.
    """

    axis: int
    kind: str
    num_bytes: int
    times: int
    seconds: float
    of: str
    hidden_s: float = 0.0
    pieces: int = 1

    @property
    def exposed_s(self) -> float:
        """Seconds of one execution that compute stands still for."""
        return self.seconds - self.hidden_s

    @property
    def leaves(self) -> bool:
        """True for a collective behind the op."""
        return self.of in ("result", "sent") or self.once

    @property
    def once(self) -> bool:
        """True for what happens once a step, however many microbatches there are."""
        return is_once(self.of)


def is_once(of: str) -> bool:
    """True for what happens once a step, however many microbatches there are: `PlannedMove.of`."""
    return of.startswith("gradient of ")


class Packing(NamedTuple):
    """Seconds of copies around an op's collectives in one step.

    Attributes:
        at_turns_s: of what it reads and of what leaves at each microbatch.
        once_s: of gradients on their way to storage.
    """

    at_turns_s: float = 0.0
    once_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.at_turns_s + self.once_s

    def plus(self, seconds: float, once: bool) -> Packing:
        """With more seconds of either."""
        return Packing(self.at_turns_s + seconds * (not once), self.once_s + seconds * once)


_NONE = Packing()


class Alternative(NamedTuple):
    """The best other choice for one class of nodes while every other choice stays as it is.

    The plan that it makes is a real one, with its real cost; the cheapest plan without the
    choice, which may change other choices too, costs at most that.

    Attributes:
        inputs: layouts of the operands; empty for a parameter.
        outputs: layouts of the results, or the storage of a parameter.
        more_s: seconds per step that it adds; memory is not looked at.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    more_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOp:
    """One op of the step.

    Attributes:
        name: of its node.
        op: name of the operator, such as `"aten.mul.Tensor"`.
        op_class: of the cost model: matmul, attention, conv, memory or view.
        phase: forward, backward, or a forward op that the backward repeats.
        module: FQN of the user's module that it runs in.
        source: the user's line, `file:line`, or "".
        operands: where each tensor operand comes from: a node, or a parameter's FQN.
        shapes: global shape of each output.
        dtype: of the first output.
        times: executions in one step.
        compute_s: seconds of one execution, with its share of `packing`.
        packing: copies around its collectives, of all executions.
        moves: its collectives.
        live: bytes live while it runs, by `Timeline.kinds`.
        alternative: the best other choice, if there is one.
        part: of a step in microbatches, the key of `Prediction.phases` that its seconds count to,
            but for collectives that happen once; else "".
    """

    name: str
    op: str
    op_class: str
    phase: OpPhase
    module: str
    source: str
    operands: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    times: int
    compute_s: float
    moves: tuple[PlannedMove, ...] = ()
    live: tuple[int, ...] = ()
    alternative: Alternative | None = None
    part: str = ""
    packing: Packing = _NONE

    @property
    def comm_s(self) -> float:
        """Seconds of its collectives in one step."""
        return sum(move.seconds * move.times for move in self.moves)

    @property
    def total_s(self) -> float:
        """Seconds of all its executions and collectives in one step, nothing hidden."""
        return self.compute_s * self.times + self.comm_s


class PlannedSpan(NamedTuple):
    """What one instance of repeated blocks adds to live memory.

    Attributes:
        times: instances.
        saved: bytes kept from its forward to its backward, by `Timeline.kinds`.
        gradient_bytes: of its parameters, kept from its backward on.
        ops: names of its ops.
    """

    times: int
    saved: tuple[int, ...]
    gradient_bytes: int
    ops: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The predicted step of one device.

    Attributes:
        ops: in the order in which they run.
        kinds: of live memory, in the order of `PlannedOp.live`.
        spans: repeated blocks that the ops hold once.
        alternatives: best other storage of a parameter, by FQN.
    """

    ops: tuple[PlannedOp, ...] = ()
    kinds: tuple[str, ...] = ()
    spans: tuple[PlannedSpan, ...] = ()
    alternatives: Mapping[str, Alternative] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: one row an op, with its strings as numbers of a table."""
        table: dict[str, int] = {}

        def number(text: str) -> int:
            return table.setdefault(text, len(table))

        rows = [_row(op, number) for op in self.ops]
        spans = [
            [s.times, list(s.saved), s.gradient_bytes, sorted(number(name) for name in s.ops)]
            for s in self.spans
        ]
        return {
            "ops": rows,
            "spans": spans,
            "alternatives": {k: _alternative(a) for k, a in self.alternatives.items()},
            "kinds": list(self.kinds),
            "strings": list(table),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Timeline:
        """Inverse of `to_dict`."""
        strings: list[str] = list(data["strings"])
        return cls(
            ops=tuple(_op(row, strings) for row in data["ops"]),
            kinds=tuple(data["kinds"]),
            spans=tuple(
                PlannedSpan(times, tuple(saved), gradient, frozenset(strings[n] for n in names))
                for times, saved, gradient, names in data["spans"]
            ),
            alternatives={k: _parsed(row) for k, row in data["alternatives"].items()},
        )


def _row(op: PlannedOp, number: Any) -> list[Any]:
    texts = (op.name, op.op, op.op_class, op.phase, op.module, op.source, op.dtype)
    moves = [
        [m.axis, number(m.kind), m.num_bytes, m.times, m.seconds, number(m.of), m.hidden_s]
        + [m.pieces] * (m.pieces > 1)
        for m in op.moves
    ]
    other = None if op.alternative is None else _alternative(op.alternative)
    return [
        *(number(text) for text in texts),
        [number(name) for name in op.operands],
        [list(shape) for shape in op.shapes],
        op.times,
        op.compute_s,
        moves,
        list(op.live),
        other,
        *([number(op.part)] if op.part or any(op.packing) else []),
        *(op.packing if any(op.packing) else []),
    ]


def _op(row: Sequence[Any], strings: Sequence[str]) -> PlannedOp:
    name, op, op_class, phase, module, source, dtype = (strings[n] for n in row[:7])
    operands, shapes, times, compute_s, moves, live, other, *part = row[7:]
    return PlannedOp(
        name=name,
        op=op,
        op_class=op_class,
        phase=phase,
        module=module,
        source=source,
        operands=tuple(strings[n] for n in operands),
        shapes=tuple(tuple(shape) for shape in shapes),
        dtype=dtype,
        times=times,
        compute_s=compute_s,
        moves=tuple(
            PlannedMove(axis, strings[kind], num_bytes, count, seconds, strings[of], *hidden)
            for axis, kind, num_bytes, count, seconds, of, *hidden in moves
        ),
        live=tuple(live),
        alternative=None if other is None else _parsed(other),
        part=strings[part[0]] if part else "",
        packing=Packing(*part[1:]),
    )


def _alternative(other: Alternative) -> list[Any]:
    """Layouts as one text each: `S0,R`."""
    return [
        [",".join(p.short for p in layout) for layout in other.inputs],
        [",".join(p.short for p in layout) for layout in other.outputs],
        other.more_s,
    ]


def _parsed(row: Sequence[Any]) -> Alternative:
    def layouts(texts: Iterable[str]) -> tuple[Layout, ...]:
        return tuple(
            tuple(parse_placement(p) for p in text.split(",")) if text else () for text in texts
        )

    return Alternative(layouts(row[0]), layouts(row[1]), row[2])


class PipelineSlot(NamedTuple):
    """What a rank of a pipeline does for some time.

    Attributes:
        rank: of the pipeline.
        kind: an action of the schedule, F, B, I or W; P before the microbatches, R behind them.
        stage, microbatch: whose; microbatch 0 for P and R.
        start_s, seconds: from the start of the step.
    """

    rank: int
    kind: str
    stage: int
    microbatch: int
    start_s: float
    seconds: float


class Execution(NamedTuple):
    """One execution of an op: which instance of its block, when it starts, live bytes.

    `before_s` and `after_s` are the exposed seconds of its collectives.
    """

    op: PlannedOp
    instance: int
    start_s: float
    before_s: float
    after_s: float
    live: tuple[int, ...]


def executed(timeline: Timeline) -> Iterator[Execution]:
    """Every execution of the step in order, each beginning where the last one ends.

    Ops that stand for repeated blocks are run once per instance: all of one block, then all of the
    next. A collective that only some instances need is spread evenly over all of them, so totals
    hold. Compute stands still for the exposed part of a collective at the op that it belongs to;
    for a gradient that is reduced late, the step does so at its end.
    """
    span_of = {name: span for span in timeline.spans for name in span.ops}
    now = 0.0
    for span, grouped in groupby(timeline.ops, key=lambda op: span_of.get(op.name)):
        ops = list(grouped)
        for instance in range(span.times if span is not None else 1):
            for op in ops:
                before = sum(m.exposed_s * m.times for m in op.moves if not m.leaves) / op.times
                after = sum(m.exposed_s * m.times for m in op.moves if m.leaves) / op.times
                live = op.live if span is None else _live(timeline, op, span, instance)
                yield Execution(op, instance, now, before, after, live)
                now += before + op.compute_s + after


def _live(timeline: Timeline, op: PlannedOp, span: PlannedSpan, instance: int) -> tuple[int, ...]:
    """Live bytes of one instance, from those of the stand-in.

    The stand-in is the last to run forward and the first backward: what the others save is there
    already. Before it, forward, fewer have saved; after it, backward, fewer still hold, and more
    gradients are there.
    """
    if not op.live:
        return ()
    away = instance if op.phase != "forward" else span.times - 1 - instance
    live = [max(0, now - away * saved) for now, saved in zip(op.live, span.saved, strict=True)]
    if op.phase != "forward" and "gradients" in timeline.kinds:
        live[timeline.kinds.index("gradients")] += away * span.gradient_bytes
    return tuple(live)
