"""Grouped-query attention: repeated key heads are traced as they are before repetition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.core.placement import Replicate, Shard
from autopar.core.strategy import OpCall, TensorSpec, op_call
from autopar.solver.candidates import expand
from autopar.tracer.trace import trace

HEADS, KV, WIDTH = 8, 2, 4
Repeat = Any


def expanded(x: Tensor) -> Tensor:
    batch, heads, rows, width = x.shape
    wide = x[:, :, None].expand(batch, heads, HEADS // heads, rows, width)
    return wide.reshape(batch, HEADS, rows, width)


def interleaved(x: Tensor) -> Tensor:
    return torch.repeat_interleave(x, HEADS // x.shape[1], dim=1)


def tiled(x: Tensor) -> Tensor:
    """Heads 0, 1, 0, 1, …: another order, which no group has."""
    return x.repeat(1, HEADS // x.shape[1], 1, 1)


class Attention(nn.Module):
    """Self-attention whose keys and values are repeated in some way."""

    def __init__(self, repeat: Repeat, dropout: float = 0.0) -> None:
        super().__init__()
        self.repeat, self.dropout = repeat, dropout
        self.q = nn.Linear(16, HEADS * WIDTH)
        self.k = nn.Linear(16, KV * WIDTH)
        self.v = nn.Linear(16, KV * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        given = self.repeat(k), self.repeat(v)
        y = F.scaled_dot_product_attention(q, *given, dropout_p=self.dropout, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().sum()


def model_and_input(repeat: Repeat) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Attention(repeat).double().train(), torch.randn(4, 8, 16, dtype=torch.float64)


@pytest.mark.parametrize(("repeat", "heads"), [(expanded, KV), (interleaved, KV), (tiled, HEADS)])
def test_keys_are_read_before_they_are_repeated(repeat: Repeat, heads: int) -> None:
    model, x = model_and_input(repeat)
    traced = trace(model, (x,))
    (call,) = (n for n in traced.graph.nodes if n.target is torch.ops.autopar.attention.default)
    assert call.args[1].meta["tensor_meta"].shape[1] == heads
    assert call.args[2].meta["tensor_meta"].shape[1] == heads


def test_one_repeated_operand_is_left_alone() -> None:
    """Values that are not repeated stay with keys that are."""

    class Half(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
            k = self.k(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, expanded(k), q).square().sum()

    torch.manual_seed(0)
    model, x = Half(expanded).double().train(), torch.randn(4, 8, 16, dtype=torch.float64)
    plan = autopar.plan(model, autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2), (x,))
    assert autopar.verify(plan, model, (x,)).worst[1] <= 1e-9


def test_keys_that_come_with_a_dim_for_their_group() -> None:
    """What is expanded is an input: there is no tensor without the dim to read instead."""

    class Given(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.expand(4, KV, HEADS // KV, 8, WIDTH).flatten(1, 2) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v).square().sum()

    traced = trace(Given(), (torch.randn(4, HEADS, 8, WIDTH), *torch.randn(2, 4, KV, 1, 8, WIDTH)))
    (call,) = (n for n in traced.graph.nodes if n.target is torch.ops.autopar.attention.default)
    assert call.args[1].meta["tensor_meta"].shape[1] == HEADS


@pytest.mark.parametrize("repeat", [expanded, interleaved, tiled])
@pytest.mark.parametrize(("ranks", "variant"), [(4, "grouped"), (2, "")])
def test_ranks_may_be_more_than_key_heads(repeat: Repeat, ranks: int, variant: str) -> None:
    """Query heads over all ranks, also where that is more than there are key heads: float64."""
    model, x = model_and_input(repeat)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=ranks)
    plan = autopar.plan(model, cluster, (x,), constraints={"sequence": "ulysses"})
    found = next(n for name, n in plan.nodes.items() if name.startswith("attention"))
    assert found.inputs[0] == (Shard(1),)
    if repeat is not tiled:
        assert found.inputs[1] == ((Replicate(),) if variant else (Shard(1),))
        assert found.variants == (variant,)
    assert autopar.verify(plan, model, (x,)).worst[1] <= 1e-9


def test_key_heads_are_sharded_outside_of_what_ranks_pick() -> None:
    """A rank whose key heads went to an inner axis lacks those of its query heads."""
    model, x = model_and_input(expanded)
    traced = trace(model, (x,))
    calls = [n for n in traced.graph.nodes if "attention" in str(n.target)]
    assert len(calls) == 2
    for node in calls:
        call = op_call(node, 2)
        first = 1 if len(call.outputs) == 3 else 0
        found = expand(call, (2, 2))
        kinds = {
            (c.variants, tuple(p.is_shard and p.dim == 1 for p in c.inputs[first + 1]))
            for c in found
            if c.inputs[first] == (Shard(1), Shard(1))
        }
        assert (("", "grouped"), (True, False)) in kinds
        assert (("grouped", "grouped"), (False, False)) in kinds
        assert (("grouped", ""), (False, True)) not in kinds


def test_a_rank_has_whole_groups_or_parts_of_one() -> None:
    """Two query heads a rank, of groups of three, would attend to one key head or to two."""
    q, kv = torch.empty(2, 12, 8, 4, device="meta"), torch.empty(2, 4, 8, 4, device="meta")
    specs = tuple(TensorSpec(tuple(t.shape), t.dtype) for t in (q, kv, kv))
    out = (specs[0], TensorSpec((2, 12, 8), torch.float32))
    target = torch.ops.autopar.attention.default
    call = OpCall(target, (None, None, None, None, False, 0.5), {}, specs, out, 6, ())
    assert not [c for c in expand(call, (6,)) if "grouped" in c.variants]
    assert [c for c in expand(call, (12,)) if "grouped" in c.variants]
    assert [c for c in expand(call, (2,)) if "grouped" in c.variants]
