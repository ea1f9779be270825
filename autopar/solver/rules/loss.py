"""Losses over the vocabulary: tokens shard freely, the vocabulary by three numbers a token.

The variant "vocab" (Shoeybi et al. 2019, arXiv 1909.08053) shards the logits' last dim and
all-reduces their maximum, and then Σexp and the target's logit together.
"""

from __future__ import annotations

import torch

from autopar.core.placement import Partial, Replicate, Shard
from autopar.core.strategy import AxisStrategy, Communication, OpCall, TensorSpec
from autopar.solver.rules.labels import by_labels, linear_rows, replicated
from autopar.solver.rules.registry import rule

aten = torch.ops.aten


@rule(torch.ops.autopar.token_nll.default)
def token_nll_rule(call: OpCall) -> list[AxisStrategy]:
    """(logits, target) -> (nll, lse)."""
    logits, lse = call.operands[0], call.outputs[1]
    rank = len(logits.shape)
    tokens = [f"t{i}" for i in range(rank - 1)]
    rows = by_labels(call, [[*tokens, None], tokens], [tokens, tokens])
    width = max(4, logits.dtype.itemsize) / lse.dtype.itemsize
    comm = (Communication("all_reduce", ~1, width), Communication("all_reduce", ~1, 2 * width))
    whole = Replicate()
    rows.append(AxisStrategy((Shard(rank - 1), whole), (whole, whole), "vocab", comm))
    return rows


@rule(torch.ops.autopar.token_nll_backward.default)
def token_nll_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(grad, logits, target, lse) -> d logits; linear in grad."""
    rank = len(call.operands[1].shape)
    tokens = [f"t{i}" for i in range(rank - 1)]
    rows = by_labels(call, [tokens, [*tokens, None], tokens, tokens], [[*tokens, None]])
    vocab, whole = Shard(rank - 1), Replicate()
    rows.append(AxisStrategy((whole, vocab, whole, whole), (vocab,), "vocab"))
    return rows + linear_rows(call, [(0,)])


@rule(aten.nll_loss_forward.default)
def nll_loss_rule(call: OpCall) -> list[AxisStrategy]:
    """(log-probabilities, target, weight?) -> (loss, total weight).

    Without reduction the rows are independent and the total weight is 0. A sum leaves both
    outputs Partial. A mean divides by the total weight, which no shard knows.
    """
    rows = [replicated(call)]
    if len(call.operands[0].shape) != 2:
        return rows
    weights = [Replicate()] * (len(call.operands) - 2)
    reduction = call.args[3]
    if reduction == 0:
        rows.append(AxisStrategy((Shard(0), Shard(0), *weights), (Shard(0), Replicate())))
    elif reduction == 2:
        rows.append(AxisStrategy((Shard(0), Shard(0), *weights), (Partial(), Partial())))
    return rows


@rule(aten.nll_loss_backward.default)
def nll_loss_backward_rule(call: OpCall) -> list[AxisStrategy]:
    """(grad, log-probabilities, target, weight?, total weight) -> d log-probabilities."""
    rows = [replicated(call)]
    if len(call.operands[1].shape) != 2:
        return rows
    grad = Shard(0) if call.args[4] == 0 else Replicate()
    rest = [Replicate()] * (len(call.operands) - 3)
    rows.append(AxisStrategy((grad, Shard(0), Shard(0), *rest), (Shard(0),)))
    return rows + linear_rows(call, [(0,)])


@rule(aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default)
def nll_loss2d_rule(call: OpCall) -> list[AxisStrategy]:
    return [replicated(call)]


@rule(
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss_forward.default,
    aten.multi_margin_loss_backward.default,
    aten.multilabel_margin_loss_backward.default,
)
def margin_loss_rule(call: OpCall) -> list[AxisStrategy]:
    """(grad?, scores, target, weights of classes?, which are targets?) by rows, without reduction.

    A gradient comes with its op in front; the tracer takes sums and means apart.
    """
    rows = call.outputs[0].shape[:1]
    backward = len(call.outputs[0].shape) == 2
    if not rows or (backward and call.operands[0].shape != rows):
        return [replicated(call)]

    def labels(position: int, spec: TensorSpec) -> list[str | None]:
        weights = "multi_margin" in str(call.target) and position == 2 + backward
        return ["row" if i == 0 and not weights else None for i in range(len(spec.shape))]

    inputs = [labels(i, spec) for i, spec in enumerate(call.operands)]
    found = by_labels(call, inputs, [labels(-1, spec) for spec in call.outputs])
    return found + (linear_rows(call, [(0,)]) if backward else [])


@rule(torch.ops.autopar.ctc.default, torch.ops.autopar.ctc_backward.default)
def ctc_rule(call: OpCall) -> list[AxisStrategy]:
    """(grad?, log-probabilities (T, N, C), targets (N, S), lengths, lengths) by samples.

    Targets one behind the other are whole: where a sample's begin depends on lengths.
    """
    backward = len(call.operands) == 5
    targets = call.operands[1 + backward]
    if len(targets.shape) != 2:
        return [replicated(call)]
    steps: list[str | None] = [None, "n", None]
    sample: list[str | None] = ["n"]
    inputs = [*[sample] * backward, steps, ["n", None], sample, sample]
    rows = by_labels(call, inputs, [steps if backward else sample])
    return rows + (linear_rows(call, [(0,)]) if backward else [])
