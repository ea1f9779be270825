"""The order in which the ops of a step run, and where the parts of a microbatch begin in it.

What is hoisted runs once, then of each microbatch the forward and the backward; a schedule may run
the weight gradients some time after the input gradients (Qi et al. 2023, arXiv 2401.10241).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.core.flights import ALONE
from autopar.solver.step import Op, Send, Step, Value

__all__ = [
    "FoldedSpan",
    "before_sends",
    "folded_spans",
    "leaving",
    "ordered",
    "part_starts",
    "parts_of_turns",
    "sums_of_turns",
    "turning_sends",
    "waits_of_ops",
    "waits_of_parts",
]


def ordered(step: Step) -> list[Op]:
    """The ops in execution order: what is hoisted, the forward, then the backward.

    Where the schedule splits the backward, what the stage before waits for comes first.
    """
    hoisted = [op for op in step.ops.values() if step.is_hoisted(op.name)]
    ops = [op for op in step.ops.values() if not step.is_hoisted(op.name)]
    backward = [op for op in ops if op.backward]
    if step.blocks.traced.flight.splits:
        first = before_sends(step)
        backward.sort(key=lambda op: op.name not in first)
    return hoisted + [op for op in ops if not op.backward] + backward


def part_starts(step: Step, order: list[Op]) -> tuple[int, int, int]:
    """Positions at which a microbatch begins, its backward, and the weight gradients after it.

    A backward in one piece has none of the latter: they begin at the end.
    """
    end = len(order)
    first = next((p for p, op in enumerate(order) if not step.is_hoisted(op.name)), 0)
    backward = next((p for p, op in enumerate(order) if op.backward), end)
    weight = end
    if step.blocks.traced.flight.splits:
        inputs = before_sends(step)
        late = (p for p, op in enumerate(order) if op.backward and op.name not in inputs)
        weight = next(late, end)
    return first, backward, weight


def before_sends(step: Step) -> set[str]:
    """Backward ops whose results go, by way of others, to the stage before."""
    traced = step.blocks.traced
    sums = sums_of_turns(step)
    stack = [
        send.value[0]
        for send in step.sends
        if send.value[0] in step.ops
        and step.ops[send.value[0]].backward
        and send.times == traced.microbatches
        and send.value[0] not in sums
    ]
    found: set[str] = set()
    while stack:
        name = stack.pop()
        if name in step.ops and name not in found and step.ops[name].backward:
            found.add(name)
            stack.extend(value[0] for value in step.ops[name].operands)
    return found


def parts_of_turns(step: Step) -> dict[str, str]:
    """Part that each op of a step in microbatches runs in: a key of `Prediction.phases`."""
    first = before_sends(step)

    def part(op: Op) -> str:
        if step.is_hoisted(op.name):
            return "prepare"
        if not op.backward:
            return "forward"
        return "input" if op.name in first else "weight"

    return {name: part(op) for name, op in step.ops.items()}


def waits_of_parts(step: Step) -> dict[str, float]:
    """What a second of each part of a step in microbatches counts in the search."""
    parts = ("prepare", "forward", "input", "weight", "finish")
    return dict(zip(parts, step.waits, strict=True))


def waits_of_ops(step: Step) -> dict[str, float]:
    """The same of each op, and of what it waits for."""
    if step.waits == ALONE:
        return dict.fromkeys(step.ops, 1.0)
    parts = waits_of_parts(step)
    return {name: parts[part] for name, part in parts_of_turns(step).items()}


@dataclass(frozen=True, slots=True)
class FoldedSpan:
    """The time in which blocks that stand for others run.

    Attributes:
        times: how many instances there are.
        saved: forward ops of the blocks; what the backward reads of them is kept by each instance.
        parameters: of the blocks.
        first, last: positions in the order of their first and last op.
        backward: position at which the backward pass begins.
        weight: position at which weight gradients that come later begin, else the end.
        middle: position of the last op before that.
        inputs: backward ops before that, where some weight gradients come later.
    """

    times: int
    saved: tuple[str, ...]
    parameters: tuple[str, ...]
    first: int
    last: int
    backward: int
    weight: int
    middle: int
    inputs: tuple[str, ...]


def folded_spans(step: Step, order: list[Op]) -> list[FoldedSpan]:
    """The span of each repeat of a folded graph."""
    _, backward, weight = part_starts(step, order)
    spans: list[FoldedSpan] = []
    for repeat in step.blocks.traced.repeats:
        inside = [
            (p, op)
            for p, op in enumerate(order)
            if step.blocks.repeat_of(op.name) == repeat and not step.is_hoisted(op.name)
        ]
        if not inside:
            continue  # of the part of a step
        positions = [p for p, _ in inside]
        spans.append(
            FoldedSpan(
                times=repeat.times,
                saved=tuple(op.name for _, op in inside if not op.backward),
                parameters=tuple(n for n in step.parameters if step.blocks.repeat_of(n) == repeat),
                first=min(positions),
                last=max(positions),
                backward=backward,
                weight=weight,
                middle=max(p for p in positions if p < weight),
                inputs=tuple(
                    op.name for p, op in inside if op.backward and p < weight < len(order)
                ),
            )
        )
    return spans


def sums_of_turns(step: Step) -> set[str]:
    """Ops whose results are added up over the microbatches: contributions to gradients."""
    if not step.in_turns:
        return set()
    sent = {o.node for o in step.blocks.traced.outputs if o.kind == "sent" and o.accumulated}
    return {value[0] for value in step.gradients.values()} | {n for n in sent if n is not None}


def turning_sends(step: Step) -> list[tuple[Send, bool]]:
    """What goes to another stage at each turn, and whether the backward makes it."""
    sums = sums_of_turns(step)
    return [
        (send, step.ops[send.value[0]].backward)
        for send in step.sends
        if send.value[0] in step.ops
        and send.value[0] not in sums
        and not step.is_hoisted(send.value[0])
    ]


def leaving(step: Step, order: list[Op]) -> list[tuple[Value, int]]:
    """What leaves a microbatch, and the position in the order up to which it lives there.

    Contributions to gradients are added up at once; a part of the step sends when it has ended.
    """
    born = {op.name: p for p, op in enumerate(order)}
    _, backward, weight = part_starts(step, order)
    sums = [*step.gradients.values(), *(s.value for s in step.sends)]
    found = [(value, born[value[0]]) for value in sums if value[0] in born]
    for send, late in turning_sends(step):
        found.append((send.value, (weight if late else backward) - 1))
    found += [(s.value, len(order)) for s in step.sends if step.is_hoisted(s.value[0])]
    return found
