"""Packed sequences, kept as the padded batches that they were made of.

A packed sequence has as many rows as its lengths say, which no graph can know. Here its `data` is a
stand-in for the whole padded batch: recurrent layers run on that, with the lengths beside it, and
`pad_packed_sequence` hands it back. Samples keep their order, so nothing is sorted. What else reads
the rows gets those that a mask picks (`picked`), and rows that are made of these stand in their
places again when they are packed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Hashable
from functools import partialmethod
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from autopar.core.ops import ops
from autopar.errors import TraceError
from autopar.tracer.diagnose import innermost_line
from autopar.tracer.recurrent import recurrent_layers
from autopar.tracer.same_masks import SameMasks

__all__ = ["LAYERS", "PackedRows"]

LAYERS = (nn.LSTM, nn.GRU, nn.RNN)
_PACKING = (pack_padded_sequence.__code__, pad_packed_sequence.__code__)
_PARTS = ("_pack_padded_sequence", "_pad_packed_sequence", "sort", "index_select", "__getitem__")
_NEAR = 8  # frames, those of modes between
_ATTRIBUTES = {
    getattr(Tensor, name).__get__ for name in ("device", "dtype", "is_cuda", "requires_grad")
}


def _packing() -> FrameType | None:
    """The frame of torch's function that a call is part of, if it packs or pads."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_NEAR):
        if frame is None or frame.f_code in _PACKING:
            return frame
        frame = frame.f_back
    return None


class _Lengths(NamedTuple):
    """Of the samples of a batch, (batch,), and which (steps, batch) are within them."""

    lengths: Tensor
    inside: Tensor


class _Rows(NamedTuple):
    """A padded batch (steps, batch, …), as its user has it and as it has all steps of a mask.

    `cleared` if it is 0 behind the lengths.
    """

    rows: Tensor
    steps: int
    long: _Lengths
    cleared: bool


class PackedRows:
    """What the stand-ins of one capture stand for.

    Args:
        same: how lengths were made: of equal ones, all masks pick as many rows to torch.
    """

    def __init__(self, same: SameMasks) -> None:
        self.same = same
        self._rows: dict[int, tuple[Tensor, _Rows]] = {}  # by the id of a stand-in
        self._lengths: dict[Hashable, _Lengths] = {}
        self._sizes: dict[int, tuple[Tensor, _Lengths]] = {}  # by the id of batch sizes
        self._picked: dict[int, Tensor] = {}  # by the id of a stand-in

    def called(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The result of a call that packs, pads or is part of these; None for any other call."""
        name = getattr(func, "__name__", "")
        if name not in _PARTS or (frame := _packing()) is None:
            return None
        if name == "_pack_padded_sequence":
            return self._packed(*args)
        if name == "_pad_packed_sequence":
            data, sizes, *options = args
            known = frame.f_locals["total_length"] is not None
            return self._padded(self._of(data, sizes), known, *options)
        if name == "sort":
            return args[0], torch.arange(len(args[0]), device=args[0].device)
        return args[0]

    def picked(self, func: Any, given: Any) -> Any:
        """Arguments of a call, with the rows that are packed, and their numbers, as they are."""
        if (
            not self._rows
            or func in _ATTRIBUTES
            or not any(map(self.is_stand_in, pytree.tree_leaves(given)))
        ):
            return given
        return given if _packing() is not None else pytree.tree_map(self._pick, given)

    def is_stand_in(self, value: Any) -> bool:
        """True for `data` and `batch_sizes` of a packed sequence, which are not what they seem."""
        return id(value) in self._rows or id(value) in self._sizes

    def _pick(self, value: Any) -> Any:
        if id(value) in self._sizes:
            return self._sizes[id(value)][1].inside.sum(1)
        if id(value) not in self._rows:
            return value
        if id(value) not in self._picked:
            _, found = self._rows[id(value)]
            self._picked[id(value)] = found.rows[found.long.inside]
        return self._picked[id(value)]

    def _stand_in(self, found: _Rows) -> Tensor:
        stand_in = found.rows.detach()
        self._rows[id(stand_in)] = stand_in, found
        return stand_in

    def _of(self, data: Tensor, sizes: Tensor) -> _Rows:
        """What a packed sequence stands for; other rows than those packed, in their places."""
        if id(data) in self._rows:
            return self._rows[id(data)][1]
        if id(sizes) not in self._sizes:
            raise TraceError(
                f"cannot trace {innermost_line(traceback.extract_stack())}\n  A packed sequence "
                "has batch sizes that pack_padded_sequence did not make. Pass on those of the "
                "sequence that its rows come from."
            )
        steps, (_, long) = sizes.shape[0], self._sizes[id(sizes)]
        shape = (*long.inside.shape, *data.shape[1:])
        rows = torch.zeros(shape, dtype=data.dtype, device=data.device)
        rows[long.inside] = data
        return _Rows(rows, steps, long, True)

    def _packed(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        rows = x.transpose(0, 1) if batch_first else x
        steps, batch = rows.shape[:2]
        key = self.same.key(lengths)
        if key not in self._lengths:
            step = torch.arange(steps, device=rows.device).unsqueeze(1)
            self._lengths[key] = _Lengths(lengths, step < lengths.to(rows.device))
        long = self._lengths[key]
        sizes = torch.full((steps,), batch, dtype=torch.int64, device="cpu")
        self._sizes[id(sizes)] = sizes, long
        # within the lengths of a batch that was packed before, no steps are cut off
        rows = _in_steps(rows, long.inside.shape[0])
        return self._stand_in(_Rows(rows, steps, long, False)), sizes

    def _padded(
        self, found: _Rows, known: bool, batch_first: bool, value: float, steps: int
    ) -> tuple[Tensor, Tensor]:
        lengths = found.long.lengths
        if not known:  # it ends with the longest sequence
            lengths = ops.longest(lengths, found.steps)
        rows = _in_steps(found.rows, steps)
        if not (known and found.cleared and not value):
            step = torch.arange(steps, device=rows.device).unsqueeze(1)
            inside = (step < lengths.to(rows.device)).view(*rows.shape[:2], *[1] * (rows.dim() - 2))
            rows = torch.where(inside, rows, value)
        return rows.transpose(0, 1) if batch_first else rows, lengths

    def forward_of(self, original: Callable[..., Any]) -> Any:
        """The forward of a recurrent layer that takes packed sequences as they are here."""
        return partialmethod(_forward, self, original)

    def through(self, layer: Any, given: PackedSequence, state: Any) -> tuple[Any, Any]:
        """What a layer makes of a packed sequence."""
        layer._update_flat_weights()  # a parametrization makes them anew
        found = self._of(given.data, given.batch_sizes)
        rows = found.rows
        count = layer.num_layers * (2 if layer.bidirectional else 1)
        sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size]
        shapes = [(count, rows.shape[1], size) for size in sizes]
        if state is None:
            zeros = [rows.new_zeros(shape) for shape in shapes]
            state = tuple(zeros) if layer.mode == "LSTM" else zeros[0]
        for x, shape in zip(state if isinstance(state, tuple) else (state,), shapes, strict=False):
            if tuple(x.shape) != shape:
                raise RuntimeError(f"Expected hidden size {shape}, got {list(x.shape)}")
        out, *states = recurrent_layers(
            layer.mode.lower(), rows, state, layer._flat_weights, layer.bias, layer.num_layers,
            layer.dropout, layer.training, layer.bidirectional, False, found.long.lengths,
        )  # fmt: skip
        result = given._replace(data=self._stand_in(found._replace(rows=out, cleared=True)))
        return result, (tuple(states) if layer.mode == "LSTM" else states[0])


def _in_steps(rows: Tensor, steps: int) -> Tensor:
    """A batch (steps, batch, …) with so many steps: without the last ones, or with zeros behind."""
    more = steps - rows.shape[0]
    if more <= 0:
        return rows[:steps] if more else rows
    return F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, more])


def _forward(
    layer: Any, packed: PackedRows, original: Callable[..., Any], input: Any, hx: Any = None
) -> Any:
    if not isinstance(input, PackedSequence):
        return original(layer, input, hx)
    return packed.through(layer, input, hx)
