"""Gated activations, and activations with their bias and dropout.

GLU variants (Shazeer 2020, arXiv 2002.05202): out = act(gate) · up, with SiLU z·σ(z) for SwiGLU and
GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415) for GeGLU: z·Φ(z), or its tanh form
z/2 · (1 + tanh(√(2/π)(z + 0.044715 z³))). Backward: dgate = dy · up · act'(gate), dup = dy ·
act(gate); act(gate) is computed again rather than saved.

`bias_act` is dropout(act(x + bias)) with the mask of `autopar::dropout`; its backward draws the
mask again: dx = mask / (1 − p) · dy · act'(x + bias).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.core.random import keep_mask
from autopar.kernels.indexing import takes_block
from autopar.kernels.registry import define, wide

__all__ = ["ACTIVATIONS", "activate", "slope"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
_ROOT_2_OVER_PI = math.sqrt(2.0 / math.pi)


def activate(z: Tensor, act: str) -> Tensor:
    """An activation of `ACTIVATIONS`.

    Raises:
        ValueError: there is none of this name.
    """
    if act == "silu":
        return torch.nn.functional.silu(z)
    if act == "gelu":
        return torch.nn.functional.gelu(z)
    if act == "gelu_tanh":
        return torch.nn.functional.gelu(z, approximate="tanh")
    if act == "relu":
        return torch.relu(z)
    raise ValueError(f"activation {act!r}: there are {', '.join(ACTIVATIONS)}")


def slope(z: Tensor, act: str) -> Tensor:
    """Derivative of an activation."""
    if act == "silu":
        s = torch.sigmoid(z)
        return s * (1.0 + z * (1.0 - s))
    if act == "gelu":
        density = torch.exp(-0.5 * z * z) * (1.0 / math.sqrt(2.0 * math.pi))
        return 0.5 * (1.0 + torch.erf(z * math.sqrt(0.5))) + z * density
    if act == "gelu_tanh":
        t = torch.tanh(_ROOT_2_OVER_PI * (z + 0.044715 * z * z * z))
        inner = _ROOT_2_OVER_PI * (1.0 + 3.0 * 0.044715 * z * z)
        return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * inner
    if act == "relu":
        return (z > 0).to(z.dtype)
    raise ValueError(f"activation {act!r}: there are {', '.join(ACTIVATIONS)}")


def _gated_fake(gate, up, act):  # type: ignore[no-untyped-def]
    return gate.new_empty(gate.shape)


def _gated_backward_fake(grad, gate, up, act):  # type: ignore[no-untyped-def]
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@define("gated(Tensor gate, Tensor up, str act) -> Tensor", module="activation", fake=_gated_fake)
def gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """act(gate) · up, of one shape."""
    return (activate(wide(gate), act) * wide(up)).to(gate.dtype).contiguous()


@define(
    "gated_backward(Tensor grad, Tensor gate, Tensor up, str act) -> (Tensor, Tensor)",
    module="activation",
    fake=_gated_backward_fake,
)
def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    grad32, gate32 = wide(grad), wide(gate)
    dgate = grad32 * wide(up) * slope(gate32, act)
    dup = grad32 * activate(gate32, act)
    return dgate.to(gate.dtype).contiguous(), dup.to(up.dtype).contiguous()


def drop(
    x: Tensor,
    p: float,
    seed: Tensor | None,
    salt: int,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """`autopar::dropout` of `x`; without a seed or with p = 0, `x` itself."""
    if p == 0.0 or seed is None:
        return x
    if p >= 1.0:
        return torch.zeros_like(x)
    keep = keep_mask(seed, salt, p, x.shape, global_shape, offset)
    return torch.where(keep, x * (1.0 / (1.0 - p)), 0.0)


def _bias_act_fake(x, bias, act, p, seed, salt, global_shape, offset):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def _bias_act_backward_fake(grad, x, bias, act, p, seed, salt, global_shape, offset):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@define(
    "bias_act(Tensor x, Tensor? bias, str act, float p, Tensor? seed, int salt,"
    " SymInt[] global_shape, SymInt[] offset) -> Tensor",
    module="activation",
    fake=_bias_act_fake,
    takes=takes_block,
)
def bias_act(
    x: Tensor,
    bias: Tensor | None,
    act: str,
    p: float,
    seed: Tensor | None,
    salt: int,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """dropout(act(x + bias)), with bias along the last dim."""
    z = wide(x) if bias is None else wide(x) + wide(bias)
    out = drop(activate(z, act), p, seed, salt, global_shape, offset)
    return out.to(x.dtype).contiguous()


@define(
    "bias_act_backward(Tensor grad, Tensor x, Tensor? bias, str act, float p, Tensor? seed,"
    " int salt, SymInt[] global_shape, SymInt[] offset) -> Tensor",
    module="activation",
    fake=_bias_act_backward_fake,
    takes=takes_block,
)
def bias_act_backward(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    act: str,
    p: float,
    seed: Tensor | None,
    salt: int,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """Gradient of x; that of the bias is its sum over rows."""
    z = wide(x) if bias is None else wide(x) + wide(bias)
    grad32 = drop(wide(grad), p, seed, salt, global_shape, offset)
    return (grad32 * slope(z, act)).to(x.dtype).contiguous()
