"""Models that compute between their blocks fold like those whose blocks do all of it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import planning
from autopar.cost_model import Cluster
from autopar.errors import ConstraintError
from autopar.tracer.trace import trace
from tests.folding import cluster, same_costs

WIDTH = 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(2, 3)
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


def feed_forward() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
    )


class Stack(nn.Module):
    """A head on what `run` makes of the blocks."""

    def __init__(self, blocks: int, build: Callable[[], nn.Module] = feed_forward) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(build() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.run(self.embed(x))).square().mean()


class Pairs(Stack):
    """Blocks that are lists themselves, which nothing calls."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, lambda: nn.ModuleList([Attention(), feed_forward()]))

    def run(self, x: Tensor) -> Tensor:
        for attention, feed in self.layers:
            x = attention(x) + x
            x = feed(x) + x
        return x


class PostNorm(Stack):
    """One norm for all blocks, behind each of them; and a rate of each block's own."""

    def run(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = self.norm(x + (0.1 + i / 10) * layer(x))
        return x


class Positions(Stack):
    """Works on what goes into a block, and always reads what came in."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.positions = nn.Parameter(torch.randn(8, WIDTH))

    def run(self, x: Tensor) -> Tensor:
        given = x
        for layer in self.layers:
            x = layer((x + self.positions).tanh()) + 0.5 * given
        return x


class Turns(Stack):
    """Every second block is gated."""

    def run(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + layer(x) if i % 2 else x + layer(x) * x.sigmoid()
        return x


class Statistics(Stack):
    """Each block keeps statistics of the batch."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8)))
        self.back = nn.Linear(8, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.back(layer(x).relu())
        return x


class Regions(Stack):
    """Between the blocks there is another precision, and a gate without gradient."""

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.no_grad():
                gate = x.mean(-1, keepdim=True).sigmoid().cos()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.embed(layer(x))
            x = x + gate * y
        return x


class Recomputed(Stack):
    """Each block is recomputed by hand."""

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


class Weighted(Stack):
    """Parameters of the parent, one for each block."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(blocks))

    def run(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + scale * layer(x)
        return x


class Lowered(Weighted):
    """All blocks run in one region of another precision."""

    def run(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().run(x).to(x.dtype)


class Lists(Stack):
    """One list for each part of a block; the first one runs first."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, lambda: nn.LayerNorm(WIDTH))
        self.attentions = nn.ModuleList(Attention() for _ in range(blocks))
        self.feeds = nn.ModuleList(feed_forward() for _ in range(blocks))

    def run(self, x: Tensor) -> Tensor:
        for norm, attention, feed in zip(self.layers, self.attentions, self.feeds, strict=True):
            x = attention(norm(x)) + x
            x = feed(x) + x
        return x


class Later(Stack):
    """The last blocks of many get more."""

    def run(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + layer(x.sin() if i > 6 else x)
        return x


class Shared(Stack):
    """A list that every block uses: its children are of no block."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.gate = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.gate(x) * layer(x)
        return x


class Dictionaries(nn.Module):
    """A block with keywords, a number, and what else it has seen, which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(WIDTH), feed_forward()

    def forward(self, *, given: dict[str, Any], rate: float) -> tuple[dict[str, Any], float]:
        x = self.feed(given["x"])
        return {"x": x, "norm": self.norm(given["x"]), "seen": x.sum()}, rate / 2


class Keywords(Stack):
    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, Dictionaries)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            found, half = layer(given={"x": x}, rate=0.5)
            x = found["norm"] + half * found["x"]
        return x


class Twice(Stack):
    """Each block is called twice, and what it was called with is written to."""

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x + layer(y.sin().mul_(0.5)).add_(1.0)
        return x


class Told(nn.Module):
    """A block that is told how to run."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = feed_forward()

    def forward(self, x: Tensor, how: Any, rate: float = 1.0) -> Tensor:
        y = self.feed(x) * rate
        return y.tanh() if how in (5, Kind.ODD) else y


class Kind(Enum):
    PLAIN = 0
    ODD = 1


class Telling(Stack):
    def __init__(self, blocks: int, how: Callable[[int], Any]) -> None:
        super().__init__(blocks, Told)
        self.how = how

    def run(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers, start=1):
            x = x + layer(x, self.how(i), rate=1 / i)
        return x


class Missing(Stack):
    """One block is not called."""

    def run(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i == 4 else x + layer(x)
        return x


class Methods(Stack):
    """Of a block nothing is called but what is in it, through a method and by hand."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, Halves)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.attend(x)
            x = x + layer.feed(x)
        return x


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed = Attention(), feed_forward()

    def attend(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class Called(Methods):
    """A block that has a forward, which is not called."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.layers = nn.ModuleList(Whole() for _ in range(blocks))


class Whole(Halves):
    def forward(self, x: Tensor) -> Tensor:
        return self.feed(self.attend(x))


class Unlike(Stack):
    """The fifth block of nine does more."""

    def run(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + layer(x)
            x = x.tanh() if i == 4 else x
        return x


class Skips(Stack):
    """Something behind the blocks reads all of them."""

    def run(self, x: Tensor) -> Tensor:
        seen = []
        for layer in self.layers:
            x = x + layer(x)
            seen.append(x)
        return torch.stack(seen).mean(0)


class Far(Stack):
    """Each block reads what the second one before it yields."""

    def run(self, x: Tensor) -> Tensor:
        before = x
        for layer in self.layers:
            before, x = x, before + layer(x)
        return x


FOLDED = {
    "residuals": (lambda: Stack(9), 1),
    "pairs": (lambda: Pairs(7), 1),
    "norm of all": (lambda: PostNorm(8), 1),
    "before": (lambda: Positions(8), 1),
    "turns": (lambda: Turns(12), 2),
    "statistics": (lambda: Statistics(8), 1),
    "regions": (lambda: Regions(8), 1),
    "weighted": (lambda: Weighted(8), 1),
    "lists": (lambda: Lists(8), 1),
    "shared": (lambda: Shared(8), 1),
    "later": (lambda: Later(10), 1),
    "keywords": (lambda: Keywords(8), 1),
    "twice": (lambda: Twice(8), 1),
    "in a region": (lambda: Lowered(8), 1),
    "recomputed": (lambda: Recomputed(8), 1),
    "rates": (lambda: Telling(8, lambda i: Kind.PLAIN), 1),
    "counted": (lambda: Telling(8, lambda i: -i), 1),
    "methods": (lambda: Methods(8), 1),
    "not called": (lambda: Called(8), 1),
}
WHOLE: dict[str, Callable[[int], Stack]] = {
    "unlike": Unlike,
    "skips": Skips,
    "far": Far,
    "missing": Missing,
    "numbers": lambda n: Telling(n, lambda i: i),
    "kinds": lambda n: Telling(n, lambda i: Kind.ODD if i == 5 else Kind.PLAIN),
}


def batch(model: Stack) -> tuple[Tensor]:
    torch.manual_seed(0)
    return (torch.randn(16, WIDTH) if isinstance(model, Statistics) else torch.randn(4, 8, WIDTH),)


# the other combinations are in the slow run
_QUICK = {"residuals": "none", "pairs": "full", "before": "selective", "lists": "full"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            name, kind, id=f"{kind}-{name}",
            marks=[] if _QUICK.get(name) == kind else [pytest.mark.slow],
        )
        for kind in ("none", "selective", "full")
        for name in FOLDED
    ],
)  # fmt: skip
def test_folded_costs_are_those_of_the_whole_model(name: str, kind: str) -> None:
    build, period = FOLDED[name]
    model = build()
    same_costs(model, batch(model), period, cluster(2, 4), kind)


@pytest.mark.parametrize("name", FOLDED)
def test_folded_plan_gives_the_same_numbers(name: str) -> None:
    model = FOLDED[name][0]().double()
    inputs = tuple(x.double() for x in batch(model))
    at = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, at, inputs, constraints={"data": 2}, cache=False)
    assert plan.repeats
    found = autopar.verify(plan, model, inputs)
    assert len(found.gradients) == len(list(model.parameters()))
    assert found.worst[1] < 1e-9


@pytest.mark.parametrize("name", WHOLE)
def test_what_repeats_in_no_block_is_traced_whole(name: str) -> None:
    """What differs is seen before anything is planned, unlike in blocks that are not called."""
    model = WHOLE[name](9)
    traced = trace(model, batch(model), training=True, fold=True)
    assert not traced.repeats
    assert len(list(traced.parameters())) == len(list(model.parameters()))


def test_the_graph_to_plan_on_does_not_grow_with_depth() -> None:
    small, large = (
        trace(model, batch(model), training=True, fold=True) for model in (Pairs(6), Pairs(16))
    )
    assert len(small.graph.nodes) == len(large.graph.nodes)
    assert len(list(small.parameters())) == len(list(large.parameters()))
    assert small.fingerprint() != large.fingerprint()


_FEW: list[Callable[[int], Stack]] = [
    Stack, Positions, Lists, Twice, Methods, Recomputed, Lowered,
    lambda n: Telling(n, lambda i: Kind.PLAIN),
]  # fmt: skip


@pytest.mark.parametrize("build", _FEW)
def test_few_blocks_run_while_a_model_is_captured(
    build: Callable[[int], Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = Mock(side_effect=F.linear)
    monkeypatch.setattr(F, "linear", linear)
    calls = []
    for blocks in (8, 16):
        linear.reset_mock()
        model = build(blocks)
        assert trace(model, batch(model), training=True, fold=True).repeats
        calls.append(linear.call_count)
    assert calls[0] == calls[1]


def test_what_is_between_blocks_is_part_of_the_block_before() -> None:
    """So a pipeline is cut behind it, and a block is recomputed with it."""
    model = Pairs(8).double()
    inputs = tuple(x.double() for x in batch(model))
    traced = trace(model, inputs, training=True)
    modules = [traced.info[n.name].module for n in traced.graph.nodes if n.op == "call_function"]
    assert all(modules.count(f"layers.{i}") >= 2 for i in range(8))
    pins = {"pipeline": {"size": 2, "microbatches": 2}, "checkpoint": "full"}
    plan = autopar.plan(model, cluster(2), inputs, constraints=pins, cache=False)
    assert plan.repeats and plan.pipeline is not None
    assert set(plan.pipeline.cuts) <= {f"layers.{i}" for i in range(1, 8)}
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-9


def test_blocks_of_several_lists_are_pinned_by_the_names_of_their_parts() -> None:
    model = Lists(8).double()
    inputs = tuple(x.double() for x in batch(model))
    pins: dict[str, Any] = {
        "checkpoint": {"attentions.3": "full", "feeds.4-5": "selective", "layers.*": "none"}
    }
    plan = autopar.plan(model, cluster(2), inputs, constraints=pins, cache=False)
    assert plan.repeats and plan.nested == ("layers+attentions+feeds",)
    assert isinstance(plan.checkpoint, dict)
    kinds = {key.rpartition(".")[2]: kind for key, kind in plan.checkpoint.items()}
    assert kinds == {"0-2": "none", "3": "full", "4-5": "selective", "6-7": "none"}
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-9
    pins = {"pipeline": {"size": 2, "microbatches": 2, "cuts": ["layers.3"]}}
    plan = autopar.plan(model, cluster(2), inputs, constraints=pins, cache=False)
    assert plan.pipeline is not None and plan.pipeline.cuts == ("layers+attentions+feeds.3",)
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-9
    pins["pipeline"]["cuts"] = ["attentions.3"]
    with pytest.raises(ConstraintError, match="inside of"):
        autopar.plan(model, cluster(2), inputs, constraints=pins, cache=False)


def test_a_model_whose_pins_keep_it_whole_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Mock(side_effect=trace)
    monkeypatch.setattr(planning, "trace", traced)
    model = Stack(8)
    pins = {"pipeline": {"size": 2, "microbatches": 2, "cuts": ["layers.3"]}}
    autopar.plan(model, cluster(2), batch(model), constraints=pins, cache=False)
    assert traced.call_count == 1


def test_a_pin_on_a_part_of_one_block_keeps_it_apart() -> None:
    """Also on that of a list of parameters, which are no modules."""
    for model, name in ((Lists(8), "feeds.4.1.weight"), (Weighted(8), "scales.4")):
        pins = {"params": {name: ["S0"]}}
        plan = autopar.plan(model, cluster(2), batch(model), constraints=pins, cache=False)
        assert not plan.repeats
        assert plan.parameters[name][0].short == "S0"


def test_a_transformer_whose_parts_are_in_four_lists() -> None:
    """Its blocks write in place to what they hand on."""
    config = transformers.XLMConfig(
        vocab_size=96, emb_dim=32, n_layers=8, n_heads=4, max_position_embeddings=16,
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = transformers.XLMWithLMHeadModel(config).double()
    ids = 3 + torch.arange(64).reshape(4, 16)
    inputs = {"input_ids": ids, "labels": ids}
    at = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, at, inputs, constraints={"data": 2}, cache=False)
    (repeat,) = plan.repeats
    assert (repeat.first, repeat.period, repeat.times) == (2, 1, 5)
    found = autopar.verify(plan, model, inputs)
    assert len(found.gradients) == len(list(model.parameters()))
    assert found.worst[1] < 1e-9


class Spare(nn.Module):
    """Has a part that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def test_parameters_that_nothing_reads_are_where_their_block_is() -> None:
    """Among them those of the blocks of a later stage that one stands for."""
    model = Stack(11, Spare).double()
    inputs = tuple(x.double() for x in batch(model))
    pins = {"pipeline": {"size": 2, "microbatches": 2, "schedule": "1f1b"}}
    plan = autopar.plan(model, cluster(2), inputs, constraints=pins, cache=False)
    assert plan.repeats
    assert set(plan.parameters) == {name for name, _ in model.named_parameters()}
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-9
