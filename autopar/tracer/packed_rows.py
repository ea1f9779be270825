"""Packed sequences, kept as the padded batches that they were made of.

A packed sequence has as many rows as its lengths say, which no graph can know. Here its `data` is a
stand-in for the whole padded batch: recurrent layers run on that, with the lengths beside it, and
`pad_packed_sequence` hands it back. Samples keep their order, so nothing is sorted. Any other
use of the stand-in is refused.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import partialmethod
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from autopar.core.ops import ops
from autopar.tracer.diagnose import innermost_line, refuse_packed
from autopar.tracer.recurrent import recurrent_layers

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


class _Rows(NamedTuple):
    """A padded batch (steps, batch, …), its lengths (batch,), and whether it is 0 behind them."""

    stand_in: Tensor
    rows: Tensor
    lengths: Tensor
    cleared: bool


class PackedRows:
    """What the stand-ins of one capture stand for."""

    def __init__(self) -> None:
        self.known: dict[int, _Rows] = {}

    def called(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The result of a call that packs, pads or is part of these; None for any other call.

        Raises:
            TraceError: another call reads the rows of a packed sequence.
        """
        name = getattr(func, "__name__", "")
        if name in _PARTS and (frame := _packing()) is not None:
            if name == "_pack_padded_sequence":
                return self._packed(*args)
            if name == "_pad_packed_sequence":
                known = frame.f_locals["total_length"] is not None
                data, _, *options = args
                return self._padded(self.known[id(data)], known, *options)
            if name == "sort":
                return args[0], torch.arange(len(args[0]), device=args[0].device)
            return args[0]
        if func not in _ATTRIBUTES and any(id(x) in self.known for x in args):
            refuse_packed(innermost_line(traceback.extract_stack()))
        return None

    def _stand_in(self, rows: Tensor, lengths: Tensor, cleared: bool) -> Tensor:
        stand_in = rows.detach()
        self.known[id(stand_in)] = _Rows(stand_in, rows, lengths, cleared)
        return stand_in

    def _packed(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        rows = x.transpose(0, 1) if batch_first else x
        sizes = torch.full(rows.shape[:1], rows.shape[1], dtype=torch.int64, device="cpu")
        return self._stand_in(rows, lengths, False), sizes

    def _padded(
        self, found: _Rows, known: bool, batch_first: bool, value: float, steps: int
    ) -> tuple[Tensor, Tensor]:
        rows, lengths = found.rows, found.lengths
        if not known:  # it ends with the longest sequence
            lengths = ops.longest(lengths, rows.shape[0])
        if not (known and found.cleared and not value):
            step = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
            inside = step < lengths.to(rows.device)
            rows = torch.where(inside.view(*inside.shape, *[1] * (rows.dim() - 2)), rows, value)
        if steps > rows.shape[0]:
            after = [0, 0] * (rows.dim() - 1) + [0, steps - rows.shape[0]]
            rows = F.pad(rows, after, value=value)
        return rows.transpose(0, 1) if batch_first else rows, lengths

    def forward_of(self, original: Callable[..., Any]) -> Any:
        """The forward of a recurrent layer that takes packed sequences as they are here."""
        return partialmethod(_forward, self, original)

    def through(self, layer: Any, given: PackedSequence, state: Any) -> tuple[Any, Any]:
        """What a layer makes of a packed sequence."""
        found = self.known[id(given.data)]
        rows, lengths = found.rows, found.lengths
        if state is None:
            count = layer.num_layers * (2 if layer.bidirectional else 1)
            sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size]
            zeros = [rows.new_zeros(count, rows.shape[1], size) for size in sizes]
            state = tuple(zeros) if layer.mode == "LSTM" else zeros[0]
        out, *states = recurrent_layers(
            layer.mode.lower(), rows, state, layer._flat_weights, layer.bias, layer.num_layers,
            layer.dropout, layer.training, layer.bidirectional, False, lengths,
        )  # fmt: skip
        result = given._replace(data=self._stand_in(out, lengths, True))
        return result, (tuple(states) if layer.mode == "LSTM" else states[0])


def _forward(
    layer: Any, packed: PackedRows, original: Callable[..., Any], input: Any, hx: Any = None
) -> Any:
    if not isinstance(input, PackedSequence):
        return original(layer, input, hx)
    return packed.through(layer, input, hx)
