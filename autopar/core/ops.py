"""Device-neutral ops that autopar's graphs are made of, next to ATen's own.

Each op stands for a family that ATen spells differently per device or per call site, so that one
sharding rule and one plan serve them all:

- ``autopar::einsum``: every dense contraction (linear, matmul, bmm, addmm, and their gradients).
- ``autopar::attention``: scaled dot-product attention; its backward is an op too
  (`core/attention.py`, on CUDA `core/attention_cuda.py`).
- ``autopar::dropout``: inverted dropout whose mask is a function of the global element index, so
  a shard draws the very mask that the whole tensor would (Widynski 2020, arXiv 2004.06278).
- ``autopar::uniform``: uniform numbers from the same counter.
- ``autopar::inverse_permutation``: where each row stands after a sort.
- ``autopar::token_nll``: negative log-likelihood per token over the last dim.
- ``autopar::ctc``: connectionist temporal classification, a loss per sample (`core/ctc.py`).
- ``autopar::recurrent``: one direction of a recurrent layer, over all steps
  (`core/recurrent.py`).
- ``autopar::eager_call``: a function of the model's own, of integers (`core/eager_calls.py`).
- ``autopar::gather_matmul``, ``autopar::matmul_reduce_scatter``: products and the collective beside
  them in one call, in emitted programs only (`core/overlapped.py`).
- ``autopar::to_host``, ``autopar::from_host``: activations in host memory (`core/host.py`).

All have fake implementations for tracing, and those of floating-point tensors, but for the last
four, backward formulas made of these
same ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.core import attention_cuda as _attention  # noqa: F401  (defines the ops)
from autopar.core import ctc as _ctc  # noqa: F401  (defines the ops)
from autopar.core import eager_calls as _eager_calls  # noqa: F401  (defines the op)
from autopar.core import host as _host  # noqa: F401  (defines the ops)
from autopar.core import overlapped as _overlapped  # noqa: F401  (defines the ops)
from autopar.core import recurrent as _recurrent  # noqa: F401  (defines the ops)
from autopar.core.einsum import contract, gradient_equations, output_shape
from autopar.core.library import KERNEL, LIBRARY, LIBRARY_NAME, fake_of, wide
from autopar.core.random import keep_mask, uniform_numbers

__all__ = ["LIBRARY_NAME", "NARROW", "RANDOM", "REARRANGING", "ops", "unsalted"]

LIBRARY.define("einsum(str equation, Tensor a, Tensor b) -> Tensor")
LIBRARY.define(
    "dropout(Tensor x, float p, Tensor seed, int salt, SymInt[] global_shape, SymInt[] offset)"
    " -> Tensor"
)
LIBRARY.define(
    "uniform(Tensor seed, int salt, SymInt[] shape, SymInt[] global_shape, SymInt[] offset,"
    " ScalarType dtype) -> Tensor"
)
LIBRARY.define("inverse_permutation(Tensor permutation) -> Tensor")
LIBRARY.define("token_nll(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor)")
LIBRARY.define(
    "token_nll_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse, int ignore_index)"
    " -> Tensor"
)
ops = torch.ops.autopar

# ops that draw random numbers, and which of their arguments is the salt
RANDOM: dict[object, int] = {ops.dropout.default: 3, ops.uniform.default: 1}

# one tensor in, all of its elements out, in another shape, order or dtype
REARRANGING = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.reshape.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.permute.default,
        torch.ops.aten.t.default,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten._to_copy.default,
    }
)

# the cast in front of a sum over ranks: unlike other casts that round, it passes partial sums
NARROW = torch.ops.prims.convert_element_type.default

# --- einsum -----------------------------------------------------------------------------------
LIBRARY.impl("einsum", contract, KERNEL)


@fake_of("einsum")
def _einsum_fake(equation: str, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype != b.dtype:
        raise RuntimeError(f"a product of dtypes {a.dtype} and {b.dtype}; cast one of them")
    return a.new_empty(output_shape(equation, a.shape, b.shape))


def _einsum_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.equation, a, b = inputs
    ctx.save_for_backward(a, b)


def _einsum_backward(ctx, grad):  # type: ignore[no-untyped-def]
    a, b = (x.conj() if x.is_complex() else x for x in ctx.saved_tensors)
    for_a, for_b = gradient_equations(ctx.equation)
    grad_a = ops.einsum(for_a, grad, b) if ctx.needs_input_grad[1] else None
    grad_b = ops.einsum(for_b, grad, a) if ctx.needs_input_grad[2] else None
    return None, grad_a, grad_b


torch.library.register_autograd(
    "autopar::einsum", _einsum_backward, setup_context=_einsum_setup, lib=LIBRARY
)


# --- dropout and random numbers ---------------------------------------------------------------
def _dropout(
    x: Tensor,
    p: float,
    seed: Tensor,
    salt: int,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> Tensor:
    """x · mask / (1 − p); `offset` is where this block begins in the global tensor."""
    if p >= 1.0:
        return torch.zeros_like(x)
    keep = keep_mask(seed, salt, p, x.shape, global_shape, offset)
    return torch.where(keep, x * (1.0 / (1.0 - p)), 0.0)


LIBRARY.impl("dropout", _dropout, KERNEL)


@fake_of("dropout")
def _dropout_fake(x, p, seed, salt, global_shape, offset):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def _dropout_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, ctx.p, seed, ctx.salt, ctx.global_shape, ctx.offset = inputs
    ctx.save_for_backward(seed)


def _dropout_backward(ctx, grad):  # type: ignore[no-untyped-def]
    (seed,) = ctx.saved_tensors
    grad_x = ops.dropout(grad, ctx.p, seed, ctx.salt, ctx.global_shape, ctx.offset)
    return grad_x, None, None, None, None, None


torch.library.register_autograd(
    "autopar::dropout", _dropout_backward, setup_context=_dropout_setup, lib=LIBRARY
)


def _uniform(
    seed: Tensor,
    salt: int,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offset: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    return uniform_numbers(seed, salt, shape, global_shape, offset).to(dtype)


LIBRARY.impl("uniform", _uniform, KERNEL)


@fake_of("uniform")
def _uniform_fake(seed, salt, shape, global_shape, offset, dtype):  # type: ignore[no-untyped-def]
    return seed.new_empty(shape, dtype=dtype)


def _inverse_permutation(permutation: Tensor) -> Tensor:
    rows = torch.arange(len(permutation), dtype=permutation.dtype, device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, rows)


LIBRARY.impl("inverse_permutation", _inverse_permutation, KERNEL)
fake_of("inverse_permutation")(torch.empty_like)


# --- cross-entropy ----------------------------------------------------------------------------
def _token_nll(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """lse(logits) − logits[target] per token, 0 where ignored; and the log-sum-exp.

    Computed in at least float32, which the log-sum-exp keeps.
    """
    ignored = target == ignore_index
    index = torch.where(ignored, 0, target).unsqueeze(-1)
    lse = torch.logsumexp(wide(logits), dim=-1)
    picked = torch.gather(logits, -1, index).squeeze(-1)
    return torch.where(ignored, 0.0, lse - picked).to(logits.dtype), lse


def _token_nll_backward(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int
) -> Tensor:
    ignored = target == ignore_index
    scale = torch.where(ignored, 0.0, grad).unsqueeze(-1)
    index = torch.where(ignored, 0, target).unsqueeze(-1)
    # in place: a copy of the logits is large
    probs = (wide(logits) - lse.unsqueeze(-1)).exp_().mul_(scale)
    return probs.scatter_add_(-1, index, -scale.to(probs.dtype)).to(logits.dtype)


LIBRARY.impl("token_nll", _token_nll, KERNEL)
LIBRARY.impl("token_nll_backward", _token_nll_backward, KERNEL)


@fake_of("token_nll")
def _token_nll_fake(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(target.shape), logits.new_empty(target.shape, dtype=wide)


@fake_of("token_nll_backward")
def _token_nll_backward_fake(grad, logits, target, lse, ignore_index):  # type: ignore[no-untyped-def]
    return logits.new_empty(logits.shape)


def _token_nll_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits, target, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _token_nll_autograd(ctx, grad, _grad_lse):  # type: ignore[no-untyped-def]
    logits, target, lse = ctx.saved_tensors
    return ops.token_nll_backward(grad, logits, target, lse, ctx.ignore_index), None, None


torch.library.register_autograd(
    "autopar::token_nll", _token_nll_autograd, setup_context=_token_nll_setup, lib=LIBRARY
)


def unsalted(target: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of an op but for its salt, which tells equal blocks' random numbers apart."""
    salt = RANDOM.get(target)
    return args if salt is None else (*args[:salt], *args[salt + 1 :])
