"""Passes over the emitted graph: order and buckets as printed, values, memory, time."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

import autopar
from autopar.codegen.emit import emit
from autopar.codegen.partition import split_phases
from autopar.codegen.passes import (
    OPTIONAL_PASSES,
    PASSES,
    check_passes,
    run_last_passes,
    run_passes,
)
from autopar.codegen.passes.lifetimes import Lifetimes
from autopar.codegen.passes.link_gaps import links
from autopar.codegen.passes.order import copied
from autopar.codegen.passes.sends import is_start, is_wait
from autopar.codegen.passes.sites import find_sites, key_of
from autopar.codegen.passes.symmetric import can_be_called
from autopar.codegen.program import Program
from autopar.core.blocks import Block, Blocks
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.core.work import is_view
from autopar.cost_model import Cluster
from autopar.cost_model.simulator import simulate
from autopar.errors import AutoparError
from autopar.runtime.lockstep import mesh_coords, run_lockstep
from autopar.runtime.shards import assemble, take_shard
from autopar.solver.solve import solve
from autopar.tracer.trace import normalize_inputs, trace
from autopar.verification import relative_error, verify, whole_inputs
from tests import handwritten as hw
from tests.test_matrix import MODES, REFUSED, traced_model

REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
SEQUENCE = ("megatron-sp", "ulysses", "ring")
FAST = [
    ("gpt2", "megatron-sp"),
    *(("mlp", mode) for mode in ("dp", "zero3", "1d", "2d", "megatron")),
]
MOVING = PASSES[1:]
# what is cut into pieces is then moved by none, by each and by all of the others
SUBSETS = [
    *(n for count in range(len(MOVING) + 1) for n in itertools.combinations(MOVING, count)),
    (PASSES[0],),
    *((PASSES[0], name) for name in MOVING),
    PASSES,
    OPTIONAL_PASSES,
    (*OPTIONAL_PASSES, *PASSES),
]
FEW = [names for names in SUBSETS if len(names) <= 1 or len(names) >= len(PASSES) - 1]


class Tower(nn.Module):
    """Linears without biases, one a block."""

    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


class Pairs(nn.Module):
    """Two linears a block, small beside their activations."""

    def __init__(self, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def planned(model: nn.Module, pins: dict[str, Any], ranks: int = 2, rows: int = 64) -> Any:
    """Traced step and plan of a tower on `ranks` devices."""
    traced = trace(model.double().train(), (torch.ones(rows, 8, dtype=torch.float64),))
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=ranks)
    return traced, solve(traced, cluster, constraints=Constraints.parse(pins))


def short(origin: str) -> str:
    return origin.replace("gradient of", "grad")


def outline(graph: fx.Graph) -> str:
    """Products and communication of a graph, one a line."""
    lines = []
    for node in graph.nodes:
        origin = str(node.meta.get("origin", ""))
        if is_start(node):
            members = node.meta.get("members", ((origin, 0),))
            kind = node.meta["collective"][0]
            lines.append(
                "\n    + ".join(
                    (f"{kind}: {short(members[0][0])}", *(short(o) for o, _ in members[1:]))
                )
            )
        elif is_wait(node):
            kind = node.args[0].meta["collective"][0]
            lines.append(f"    wait {kind}: {short(origin)}")
        elif node.target is torch.ops.autopar.einsum.default:
            lines.append(f"        {origin}")
    return "\n".join(lines)


DATA = """\
        einsum
        einsum_1
        einsum_2
all_gather: sum_1
    wait all_gather: sum_1
        einsum_3
        einsum_4
        einsum_5
        einsum_6
        einsum_7
all_reduce: grad layers.2.weight
    + grad layers.1.weight
    + grad layers.0.weight
    wait all_reduce: grad layers.2.weight"""

ZERO_PLAIN = """\
all_gather: einsum
    wait all_gather: einsum
        einsum
all_gather: einsum_1
    wait all_gather: einsum_1
        einsum_1
all_gather: einsum_2
    wait all_gather: einsum_2
        einsum_2
all_gather: einsum_3
    wait all_gather: einsum_3
        einsum_3
all_gather: sum_1
    wait all_gather: sum_1
all_gather: einsum_4
    wait all_gather: einsum_4
        einsum_4
        einsum_5
reduce_scatter: grad layers.1.1.weight
    wait reduce_scatter: grad layers.1.1.weight
all_gather: einsum_6
    wait all_gather: einsum_6
        einsum_6
        einsum_7
reduce_scatter: grad layers.1.0.weight
    wait reduce_scatter: grad layers.1.0.weight
all_gather: einsum_8
    wait all_gather: einsum_8
        einsum_8
        einsum_9
reduce_scatter: grad layers.0.1.weight
    wait reduce_scatter: grad layers.0.1.weight
        einsum_10
reduce_scatter: grad layers.0.0.weight
    wait reduce_scatter: grad layers.0.0.weight"""

ZERO_PREFETCH = """\
all_gather: einsum
all_gather: einsum_1
all_gather: einsum_2
all_gather: einsum_3
    wait all_gather: einsum
        einsum
    wait all_gather: einsum_1
        einsum_1
    wait all_gather: einsum_2
        einsum_2
    wait all_gather: einsum_3
        einsum_3
all_gather: sum_1
    wait all_gather: sum_1
all_gather: einsum_4
all_gather: einsum_6
all_gather: einsum_8
    wait all_gather: einsum_4
        einsum_4
        einsum_5
reduce_scatter: grad layers.1.1.weight
    wait reduce_scatter: grad layers.1.1.weight
    wait all_gather: einsum_6
        einsum_6
        einsum_7
reduce_scatter: grad layers.1.0.weight
    wait reduce_scatter: grad layers.1.0.weight
    wait all_gather: einsum_8
        einsum_8
        einsum_9
reduce_scatter: grad layers.0.1.weight
    wait reduce_scatter: grad layers.0.1.weight
        einsum_10
reduce_scatter: grad layers.0.0.weight
    wait reduce_scatter: grad layers.0.0.weight"""

ZERO_LATE = """\
all_gather: einsum
    wait all_gather: einsum
        einsum
all_gather: einsum_1
    wait all_gather: einsum_1
        einsum_1
all_gather: einsum_2
    wait all_gather: einsum_2
        einsum_2
all_gather: einsum_3
    wait all_gather: einsum_3
        einsum_3
all_gather: sum_1
    wait all_gather: sum_1
all_gather: einsum_4
    wait all_gather: einsum_4
        einsum_4
        einsum_5
reduce_scatter: grad layers.1.1.weight
all_gather: einsum_6
    wait all_gather: einsum_6
        einsum_6
        einsum_7
reduce_scatter: grad layers.1.0.weight
all_gather: einsum_8
    wait all_gather: einsum_8
        einsum_8
        einsum_9
reduce_scatter: grad layers.0.1.weight
        einsum_10
reduce_scatter: grad layers.0.0.weight
    wait reduce_scatter: grad layers.1.1.weight
    wait reduce_scatter: grad layers.1.0.weight
    wait reduce_scatter: grad layers.0.1.weight
    wait reduce_scatter: grad layers.0.0.weight"""

ZERO_ALL = """\
all_gather: einsum
    + einsum_1
all_gather: einsum_2
    + einsum_3
    wait all_gather: einsum
        einsum
        einsum_1
    wait all_gather: einsum_2
        einsum_2
        einsum_3
all_gather: sum_1
    wait all_gather: sum_1
all_gather: einsum_4
    + einsum_6
all_gather: einsum_8
    wait all_gather: einsum_4
        einsum_4
        einsum_5
        einsum_6
        einsum_7
    wait all_gather: einsum_8
        einsum_8
        einsum_9
        einsum_10
reduce_scatter: grad layers.1.1.weight
    + grad layers.1.0.weight
    + grad layers.0.1.weight
    + grad layers.0.0.weight
    wait reduce_scatter: grad layers.1.1.weight"""


def test_printed_graph_of_data_parallel() -> None:
    """Gradients go in one bucket, behind the last of them."""
    traced, plan = planned(Tower(), {"data": 2, "zero": 0})
    assert outline(emit(traced, plan, [0]).joint.graph) == DATA


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), ZERO_PLAIN),
        (("prefetch",), ZERO_PREFETCH),
        (("late",), ZERO_LATE),
        (None, ZERO_ALL),
    ],
    ids=["none", "prefetch", "late", "all"],
)
def test_printed_graph_of_zero(names: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's weights arrive in one bucket while the block before runs, where that fits."""
    monkeypatch.setattr("autopar.codegen.passes._SCRATCH", 0.0)
    traced, plan = planned(Pairs(), {"data": 2, "zero": 3})
    assert outline(emit(traced, plan, [0], passes=names).joint.graph) == expected


def _told_waits(program: Program) -> list[bool]:
    """Of each wait in the forward, whether the backward is over there."""
    nodes = list(program.joint.graph.nodes)
    last = max(i for i, n in enumerate(nodes) if n.meta.get("phase") == "backward")
    return [i > last for i, n in enumerate(nodes) if is_wait(n) and n.meta["phase"] == "forward"]


def test_the_loss_is_waited_for_behind_the_backward() -> None:
    _, _, traced = traced_model("gpt2")
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=2, mesh_shape=(2,))
    plan = solve(traced, cluster, constraints=Constraints.parse({"data": 2, "zero": 0}))
    # without `in_place`, whose lower peak makes other buckets
    sets = (["bucket", "early", "late"], ["bucket", "early"])
    late, plain = (emit(traced, plan, [0], passes=names) for names in sets)
    assert _told_waits(late)[-1] and not any(_told_waits(plain))
    seconds, waited = (simulate(p.joint.graph, cluster).exposed_s[0] for p in (late, plain))
    assert seconds < waited
    # called alone, the forward has the loss all the same
    assert any(is_wait(n) for n in late.forward.graph.nodes)


def test_a_gather_that_only_the_caller_reads_is_not_held_where_the_peak_would_rise() -> None:
    """The sum of a whole activation: its gather is waited for, and freed, where it is."""
    traced, plan = planned(Pairs(), {"data": 2, "zero": 0})
    program = emit(traced, plan, [0])
    assert _told_waits(program) == [False]
    peaks = [
        Lifetimes(p.joint.graph).peak_bytes for p in (program, emit(traced, plan, [0], passes=()))
    ]
    assert peaks[0] <= peaks[1]


def test_early_moves_a_gather_of_activations_in_front_of_what_it_does_not_need() -> None:
    """Megatron's backward gathers the saved shard of a linear's input again, for its weight."""
    traced, plan = tensor_parallel()
    plain = emit(traced, plan, [0], passes=()).joint.graph
    early = emit(traced, plan, [0], passes=["early"]).joint.graph
    assert sorted(outline(plain).splitlines()) == sorted(outline(early).splitlines())
    moved = 0
    for before, after in zip(ahead(plain), ahead(early), strict=True):
        assert after >= before
        moved += after > before
    assert moved >= 2


def tensor_parallel() -> Any:
    mode = {"tensor": {"mode": "1d", "size": 2}, "sequence": "megatron"}
    traced = traced_model("gpt2")[2]
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=2)
    return traced, solve(traced, cluster, constraints=Constraints.parse(mode))


def ahead(graph: fx.Graph) -> list[int]:
    """Ops between each collective's start and its wait, by the start's order."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    starts = [node for node in graph.nodes if is_start(node)]
    return [position[next(iter(node.users))] - position[node] for node in starts]


# --- values


@cache
def small() -> tuple[nn.Module, Any, TracedModel]:
    """Four linears with biases; sizes that 8 devices divide."""
    model = hw.Mlp(width=16, layers=2).double().train()
    inputs = {"x": torch.randn(32, 16, dtype=torch.float64), "labels": torch.arange(32) % 8}
    return model, inputs, trace(model, inputs)


class Runs:
    """A plan's programs without passes, and what any passes make of them."""

    def __init__(self, name: str, mode: str) -> None:
        ranks, constraints = MODES[mode]
        model, inputs, self.traced = small() if name == "mlp" else traced_model(name)
        cluster = Cluster.from_profile("cpu-gloo", devices_per_node=ranks)
        pins = Constraints.parse(constraints)
        self.plan: Plan = solve(self.traced, cluster, constraints=pins)
        self.coords = mesh_coords(self.plan.mesh_shape)
        self.programs: list[Program] = [
            emit(self.traced, self.plan, coords, passes=()) for coords in self.coords
        ]
        args, kwargs = normalize_inputs(inputs)
        flat = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        whole = whole_inputs(self.traced, model, flat, seed=0)
        self.feeds = [
            [take_shard(whole[s.node], layout, self.plan.mesh_shape, c) for s, layout in p.inputs]
            for p, c in zip(self.programs, self.coords, strict=True)
        ]
        self.place = Blocks(self.traced).place

    def block_of(self, name: str) -> Block | None:
        return self.place[name][0] if name in self.place else None

    def graphs(self, names: tuple[str, ...]) -> list[fx.Graph]:
        """The program of every rank with some passes."""
        return [self.graph(program, names) for program in self.programs]

    def graph(self, program: Program, names: tuple[str, ...], spare: int = 1 << 16) -> fx.Graph:
        copy = copied(program.joint.graph)
        found = run_passes(
            copy,
            names,
            sizes=self.plan.bucket_sizes(),
            block_of=self.block_of,
            links=links(self.plan),
            spare=spare,
            pieces={key_of(site.start): 2 for site in find_sites(copy)},
            calls={key_of(site.start) for site in find_sites(copy) if can_be_called(site)},
        )
        run_last_passes(found, names)
        return found

    def values(self, graphs: list[fx.Graph]) -> list[Tensor]:
        """Global value of every output."""
        results = run_lockstep(graphs, self.feeds, self.plan.mesh_shape)
        return [
            assemble([r[i] for r in results], layout, self.plan.mesh_shape)
            for i, (spec, layout) in enumerate(self.programs[0].outputs)
            if spec.node is not None
        ]


def stale(graph: fx.Graph) -> list[fx.Node]:
    """Views whose fake values show another storage than their operands': they count as copies."""
    found = []
    for node in graph.nodes:
        if not is_view(node.target) or not isinstance(node.meta["val"], Tensor):
            continue
        if "copies" in node.meta:  # of what may have other strides than its fake value
            continue
        (source,) = node.all_input_nodes
        given = source.meta["val"]
        args, kwargs = tree_map_only(fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs))
        with given.fake_mode:
            shows = node.target(*args, **kwargs)._is_view()
        if shows and node.meta["val"].untyped_storage()._cdata != given.untyped_storage()._cdata:
            found.append(node)
    return found


def sent(graph: fx.Graph) -> dict[tuple[str, int], int]:
    found: dict[tuple[str, int], int] = {}
    for node in (n for n in graph.nodes if is_start(n) or "overlapped" in n.meta):
        kind, axis, num_bytes, times = node.meta.get("collective") or node.meta["overlapped"]
        found[kind, axis] = found.get((kind, axis), 0) + num_bytes * times
    return found


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(n, m, marks=[] if (n, m) in FAST else [pytest.mark.slow])
        for n in ("mlp", "vit", "gpt2")
        for m in MODES
        if (n, m) not in REFUSED and not (n == "mlp" and m in SEQUENCE)
    ],
)
@pytest.mark.parametrize(
    "subsets",
    [pytest.param(FEW, id="few"), pytest.param(SUBSETS, id="all", marks=pytest.mark.slow)],
)
def test_no_pass_changes_a_value(name: str, mode: str, subsets: list[tuple[str, ...]]) -> None:
    """Sets of passes: outputs and gradients in float64, bytes, peak, and the two phases."""
    runs = Runs(name, mode)
    plain = runs.graphs(())
    expected = runs.values(plain)
    # of a key's bias the gradient is zero but for rounding
    floor = 1e-6 * max(float(value.norm()) for value in expected if value.is_floating_point())
    budget = Lifetimes(plain[0]).peak_bytes + (1 << 16)
    tangents = {s.node for s, _ in runs.programs[0].inputs if s.kind == "tangent"}
    for names in subsets[1:]:
        graphs = runs.graphs(names)
        found = runs.values(graphs)
        worst = max(relative_error(a, b, floor) for a, b in zip(found, expected, strict=True))
        assert worst <= 1e-9, names
        assert sent(graphs[0]) == sent(plain[0])
        # a loss that is told last may take a thousandth
        more = 1.001 if "late" in names else 1.0
        assert Lifetimes(graphs[0]).peak_bytes <= more * budget, names
        assert not stale(graphs[0]), names
        split_phases(graphs[0], runs.programs[0].num_results, tangents)


# --- memory and time


@pytest.mark.parametrize(("mode", "name"), [("zero3", "prefetch"), ("megatron-sp", "early")])
def test_what_is_moved_is_bounded_by_memory(mode: str, name: str) -> None:
    """Without room nothing moves; with more room more does, and the peak stays within it."""
    runs = Runs("vit" if mode == "zero3" else "gpt2", mode)
    (first, *_) = runs.programs
    peak = Lifetimes(first.joint.graph).peak_bytes
    distance: list[int] = []
    for spare in (-peak, 0, 1 << 14, 1 << 40):
        graph = runs.graph(first, (name,), spare)
        assert Lifetimes(graph).peak_bytes <= peak + max(spare, 0)
        distance.append(sum(ahead(graph)))
    assert distance[0] == sum(ahead(first.joint.graph))
    assert min(distance) == distance[0] < distance[1]
    assert max(distance) == distance[-1]


def test_live_bytes_of_a_graph() -> None:
    """By hand: a buffer lives from its op to the last reader of its views; a collective holds."""
    traced, plan = planned(Tower(layers=2), {"data": 2, "zero": 3})
    graph = emit(traced, plan, [0], passes=()).joint.graph
    lifetimes = Lifetimes(graph)
    gather = next(n for n in graph.nodes if is_start(n))
    here = lifetimes.position[gather]
    assert lifetimes.created(gather) == 8 * 8 * 8
    assert lifetimes.held(gather) == []  # the caller's
    assert lifetimes.live[here] == 8 * 8 * 8
    product = next(n for n in graph.nodes if n.target is torch.ops.autopar.einsum.default)
    assert lifetimes.live[lifetimes.position[product]] == 8 * 8 * 8 + 32 * 8 * 8
    reduce = next(n for n in graph.nodes if n.target is REDUCE_SCATTER)
    assert len(lifetimes.held(reduce)) == 1


class Written(nn.Module):
    """Columns of a table are written over: of a rank's share, and of a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = (self.table * 2).slice_scatter(x[:, :3], 1, 0, 3)
        part = rows[:, 2:6].select_scatter(x[:, 0], 1, 1).diagonal_scatter(x[:4, 0])
        return (part * part).sum() + rows.square().mean()


def test_a_write_to_a_part_copies_no_more_than_that_part() -> None:
    """The kernels clone the whole storage; fakes of them one that depends on the rank."""
    torch.manual_seed(0)
    model = Written()
    traced, plan = planned(model, {"data": 2})
    graphs = [emit(traced, plan, [rank], passes=()).joint.graph for rank in (0, 1)]
    scatters = [n for g in graphs for n in g.nodes if "_scatter.default" in str(n.target)]
    assert len(scatters) == 12  # of forward and backward
    for node in scatters:
        written = node.all_input_nodes[0].meta["val"]
        assert written.untyped_storage().nbytes() == written.numel() * written.element_size()
    assert any(n.target is torch.ops.aten.clone.default for n in graphs[0].nodes)
    first, second = (Lifetimes(graph).live.tolist() for graph in graphs)
    assert first == second
    assert max(verify(plan, model, (torch.randn(64, 8).double(),)).worst[1:]) < 1e-12


def test_passes_hide_communication_in_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """All together are faster than none, and no set hides more than its compute."""
    monkeypatch.setattr("autopar.codegen.passes._SCRATCH", 0.0)
    for name, mode in (("vit", "dp"), ("vit", "zero3")):
        runs = Runs(name, mode)
        cluster = Cluster.from_dict(runs.plan.cluster)
        seconds = {names: simulate(runs.graph(runs.programs[0], names), cluster) for names in FEW}
        plain, best = seconds[()], seconds[PASSES]
        assert sum(plain.hidden_s) == pytest.approx(0.0, abs=1e-12)
        if mode == "zero3":  # all of this model's reductions fit in one bucket, behind its compute
            assert sum(best.hidden_s) > 0
        assert best.step_s < 0.9 * plain.step_s
        for found in seconds.values():
            assert -1e-12 <= sum(found.hidden_s) <= found.compute_s + 1e-12


def test_plan_says_what_its_program_hides() -> None:
    model, inputs, traced = traced_model("vit")
    cluster = Cluster.from_profile("cpu-gloo", devices_per_node=4)
    plan = autopar.plan(model, cluster, inputs, constraints={"data": 4, "zero": 0}, cache=False)
    p = plan.predicted
    assert 0 < p.hidden_time_s <= p.compute_time_s + 1e-9  # moves are rounded
    assert p.step_time_s == pytest.approx(p.compute_time_s + p.exposed_time_s + p.update_s)
    found = autopar.simulate(plan, model, inputs, traced=traced)
    shares = found.hidden_shares()
    moves = [m for op in p.timeline.ops for m in op.moves if m.of.startswith("gradient of ")]
    assert len(moves) > 20
    for move in moves:
        share = shares[move.of, move.axis, move.kind]
        assert move.hidden_s == pytest.approx(share * move.seconds, rel=1e-6)
    assert sum(move.hidden_s for move in moves) > 0


def test_only_known_passes() -> None:
    assert check_passes(["late", "bucket"]) == ("bucket", "late")
    with pytest.raises(AutoparError, match="'fast': give a list of names out of decompose, bucket"):
        check_passes(["fast"])
    with pytest.raises(AutoparError, match="passes='late'"):
        check_passes("late")
