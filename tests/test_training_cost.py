"""Local programs, the price of their parts, and steps put together from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.core.constraints import Constraints
from autopar.cost_model import Cluster, load_profile
from autopar.errors import ConstraintError
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from benchmarks.contention import wave_factor
from benchmarks.local_program import local_program
from benchmarks.segments import Execution, LossSteps, PassCost, SegmentCost, segment_cost
from benchmarks.step_cost import Layers, Recipe, step_cost

BATCH, WIDTH, TENSOR = 8, 64, 4
NO_LIMIT = 1 << 62


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.back = nn.Linear(WIDTH, 10)

    def forward(self, x, labels):
        x = self.front(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.back(x).flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module")
def planned():
    with torch.device("meta"):
        x, labels = torch.zeros(BATCH, 16, WIDTH), torch.zeros(BATCH, 16, dtype=torch.long)
        traced = trace(Net().train(), {"x": x, "labels": labels})
    cluster = Cluster.from_profile("a100-80g", devices_per_node=TENSOR)
    wanted = {
        "tensor": {"mode": "1d", "size": TENSOR},
        "sequence": "none",
        "checkpoint": "none",
        "params": {"*.up.weight": "S0", "*.down.weight": "S1"},
    }
    constraints = Constraints.parse(wanted)
    plan = solve(traced, cluster, constraints=constraints, memory_limit=NO_LIMIT)
    return local_program(traced, plan), plan, cluster


def test_sequence_none_is_megatron_without_sequence_parallelism(planned):
    program, plan, _ = planned
    block = program.block("layers", 1)
    assert plan.modes["layers.1.up.weight"] == "1D column"
    assert plan.modes["layers.1.down.weight"] == "1D row"
    sent = [(op.phase, m.kind, m.num_bytes) for op in block for m in op.moves]
    activation = BATCH * 16 * WIDTH * 4
    assert sorted(sent) == [
        ("backward", "all_reduce", activation),
        ("forward", "all_reduce", activation),
    ]
    whole = [op for op in block if op.op_class == "norm"]
    assert whole
    assert all(op.writes[0][1] == activation for op in whole)


def test_sequence_none_needs_tensor_parallelism(planned):
    with pytest.raises(ConstraintError, match="belongs to tensor mode 1d"):
        solve(None, planned[2], constraints=Constraints.parse({"sequence": "none"}))


def test_local_products_and_bytes_are_those_of_the_shards(planned):
    program, _, _ = planned
    rows, wide = BATCH * 16, 4 * WIDTH // TENSOR
    block = program.block("layers", 1)
    forward = [op for op in block if op.linear and op.phase == "forward"]
    assert [op.gemm for op in forward] == [(1, rows, wide, WIDTH), (1, rows, WIDTH, wide)]
    assert all(op.flops == 2 * rows * wide * WIDTH for op in forward)
    backward = [op for op in block if op.linear and op.phase == "backward"]
    assert len(backward) == 4
    assert sum(op.gradient for op in backward) == 2
    assert sum(op.folded for op in block) == 2  # both biases
    gelu = next(op for op in block if "gelu.default" in op.target)
    assert gelu.writes[0][1] == rows * wide * 4


def test_recomputation_trades_bytes_for_seconds(planned):
    program, _, cluster = planned
    block = program.block("layers", 1)
    names = [op.name for op in block if op.phase == "forward"]
    none = segment_cost(program, block, (), cluster, Execution())
    full = segment_cost(program, block, names, cluster, Execution())
    rerun = segment_cost(program, block, names, cluster, Execution(whole_again=True))
    rows = BATCH * 16
    assert full.saved_bytes == rows * WIDTH * 4  # the block's input
    assert none.saved_bytes > 2 * full.saved_bytes
    assert full.again_bytes > 0 == none.again_bytes
    assert none.recompute.seconds == 0
    # the last product is not needed again, unless the pass runs to its end
    assert 0 < full.recompute.device_s < rerun.recompute.device_s == none.forward.device_s
    assert none.forward == full.forward
    assert none.backward == full.backward


def test_fusion_saves_traffic_and_launches_and_a_captured_program_has_no_host(planned):
    program, _, cluster = planned
    block = program.block("layers", 1)

    def cost(**options):
        return segment_cost(program, block, (), cluster, Execution(**options)).forward

    plain, fused = cost(), cost(fuse="pointwise")
    assert fused.device_s < plain.device_s
    assert fused.host_s < plain.host_s
    assert cost(function_factor=2.0).host_s > plain.host_s
    assert cost(host=False).host_s == 0
    assert cost(split_collectives=True).comm_s < plain.comm_s
    assert cost(dropout_mask=False).device_s < plain.device_s
    assert plain.seconds == max(plain.device_s + plain.comm_s, plain.host_s)


def test_a_loss_in_steps_passes_over_the_logits_again(planned):
    program, _, cluster = planned
    _, back = program.around("layers")
    steps = LossSteps(passes=3, kernels=2, token_ops=4, token_ops_backward=5)
    one, many, torch_own = (
        segment_cost(program, back, (), cluster, Execution(loss=loss))
        for loss in (LossSteps(), steps, LossSteps(passes=3, passes_backward=2, kernels=2))
    )
    device = cluster.device
    memory = device.efficiency["memory"]
    launched = device.kernel_overhead_s
    logits = next(op for op in back if op.op_class == "loss" and op.phase == "forward").reads[0][1]
    passes = (2 * logits / device.memory_bandwidth + memory.ramp_s) / memory.peak_fraction
    assert many.forward.device_s - one.forward.device_s == pytest.approx(5 * launched + passes)
    assert many.backward.device_s - one.backward.device_s == pytest.approx(5 * launched)
    assert torch_own.backward.device_s - one.backward.device_s == pytest.approx(launched + passes)
    assert many.forward.host_s - one.forward.host_s == pytest.approx(5 * device.host_op_s)
    assert many.backward.host_s - one.backward.host_s == pytest.approx(5 * device.host_op_s)


def test_host_calls_beside_the_ops_and_of_collectives(planned):
    program, _, cluster = planned
    block = program.block("layers", 1)

    def cost(**changes):
        return segment_cost(program, block, (), cluster, Execution(**changes)).forward

    op_s = cluster.device.host_op_s
    assert cost(forward_calls=4).host_s - cost().host_s == pytest.approx(4 * op_s)
    sent = (cost(collective_calls=3).host_s - cost(collective_calls=2).host_s) / op_s
    assert sent == pytest.approx(round(sent))
    assert sent > 0
    apart = segment_cost(program, block, (), cluster, Execution(forward_calls=4), calls=False)
    assert apart.forward.host_s == cost().host_s


def test_axes_of_a_program_are_where_the_cluster_has_them(planned):
    program, _, cluster = planned
    block = program.block("layers", 1)
    inner = cluster.with_mesh_shape((1, *cluster.mesh_shape), ("outer", *cluster.axis_names))
    moved = segment_cost(program, block, (), inner, Execution(), axes=(1,))
    assert moved == segment_cost(program, block, (), cluster, Execution())
    assert moved != segment_cost(program, block, (), inner, Execution())


@pytest.mark.parametrize(
    ("gemm", "factor"),
    [
        ((1, 256 * 12, 128 * 9, 512), 1.0),  # 108 tiles of 256 x 128: one full wave
        ((1, 256, 128 * 109, 512), 2 * 108 / 109 / 1.0),  # one tile more: two waves
        ((1, 4096, 4096, 512), 5 * 108 * 256 * 128 / 4096**2),
    ],
)
def test_tiles_that_do_not_fill_a_wave(gemm, factor):
    device = load_profile("a100-80g").device
    found = wave_factor(device, gemm)
    assert 1.0 <= found <= factor + 1e-12
    if factor < 1.1:
        assert found == pytest.approx(factor)
    assert wave_factor(replace(device, multiprocessors=0), gemm) == 1.0


def test_a_power_limit_slows_arithmetic_by_its_cube_root():
    device = load_profile("h100-sxm").device
    slow = device.limited(device.power_w / 8)
    assert slow.peak("bfloat16") == pytest.approx(device.peak("bfloat16") / 2)
    assert slow.memory_bandwidth == device.memory_bandwidth
    assert device.limited(device.power_w + 1) is device


def _segment(seconds: float, saved: int = 1 << 20) -> SegmentCost:
    return SegmentCost(
        forward=PassCost(device_s=seconds),
        recompute=PassCost(),
        backward=PassCost(device_s=2 * seconds),
        weight_s=seconds,
        saved_bytes=saved,
        again_bytes=0,
        working_bytes=0,
    )


NOTHING = _segment(0.0, 0)
LAYERS = Layers(
    count=8,
    block=(_segment(1.0),),
    front=NOTHING,
    back=NOTHING,
    block_parameters=1 << 24,
    front_parameters=0,
    back_parameters=0,
    boundary_bytes=0.0,
)


def _cluster(pipeline: int = 1, data: int = 1) -> Cluster:
    nodes = max(1, pipeline * data // 8)
    cluster = Cluster.from_profile("a100-80g", nodes=nodes, devices_per_node=8)
    return replace(cluster, mesh_shape=(pipeline, data, 1), axis_names=("p", "d", "i"))


@pytest.mark.parametrize(
    ("schedule", "chunks", "units"),
    [("gpipe", 1, 8 + 3), ("1f1b", 1, 8 + 3), ("interleaved", 2, 8 + 1.5), ("zero-bubble", 1, 9)],
)
def test_a_pipelined_step_is_its_schedule(schedule, chunks, units):
    recipe = Recipe(pipeline=4, microbatches=8, schedule=schedule, chunks=chunks)
    cost = step_cost(LAYERS, recipe, _cluster(4))
    # two blocks a rank take 2 s forward and 4 s backward
    assert cost.pipeline.step_s == pytest.approx(6 * units, rel=1e-4)
    assert cost.step_s == pytest.approx(cost.pipeline.step_s + cost.optimizer_s)


def test_uneven_layers_go_to_the_first_stages():
    recipe = Recipe(pipeline=3, microbatches=1)
    cost = step_cost(LAYERS, recipe, _cluster(3))
    assert cost.pipeline.busy_s == pytest.approx((9.0, 9.0, 6.0))


def test_zero_stages_divide_states_and_gathering_is_hidden_beside_compute():
    whole = step_cost(LAYERS, Recipe(data=8), _cluster(1, 8))
    sharded = step_cost(LAYERS, Recipe(data=8, zero=1), _cluster(1, 8))
    gathered = step_cost(LAYERS, Recipe(data=8, zero=3), _cluster(1, 8))
    count = 8 * LAYERS.block_parameters
    assert whole.state_bytes == 16 * count
    assert sharded.state_bytes == pytest.approx((6 + 10 / 8) * count)
    assert gathered.state_bytes == pytest.approx(2 * count)
    assert gathered.data_s == 0.0
    assert whole.data_s > 0
    # blocks compute for a second and gather for less than a millisecond
    assert gathered.step_s == pytest.approx(24.0, rel=0.01)
    exposed = step_cost(LAYERS, Recipe(data=8, zero=3, overlap=False), _cluster(1, 8))
    assert exposed.step_s > gathered.step_s
    assert exposed.step_s - 24 < 0.1


def test_more_microbatches_in_flight_hold_more_memory():
    few = step_cost(LAYERS, Recipe(pipeline=4, microbatches=8), _cluster(4))
    many = step_cost(LAYERS, Recipe(pipeline=4, microbatches=8, schedule="gpipe"), _cluster(4))
    assert few.activation_bytes == 4 * 2 << 20
    assert many.activation_bytes == 8 * 2 << 20


def test_gradients_of_later_microbatches_are_added_by_the_device_or_the_host():
    layers = replace(LAYERS, block=(_segment(1e-3),), block_tensors=4)
    cluster = _cluster()
    plain = step_cost(layers, Recipe(microbatches=2), cluster)
    recipe = Recipe(microbatches=2, added=0.5, added_bytes=6)
    added = step_cost(layers, recipe, cluster)
    # 16 passes over a block, half of which add: 6 bytes of each parameter, in four kernels
    device = cluster.device
    one = 6 * layers.block_parameters / 4 / device.memory_bandwidth
    memory = device.efficiency["memory"]
    kernel = device.kernel_overhead_s + (one + memory.ramp_s) / memory.peak_fraction
    assert added.step_s - plain.step_s == pytest.approx(8 * 4 * kernel)
    slow = step_cost(layers, replace(recipe, added_s=1.0), cluster)
    # the host takes four seconds beside a backward of 2 ms
    assert slow.pipeline.step_s == pytest.approx(16 * (1e-3 + 0.5 * 4))
    sharded = replace(recipe, data=8, zero=3)
    assert step_cost(layers, sharded, _cluster(1, 8)) == step_cost(
        layers, replace(sharded, added=0.0), _cluster(1, 8)
    )
