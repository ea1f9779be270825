"""Attention on CUDA: which kernel takes a call, and what is handed to it and made of its results.

Without a GPU the kernels are called on meta tensors, for shapes and strides, and the numbers
around them are checked with stand-ins that have the kernels' conventions.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.core import attention_cuda as cuda
from autopar.core.attention import attention, attention_backward

B, H, KV, S, T, D = 2, 8, 2, 100, 84, 64
HALF, FULL = torch.bfloat16, torch.float32


def tensors(dtype: torch.dtype, rows: int = S, columns: int = S, kv: int = KV, width: int = D):
    q = torch.empty(B, H, rows, width, dtype=dtype, device="meta")
    k = torch.empty(B, kv, columns, width, dtype=dtype, device="meta")
    return q, k, torch.empty_like(k)


@pytest.mark.parametrize(
    ("expected", "options"),
    [
        ("flash", {"dtype": HALF}),
        ("flash", {"dtype": torch.float16, "causal": True}),
        ("flash", {"dtype": HALF, "width": 256}),
        ("flash", {"dtype": HALF, "width": 256, "capability": (10, 0)}),
        ("efficient", {"dtype": HALF, "width": 256, "capability": (8, 9)}),
        ("efficient", {"dtype": HALF, "width": 224, "capability": (12, 0)}),
        ("efficient", {"dtype": HALF, "columns": T, "causal": True}),
        ("efficient", {"dtype": HALF, "mask": (B, 1, S, S)}),
        ("efficient", {"dtype": HALF, "mask": (S, S)}),
        ("efficient", {"dtype": FULL, "causal": True}),
        ("efficient", {"dtype": FULL, "width": 20}),
        ("formula", {"dtype": FULL, "width": 18}),
        ("formula", {"dtype": HALF, "width": 20}),
        ("formula", {"dtype": HALF, "capability": (7, 5)}),
        ("formula", {"dtype": torch.float64}),
        ("formula", {"dtype": FULL, "mask": (1, S, S)}),
        ("formula", {"dtype": FULL, "mask": (B, 1, S, S), "causal": True}),
    ],
)
def test_kernel_of_a_call(expected: str, options: dict[str, Any]) -> None:
    shape = {k: v for k, v in options.items() if k in ("dtype", "columns", "width")}
    q, k, v = tensors(**shape)
    mask = torch.empty(options["mask"], device="meta") if "mask" in options else None
    capability = options.get("capability", (9, 0))
    found = cuda.choose_kernel(q, k, v, mask, options.get("causal", False), capability)
    assert found == expected


class Largest(TorchDispatchMode):
    """The ops that run, and the elements of the largest tensor that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.called.append(func._schema.name.removeprefix("aten::"))
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_no_scores_are_stored(kernel: str) -> None:
    """Results have the shapes and strides that the op promises, and nothing is as large as S×S."""
    length = 4096
    dtype = HALF if kernel == "flash" else FULL
    with Largest() as seen:
        q, k, v = tensors(dtype, length, length)
        extra = () if kernel == "flash" else (None,)
        out, lse = getattr(cuda, kernel)(q, k, v, *extra, True, 0.5)
        grad = torch.empty_like(out)
        back = getattr(cuda, f"{kernel}_backward")
        grads = back(grad, q, k, v, *extra, out, lse, True, 0.5)
        wanted = torch.ops.autopar.attention(q, k, v, None, True, 0.5)
        wanted_grads = torch.ops.autopar.attention_backward(
            grad, q, k, v, None, out, lse, True, 0.5
        )
    named = f"_scaled_dot_product_{kernel}_attention"
    assert named in seen.called and f"{named}_backward" in seen.called
    assert seen.elements < length * length
    for a, b in zip((out, lse, *grads), (*wanted, *wanted_grads), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def _padded(lse: Tensor) -> Tensor:
    return torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)


def _efficient(q, k, v, bias, compute_lse, dropout, is_causal, *, scale):  # type: ignore[no-untyped-def]
    """As the kernel: equal heads, an aligned bias, rows of the log-sum-exp in 32s."""
    assert compute_lse and not dropout and q.shape[1] == k.shape[1] == v.shape[1]
    _check(q, k, bias)
    out, lse = attention(q, k, v, bias, is_causal, scale)
    blocked = lse.isneginf()  # what a kernel gives there is not said
    return out.masked_fill(blocked.unsqueeze(-1), 7.0), _padded(lse.masked_fill(blocked, 7.0)), 0, 0


def _efficient_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, is_causal, *, scale
):
    assert not dropout and wanted == [True, True, True, False]
    assert lse.shape[-1] % 32 == 0 and bool(lse[..., q.shape[2] :].eq(math.inf).all())
    assert bool(lse[..., : q.shape[2]].isfinite().all())
    _check(q, k, bias)
    rows = lse[..., : q.shape[2]]
    return *attention_backward(grad, q, k, v, bias, out, rows, is_causal, scale), None


def _check(q: Tensor, k: Tensor, bias: Tensor | None) -> None:
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.stride(-1) == 1
        assert bias.stride(-2) % 16 == 0


def _flash(q, k, v, dropout, is_causal, debug, *, scale):  # type: ignore[no-untyped-def]
    assert not dropout and not debug
    return (*attention(q, k, v, None, is_causal, scale), None, None, 0, 0, 0, 0, 0)


def _flash_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, first, second, rows, columns, dropout, is_causal, *unused, scale
):
    assert first is second is None and (rows, columns) == (q.shape[2], k.shape[2])
    return attention_backward(grad, q, k, v, None, out, lse, is_causal, scale)


def _mask(kind: str) -> Tensor | None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.rand(B, 1, S, T, generator=generator) < 0.7
    bits[:, :, 3] = False  # a row with nothing to attend to
    return {
        "none": None,
        "bits": bits,
        "rows": bits[0, 0],
        "heads": torch.rand(1, H, S, T, generator=generator, dtype=torch.float64),
        "columns": bits[:, :, :1].expand(B, 1, S, T),
        "one": torch.rand(B, H, S, 1, generator=generator, dtype=torch.float64),
    }[kind]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("flash", "none"),  # it takes no mask
        *(("efficient", kind) for kind in ("none", "bits", "rows", "heads", "columns", "one")),
    ],
)
def test_numbers_around_the_kernels(
    kernel: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the formula, in float64: masks, groups of heads, rows with nothing to attend to."""
    stand_ins = SimpleNamespace(
        _scaled_dot_product_flash_attention=_flash,
        _scaled_dot_product_flash_attention_backward=_flash_backward,
        _scaled_dot_product_efficient_attention=_efficient,
        _scaled_dot_product_efficient_attention_backward=_efficient_backward,
    )
    monkeypatch.setattr(cuda, "aten", stand_ins)
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, S, D), (B, KV, T, D), (B, KV, T, D), (B, H, S, D)]
    q, k, v, grad = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    mask = _mask(kind)
    extra = () if kernel == "flash" else (mask,)
    found = getattr(cuda, kernel)(q, k, v, *extra, False, 0.3)
    expected = attention(q, k, v, mask, False, 0.3)
    back = getattr(cuda, f"{kernel}_backward")
    found += back(grad, q, k, v, *extra, *found, False, 0.3)
    expected += attention_backward(grad, q, k, v, mask, *expected, False, 0.3)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU")
def test_kernels_on_a_gpu() -> None:
    """The op and its backward against the formula in float64."""
    kinds = [(kind, False) for kind in ("none", "bits", "rows", "heads", "one")]
    for dtype in (HALF, FULL):
        for kind, causal in (*kinds, ("none", True)):
            _compare_on_a_gpu(dtype, kind, causal)


def _compare_on_a_gpu(dtype: torch.dtype, kind: str, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    columns = S if causal else T
    shapes = [(B, H, S, D), (B, KV, columns, D), (B, KV, columns, D), (B, H, S, D)]
    given = [torch.randn(s, generator=generator).to("cuda", dtype) for s in shapes]
    mask = _mask(kind)
    mask = mask if mask is None else mask.to("cuda")
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    q, k, v, grad = given
    found = torch.ops.autopar.attention(q, k, v, mask, causal, 0.3)
    back = torch.ops.autopar.attention_backward
    grads = back(grad, q, k, v, mask, *found, causal, 0.3)
    wide = [x.double() for x in given]
    wide_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    expected = attention(*wide[:3], wide_mask, causal, 0.3)
    expected_grads = attention_backward(wide[3], *wide[:3], wide_mask, *expected, causal, 0.3)
    bound = 2e-2 if dtype == HALF else 1e-4
    for a, b in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound)
