"""`nn.LSTM`, `nn.GRU` and `nn.RNN` in ops of a layer and a direction each (`core/recurrent.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.core.ops import ops
from autopar.core.recurrent import CELLS

__all__ = ["recurrent_call", "recurrent_layers"]


def recurrent_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of torch's returns that runs a cell, over all steps or one; else None."""
    name = getattr(func, "__name__", "")
    cell = name.removesuffix("_cell")
    if cell not in CELLS or func is not getattr(torch, name):
        return None
    if len(args) > 1 and isinstance(args[1], Tensor) and not args[1].is_floating_point():
        return None  # batch sizes, of rows that are packed
    call = recurrent_layers if name == cell else _one_step
    return call(cell, *args, **kwargs)


def _one_step(
    cell: str,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What `torch.lstm_cell` and its like return for (batch, inputs)."""
    h, c = hx if cell == "lstm" else (hx, None)
    weights = (w_ih, w_hh, b_ih, b_hh, None)
    _, *states = ops.recurrent(cell, input.unsqueeze(0), h, c, *weights, None, False)
    return states[0] if c is None else tuple(states)


def recurrent_layers(
    cell: str,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """What `torch.lstm` and its like return: outputs, last states, an LSTM's last cell states.

    Args:
        cell: name of the function.
        input: (steps, batch, inputs), or (batch, steps, inputs) with `batch_first`.
        hx: states of each layer and direction, (layers · directions, batch, H); an LSTM has cell
            states beside.
        params: weights of each layer and direction, as modules have them.
        has_biases, num_layers, dropout, train, bidirectional, batch_first: as modules have them.
        lengths: steps of each sample, (batch,); None: all.
    """
    h, c = hx if cell == "lstm" else (hx, None)
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    out = input.transpose(0, 1) if batch_first else input
    last: list[tuple[Tensor, Tensor]] = []
    for layer in range(num_layers):
        if layer and dropout and train:
            out = F.dropout(out, dropout, True)
        found = []
        for direction in range(directions):
            index = layer * directions + direction
            own = _by_name(params[index * each : (index + 1) * each], has_biases)
            cell_state = None if c is None else c[index]
            result = ops.recurrent(cell, out, h[index], cell_state, *own, lengths, direction == 1)
            found.append(result[0])
            last.append(result[1:])
        out = torch.cat(found, -1) if bidirectional else found[0]
    states = [torch.stack([s[i] for s in last]) for i in range(1 if c is None else 2)]
    return out.transpose(0, 1) if batch_first else out, *states


def _by_name(weights: Sequence[Tensor], has_biases: bool) -> list[Tensor | None]:
    """`w_ih`, `w_hh`, `b_ih`, `b_hh`, `w_hr`, of which a layer has some."""
    rest = list(weights[2:])
    biases = [rest.pop(0), rest.pop(0)] if has_biases else [None, None]
    return [*weights[:2], *biases, rest.pop(0) if rest else None]
