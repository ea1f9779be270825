"""Published runs are predicted and scored."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import Outcome, outcomes, scores, summary
from benchmarks.published_frameworks import fits_kernel
from benchmarks.published_predict import Predictor, constraints_of
from benchmarks.published_rows import job
from benchmarks.segments import SegmentCost
from tests.published import LLAMA, row

ROOT = Path(__file__).parent.parent


def test_scores_that_the_softmax_kernel_does_not_take():
    """Megatron's kernel takes matrices in fours; two heads of one sequence are two."""
    assert fits_kernel(1024, 4)
    assert not fits_kernel(1024, 2)
    assert not fits_kernel(8192, 4)
    two = row(parallel={"dp": 1, "tp": 4, "pp": 2}, micro_batch=1)
    assert not job(two).shape.masked_softmax
    assert job(row(parallel={"dp": 1, "tp": 4, "pp": 2})).shape.masked_softmax
    given = job(two)
    fused = replace(given, shape=replace(given.shape, masked_softmax=True))
    predictor = Predictor()
    (apart,), (one,) = (predictor.layers(j).block for j in (given, fused))
    assert apart.forward.host_s > one.forward.host_s
    assert apart.backward.device_s > one.backward.device_s


def test_float8_with_scales_from_before_casts_less():
    hopper = {"hardware": {"gpu": "H100"}, "precision": "fp8", "activation_ckpt": "none"}
    before = job(row(framework="NeMo", **hopper))
    assert before.execution.delayed_scales
    now = replace(before, execution=replace(before.execution, delayed_scales=False))
    predictor = Predictor()
    (less,), (more,) = (predictor.layers(j).block for j in (before, now))
    assert less.forward.device_s < more.forward.device_s
    assert less.backward.device_s < more.backward.device_s
    # what attention and activation made is cast by a kernel of its own; what norms made is not
    free = replace(before, execution=replace(before.execution, float8_linears=False))
    (wide,) = predictor.layers(free).block
    assert less.forward.device_s > wide.forward.device_s  # small products gain nothing


def test_ranks_that_share_a_sequence_hold_whole_weights():
    """What shards them is priced with the step, over these ranks and data's."""
    whole = {**LLAMA, "framework": "Megatron-LM", "micro_batch": 2, "global_batch": 16}
    alone = job(row(**{**whole, "parallel": {"dp": 8}}))
    shared = job(row(**{**whole, "parallel": {"dp": 4, "cp": 2}}))
    predictor = Predictor()
    one, two = predictor.layers(alone), predictor.layers(shared)
    assert two.block_parameters == one.block_parameters
    sent = shared.cluster.intra.latency_s + shared.cluster.intra.base_latency_s
    moved = 2 * 128 // 2 * 2 * 64 * 2 * 2 / shared.cluster.intra.bandwidth  # keys and values
    assert two.block[0].forward.comm_s == pytest.approx(2 * sent + moved, rel=0.2)
    assert (shared.recipe.data, shared.cluster.mesh_shape) == (8, (1, 8, 1))
    both = {"tp": 2, "cp": 2, "dp": 2}
    tensor = {"tp": 2, "dp": 4}
    mixed = predictor.layers(job(row(**{**whole, "parallel": both})))
    split = predictor.layers(job(row(**{**whole, "parallel": tensor})))
    assert mixed.block_parameters == pytest.approx(split.block_parameters, rel=0.01)


def test_tensor_ranks_stay_on_a_node_beside_ranks_that_share_a_sequence():
    shape = {**LLAMA["shape"], "kv_heads": 8}
    sizes = {"gpus": 16, "parallel": {"tp": 8, "cp": 2}, "global_batch": 8, "micro_batch": 2}
    given = job(row(**{**LLAMA, "framework": "Megatron-LM", "shape": shape, **sizes}))
    slow = replace(given.cluster.inter, bandwidth=1e9)
    beyond = replace(given, cluster=replace(given.cluster, inter=slow))
    predictor = Predictor()
    (fast,), (late,) = (predictor.layers(j).block for j in (given, beyond))
    more_s = late.forward.comm_s - fast.forward.comm_s
    # a block gathers and scatters the whole of its input among tensor ranks, twice each
    tensor_s = 4 * 7 / 8 * 2 * 64 * 512 * 2 / slow.bandwidth
    assert 0 < more_s < tensor_s / 6  # a quarter of it where they lie over two nodes


def test_keys_and_values_of_groups_without_a_fused_kernel():
    volta = row(**{**LLAMA, "framework": "Megatron-LM", "micro_batch": 1},
                hardware={"gpu": "V100-32GB"})  # fmt: skip
    (found,) = outcomes([{**volta, "precision": "fp16", "parallel": {"dp": 8}}])
    assert not found.skipped
    assert found.predicted_s


def test_parallel_configurations_are_constraints():
    assert constraints_of(1, 1, True) == {"checkpoint": "none"}
    plain, shared = constraints_of(4, 1, False), constraints_of(4, 1, True)
    assert plain["tensor"] == {"mode": "1d", "size": 4}
    assert (plain["sequence"], shared["sequence"]) == ("none", "megatron")
    assert constraints_of(2, 2, True)["sequence"] == {"mode": "ring", "size": 2}


@pytest.fixture(scope="module")
def predicted() -> dict[str, Outcome]:
    rows = {
        "base": row(),
        "none": row(activation_ckpt="none"),
        "core": row(activation_ckpt="selective"),
        "deep": row(shape={**row()["shape"], "layers": 48}),
        "fsdp": row(**LLAMA),
        "context": row(**{**LLAMA, "parallel": {"fsdp": 4, "cp": 2}, "local_batch": 2}),
        "oom": row(
            **{**LLAMA, "shape": {**LLAMA["shape"], "layers": 200_000}},
            measured={"oom": True},
        ),
    }
    return dict(zip(rows, outcomes(list(rows.values())), strict=True))


def test_predictions_order_configurations_as_they_must(predicted):
    assert not [o.skipped for o in predicted.values() if o.skipped]
    seconds = {name: o.predicted_s for name, o in predicted.items()}
    assert seconds["none"] < seconds["core"] < seconds["base"] < seconds["deep"]
    memory = {name: o.predicted_bytes for name, o in predicted.items()}
    assert memory["base"] < memory["core"] < memory["none"]
    assert seconds["context"] > 0


@pytest.mark.parametrize(
    ("policy", "shared", "bytes_of"),
    [
        ("none", False, lambda a, s, h, t: 10 + 24 / t + 5 * a * s / (h * t)),
        ("none", True, lambda a, s, h, t: (34 + 5 * a * s / h) / t),
        ("selective", True, lambda a, s, h, t: 34 / t),
        ("selective", False, lambda a, s, h, t: 10 + 24 / t),
        ("full", True, lambda a, s, h, t: 2 / t),
        ("full", False, lambda a, s, h, t: 2),
    ],
)
def test_kept_activations_are_those_of_korthikanti(policy, shared, bytes_of):
    """Table 2 of arXiv 2205.05198, in bytes over s b h."""
    parallel = {"dp": 2, "tp": 4, "pp": 1, "sequence_parallel": shared}
    shape = {"layers": 4, "hidden": 4096, "heads": 32, "vocab": 51200}
    given = row(parallel=parallel, shape=shape, activation_ckpt=policy, seq_len=2048)
    (block,) = Predictor().layers(job(given)).block
    unit = 2048 * 2 * 4096
    # statistics of norms are not in the table
    assert block.saved_bytes / unit == pytest.approx(bytes_of(32, 2048, 4096, 4), abs=0.05)


@pytest.mark.parametrize(
    ("policy", "shared", "forward_ms", "backward_ms"),
    [
        ("none", False, 7.7, 11.9),
        ("none", True, 7.2, 11.8),
        ("full", False, 7.7, 19.5),
        ("selective", False, 7.7, 13.2),
        ("selective", True, 7.2, 13.1),
    ],
)
def test_a_layer_takes_about_what_korthikanti_measured(policy, shared, forward_ms, backward_ms):
    """Table 4 of arXiv 2205.05198: a layer of 22B on eight A100s, recomputation in the backward."""
    shape = {"layers": 48, "hidden": 6144, "heads": 64, "vocab": 51200}
    parallel = {"dp": 1, "tp": 8, "pp": 1, "sequence_parallel": shared}
    given = row(framework="Megatron-LM (2022)", shape=shape, parallel=parallel, seq_len=2048,
                micro_batch=4, global_batch=4, activation_ckpt=policy)  # fmt: skip
    (block,) = Predictor().layers(job(given)).block
    assert block.forward.seconds * 1e3 == pytest.approx(forward_ms, rel=0.12)
    assert (block.recompute + block.backward).seconds * 1e3 == pytest.approx(backward_ms, rel=0.12)


def test_the_products_of_a_linear_run_beside_each_others_collectives():
    shape = {"layers": 4, "hidden": 4096, "heads": 32, "vocab": 1024}

    def block(framework: str, **more: Any) -> SegmentCost:
        parallel = {"dp": 2, "tp": 4, "pp": 1, **more}
        given = row(framework=framework, shape=shape, parallel=parallel, activation_ckpt="none")
        (found,) = predictor.layers(job({**given, "seq_len": 1024})).block
        return found

    predictor = Predictor()
    shared = block("Megatron-LM (2022)", sequence_parallel=True)
    plain = block("Megatron-LM (2022)")
    # three of four units of the backward's bytes have a product beside them; none of the forward's
    assert 0.4 < shared.backward.comm_s / shared.forward.comm_s < 1.0
    assert plain.backward.comm_s > 0.9 * plain.forward.comm_s
    assert shared.forward.comm_s == pytest.approx(plain.forward.comm_s, rel=0.1)
    assert shared.forward.device_s < plain.forward.device_s


def test_a_fused_norm_keeps_its_input_alone():
    apart = job(row(**LLAMA, activation_ckpt="none"))
    fused = replace(apart, execution=replace(apart.execution, fused_norms=True))
    predictor = Predictor()
    (small,), (large,) = (predictor.layers(j).block for j in (fused, apart))
    assert small.saved_bytes < large.saved_bytes
    assert small.forward.device_s < large.forward.device_s


def test_out_of_memory_is_predicted(predicted):
    assert not predicted["oom"].fits
    assert predicted["base"].fits
    result = summary(list(predicted.values()))
    assert (result["oom"], result["oom_right"]) == (1, 1)
    assert result["n"] == len(predicted) - 1


def _outcomes(pairs: list[tuple[float, float]], **changes: Any) -> list[Outcome]:
    return [Outcome(row(**changes), predicted_s=p, measured_s=m) for p, m in pairs]


def test_scores_are_their_definitions():
    group = _outcomes([(2.0, 1.0), (1.0, 2.0), (3.0, 3.0), (4.0, 4.0)])
    small = _outcomes([(1.0, 2.0), (2.0, 1.0)], gpus=4, parallel={"tp": 4})
    found = scores([*group, *small])
    assert found["n"] == 6
    assert found["groups"] == 1
    assert found["mape"] == pytest.approx((1 + 0.5 + 0 + 0 + 0.5 + 1) / 6)
    assert found["kendall_tau"] == pytest.approx((5 - 1) / 6)
    assert found["top1_regret"] == pytest.approx(1.0)  # the row of 2 s was chosen, 1 s is possible
    other = _outcomes([(float(i), float(i)) for i in range(1, 9)], seq_len=256)
    both = scores([*group, *other])
    assert both["kendall_tau"] == pytest.approx((4 * 4 / 6 + 8 * 1) / 12)
    assert both["top1_regret"] == pytest.approx(0.5)


UNSEEN = {
    "data": {"dp": 16},
    "tensor": {"dp": 8, "tp": 2},
    "pipeline": {"dp": 4, "pp": 4},
    "interleaved": {"dp": 4, "pp": 4, "vpp": 3},
    "all": {"dp": 2, "tp": 4, "pp": 2, "sequence_parallel": True},
    "context": {"dp": 8, "cp": 2},
    "fsdp": {"fsdp": 16},
}


@pytest.mark.parametrize(
    ("gpu", "precision", "framework"),
    [
        ("V100-SXM2-32GB", "fp16", "Megatron-LM"),
        ("A100-SXM4-80GB", "bf16", "Megatron-LM"),
        ("H100", "bf16", "torchtitan"),
        ("H200", "fp8", "NeMo"),
    ],
)
def test_hardware_and_ways_that_no_row_has_give_plausible_shares_of_the_peak(
    gpu, precision, framework
):
    sizes = {"layers": 24, "hidden": 4096, "heads": 32, "vocab": 51200}
    given = {
        name: row(
            framework=framework, shape=sizes, hardware={"gpu": gpu}, gpus=16, parallel=parallel,
            seq_len=2048, micro_batch=1, global_batch=64, precision=precision,
        )
        for name, parallel in UNSEEN.items()
        if not (name == "context" and "V100" in gpu)  # no kernel that a ring is made of
    }  # fmt: skip
    found = dict(zip(given, outcomes(list(given.values())), strict=True))
    assert not [o.skipped for o in found.values() if o.skipped]
    forward = 24 * (12 * 4096**2 + 2048 * 4096) + 4096 * 51200  # products of a token
    for name, o in found.items():
        peak = job(given[name]).cluster.device.peak("float8" if precision == "fp8" else "float16")
        share = 4 * 2 * forward * 2048 * 64 / (o.predicted_s * 16 * peak)
        assert 0.05 < share < 0.75, name
    assert found["interleaved"].predicted_s < found["pipeline"].predicted_s


def test_names_of_any_kind_and_sizes_out_of_range_end_no_run():
    """A model's name may be anything; tensors beyond 2**63 elements are no tensors."""
    odd = [row(model={"name": "gpt"}), row(seq_len=1e30)]
    named, vast = outcomes(odd)
    assert named.predicted_s
    assert "OverflowError" in vast.skipped
    assert scores([named, vast])["n"] == 1


def test_the_command_prints_scores_as_its_last_line(tmp_path):
    file = tmp_path / "runs.json"
    rows = [row(), row(gpus=9, id="b"), row(**LLAMA)]
    common = {key: rows[0][key] for key in ("hardware", "precision")}
    short = [{k: v for k, v in some.items() if common.get(k) != v} for some in rows]
    assert all(len(some) < len(whole) for some, whole in zip(short[:2], rows, strict=False))
    file.write_text(json.dumps({"note": "", "common": common, "runs": short}))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.published", "--runs", str(file), "--json", "--jobs", "2",
         "--plot", str(tmp_path / "plot.svg")],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    last = json.loads(done.stdout.splitlines()[-1])
    assert {"mape", "kendall_tau", "top1_regret", "n", "skipped"} <= set(last)
    assert (last["n"], last["skipped"]) == (2, 1)
    assert last["mape"] == scores(outcomes(rows))["mape"]  # whatever the number of processes
    assert set(last["sets"]) == {"here", "single-node", "multi-node"}
    assert "skipped: RowError" in done.stdout
    assert (tmp_path / "plot.svg").stat().st_size > 1000
