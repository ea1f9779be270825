"""Replaces calls of torch's op table by calls of torch's own Python bindings.

`torch.ops.aten.reshape.default(x, shape)` and `torch.reshape(x, shape)` run the same code, but the
first passes its arguments as generic values and takes a microsecond longer. That is more than many
a view takes, and a step has hundreds of them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

__all__ = ["with_direct_calls"]

aten = torch.ops.aten

# op -> what takes the same positional arguments
_BINDINGS: dict[Any, Any] = {
    aten.add.Tensor: torch.add,
    aten.add_.Tensor: torch.Tensor.add_,
    aten.cat.default: torch.cat,
    aten.div.Scalar: torch.div,
    aten.div.Tensor: torch.div,
    aten.div_.Tensor: torch.Tensor.div_,
    aten.expand.default: torch.Tensor.expand,
    aten.mul.Scalar: torch.mul,
    aten.mul.Tensor: torch.mul,
    aten.mul_.Tensor: torch.Tensor.mul_,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.permute.default: torch.permute,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.reshape.default: torch.reshape,
    aten.rsqrt.default: torch.rsqrt,
    aten.select.int: torch.select,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
}


def with_direct_calls(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph, to be written as code, that calls bindings where there are some."""
    found = copy.deepcopy(graph)
    for node in found.nodes:
        if node.op == "call_function" and not node.kwargs:
            node.target = _BINDINGS.get(node.target, node.target)
    return found
