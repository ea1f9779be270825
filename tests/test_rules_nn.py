"""Layers whose sharded form is another algorithm, against torch's own functions and gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.core.placement import Layout, Placement, Replicate, Shard
from autopar.core.strategy import AxisStrategy, OpCall, op_call
from autopar.runtime.lockstep import mesh_coords, run_lockstep
from autopar.solver.candidates import expand
from autopar.solver.rules.registry import find_rule
from tests.bruteforce import (
    Captured,
    Rows,
    Sample,
    capture,
    distribute,
    emit,
    layouts,
    offered,
    rows_of,
)
from tests.rule_samples_nn import SAMPLES

aten = torch.ops.aten
autopar = torch.ops.autopar
Pick = Callable[[list[AxisStrategy]], AxisStrategy]


def _x(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def _assemble(values: Sequence[Tensor], layout: Layout, mesh: tuple[int, ...]) -> Tensor:
    """The whole tensor from the parts of all ranks; replicas must be equal to the bit."""
    parts = dict(zip(mesh_coords(mesh), values, strict=True))
    for axis in reversed(range(len(mesh))):
        merged: dict[tuple[int, ...], Tensor] = {}
        for lead in {coords[:axis] for coords in parts}:
            group = [parts[(*lead, i)] for i in range(mesh[axis])]
            placement = layout[axis]
            if placement.is_shard:
                merged[lead] = torch.cat(group, placement.dim)
            elif placement.is_partial:
                merged[lead] = torch.stack(group).sum(0)
            else:
                assert all(torch.equal(x, group[0]) for x in group)
                merged[lead] = group[0]
        parts = merged
    return parts[()]


def _run(
    function: Callable[..., Any], inputs: Sequence[Tensor], picks: Sequence[Pick], *mesh: int
) -> tuple[Tensor, ...]:
    """Run an op with the rows that `picks` choose, one per mesh axis; returns whole outputs."""
    captured = capture(Sample("", function, lambda: tuple(inputs)))
    rows = tuple(pick(rows_of(captured, size)) for pick, size in zip(picks, mesh, strict=True))
    assert offered(op_call(captured.node, mesh[0]), rows, mesh)
    ins, outs = layouts(rows)
    split = [distribute(x, layout, mesh) for x, layout in zip(inputs, ins, strict=True)]
    feeds = [[parts[rank] for parts in split] for rank in range(math.prod(mesh))]
    graphs = [emit(captured, rows, mesh, rank, feed) for rank, feed in enumerate(feeds)]
    results: list[Any] = run_lockstep(graphs, feeds, mesh)
    if isinstance(results[0], Tensor):
        results = [(result,) for result in results]
    return tuple(
        _assemble([result[i] for result in results], layout, mesh)
        for i, layout in enumerate(outs)
        if results[0][i] is not None
    )


def _variant(name: str) -> Pick:
    return lambda rows: next(row for row in rows if row.variant == name)


def _plain(*inputs: Placement) -> Pick:
    """The plain row whose first operands are placed so."""
    return lambda rows: next(
        row for row in rows if not row.variant and row.inputs[: len(inputs)] == inputs
    )


def _close(got: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


# --- attention --------------------------------------------------------------------------------
def _mask(kind: str) -> Tensor | None:
    if kind == "float":
        return _x(8, 8)
    if kind == "":
        return None
    mask = torch.rand(2, 1 if kind == "rows" else 4, 8, 8) > 0.4
    mask[..., 0] = True
    mask[0, :, 5] = False  # a row with nothing to attend to
    return mask


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """torch's attention, with the causal mask made part of the mask."""
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    if mask is None:
        mask = allowed
    elif mask.dtype == torch.bool:
        mask = mask & allowed
    else:
        mask = mask.masked_fill(~allowed, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)


def _check_attention(
    picks: Sequence[Pick], mesh: tuple[int, ...], causal: bool, kv_heads: int, kind: str
) -> None:
    torch.manual_seed(0)
    q, k, v = _x(2, 4, 8, 3), _x(2, kv_heads, 8, 3), _x(2, kv_heads, 8, 3)
    mask = _mask(kind)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = _reference(*leaves, mask, causal)
    grad = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, leaves, grad)
    extra = () if mask is None else (mask,)

    def forward(q: Any, k: Any, v: Any, *given: Any) -> Any:
        return autopar.attention.default(q, k, v, given[0] if given else None, causal, 0.3)

    def backward(grad: Any, q: Any, k: Any, v: Any, *given: Any) -> Any:
        *masks, out, lse = given
        return autopar.attention_backward.default(
            grad, q, k, v, masks[0] if masks else None, out, lse, causal, 0.3
        )

    out, lse = _run(forward, (q, k, v, *extra), picks, *mesh)
    _close(out, expected.detach())
    got = _run(backward, (grad, q, k, v, *extra, out, lse), picks, *mesh)
    for name, mine, theirs in zip("qkv", got, grads, strict=True):
        assert theirs.abs().max() > 1e-3, name
        _close(mine, theirs)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["", "float", "rows", "heads"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_ring_attention(causal: bool, kv_heads: int, kind: str, size: int) -> None:
    _check_attention([_variant("ring")], (size,), causal, kv_heads, kind)


def _sharded_rows(rows: list[AxisStrategy]) -> AxisStrategy:
    """Queries sharded along the sequence, keys whole."""
    is_backward = len(rows[0].outputs) == 3
    q, k = (1, 2) if is_backward else (0, 1)
    return next(r for r in rows if r.inputs[q] == Shard(2) and r.inputs[k] == Replicate())


def _batch(rows: list[AxisStrategy]) -> AxisStrategy:
    return _plain(Shard(0))(rows)


def _heads(rows: list[AxisStrategy]) -> AxisStrategy:
    return _plain(Shard(1))(rows)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "picks",
    [
        (_variant("ring"), _variant("ring")),
        (_variant("ring"), _sharded_rows),
        (_sharded_rows, _variant("ring")),
        (_sharded_rows, _sharded_rows),
        (_batch, _variant("ring")),
        (_variant("ring"), _heads),
    ],
    ids=["ring-ring", "ring-rows", "rows-ring", "rows-rows", "batch-ring", "ring-heads"],
)
def test_attention_on_two_axes(picks: tuple[Pick, Pick], causal: bool) -> None:
    _check_attention(picks, (2, 2), causal, 2, "rows")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_zigzag_attention(kv_heads: int, size: int) -> None:
    _check_attention([_variant("zigzag")], (size,), True, kv_heads, "")


@pytest.mark.parametrize("picks", [(_variant("zigzag"), _heads), (_batch, _variant("zigzag"))])
def test_zigzag_attention_beside_another_axis(picks: tuple[Pick, Pick]) -> None:
    _check_attention(picks, (2, 2), True, 2, "")


def test_six_ranks_exchange_chunks() -> None:
    torch.manual_seed(0)
    q, k, v = (_x(1, 2, 24, 3) for _ in range(3))
    out, _ = _run(
        lambda q, k, v: autopar.attention.default(q, k, v, None, True, 1.0),
        (q, k, v), [_variant("zigzag")], 6,
    )  # fmt: skip
    _close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0))


def test_rings_of_different_size() -> None:
    torch.manual_seed(0)
    q, k, v = (_x(1, 1, 8, 2) for _ in range(3))
    ring = (_variant("ring"), _variant("ring"))
    for mesh in ((2, 4), (4, 2)):
        out, _ = _run(
            lambda q, k, v: autopar.attention.default(q, k, v, None, True, 1.0),
            (q, k, v), ring, *mesh,
        )  # fmt: skip
        _close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0))


def test_half_precision_keeps_the_lse_in_float32() -> None:
    q = _x(1, 2, 8, 4, dtype=torch.bfloat16)
    out, lse = autopar.attention(q, q, q, None, False, 0.5)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    nll, lse = autopar.token_nll(q[0, 0], torch.zeros(8, dtype=torch.int64), -100)
    assert (nll.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


# --- cross-entropy ----------------------------------------------------------------------------
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_vocab_parallel_cross_entropy(mesh: tuple[int, ...], scale: float) -> None:
    torch.manual_seed(0)
    logits = (_x(6, 16) * scale).requires_grad_()
    target = torch.tensor([0, 15, 7, -100, 8, 3])
    with torch.no_grad():
        logits[0, 8:] = -math.inf  # whole shards without a finite logit
    grad = _x(6)
    expected = F.cross_entropy(logits, target, reduction="none", ignore_index=-100)
    (grad_logits,) = torch.autograd.grad(expected, logits, grad)
    vocab = [_variant("vocab")] * len(mesh)
    x = logits.detach()
    nll, lse = _run(lambda x, t: autopar.token_nll.default(x, t, -100), (x, target), vocab, *mesh)
    _close(nll, expected.detach())
    (got,) = _run(
        lambda g, x, t, s: autopar.token_nll_backward.default(g, x, t, s, -100),
        (grad, x, target, lse), vocab, *mesh,
    )  # fmt: skip
    _close(got, grad_logits)
    assert not got[3].any()


# --- normalisation ----------------------------------------------------------------------------
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_hidden_layer_norm_with_a_large_mean(mesh: tuple[int, ...]) -> None:
    """In float32 E[x²] − E[x]² of numbers near 10⁴ is off by more than the variance, 1."""
    torch.manual_seed(0)
    x, weight, bias, grad = (_x(*s, dtype=torch.float32) for s in ((4, 64), (64,), (64,), (4, 64)))
    x = x + 1e4
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = F.layer_norm(leaves[0], [64], leaves[1], leaves[2])
    grads = torch.autograd.grad(expected, leaves, grad.double())
    hidden = [_variant("hidden")] * len(mesh)
    out, mean, rstd = _run(
        lambda x, w, b: aten.native_layer_norm.default(x, [64], w, b, 1e-5),
        (x, weight, bias), hidden, *mesh,
    )  # fmt: skip
    got = _run(
        lambda g, x, m, s, w, b: aten.native_layer_norm_backward.default(
            g, x, [64], m, s, w, b, [True, True, True]
        ),
        (grad, x, mean, rstd, weight, bias), hidden, *mesh,
    )  # fmt: skip
    for mine, theirs in zip((out, *got), (expected.detach(), *grads), strict=True):
        _close(mine.double(), theirs, 5e-3)


# --- random numbers ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mesh", "dims"),
    [((4,), (0,)), ((4,), (1,)), *(((2, 4), d) for d in itertools.product((0, 1), repeat=2))],
)
def test_a_shard_draws_the_mask_of_the_whole(mesh: tuple[int, ...], dims: tuple[int, ...]) -> None:
    x, seed = torch.ones(16, 8, dtype=torch.float64), torch.tensor(11)
    picks = [_plain(Shard(dim)) for dim in dims]
    (got,) = _run(
        lambda x, s: autopar.dropout.default(x, 0.4, s, 3, [16, 8], [0, 0]), (x, seed), picks, *mesh
    )
    assert torch.equal(got, autopar.dropout(x, 0.4, seed, 3, [16, 8], [0, 0]))
    assert 0 < (got == 0).sum() < got.numel()
    picks = [lambda rows, d=dim: next(r for r in rows if r.outputs[0] == Shard(d)) for dim in dims]
    rest = (3, [16, 8], [16, 8], [0, 0], torch.float64)
    (got,) = _run(lambda s: autopar.uniform.default(s, *rest), (seed,), picks, *mesh)
    assert torch.equal(got, autopar.uniform(seed, *rest))


# --- embedding --------------------------------------------------------------------------------
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2), (2, 4)])
def test_vocab_parallel_embedding(mesh: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight, indices = _x(16, 4).requires_grad_(), torch.tensor([[0, 15, 3], [3, 8, 7]])
    expected = F.embedding(indices, weight, padding_idx=3)
    grad = torch.randn_like(expected)
    (grad_weight,) = torch.autograd.grad(expected, weight, grad)
    vocab = [_variant("vocab")] * len(mesh)
    (out,) = _run(
        lambda w, i: aten.embedding.default(w, i, 3), (weight.detach(), indices), vocab, *mesh
    )
    _close(out, expected.detach())
    (got,) = _run(
        lambda g, i: aten.embedding_dense_backward.default(g, i, 16, 3, False),
        (grad, indices), vocab, *mesh,
    )  # fmt: skip
    _close(got, grad_weight)
    assert not got[3].any()


def test_frequency_scaling_keeps_the_indices_whole() -> None:
    sample = next(s for s in SAMPLES if s.name == "embedding_backward_-1_True")
    assert all(row.inputs[1].is_replicate for row in rows_of(capture(sample), 2))


# --- what a row declares ----------------------------------------------------------------------
def _declared(call: OpCall, rows: Rows, mesh: tuple[int, ...]) -> list[tuple[str, int, int]]:
    """The collectives that the op is priced with."""
    way = (*layouts(rows), tuple(row.variant for row in rows))
    priced = next(c for c in expand(call, mesh) if (c.inputs, c.outputs, c.variants) == way)
    return sorted((x.kind, x.axis, round(x.num_bytes)) for x in priced.comm)


def _emitted(captured: Captured, rows: Rows, mesh: tuple[int, ...]) -> list[tuple[str, int, int]]:
    ins, _ = layouts(rows)
    pairs = zip(captured.operands, ins, strict=True)
    parts = [distribute(x, layout, mesh)[0] for x, layout in pairs]
    graph = emit(captured, rows, mesh, 0, parts)
    return sorted(n.meta["collective"][:3] for n in graph.nodes if "collective" in n.meta)


def _has_variants(sample: Sample) -> bool:
    captured = capture(sample)
    rule = find_rule(captured.node.target)
    assert rule is not None
    return any(row.variant for row in rule(op_call(captured.node, 2)))


@pytest.mark.parametrize(
    "sample", [s for s in SAMPLES if _has_variants(s)], ids=lambda sample: sample.name
)
def test_rows_declare_what_their_lowering_sends(sample: Sample) -> None:
    captured = capture(sample)
    for mesh in ((4,), (2, 2)):
        call = op_call(captured.node, mesh[0])
        for rows in itertools.product(*(rows_of(captured, size) for size in mesh)):
            if not any(row.variant for row in rows) or not offered(call, rows, mesh):
                continue
            assert _declared(call, rows, mesh) == _emitted(captured, rows, mesh), rows
