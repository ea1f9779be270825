"""Causal attention around a ring with equal work on all ranks.

Each of n ranks has two neighbouring ones of 2 n chunks of the rows. For the op they change places,
so that rank r has chunks r and 2 n - 1 - r. Of the keys that rank s sends around the ring, both of
r's chunks of rows attend to the first one if s < r, and else r's second chunk to both: two products
of chunks at each hop, in place of four of which up to four count for nothing. Its own keys it takes
under the op's causal mask. Llama 3 (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2) shards rows
like this, and has them gather all keys instead.

The ranks run the same sequence of nodes: what depends on the rank is where slices begin, and
numbers that leave out what does not count.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall
from autopar.codegen.lowerings.merging import Merged

__all__ = ["lower_zigzag", "lower_zigzag_backward"]

aten = torch.ops.aten
autopar = torch.ops.autopar

_ROWS = 2  # dim of the sequence in q, k, v, out and lse


class _Zigzag:
    """The exchange of chunks, and the hops around the ring."""

    def __init__(self, b: Builder, local: LocalCall) -> None:
        self.b = b
        (self.axis,) = local.axes_of("zigzag")
        self.size, self.me = b.mesh_shape[self.axis], b.coords[self.axis]

    def _owner(self, chunk: int) -> int:
        return min(chunk, 2 * self.size - 1 - chunk)

    def _counts(self, ranks: tuple[int, int]) -> list[int]:
        return [ranks.count(rank) for rank in range(self.size)]

    @property
    def _mine(self) -> tuple[int, int]:
        """Who has this rank's own chunks during the op."""
        return self._owner(2 * self.me), self._owner(2 * self.me + 1)

    @property
    def _given(self) -> tuple[int, int]:
        """Whose chunks this rank has during the op."""
        return self.me // 2, (2 * self.size - 1 - self.me) // 2

    @property
    def _order(self) -> tuple[int, int]:
        """This rank's own chunks in the order of the ranks that have them during the op."""
        return (0, 1) if self._mine[0] <= self._mine[1] else (1, 0)

    def enter(self, x: fx.Node) -> fx.Node:
        """From neighbouring chunks of the rows to those with equal work."""
        parts = [self.half(x, which) for which in self._order]
        return self._joined(self._sent(parts, self._mine, self._given), (0, 1))

    def leave(self, x: fx.Node) -> fx.Node:
        """Back to neighbouring chunks."""
        parts = [self.half(x, which) for which in (0, 1)]
        return self._joined(self._sent(parts, self._given, self._mine), self._order)

    def _sent(self, parts: list[fx.Node], to: tuple[int, int], source: tuple[int, int]) -> fx.Node:
        stacked = self.b.call(aten.stack.default, parts)
        return self.b.exchange(stacked, self.axis, self._counts(source), self._counts(to))

    def _joined(self, stacked: fx.Node, order: tuple[int, int]) -> fx.Node:
        parts = [self.b.call(aten.select.int, stacked, 0, which) for which in order]
        return self.b.call(aten.cat.default, parts, _ROWS)

    def half(self, x: fx.Node, which: int) -> fx.Node:
        """The first or the second chunk."""
        size = self.b.shape(x)[_ROWS] // 2
        return self.b.call(aten.slice.Tensor, x, _ROWS, which * size, (which + 1) * size)

    def counting(self, step: int) -> int:
        """Which chunk of rows attends to which of keys after some hops, beside second to first."""
        return int((self.me - step) % self.size > self.me)

    def rotated(self, *tensors: fx.Node) -> tuple[fx.Node, ...]:
        return tuple(self.b.rotate(x, self.axis) for x in tensors)


def lower_zigzag(b: Builder, local: LocalCall) -> fx.Node:
    """Output and log-sum-exp of causal attention without another mask."""
    q, k, v, _, _, scale = local.args
    zigzag = _Zigzag(b, local)
    q, k, v = (zigzag.enter(x) for x in (q, k, v))
    both = b.call(autopar.attention.default, q, k, v, None, True, scale)
    out, lse = b.item(both, 0), b.item(both, 1)
    rows = [Merged(b, zigzag.half(out, i), zigzag.half(lse, i)) for i in (0, 1)]

    def attend(of: int, to: int) -> tuple[fx.Node, fx.Node]:
        operands = zigzag.half(q, of), zigzag.half(k, to), zigzag.half(v, to)
        both = b.call(autopar.attention.default, *operands, None, False, scale)
        return b.item(both, 0), b.item(both, 1)

    for step in range(1, zigzag.size):
        k, v = zigzag.rotated(k, v)
        rows[1].add(*attend(1, 0))
        which = zigzag.counting(step)
        out, lse = attend(which, which)
        for number in (0, 1):
            none = 0.0 if number == which else -math.inf
            rows[number].add(out, b.call(aten.add.Scalar, lse, none))
    outs = [b.cast(each.out, local.call.outputs[0].dtype) for each in rows]
    out = zigzag.leave(b.call(aten.cat.default, outs, _ROWS))
    lse = zigzag.leave(b.call(aten.cat.default, [each.lse for each in rows], _ROWS))
    return b.pack(out, lse)


def lower_zigzag_backward(b: Builder, local: LocalCall) -> fx.Node:
    """Gradients of queries, keys and values; those of keys and values travel on with them."""
    grad, q, k, v, _, out, lse, _, scale = local.args
    zigzag = _Zigzag(b, local)
    dtype = b.value(q).dtype
    grad, q, k, v, out, lse = (zigzag.enter(x) for x in (grad, q, k, v, out, lse))

    def attend(of: int, to: int) -> list[fx.Node]:
        rows = [zigzag.half(x, of) for x in (grad, q)]
        keys = [zigzag.half(x, to) for x in (k, v)]
        saved = [zigzag.half(x, of) for x in (out, lse)]
        given = (*rows, *keys, None, *saved, False, scale)
        grads = b.call(autopar.attention_backward.default, *given)
        return [b.item(grads, i) for i in range(3)]

    given = (grad, q, k, v, None, out, lse, True, scale)
    grads = b.call(autopar.attention_backward.default, *given)
    grad_q = [b.widen(zigzag.half(b.item(grads, 0), i)) for i in (0, 1)]
    own, away = [b.item(grads, 1), b.item(grads, 2)], list[fx.Node]()
    for step in range(1, zigzag.size):
        k, v = zigzag.rotated(k, v)
        first, which = attend(1, 0), zigzag.counting(step)
        other = attend(which, which)
        grad_q[1] = b.call(aten.add.Tensor, grad_q[1], b.widen(first[0]))
        wide = b.widen(other[0])
        for number in (0, 1):
            counts = int(number == which)
            grad_q[number] = b.call(aten.add.Tensor, grad_q[number], wide, alpha=counts)
        new = [
            b.call(
                aten.cat.default,
                [
                    b.call(aten.add.Tensor, x, y, alpha=1 - which),
                    b.call(aten.mul.Scalar, y, which),
                ],
                _ROWS,
            )
            for x, y in zip(first[1:], other[1:], strict=True)
        ]
        gone = zigzag.rotated(*away)
        away = [b.call(aten.add.Tensor, x, y) for x, y in zip(gone, new, strict=False)] or new
    home = zigzag.rotated(*away)
    own = [b.call(aten.add.Tensor, x, y) for x, y in zip(own, home, strict=True)]
    whole_q = b.call(aten.cat.default, [b.cast(x, dtype) for x in grad_q], _ROWS)
    return b.pack(*(zigzag.leave(x) for x in (whole_q, *own)))
