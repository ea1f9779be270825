"""Dropout with the residual add, and alone: residual + dropout(x + bias).

The mask is a function of (seed, salt, global element index), drawn by Squares (Widynski 2020,
arXiv 2004.06278) inside the kernel, bit for bit that of `core.random.keep_mask`. Dropout is
x · mask / (1 − p) (Srivastava et al. 2014); its backward is dropout of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autopar.kernels.activation import drop
from autopar.kernels.indexing import takes_block
from autopar.kernels.registry import define, wide

__all__: list[str] = []


def _dropout_fake(x, p, seed, salt, global_shape, offset):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def _dropout_add_fake(x, bias, residual, p, seed, salt, global_shape, offset):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@define(
    "dropout(Tensor x, float p, Tensor seed, int salt, SymInt[] global_shape, SymInt[] offset)"
    " -> Tensor",
    module="dropout",
    fake=_dropout_fake,
    takes=takes_block,
)
def dropout(
    x: Tensor,
    p: float,
    seed: Tensor,
    salt: int,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """x · mask / (1 − p)."""
    out = drop(x, p, seed, salt, global_shape, offset)
    return out.clone() if out is x else out.contiguous()


@define(
    "dropout_add(Tensor x, Tensor? bias, Tensor residual, float p, Tensor seed, int salt,"
    " SymInt[] global_shape, SymInt[] offset) -> Tensor",
    module="dropout",
    fake=_dropout_add_fake,
    takes=takes_block,
)
def dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    seed: Tensor,
    salt: int,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """residual + dropout(x + bias), with bias along the last dim."""
    z = wide(x) if bias is None else wide(x) + wide(bias)
    out = wide(residual) + drop(z, p, seed, salt, global_shape, offset)
    return out.to(x.dtype).contiguous()
