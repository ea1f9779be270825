"""Folded graphs: one block stands for many, and costs, memory, bytes and numbers are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.core.constraints import Constraints, assign_mesh
from autopar.core.graph import Repeat
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.errors import PlanMismatchError
from autopar.explanation import explain
from autopar.report.page import page_data
from autopar.solver.solve import solve
from autopar.tracer.repeats import find_repeats, longest_run
from autopar.tracer.trace import trace
from tests.folding import cluster, same_costs

TEXT = {"input_ids": 1 + torch.arange(64).reshape(4, 16), "labels": torch.ones(4, 16).long()}
IMAGES = {
    "pixel_values": torch.linspace(-1, 1, 4 * 3 * 32 * 32).reshape(4, 3, 32, 32).sin(),
    "labels": torch.arange(4),
}


def llama(layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(layers: int, **settings: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=layers, n_head=4, n_positions=16, **settings
    )
    return transformers.GPT2LMHeadModel(config)


def gemma(layers: int, period: int = 2) -> nn.Module:
    """Every so many layers one attends to everything."""
    config = transformers.Gemma3TextConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        layer_types=[
            "sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)
        ],
    )
    return transformers.Gemma3ForCausalLM(config)


def t5(layers: int) -> nn.Module:
    """Two stacks; the first block of each makes a bias, with a gradient, for all of its stack."""
    config = transformers.T5Config(
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=layers,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def resnet(layers: int) -> nn.Module:
    """Two stages that differ; blocks update statistics of batches."""
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, layers], layer_type="basic", num_labels=4
    )
    return transformers.ResNetForImageClassification(config)


def swin(layers: int) -> nn.Module:
    """The blocks of a stage take turns, and each is left out at another rate."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, window_size=4, embed_dim=8, depths=[2, layers],
        num_heads=[2, 2], num_labels=4,
    )  # fmt: skip
    return transformers.SwinForImageClassification(config)


def convnext(layers: int) -> nn.Module:
    config = transformers.ConvNextConfig(
        depths=[1, layers], hidden_sizes=[8, 16], num_stages=2, num_labels=4, drop_path_rate=0.1
    )
    return transformers.ConvNextForImageClassification(config)


class Branches(nn.Module):
    """Equal blocks that do not follow each other: nothing may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x) for part in self.parts]).square().mean()


class Numbered(nn.Module):
    """A block that depends on its place, unseen until it is traced whole."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x + self.linear(x)
        return out.tanh() if self.index == 5 else out


class NumberedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Numbered(i) for i in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Shifted(nn.Module):
    """A block with a buffer of its own, of another value in each block."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("shift", torch.arange(32.0).roll(index) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x + self.shift).tanh()


class ShiftedStack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.layers = nn.ModuleList(Shifted(i) for i in range(layers))
        self.head = nn.Linear(32, 96)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Picked(Shifted):
    """Each block picks by a list, of which each makes a constant tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x[:, :, [1, -1]].mean(-1, keepdim=True)


class PickedStack(ShiftedStack):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.layers = nn.ModuleList(Picked(i) for i in range(layers))


class Tables(nn.Module):
    """Rotary tables, which one module holds for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.arange(16 * 32.0).reshape(16, 32).sin(), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache: torch.Tensor = self.get_buffer("cache")[: x.shape[1]]
        return x * cache + x.flip(-1) * cache.cos()


class Turned(Shifted):
    """A block whose tables and activation are those of all others, too."""

    def __init__(self, index: int, tables: Tables, act: nn.Module) -> None:
        super().__init__(index)
        self.tables, self.act = tables, act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(self.tables(x)))


class TurnedStack(ShiftedStack):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        tables, act = Tables(), nn.GELU()
        self.layers = nn.ModuleList(Turned(i, tables, act) for i in range(layers))


CASES = {
    "llama": (lambda: llama(9), 1, TEXT),
    "gpt2": (lambda: gpt2(8), 1, TEXT),
    "scaled": (lambda: gpt2(8, scale_attn_by_inverse_layer_idx=True), 1, TEXT),
    "gemma": (lambda: gemma(14), 2, TEXT),
    "seldom": (lambda: gemma(15, 4), 4, TEXT),
    "t5": (lambda: t5(7), 1, TEXT),
    "buffers": (lambda: ShiftedStack(9), 1, TEXT),
    "constants": (lambda: PickedStack(9), 1, TEXT),
    "shared modules": (lambda: TurnedStack(9), 1, TEXT),
    "resnet": (lambda: resnet(8), 1, IMAGES),
    "swin": (lambda: swin(12), 2, IMAGES),
}


# the other combinations are in the slow run
_QUICK = {
    ("llama", (8,), "none"),
    ("llama", (2, 4), "full"),
    ("gpt2", (8,), "selective"),
    ("seldom", (2, 4), "selective"),
    ("gpt2", (2, 4), "none"),
    ("buffers", (8,), "none"),
    ("shared modules", (8,), "none"),
    ("shared modules", (2, 4), "full"),
    ("resnet", (2, 4), "none"),
    ("swin", (8,), "full"),
}


def _cost_cases() -> list[Any]:
    return [
        pytest.param(
            name, mesh, kind,
            marks=[] if (name, mesh, kind) in _QUICK else [pytest.mark.slow],
            id=f"{kind}-{mesh}-{name}",
        )
        for kind in ("none", "selective", "full")
        for mesh in ((8,), (2, 4))
        for name in CASES
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh", "kind"), _cost_cases())
def test_folded_costs_are_those_of_the_whole_model(
    name: str, mesh: tuple[int, ...], kind: str
) -> None:
    build, period, inputs = CASES[name]
    same_costs(build(), inputs, period, cluster(*mesh), kind)


def test_what_the_first_block_makes_for_all_of_its_stack_may_be_folded() -> None:
    traced = trace(t5(7), TEXT, training=True, fold=True)
    assert [repeat.container for repeat in traced.repeats] == ["encoder.block", "decoder.block"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n in ("gemma", "llama", "t5") else n
        for n in CASES
    ],
)
def test_folded_plan_gives_the_same_numbers(name: str) -> None:
    build, _, inputs = CASES[name]
    model = build().double()
    inputs = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    plan = autopar.plan(model, Cluster.from_profile("cpu-gloo", devices_per_node=2), inputs)
    assert plan.repeats
    found = autopar.verify(plan, model, inputs)
    assert len(found.gradients) == len(list(model.parameters()))
    assert found.worst[1] < 1e-6  # the losses compute in float32


def test_plan_time_graph_does_not_grow_with_depth() -> None:
    small, large = (trace(llama(n), TEXT, training=True, fold=True) for n in (6, 24))
    assert len(small.graph.nodes) == len(large.graph.nodes)
    assert small.fingerprint() != large.fingerprint()
    two = cluster(2, 4)
    plans = [solve(traced, two) for traced in (small, large)]
    assert len(plans[0].parameters) < len(plans[1].parameters) == len(list(llama(24).parameters()))


def test_blocks_side_by_side_are_not_folded() -> None:
    model = Branches()
    assert find_repeats(model)
    traced = trace(model, (torch.ones(4, 8),), training=True, fold=True)
    assert not traced.repeats
    assert len(list(traced.parameters())) == 18


def test_blocks_that_share_other_modules_or_have_other_hooks_are_unlike() -> None:
    model = TurnedStack(10)
    assert [r.times for r in find_repeats(model)] == [7]
    hook = model.layers[2].register_forward_pre_hook(lambda _, args: (args[0] * 3,))
    (repeat,) = find_repeats(model)
    assert (repeat.first, repeat.times) == (5, 4)  # the seven behind it
    hook.remove()
    for index, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda _, args, out, by=index: out * by)
    assert [r.times for r in find_repeats(model)] == [7]
    tables = Tables()
    for layer in list(model.layers)[5:]:
        layer.tables = tables
    assert [r.times for r in find_repeats(model)] == [2]


def test_numbers_that_count_with_the_blocks_do_not_tell_them_apart() -> None:
    class Named(Shifted):
        def __init__(self, index: int, **settings: Any) -> None:
            super().__init__(index)
            self.layer_number = index + 1
            self.prefix = f"decoder.layers.{index}"
            self.__dict__.update(settings)

    model = ShiftedStack(9)
    model.layers = nn.ModuleList(Named(i) for i in range(9))
    assert [r.times for r in find_repeats(model)] == [6]
    model.layers = nn.ModuleList(Named(i, width=64 // (1 + i)) for i in range(9))
    assert not find_repeats(model)


@pytest.mark.parametrize(
    ("kinds", "first", "period", "times"),
    [
        ("aaaaa", 2, 1, 2),
        ("aaaaaaaaa", 2, 1, 6),
        ("baaaaaaaaab", 3, 1, 6),
        ("ababababab", 4, 2, 2),
        ("abababababa", 3, 2, 3),
        ("aaaabaaaabaaaabaa", 6, 5, 2),
        ("b" + "aaab" * 3 + "aa", 5, 4, 2),
        ("aaaab" + "ab" * 4, 7, 2, 2),
    ],
)
def test_of_equal_periods_the_graph_holds_two_and_blocks_on_either_side(
    kinds: str, first: int, period: int, times: int
) -> None:
    repeat = longest_run("layers", [ord(kind) for kind in kinds])
    assert repeat == Repeat(container="layers", first=first, period=period, times=times)
    inside = range(first - period - 1, repeat.instances().stop + 1)  # with a block on either side
    assert inside.start >= 0 and inside.stop <= len(kinds)
    assert all(kinds[i] == kinds[first + (i - first) % period] for i in inside)


@pytest.mark.parametrize("kinds", ["aaaa", "abababab", "aaabaaabaaaba", "abcdefghi"])
def test_too_few_equal_periods_are_all_held(kinds: str) -> None:
    assert longest_run("layers", [ord(kind) for kind in kinds]) is None


def test_shared_blocks_are_not_folded() -> None:
    block = nn.Linear(8, 8)
    assert not find_repeats(nn.Sequential(nn.ModuleList([block] * 9)))


def test_lists_inside_of_blocks_are_no_blocks_themselves() -> None:
    class Layer(nn.Module):
        """Experts, all of which get the same; the first layer has more of them."""

        def __init__(self, experts: int) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.stack([expert(x) for expert in self.experts]).tanh().mean(0)

    class Stack(nn.Module):
        def __init__(self, experts: list[int]) -> None:
            super().__init__()
            self.layers = nn.ModuleList(map(Layer, experts))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    x = (torch.ones(4, 8),)
    assert [r.container for r in find_repeats(Stack([6] * 9))] == ["layers"]
    unlike = Stack([6, 7])
    assert len(find_repeats(unlike)) == 2
    for fold in (False, True):
        traced = trace(unlike, x, training=True, fold=fold)
        assert not traced.repeats and not traced.nested


def test_lists_inside_of_lists_too_short_to_fold() -> None:
    """As in a denoiser, whose stages have one to three attention modules of many layers each."""

    class Stage(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers)]
            self.layers = nn.ModuleList(blocks)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sigmoid()

    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList(Stage(8) for _ in range(2))
            self.mid = nn.ModuleList([Stage(8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for stage in (*self.down, *self.mid):
                x = stage(x)
            return x.square().mean()

    torch.manual_seed(0)
    model, x = Stages().double(), (torch.randn(4, 8).double(),)
    plan = autopar.plan(model, cluster(2), x, constraints={"data": 2}, cache=False)
    assert [r.container for r in plan.repeats] == ["down.0.layers", "down.1.layers", "mid.0.layers"]
    assert autopar.verify(plan, model, x).worst[1] < 1e-9


def test_blocks_that_are_not_called_are_folded() -> None:
    class Towers(ShiftedStack):
        """One tower is for inputs that are not given."""

        def __init__(self) -> None:
            super().__init__(8)
            self.images = nn.ModuleList(Shifted(i) for i in range(7))

    model = Towers().double()
    traced = trace(model, TEXT, training=True, fold=True)
    assert [(r.container, r.times) for r in traced.repeats] == [("layers", 5), ("images", 4)]
    plan = autopar.plan(model, cluster(2), TEXT, constraints={"data": 2}, cache=False)
    assert set(plan.parameters) == {name for name, _ in model.named_parameters()}
    assert autopar.verify(plan, model, TEXT).worst[1] < 1e-9


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_that_count_the_batch_are_run_in_microbatches(size: int) -> None:
    """Each counts it before the microbatches, and so do those of a stage that one stands for."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x * mask).tanh() / mask.sum()

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Counting() for _ in range(11))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, mask)
            return x.square().mean()

    torch.manual_seed(0)
    model = Stack().double()
    inputs = torch.randn(4, 8).double(), (torch.rand(4, 1) > 0.3).double()
    pins = {"pipeline": {"size": size, "microbatches": 2}}
    plan = autopar.plan(model, cluster(size), inputs, constraints=pins, cache=False)
    assert plan.repeats
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-9


def test_a_block_that_turns_out_to_differ() -> None:
    model, x = NumberedStack().double(), (torch.ones(4, 8).double(),)
    plan = autopar.plan(model, Cluster.from_profile("cpu-gloo", devices_per_node=2), x)
    assert plan.repeats  # nothing shows it before the whole model is traced
    with pytest.raises(PlanMismatchError, match=r"layers\.5"):
        autopar.verify(plan, model, x)


def test_the_model_is_left_as_it_was() -> None:
    model = llama(9)
    blocks = model.model.layers
    own = blocks[2].forward
    vars(blocks[2])["forward"] = own
    before = [id(block) for block in blocks]
    assert trace(model, TEXT, training=True, fold=True).repeats
    assert [id(block) for block in blocks] == before
    assert vars(blocks[2])["forward"] is own
    assert all("forward" not in vars(block) for i, block in enumerate(blocks) if i != 2)


def test_a_pin_on_one_block_keeps_it_apart() -> None:
    model = llama(9)
    pins = {"params": {"model.layers.6.mlp.up_proj.weight": ["S0"]}}
    at = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, at, TEXT, constraints=pins)
    assert not plan.repeats
    assert plan.parameters["model.layers.6.mlp.up_proj.weight"][0].short == "S0"
    everywhere = {"params": {"*.mlp.up_proj.weight": ["S0"]}}
    plan = autopar.plan(model, at, TEXT, constraints=everywhere)
    assert plan.repeats
    assert {plan.parameters[n][0].short for n in plan.parameters if "up_proj" in n} == {"S0"}


def test_layers_of_a_stage_are_pinned_by_their_names_or_the_stage() -> None:
    model, at = resnet(8), Cluster.from_profile("cpu-gloo", devices_per_node=2)
    stage = "resnet.encoder.stages.1"
    for key in (stage, f"{stage}.layers.0-7", f"{stage}.layers.*"):
        plan = autopar.plan(model, at, IMAGES, constraints={"checkpoint": {key: "full"}})
        assert plan.repeats and isinstance(plan.checkpoint, dict)
        assert plan.checkpoint[f"{stage}.layers.0-7"] == "full"
    found = autopar.verify(plan, model, IMAGES)
    assert found.worst[1] < 1e-4


@pytest.mark.parametrize(("layers", "ranks"), [(9, 2), (15, 8)])
def test_pipelines_are_cut_between_layers_of_a_stage(layers: int, ranks: int) -> None:
    """With eight ranks, some stages are equal but for the numbers of their layers."""
    model, at = convnext(layers).double(), cluster(ranks)
    inputs = {**IMAGES, "pixel_values": IMAGES["pixel_values"].double()}
    pins = {"pipeline": {"size": ranks, "microbatches": 4}}
    plan = autopar.plan(model, at, inputs, constraints=pins)
    assert plan.repeats and plan.pipeline is not None
    assert any(cut.startswith("convnext.encoder.stages.1.layers.") for cut in plan.pipeline.cuts)
    if ranks == 8:
        assert len({s.fingerprint for s in plan.pipeline.stages}) < 8
    found = autopar.verify(plan, model, inputs)
    assert len(found.gradients) == len(list(model.parameters()))
    assert found.worst[1] < 1e-9
    assert Plan.from_dict(plan.to_dict()).nested == ("convnext.encoder.stages.1.layers",)
    shown = {op["block"] for op in page_data(plan)["ops"]}
    assert "convnext.encoder.stages.1.layers.2" in shown
    assert "convnext.encoder.stages.1" not in shown
    for name, _ in model.named_parameters():
        told = explain(plan, param=name)
        assert (
            told.asked == name and told.choice == told.pipeline.stages[told.stage].parameters[name]
        )


def test_constraints_are_met_in_folded_plans() -> None:
    wanted = Constraints.parse({"tensor": {"mode": "1d", "size": 4}})
    traced = trace(llama(9), TEXT, training=True, fold=True)
    plan = solve(traced, cluster(4), constraints=wanted)
    assert plan.mesh_shape == tuple(r.size for r in assign_mesh(wanted, (4,)))
    assert plan.modes["model.layers.5.mlp.up_proj.weight"].startswith("1D")
