"""Derivatives of activations: (dy, x, …) -> dx, elementwise and linear in dy.

So a Partial dy could pass through beside a replicated x. That row is offered where x is made from
parameters alone, as the filters of a long convolution, the biases of positions and gates are: dy is
a sum over the batch there, which is split into microbatches only if that sum may wait. Elsewhere
the row would only cost planning time.
"""

from __future__ import annotations

import torch

from autopar.core.graph import TracedModel, dependents
from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.labels import by_labels, linear_rows
from autopar.solver.rules.pointwise import broadcast_labels
from autopar.solver.rules.registry import facts, rule

__all__ = ["note_activated"]

aten = torch.ops.aten

_DERIVATIVES = (
    aten.elu_backward.default,
    aten.gelu_backward.default,
    aten.hardshrink_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.log_sigmoid_backward.default,
    aten.logit_backward.default,
    aten.mish_backward.default,
    aten.sigmoid_backward.default,
    aten.silu_backward.default,
    aten.softplus_backward.default,
    aten.softshrink_backward.default,
    aten.tanh_backward.default,
)
_KEY = "activated"


def note_activated(traced: TracedModel) -> None:
    """Write into the meta of what derivatives read that it is made from parameters alone.

    Args:
        traced: a traced step; done before it is copied, so that recomputed values have it too.
    """
    weighted = dependents(traced, "parameter")
    fed = dependents(traced, "input", "received", "seed", "tangent")
    for node in traced.graph.nodes:
        saved = node.all_input_nodes[1:] if node.target in _DERIVATIVES else []
        for x in saved:
            if x.name in weighted and x.name not in fed:
                x.meta[_KEY] = True


@facts(*_DERIVATIVES)
def _of_parameters(call: OpCall) -> bool:
    """True if what is read beside dy is made from parameters alone."""
    return all(_KEY in node.meta for node in call.nodes[1:])


@rule(*_DERIVATIVES)
def derivative_rule(call: OpCall) -> list[AxisStrategy]:
    rows = by_labels(call, *broadcast_labels(call))
    return rows + (linear_rows(call, [(0,)]) if _of_parameters(call) else [])
