"""A fused kernel and the chain that it takes the place of: the square of relu(x)."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from autopar.extend import Op, Rewriter, V, find, pattern

aten = torch.ops.aten


@torch.library.custom_op("autopar_example::squared_relu", mutates_args=())
def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, as a device's own kernel would compute it in one pass."""
    kept = x.clamp_min(0)
    return kept * kept


@squared_relu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_CHAIN = Op(aten.pow.Tensor_Scalar, Op(aten.relu.default, V("x")), 2)


@pattern("example-squared-relu", aten.pow.Tensor_Scalar)
def fuse_squared_relu(rewriter: Rewriter, root: fx.Node) -> bool:
    match = find(_CHAIN, root)
    if match is None:
        return False
    op = torch.ops.autopar_example.squared_relu.default
    return rewriter.fused(op, root, (match["x"],), {0: root})
