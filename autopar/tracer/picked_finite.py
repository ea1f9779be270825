"""Rows that were not picked are kept finite, whatever they held (`picked`).

Their gradients are zero, but zero times an infinity or nan is nan, and in the gradient of a weight
that all rows are multiplied by, it would spoil those of the picked rows. So an op that may fail on
such rows or make an infinity of them, such as a logarithm or a look-up, is given a number there
that it accepts, and its result is replaced by zeros there. In the backward this drops whatever the
op's derivative makes of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from autopar.tracer.picked import Picks, Rows, Said, args_of, name_of, value_of
from autopar.tracer.picked_rows import NUMBERS

__all__ = ["guarded", "started"]

# finite, with finite derivatives, of all that is finite
_SAFE = frozenset(
    "index masked_select nonzero where getitem sym_size view reshape _unsafe_view flatten squeeze "
    "unsqueeze select slice transpose permute expand expand_as broadcast_tensors chunk split "
    "split_with_sizes t mT numpy_T linear matmul mm bmm einsum add sub mul neg square relu gelu "
    "silu sigmoid tanh softmax log_softmax layer_norm dropout to _to_copy contiguous detach alias "
    "clone type_as zeros_like ones_like full_like abs eq ne lt le gt ge logical_not logical_and "
    "logical_or bitwise_and bitwise_or bitwise_not argmax argmin cross_entropy_loss nll_loss_nd "
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy_with_logits "
    "sum mean amax amin any all index_put index_put_ index_add index_add_ masked_scatter "
    "masked_scatter_ masked_fill clamp clamp_min clamp_max cat gather linalg_vector_norm logsumexp "
    "leaky_relu elu selu hardtanh softplus mish erf sin cos".split()
)
# of which a mean over no rows is nan
_MEANS = frozenset(name for name in _SAFE if "loss" in name or name.startswith("binary"))
_ALSO_FINITE = frozenset(
    "zeros ones full arange eye new_zeros new_ones new_full scalar_tensor embedding stack "
    "unbind addmm conv1d conv2d conv3d".split()
)
_TRAINED = frozenset("linear conv1d conv2d conv3d layer_norm".split())
_DIVIDING = frozenset("div divide floor_divide remainder fmod true_divide".split())


def started(picks: Picks, source: fx.Node, rows: Rows) -> Rows:
    """Rows where they are picked of a source."""
    return rows if _is_finite(picks, source) else _zeroed(picks, rows)


def guarded(picks: Picks, node: fx.Node, rule: Callable[[Picks, fx.Node], Any]) -> Any:
    """What a rule makes of an op that reads picked rows, finite in those that were not picked."""
    operands = {n: picks.found(n) for n in node.all_input_nodes}
    fill = 1 if name_of(node.target) in _DIVIDING else 0  # integers are not divided by 0
    risky: dict[fx.Node, Said] = {
        n: rows
        for n, rows in operands.items()
        if isinstance(rows, Rows) and rows.places is None and not _is_safe(node, n)
    }
    filled = {n: _zeroed(picks, rows, fill) for n, rows in risky.items() if isinstance(rows, Rows)}
    picks.known.update(filled)
    found = rule(picks, node)
    picks.known.update(risky)
    plain = [n for n, known in operands.items() if known is None]
    if isinstance(found, Rows) and (risky or not all(_is_finite(picks, n) for n in plain)):
        return _zeroed(picks, found)
    return found


def _zeroed(picks: Picks, rows: Rows, fill: int = 0) -> Rows:
    """A number in the rows that are not picked, which are no longer their places."""
    if value_of(rows.node).is_complex():
        return rows
    return Rows(node=picks.only_picked(rows, fill), dim=rows.dim, pick=rows.pick)


def _is_safe(node: fx.Node, operand: fx.Node) -> bool:
    """True if no finite number is beyond what an op, or its derivative, is made for."""
    name = name_of(node.target)
    looks_up = name == "gather" and operand is not args_of(node)[0]
    if looks_up or (
        name.startswith("index") and operand not in (args_of(node)[0], args_of(node)[-1])
    ):
        return False  # a place, which may be out of range
    if name == "pow":
        return isinstance(args_of(node)[1], int) and args_of(node)[1] > 0
    if name == "div":
        return isinstance(args_of(node)[1], (int, float)) and args_of(node)[1] != 0
    python = node.target in (*NUMBERS, operator.le, operator.ge, operator.eq)
    return python or (name in _SAFE and _of_finite_numbers(node))


def _of_finite_numbers(node: fx.Node) -> bool:
    numbers = (a for a in (*args_of(node), *node.kwargs.values()) if isinstance(a, float))
    return all(map(math.isfinite, numbers))


def _is_finite(picks: Picks, node: fx.Node) -> bool:
    """True if a value is made by safe ops of parameters and whole numbers, or if one device, too,
    would have made a nan gradient of what is not finite in it."""
    todo, seen = [node], set[fx.Node]()
    detached = any(n.target is torch._C._set_grad_enabled for n in picks.graph.nodes)
    while todo:
        at = todo.pop()
        if at in seen or not _may_be_infinite(at):
            continue
        seen.add(at)
        if at.op != "call_function":
            if at.op == "placeholder" and value_of(at).requires_grad:
                continue
            return False
        name = name_of(at.target)
        if name in _TRAINED and not detached and _is_trained(at):
            continue
        safe = name in _ALSO_FINITE or (
            name not in _MEANS and _is_safe(at, (*args_of(at), None)[0])
        )
        if not safe or name == "detach" or at in picks.written or not _of_finite_numbers(at):
            return False
        todo += at.all_input_nodes
    return True


def _may_be_infinite(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, (tuple, list)) or value is None


def _is_trained(node: fx.Node) -> bool:
    """True if the weight of a layer is a parameter that gets a gradient."""
    weights = [n for n in node.all_input_nodes if n is not args_of(node)[0]]
    for weight in weights:
        while name_of(weight.target) in ("to", "_to_copy", "alias") and weight.op != "placeholder":
            weight = args_of(weight)[0]
        if weight.op == "placeholder" and value_of(weight).requires_grad:
            return True
    return False
