"""Every fused op, in Triton's interpreter and in ATen, against torch's own functions in float64.

Gradients come from autograd on the reference. Shapes are random, few of them powers of two;
operands are slices or transposes where a kernel takes them.
"""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.core.ops import ops as core_ops
from autopar.core.random import keep_mask
from autopar.kernels import activation, dropout, loss, norm, optimizer, rotary, softmax
from autopar.kernels.activation import ACTIVATIONS
from autopar.kernels.registry import KERNELS

MODULES = (activation, dropout, loss, norm, optimizer, rotary, softmax)

BOUND = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = st.sampled_from(list(BOUND))
random_shapes = settings(
    max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
sizes = st.integers(1, 5)
widths = st.sampled_from([1, 3, 8, 17, 40, 64])


def randn(*shape: int, dtype: torch.dtype, seed: int = 0, strided: bool = False) -> Tensor:
    """Normal numbers; with `strided`, every second element of a wider tensor."""
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    wide = (*shape[:-1], 2 * shape[-1]) if strided else shape
    x = torch.randn(wide, generator=generator, dtype=torch.float64).to(dtype)
    return x[..., ::2] if strided else x


def close(found: Any, expected: Any, dtype: torch.dtype) -> None:
    """Norm-wise relative error of each tensor, against the bound of the dtype."""
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        x, y = x.detach().double(), y.detach().double()
        assert torch.equal(x.isinf(), y.isinf())
        x, y = x.masked_fill(x.isinf(), 0.0), y.masked_fill(y.isinf(), 0.0)
        assert (x - y).norm() <= BOUND[dtype] * (1e-3 + y.norm()), (x, y)


def both_forms(name: str, args: tuple[Any, ...], expected: Any, dtype: torch.dtype) -> None:
    """The op, its Triton kernel and its fake agree with the expected tensors."""
    kernel = KERNELS[name]
    op = getattr(torch.ops.autopar_kernels, name)
    for run in (kernel.triton, op):
        found = run(*args)
        found = found if isinstance(found, tuple) else (found,)
        close(found, expected, dtype)
        assert all(x.is_contiguous() for x in found)
    meta = [x.to("meta") if isinstance(x, Tensor) else x for x in args]
    fakes = op(*meta)
    fakes = fakes if isinstance(fakes, tuple) else (fakes,)
    assert [(x.shape, x.dtype) for x in fakes] == [(x.shape, x.dtype) for x in found]


def wide64(*values: Tensor | None) -> list[Any]:
    return [None if v is None else v.detach().double().clone().requires_grad_() for v in values]


# --- norms ------------------------------------------------------------------------------------
@random_shapes
@given(rows=sizes, size=widths, dtype=DTYPES, affine=st.booleans(), strided=st.booleans())
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("add", [False, True])
def test_norm(kind: str, add: bool, rows: int, size: int, dtype: Any, affine: bool,
              strided: bool) -> None:  # fmt: skip
    x = randn(2, rows, size, dtype=dtype, strided=strided)
    residual = randn(2, rows, size, dtype=dtype, seed=1) if add else None
    weight, bias = (randn(size, dtype=dtype, seed=s) if affine else None for s in (2, 3))
    grad, through = (randn(2, rows, size, dtype=dtype, seed=s) for s in (4, 5))
    eps = 1e-2
    total = x if residual is None else x + residual
    t, w, b = wide64(total, weight, bias)
    if kind == "layer":
        y = F.layer_norm(t, (size,), w, b, eps)
        stats = [t.mean(-1, keepdim=True), (t.var(-1, False, keepdim=True) + eps).rsqrt()]
    else:
        y = F.rms_norm(t, (size,), w, eps)
        b = None
        stats = [(t.pow(2).mean(-1, keepdim=True) + eps).rsqrt()]
    outs = [y, *([total] if add else []), *stats]
    inputs = [x, *([residual] if add else []), weight, *([bias] if kind == "layer" else []), eps]
    both_forms(("add_" if add else "") + kind + "_norm", tuple(inputs), outs, dtype)
    (y * grad.double()).sum().backward()
    normal = (t - stats[0] if kind == "layer" else t) * stats[-1]
    over = (0, 1)
    expected = [t.grad + through.double(), (grad.double() * normal).sum(over)]
    if kind == "layer":
        expected.append(grad.double().sum(over))
    if w is not None:
        close([w.grad], [expected[1]], torch.float64)
    args = (grad, total, *(s.detach().to(norm.wide_dtype(x)) for s in stats), weight, through)
    both_forms(f"{kind}_norm_backward", args, expected, dtype)


# --- activations ------------------------------------------------------------------------------
REFERENCE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
}


@random_shapes
@given(rows=sizes, size=widths, dtype=DTYPES, fused=st.booleans())
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gated(act: str, rows: int, size: int, dtype: Any, fused: bool) -> None:
    both = randn(2, rows, 2 * size, dtype=dtype)
    gate, up = both.chunk(2, -1) if fused else (c.contiguous() for c in both.chunk(2, -1))
    grad = randn(2, rows, size, dtype=dtype, seed=1)
    g, u = wide64(gate, up)
    y = REFERENCE[act](g) * u
    both_forms("gated", (gate, up, act), [y], dtype)
    (y * grad.double()).sum().backward()
    both_forms("gated_backward", (grad, gate, up, act), [g.grad, u.grad], dtype)


def test_no_such_activation() -> None:
    with pytest.raises(ValueError, match="gelu_tanh"):
        torch.ops.autopar_kernels.gated(torch.ones(2), torch.ones(2), "swish")


@random_shapes
@given(rows=sizes, size=widths, dtype=DTYPES, p=st.sampled_from([0.0, 0.3, 1.0]),
       biased=st.booleans(), strided=st.booleans())  # fmt: skip
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_bias_act(act: str, rows: int, size: int, dtype: Any, p: float, biased: bool,
                  strided: bool) -> None:  # fmt: skip
    x = randn(3, rows, size, dtype=dtype, strided=strided)
    bias = randn(size, dtype=dtype, seed=1) if biased else None
    grad = randn(3, rows, size, dtype=dtype, seed=2)
    random = (p, torch.tensor(11), 5, [6, rows, 2 * size], [3, 0, size])
    z, b = wide64(x, bias)
    y = core_ops.dropout(REFERENCE[act](z if b is None else z + b), *random)
    both_forms("bias_act", (x, bias, act, *random), [y], dtype)
    (y * grad.double()).sum().backward()
    both_forms("bias_act_backward", (grad, x, bias, act, *random), [z.grad], dtype)


# --- dropout ----------------------------------------------------------------------------------
@random_shapes
@given(
    local=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    before=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    after=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    p=st.sampled_from([0.1, 0.5, 0.9]),
    seed=st.integers(0, 2**40),
    salt=st.integers(0, 2**20),
)
def test_mask_is_bit_equal(local: Any, before: Any, after: Any, p: float, seed: int,
                           salt: int) -> None:  # fmt: skip
    whole = [b + n + a for b, n, a in zip(before, local, after, strict=False)]
    offset = before[: len(local)]
    ones = torch.ones(local, dtype=torch.float64)
    found = KERNELS["dropout"].triton(ones, p, torch.tensor(seed), salt, whole, offset)
    expected = keep_mask(torch.tensor(seed), salt, p, local, whole, offset)
    assert torch.equal(found != 0, expected)
    assert torch.equal(found, core_ops.dropout(ones, p, torch.tensor(seed), salt, whole, offset))


@random_shapes
@given(rows=sizes, size=widths, dtype=DTYPES, p=st.sampled_from([0.3, 1.0]),
       biased=st.booleans(), strided=st.booleans())  # fmt: skip
def test_dropout_add(rows: int, size: int, dtype: Any, p: float, biased: bool,
                     strided: bool) -> None:  # fmt: skip
    x = randn(2, rows, size, dtype=dtype, strided=strided)
    bias = randn(size, dtype=dtype, seed=1) if biased else None
    residual = randn(2, rows, size, dtype=dtype, seed=2, strided=strided)
    random = (p, torch.tensor(3), 7, [4, rows, size], [2, 0, 0])
    z = x.double() if bias is None else x.double() + bias.double()
    y = residual.double() + core_ops.dropout(z, *random)
    both_forms("dropout_add", (x, bias, residual, *random), [y], dtype)
    grads = core_ops.dropout(x.double(), *random)
    both_forms("dropout", (x, *random), [grads], dtype)


# --- rotary, softmax --------------------------------------------------------------------------
def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat((-two, one), -1) * sin


@random_shapes
@given(batch=sizes, heads=sizes, length=sizes, half=st.sampled_from([1, 3, 8, 20]), dtype=DTYPES)
def test_rotary(batch: int, heads: int, length: int, half: int, dtype: Any) -> None:
    x = randn(batch, length, heads, 2 * half, dtype=dtype).transpose(1, 2)
    cos, sin = (randn(1, 1, length, 2 * half, dtype=dtype, seed=s) for s in (1, 2))
    grad = randn(batch, heads, length, 2 * half, dtype=dtype, seed=3)
    (z,) = wide64(x)
    y = rotated(z, cos.double(), sin.double())
    both_forms("rotary", (x, cos, sin, False), [y], dtype)
    (y * grad.double()).sum().backward()
    both_forms("rotary", (grad, cos, sin, True), [z.grad], dtype)


@random_shapes
@given(batch=sizes, heads=sizes, rows=sizes, size=widths, dtype=DTYPES, masked=st.booleans(),
       scale=st.sampled_from([1.0, 0.25, -0.5]))  # fmt: skip
def test_softmax(batch: int, heads: int, rows: int, size: int, dtype: Any, masked: bool,
                 scale: float) -> None:  # fmt: skip
    x = randn(batch, heads, rows, size, dtype=dtype)
    grad = randn(batch, heads, rows, size, dtype=dtype, seed=1)
    mask = None
    if masked:
        mask = randn(batch, 1, rows, size, dtype=torch.float64, seed=2) > 0
        mask[..., 0] = True
        mask = mask.expand(x.shape)
    (z,) = wide64(x)
    scaled = z * scale
    y = torch.softmax(scaled if mask is None else scaled.masked_fill(~mask, -math.inf), -1)
    both_forms("masked_softmax", (x, mask, scale), [y], dtype)
    (y * grad.double()).sum().backward()
    both_forms("softmax_backward", (grad, y.detach().to(dtype), scale), [z.grad], dtype)


# --- losses -----------------------------------------------------------------------------------
def tokens(count: int, vocab: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, vocab, (2, count), generator=generator)
    target[0, 0] = -100
    return target


@random_shapes
@given(count=sizes, vocab=widths, dtype=DTYPES, strided=st.booleans())
def test_token_nll(count: int, vocab: int, dtype: Any, strided: bool) -> None:
    logits = randn(2, count, vocab, dtype=dtype, strided=strided)
    target, grad = tokens(count, vocab), randn(2, count, dtype=torch.float32, seed=1)
    (z,) = wide64(logits)
    flat = F.cross_entropy(z.reshape(-1, vocab), target.reshape(-1), reduction="none")
    nll, lse = flat.reshape(target.shape), torch.logsumexp(z, -1)
    both_forms("token_nll", (logits, target, -100), [nll, lse], dtype)
    (nll * grad.double()).sum().backward()
    wide = lse.detach().to(norm.wide_dtype(logits))
    both_forms("nll_backward", (grad, logits, target, wide, 0, -100), [z.grad], dtype)


@random_shapes
@given(count=sizes, part=st.integers(1, 9), ranks=st.integers(1, 4), dtype=DTYPES,
       blocked=st.booleans())  # fmt: skip
def test_sharded_nll_composes(count: int, part: int, ranks: int, dtype: Any,
                              blocked: bool) -> None:  # fmt: skip
    """Parts of the vocabulary, combined as the all-reduces of the emitted program do."""
    logits = randn(2, count, part * ranks, dtype=dtype)
    if blocked:
        logits[..., :part] = -math.inf
        if ranks == 1:
            logits[..., 0] = 0.0
    target, grad = tokens(count, part * ranks), randn(2, count, dtype=torch.float32, seed=1)
    (z,) = wide64(logits)
    lse = torch.logsumexp(z, -1)
    picked = z.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    nll = torch.where(target == -100, 0.0, lse - picked)
    finite = torch.where(nll.isinf(), 0.0, nll)
    (slope,) = torch.autograd.grad((finite * grad.double()).sum(), z)
    wide = norm.wide_dtype(logits)
    parts = logits.split(part, -1)
    kernel = KERNELS["nll_stats"]
    found = [kernel.triton(x, target, r * part, -100) for r, x in enumerate(parts)]
    for r, (x, values) in enumerate(zip(parts, found, strict=True)):
        both_forms("nll_stats", (x, target, r * part, -100), values, dtype)
    top = torch.stack([m for m, _, _ in found]).amax(0)
    total = sum(s * torch.exp(torch.where(m.isinf(), 0.0, m) - top) for m, s, _ in found)
    close([torch.log(total) + top], [lse], dtype)
    close([torch.where(target == -100, 0.0, lse - sum(x for _, _, x in found))], [nll], dtype)
    if nll.isinf().any():
        return
    for r, (x, dz) in enumerate(zip(parts, slope.split(part, -1), strict=True)):
        args = (grad, x, target, lse.detach().to(wide), r * part, -100)
        both_forms("nll_backward", args, [dz], dtype)


@random_shapes
@given(count=sizes, size=sizes, vocab=widths, dtype=DTYPES)
def test_linear_nll(count: int, size: int, vocab: int, dtype: Any) -> None:
    x, weight = randn(2, count, size, dtype=dtype), randn(vocab, size, dtype=dtype, seed=1)
    target, grad = tokens(count, vocab), randn(2, count, dtype=torch.float32, seed=2)
    a, w = wide64(x, weight)
    z = a @ w.t()
    z = z + (z.to(dtype).double() - z).detach()  # logits are rounded to the dtype
    flat = F.cross_entropy(z.reshape(-1, vocab), target.reshape(-1), reduction="none")
    lse = torch.logsumexp(z, -1)
    chunk = loss.CHUNK_ROWS
    try:
        loss.CHUNK_ROWS = 3  # several chunks, the last one short
        both_forms("linear_nll", (x, weight, target, -100), [flat.reshape(target.shape), lse],
                   dtype)  # fmt: skip
        (flat.reshape(target.shape) * grad.double()).sum().backward()
        args = (grad, x, weight, target, lse.detach().to(norm.wide_dtype(x)), -100)
        both_forms("linear_nll_backward", args, [a.grad, w.grad], dtype)
    finally:
        loss.CHUNK_ROWS = chunk


# --- optimizer --------------------------------------------------------------------------------
@random_shapes
@given(count=st.sampled_from([1, 7, 1025]), dtype=DTYPES, decay=st.sampled_from([0.0, 0.1]),
       steps=st.integers(1, 3), overflow=st.booleans())  # fmt: skip
@pytest.mark.parametrize("form", ["triton", "aten"])
def test_adamw(form: str, count: int, dtype: Any, decay: float, steps: int,
               overflow: bool) -> None:  # fmt: skip
    if dtype == torch.bfloat16:  # a step is below bfloat16's rounding
        dtype = torch.float32
    scale, clip = 1024.0, 0.25
    start = randn(count, dtype=dtype)
    reference = torch.nn.Parameter(start.double())
    torch_adamw = torch.optim.AdamW([reference], lr=1e-2, weight_decay=decay, betas=(0.8, 0.95))
    param, avg, square = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, steps + 1):
        grad = randn(count, dtype=dtype, seed=step)
        args = (
            torch.tensor(float(step)), torch.tensor(1e-2, dtype=torch.float64),
            torch.tensor(clip / scale), torch.tensor(0.0), 0.8, 0.95, 1e-8, decay,
        )  # fmt: skip
        run = KERNELS["adamw_"].triton if form == "triton" else torch.ops.autopar_kernels.adamw_
        run(param, grad * scale, avg, square, *args)
        if overflow:  # leaves everything as it is
            before = [x.clone() for x in (param, avg, square)]
            run(param, grad * math.inf, avg, square, *args[:3], torch.tensor(1.0), *args[4:])
            assert all(map(torch.equal, before, (param, avg, square)))
        reference.grad = grad.double() * clip
        torch_adamw.step()
    state = torch_adamw.state[reference]
    expected = [reference.detach(), state["exp_avg"], state["exp_avg_sq"]]
    close([param, avg, square], expected, dtype)


def test_every_kernel_has_a_test_and_a_docstring() -> None:
    source = Path(__file__).read_text()
    for name, kernel in KERNELS.items():
        assert kernel.aten.__doc__
        stem = name.removeprefix("add_").replace("rms_", "{kind}_").replace("layer_", "{kind}_")
        assert f'"{name}"' in source or stem.removeprefix("{kind}") in source, name
    for module in MODULES:
        assert "arXiv" in str(module.__doc__)


def test_every_kernel_compiles_for_a_gpu() -> None:
    """Machine code for compute capability 9.0, which needs no device."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_compile"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert {line.partition(":")[0] for line in done.stdout.splitlines()} == {*KERNELS, "generated"}


def test_benchmark_has_a_row_for_every_kernel() -> None:
    """Its arguments fit the ops; on a machine without a GPU it says that rows are open."""
    from benchmarks.kernels import GPT2, MAKE, rows, traffic

    assert {row.kernel for row in rows([])} == KERNELS.keys()
    for name, (make, _) in MAKE.items():
        args = make(dataclasses.replace(GPT2, batch=1, length=4, vocab=64), "meta")
        results = getattr(torch.ops.autopar_kernels, name)(*args)
        assert traffic(args, results) > 0
    if not torch.cuda.is_available():
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.kernels", "--only", "rotary"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "2 rows are open" in done.stdout
