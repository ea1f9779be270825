"""The work of ops that are loops inside: a step cannot begin before the one ahead of it is done.

A recurrent layer of T steps takes T times as long as one step with a T-th of the work. Its backward
runs the forward again, then each step twice: for its operands and for its weights.
"""

from __future__ import annotations

from autopar.core.recurrent import CELLS, OPERANDS, RECURRENT, RECURRENT_BACKWARD
from autopar.core.strategy import OpCall, TensorSpec

__all__ = [
    "LOOPS",
    "bytes_read_again",
    "loop_flops",
    "loop_variant",
    "steps_in_turn",
    "working_tensors",
]

LOOPS = frozenset({RECURRENT, RECURRENT_BACKWARD})
_PASSES = 3  # of a backward
_GRADIENTS = 3  # arguments in front of those of the forward
# about how many numbers ATen's backward on a CPU holds for each unit of each step
_HELD = {"lstm": 23, "gru": 9, "rnn_tanh": 2, "rnn_relu": 2}


def _operand(call: OpCall, name: str) -> TensorSpec | None:
    first = _GRADIENTS if call.target is RECURRENT_BACKWARD else 0
    index = call.operand_index(first + 1 + OPERANDS.index(name))
    return None if index is None else call.operands[index]


def _given(call: OpCall, name: str) -> TensorSpec:
    found = _operand(call, name)
    assert found is not None, f"a recurrent layer has no {name}"
    return found


def _gates(call: OpCall) -> int:
    return CELLS[call.args[_GRADIENTS if call.target is RECURRENT_BACKWARD else 0]]


def loop_variant(call: OpCall) -> str:
    """What the class of a loop ends with."""
    backward = call.target is RECURRENT_BACKWARD
    lstm = call.args[_GRADIENTS if backward else 0] == "lstm"
    return ("_lstm" if lstm else "") + ("_backward" if backward else "")


def steps_in_turn(call: OpCall) -> int:
    """How many equal parts of an op run one after the other; 1 for ops that are no loops."""
    if call.target not in LOOPS:
        return 1
    steps = max(1, _given(call, "x").shape[0])
    return steps * (_PASSES if call.target is RECURRENT_BACKWARD else 1)


def loop_flops(call: OpCall) -> float:
    """Floating-point operations of the products of all steps."""
    x, weights = _given(call, "x"), [_given(call, "w_ih"), _given(call, "w_hh")]
    if (projection := _operand(call, "w_hr")) is not None:
        weights.append(projection)
    rows = x.shape[0] * x.shape[1]
    each = sum(2.0 * w.shape[0] * w.shape[1] for w in weights)
    return rows * each * (_PASSES if call.target is RECURRENT_BACKWARD else 1)


def bytes_read_again(call: OpCall) -> int:
    """Bytes of weights that every step but the first reads again; 0 for ops that are no loops."""
    if call.target not in LOOPS:
        return 0
    return (steps_in_turn(call) - 1) * _given(call, "w_hh").num_bytes


def working_tensors(call: OpCall) -> TensorSpec | None:
    """What an op holds beside its operands and results while it runs, split as its batch is.

    The forward holds its inputs' part of all gates, the backward what each step's derivative needs,
    and a reversed one copies its inputs and results. None for ops that are no loops.
    """
    if call.target not in LOOPS:
        return None
    x, backward = _given(call, "x"), call.target is RECURRENT_BACKWARD
    cell, gates = call.args[_GRADIENTS if backward else 0], _gates(call)
    hidden = _given(call, "w_hh").shape[0] // gates
    width = hidden * (_HELD[cell] if backward else gates + 1)
    if call.args[-1]:
        width += x.shape[2] + hidden
    return TensorSpec((x.shape[0], x.shape[1], width), x.dtype)
