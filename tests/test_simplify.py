"""Simplified joint graphs compute the same bits with less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.tracer.simplify import simplify

aten = torch.ops.aten
SHAPE = (2, 3, 8)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotary(x: Tensor, weight: Tensor) -> Tensor:
    turned = torch.cat([-x[..., 4:], x[..., :4]], dim=-1)
    return x * weight.cos() + turned * weight.sin()


def thirds(x: Tensor, weight: Tensor) -> Tensor:
    """Three slices that are read in another order than they lie in."""
    return (x[..., 5:].sum() * weight).sum() + x[..., :2].exp().sum() + (x[..., 2:5] ** 3).sum()


def rows(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([x[:1] * 3, x[1:] * 5]) * weight


def gradient(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def joint(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = function(x, weight)
        return y.detach(), *torch.autograd.grad(y.sum(), (x, weight))

    return joint


def traced(function: Callable[..., Any], dtype: torch.dtype) -> fx.GraphModule:
    leaves = [
        torch.randn(SHAPE, dtype=dtype, requires_grad=True),
        torch.randn(SHAPE[-1:], dtype=dtype, requires_grad=True),
    ]
    found = make_fx(function, tracing_mode="fake")(*leaves)
    graph = found.graph
    for node in list(graph.nodes):
        if node.target is aten.detach.default:  # as the tracer's clean-up does
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return found


def counts(graph: fx.Graph) -> Counter[Any]:
    return Counter(n.target for n in graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("function", [rms_norm, rotary, thirds, rows])
def test_same_bits(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    module = traced(gradient(function), dtype)
    torch.manual_seed(1)
    inputs = [torch.randn(SHAPE, dtype=dtype), torch.randn(SHAPE[-1:], dtype=dtype)]
    wanted = module(*inputs)
    before = counts(module.graph)
    simplify(module.graph, {})
    module.graph.lint()
    module.recompile()
    assert sum(counts(module.graph).values()) < sum(before.values())
    for mine, theirs in zip(module(*inputs), wanted, strict=True):
        assert torch.equal(mine, theirs)


def test_a_norm_works_on_rows_where_it_can() -> None:
    """Neither the quotient nor the factor of two of the mean's gradient touches the whole."""
    graph = traced(gradient(rms_norm), torch.float32).graph
    simplify(graph, {})
    wide = [n for n in graph.nodes if n.op == "call_function" and n.meta["val"].shape == SHAPE]
    assert counts(graph)[aten.pow.Tensor_Scalar] == 2  # x² and rstd³
    assert not any(n.target in (aten.div.Scalar, aten.mul.Scalar) for n in wide)


@pytest.mark.parametrize("function", [rotary, thirds, rows])
def test_slices_become_one_cat(function: Callable[..., Tensor]) -> None:
    graph = traced(gradient(function), torch.float32).graph
    assert counts(graph)[aten.slice_backward.default] >= 2
    simplify(graph, {})
    assert counts(graph)[aten.slice_backward.default] == 0


def test_a_sum_that_begins_with_zero() -> None:
    def total(x: Tensor, weight: Tensor) -> Tensor:
        return sum([x * weight, x.exp()]) - 0  # type: ignore[return-value]

    graph = traced(total, torch.float64).graph
    assert counts(graph)[aten.add.Tensor] == 2
    simplify(graph, {})
    assert counts(graph)[aten.add.Tensor] == 1
    assert counts(graph)[aten.sub.Tensor] == 0


def overlapping(x: Tensor) -> Tensor:
    return aten.slice_backward(x[..., :5], SHAPE, 2, 0, 5, 1) + aten.slice_backward(
        x[..., 4:], SHAPE, 2, 4, 8, 1
    )


def with_a_gap(x: Tensor) -> Tensor:
    return aten.slice_backward(x[..., :3], SHAPE, 2, 0, 3, 1) + aten.slice_backward(
        x[..., 4:], SHAPE, 2, 4, 8, 1
    )


def strided(x: Tensor) -> Tensor:
    return aten.slice_backward(x[..., ::2], SHAPE, 2, 0, 8, 2) + aten.slice_backward(
        x[..., 1::2], SHAPE, 2, 1, 8, 2
    )


def read_twice(x: Tensor) -> Tensor:
    first = aten.slice_backward(x[..., :4], SHAPE, 2, 0, 4, 1)
    return (first + aten.slice_backward(x[..., 4:], SHAPE, 2, 4, 8, 1)) * first


def two_more(x: Tensor) -> Tensor:
    """(a + c) + (b + d) and (a + b) + (c + d) round differently."""
    first = aten.slice_backward(x[..., :4], SHAPE, 2, 0, 4, 1)
    return (first + x.exp()) + (aten.slice_backward(x[..., 4:], SHAPE, 2, 4, 8, 1) + x.sin())


def halved(x: Tensor) -> Tensor:
    """Half of a number that is not normal may be zero."""
    return x.sum(-1, keepdim=True).expand(SHAPE) * (x * 0.5)


def scaled_by_three(x: Tensor) -> Tensor:
    """3 (a b) and (3 a) b round differently."""
    return x.sum(-1, keepdim=True).expand(SHAPE) * (x * 3)


def squared(x: Tensor) -> Tensor:
    """Both factors are the expansion."""
    wide = x.sum(-1, keepdim=True).expand(SHAPE)
    return wide * wide


def integers(x: Tensor) -> Tensor:
    """An integer divided by one is a float."""
    return x.to(torch.int64) / 1


@pytest.mark.parametrize(
    "function",
    [
        overlapping,
        with_a_gap,
        strided,
        read_twice,
        two_more,
        halved,
        scaled_by_three,
        squared,
        integers,
    ],
)
def test_what_would_change_stays(function: Callable[..., Tensor]) -> None:
    module = make_fx(function, tracing_mode="fake")(torch.randn(SHAPE))
    before = counts(module.graph)
    simplify(module.graph, {})
    assert counts(module.graph) == before


def test_one_more_term() -> None:
    """Wherever it stands in the sum, and behind a thousand sums of something else."""

    def behind(x: Tensor) -> Tensor:
        low = aten.slice_backward(x[..., :4], SHAPE, 2, 0, 4, 1)
        found = low + x.exp() + aten.slice_backward(x[..., 4:], SHAPE, 2, 4, 8, 1)
        for _ in range(1500):
            found = found + x
        return found

    x = torch.randn(SHAPE)
    module = make_fx(behind, tracing_mode="fake")(x)
    wanted = module(x)
    simplify(module.graph, {})
    module.graph.lint()
    module.recompile()
    assert counts(module.graph)[aten.cat.default] == 1
    assert counts(module.graph)[aten.slice_backward.default] == 0
    assert torch.equal(module(x), wanted)
