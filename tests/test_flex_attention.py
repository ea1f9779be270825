"""`flex_attention`, which has no backward on a CPU, against torch's own formula of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    or_masks,
)
from torch.utils import _pytree as pytree

import autopar
from autopar.runtime.compiled_step import input_signature
from autopar.tracer.trace import trace
from tests.test_handwritten import PLANS, plan_for

Mod = Callable[..., Any]
BATCH, HEADS, LENGTH, WIDTH = 4, 4, 8, 16


def block_mask(mod: Mod, batch: int | None = None, heads: int | None = None) -> BlockMask:
    return create_block_mask(mod, batch, heads, LENGTH, LENGTH, device="cpu")


def causal(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


class Attends(nn.Module):
    """`how` gives the arguments of one call, of the module and the documents of a batch."""

    def __init__(self, how: Callable[[Attends, Tensor], dict[str, Any]], kv_heads: int) -> None:
        super().__init__()
        self.how, self.kv_heads, self.own_formula = how, kv_heads, False
        self.query = nn.Linear(WIDTH, WIDTH)
        self.pairs = nn.Linear(WIDTH, 2 * WIDTH * kv_heads // HEADS)
        self.slope = nn.Parameter(torch.rand(HEADS))
        self.table = nn.Parameter(torch.rand(HEADS, 2 * LENGTH - 1))

    def forward(self, x: Tensor, documents: Tensor) -> dict[str, Tensor]:
        q = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.pairs(x).unflatten(-1, (2, self.kv_heads, -1)).permute(2, 0, 3, 1, 4)
        out = self.attend(q, k, v, **self.how(self, documents))
        return {"loss": out.square().sum()}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        if not self.own_formula:
            return flex_attention(q, k, v, enable_gqa=self.kv_heads < HEADS, **given)
        score_mod = given.get("score_mod", lambda score, *_: score)
        mask = given.get("block_mask", block_mask(lambda _b, _h, q, _k: q >= 0)).as_tuple()
        scale = given.get("scale", 1 / math.sqrt(q.shape[-1]))
        found: Tensor = math_attention(q, k, v, score_mod, mask, scale, {})[0]
        return found


def documents_mask(_: Attends, documents: Tensor) -> dict[str, Any]:
    def same(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[b, q] == documents[b, k]

    return {"block_mask": block_mask(and_masks(causal, same), BATCH)}


def rows_of_documents(_: Attends, documents: Tensor) -> dict[str, Any]:
    def next_of(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (documents[b][(k + 1) % LENGTH] == documents[b][q]) | (q == k)

    return {"block_mask": block_mask(next_of, BATCH)}


def window(_: Attends, _documents: Tensor) -> dict[str, Any]:
    near = or_masks(lambda _b, _h, q, k: q - k < 3, lambda _b, h, _q, k: (k < 1) & (h > 1))
    return {"block_mask": block_mask(and_masks(causal, near), None, HEADS)}


def alibi(model: Attends, _: Tensor) -> dict[str, Any]:
    slopes = torch.exp2(-torch.arange(1, HEADS + 1, dtype=model.slope.dtype))
    biased = lambda score, _b, h, q, k: slopes[h] * (k - q) + score  # noqa: E731
    return {"score_mod": biased, "block_mask": block_mask(causal)}


def learned(model: Attends, _: Tensor) -> dict[str, Any]:
    def biased(score: Tensor, _b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        known = score  # the same one, under two names
        score += model.table[h, q - k + LENGTH - 1]
        return torch.where(q >= k, known - model.slope[h] * (q - k), -math.inf)

    return {"score_mod": biased}


def soft_cap(_: Attends, _documents: Tensor) -> dict[str, Any]:
    capped = lambda score, *_: 2.0 * torch.tanh(score / 2.0)  # noqa: E731
    return {"score_mod": capped, "block_mask": block_mask(causal), "scale": 0.7}


def reduced(_: Attends, documents: Tensor) -> dict[str, Any]:
    places = torch.stack([torch.arange(LENGTH) // 2, torch.arange(LENGTH) % 2], 1)

    def near(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((places[q] - places[k]).abs() <= 1).all()

    return {"block_mask": block_mask(near)}


MODS = [documents_mask, rows_of_documents, window, alibi, learned, soft_cap, reduced]


def built(how: Any, kv_heads: int) -> tuple[Attends, dict[str, Tensor]]:
    torch.manual_seed(0)
    inputs = {
        "x": torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64),
        "documents": torch.randint(0, 3, (BATCH, LENGTH)).sort(1).values,
    }
    return Attends(how, kv_heads).double(), inputs


@pytest.mark.parametrize("how", MODS, ids=lambda how: how.__name__)
def test_equals_the_formula(how: Any) -> None:
    kv_heads = 2 if how in (window, soft_cap) else HEADS
    model, inputs = built(how, kv_heads)
    traced = trace(model, inputs, training=True)
    plan = plan_for(model, inputs, *PLANS["data and tensor"])
    model.own_formula = True
    with torch.no_grad():
        model(**inputs)
    result = autopar.verify(plan, model, inputs, traced=traced)
    assert result.worst[1] < 1e-12, result.worst
    assert {"query.weight", "pairs.weight"} < set(result.gradients)
    assert ("table" in result.gradients) == (how is learned)


@pytest.mark.parametrize("how", MODS, ids=lambda how: how.__name__)
def test_becomes_one_op_where_it_adds_to_the_scores(how: Any) -> None:
    model, inputs = built(how, HEADS)
    names = [str(n.target) for n in trace(model, inputs, training=False).graph.nodes]
    assert ("autopar.attention.default" in names) == (how is not soft_cap)


def test_documents_are_compared_without_indexing() -> None:
    """So that a rank compares those of its own samples."""
    model, inputs = built(documents_mask, HEADS)
    names = [str(n.target) for n in trace(model, inputs, training=True).graph.nodes]
    assert not [name for name in names if "index" in name or "gather" in name]


class Asks(nn.Module):
    """Compiled functions, the sums of each row, and a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.compiled = torch.compile(flex_attention)
        self.mask = block_mask(causal)
        self.plain = False

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        if self.plain:
            allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            scores = (q @ q.mT / 2.0).masked_fill(~allowed, -math.inf)
            out, lse, most = scores.softmax(-1) @ q, scores.logsumexp(-1), scores.amax(-1)
            dense = q
        else:
            request = AuxRequest(lse=True, max_scores=True)
            out, aux = self.compiled(q, q, q, block_mask=self.mask, return_aux=request)
            lse, most = aux.lse, aux.max_scores
            allowed = create_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
            dense = torch.where(allowed[0, 0, -1, 0], q, 0.0)
        return (out + dense).square().sum() + lse.sum() + most.sum()


def test_compiled_with_the_sums_of_each_row() -> None:
    torch.manual_seed(0)
    model = Asks().double()
    inputs = (torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64),)
    traced = trace(model, inputs, training=True)
    plan = plan_for(model, inputs, *PLANS["data"])
    model.plain = True
    result = autopar.verify(plan, model, inputs, traced=traced)
    assert result.worst[1] < 1e-12, result.worst


def test_torch_s_functions_are_their_own_again() -> None:
    code = flex_attention.__code__, create_mask.__code__
    model, inputs = built(alibi, HEADS)
    trace(model, inputs, training=True)
    assert (flex_attention.__code__, create_mask.__code__) == code


def test_unequal_heads_are_refused_as_torch_does() -> None:
    model, inputs = built(alibi, HEADS)
    model.pairs = nn.Linear(WIDTH, WIDTH).double()
    model.kv_heads = 2
    model.attend = lambda q, k, v, **_: flex_attention(q, k, v)  # type: ignore[method-assign]
    with pytest.raises(autopar.TraceError, match="4 query heads and 2 key heads"):
        trace(model, inputs)


class Given(nn.Module):
    """Gets its mask from outside, of each batch another one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.own_formula = False

    def forward(self, x: Tensor, mask: BlockMask) -> dict[str, Tensor]:
        q = self.linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        if self.own_formula:
            identity = lambda score, *_: score  # noqa: E731
            scale = 1 / math.sqrt(q.shape[-1])
            out = math_attention(q, q, q, identity, mask.as_tuple(), scale, {})[0]
        else:
            out = flex_attention(q, q, q, block_mask=mask)
        return {"loss": out.square().sum()}


def batch_of_documents(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    documents = torch.randint(0, 3, (BATCH, LENGTH)).sort(1).values

    def same(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[b, q] == documents[b, k]

    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    return {"x": x, "mask": block_mask(and_masks(causal, same), BATCH)}


@pytest.mark.parametrize("pins", [{"data": 2}, {"pipeline": {"size": 1, "microbatches": 2}}])
def test_a_mask_that_is_an_input(pins: Any) -> None:
    model = Given().double()
    first, second = batch_of_documents(0), batch_of_documents(1)
    plan = plan_for(model, first, (2,), pins, cache=False)
    traced = trace(model, first, training=True)
    mask = pytree.tree_map(lambda x: x, first["mask"])
    assert torch.equal(
        create_mask(mask.mask_mod, BATCH, 1, LENGTH, LENGTH, "cpu"),
        create_mask(first["mask"].mask_mod, BATCH, 1, LENGTH, LENGTH, "cpu"),
    )
    assert input_signature((), first) == input_signature((), second)
    model.own_formula = True
    result = autopar.verify(plan, model, second, traced=traced)
    assert result.worst[1] < 1e-12, result.worst


def test_masks_of_other_functions_have_other_steps() -> None:
    first = batch_of_documents(0)
    other = {**first, "mask": block_mask(causal)}
    assert input_signature((), first) != input_signature((), other)


def test_blocks_share_a_mask_that_is_made_before_them() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Given() for _ in range(8))

        def forward(self, x: Tensor, documents: Tensor) -> Tensor:
            same = lambda b, _h, q, k: documents[b, q] == documents[b, k]  # noqa: E731
            per_head = lambda _b, h, q, k: q - k < h + 2  # noqa: E731
            for mod, heads in ((same, None), (per_head, 2)):
                mask = block_mask(mod, BATCH, heads)
                for layer in self.layers:
                    x = x + layer(x, mask)["loss"]
            return x.sum()

    inputs = (torch.randn(BATCH, LENGTH, WIDTH), torch.randint(0, 3, (BATCH, LENGTH)))
    names = [str(n.target) for n in trace(Blocks(), inputs, training=False).graph.nodes]
    assert names.count("aten.eq.Tensor") == 1
    # a mask made for two heads says nothing of the others, so that each layer asks anew
    assert names.count("aten.lt.Tensor") == len(Blocks().layers)


class Numbered(nn.Module):
    """Its mask writes to what it has picked, which is no part of the input."""

    def forward(self, q: Tensor, documents: Tensor) -> Tensor:
        def mask(b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = documents[b, query]
            own += 1
            return own > documents[b, key]

        return flex_attention(q, q, q, block_mask=block_mask(mask, BATCH))  # type: ignore[no-any-return]


def test_a_mask_does_not_write_to_what_it_reads() -> None:
    torch.manual_seed(0)
    documents = torch.randint(0, 3, (BATCH, LENGTH))
    inputs = torch.randn(BATCH, HEADS, LENGTH, 4, dtype=torch.float64), documents
    model = Numbered().eval()
    plan = plan_for(model, inputs, (2,), {"data": 2}, training=False)
    result = autopar.verify(plan, model, inputs)
    assert result.worst[1] < 1e-12, result.worst
