"""What the other instances of folded blocks hold while the one in the graph runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from autopar.solver.order import FoldedSpan, folded_spans

if TYPE_CHECKING:
    from autopar.solver.buffers import Buffers

__all__ = ["Twins", "twins_of"]

_TWINS = " of others"

Sizes = list[tuple[str, int]]


class Twins(NamedTuple):
    """What the other instances of folded blocks keep while the one in the graph runs.

    Attributes:
        span: of the blocks.
        alloc, late, kept: buffers that are there from the first op of the blocks on, from the last
            before weight gradients that come later, and behind the last.
        freed: buffers, each with the position of the op behind which it goes; not what is returned.
    """

    span: FoldedSpan
    alloc: Sizes
    late: Sizes
    kept: Sizes
    freed: list[tuple[str, int]]


def twins_of(buffers: Buffers) -> tuple[Twins, ...]:
    """What the other instances of each folded span keep; the buffers get to know their kinds.

    The one in the graph is the last to run forward and the first backward: the others' saved
    activations are there from its first op to its last, their gradients after its last, and what
    they return, such as statistics of batches, from its first op on.
    """
    size = {buffer: num_bytes for op in buffers.ops for buffer, num_bytes in op.alloc}
    step = buffers.step
    found: list[Twins] = []
    for span in folded_spans(step, buffers.order):
        alloc = _of_others(buffers, span, span.saved, span.backward, size)
        late = _of_others(buffers, span, span.inputs, span.weight, size)
        kept = [
            (f"grad.{name}{_TWINS}", _times(buffers, buffers.share(name), span))
            for name in span.parameters
            if name in step.gradients and not step.in_turns
        ]
        buffers.kinds.update(dict.fromkeys((buffer for buffer, _ in kept), "gradients"))
        freed = [
            (buffer, span.middle if read < span.weight else span.last)
            for buffer, read in _reads(buffers, (*alloc, *late))
            if read < len(buffers.order) or step.in_turns
        ]
        found.append(Twins(span, alloc, late, kept, freed))
    return tuple(found)


def _of_others(
    buffers: Buffers, span: FoldedSpan, ops: Iterable[str], cut: int, size: dict[str, int]
) -> Sizes:
    """Buffers of the instances that are not in the graph which ops from a position on read."""
    found: Sizes = []
    for name in ops:
        for index in range(len(buffers.step.ops[name].call.outputs)):
            buffer = buffers.id((name, index))
            if buffer in size and buffers.is_read_from(cut, buffer):
                found.append((f"{buffer}{_TWINS}", _times(buffers, size[buffer], span)))
                buffers.kinds[found[-1][0]] = buffers.kinds[buffer]
    return found


def _reads(buffers: Buffers, of_others: Iterable[tuple[str, int]]) -> Iterable[tuple[str, int]]:
    """Buffers of other instances, and the position up to which they are read."""
    for buffer, _ in of_others:
        name, _, index = buffer.removesuffix(_TWINS).rpartition(".")
        yield buffer, buffers.last_use[name, int(index)]


def _times(buffers: Buffers, num_bytes: int, span: FoldedSpan) -> int:
    return (span.times - 1) * buffers.rounded(num_bytes)
