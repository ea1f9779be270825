"""Rows of published runs are read, or refused with a reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.published import by_group, line, outcomes, scores, summary
from benchmarks.published_rows import RowError, job, measured_seconds
from tests.published import LLAMA, row


def test_a_row_becomes_a_job():
    found = job(row())
    assert found.recipe.data == 2
    assert found.recipe.microbatches == 4
    assert found.recipe.blocking
    assert found.cluster.mesh_shape == (2, 2, 2)
    assert found.policy == "full"
    assert not found.sequence_parallel
    assert found.dtype == "float16"
    assert found.shape.kind == "gpt"
    assert not found.shape.fused_attention


def test_what_a_row_says_goes_before_what_its_framework_usually_does():
    parallel = {"dp": 1, "tp": 4, "pp": 2, "interleave": 3, "sequence_parallel": True}
    found = job(row(parallel=parallel, activation_ckpt="selective recompute + SP"))
    assert found.sequence_parallel
    assert found.recipe.schedule == "interleaved"
    assert found.recipe.chunks == 3
    assert found.policy == "core"
    titan = job(row(**LLAMA, activation_ckpt="selective layer"))
    assert titan.policy == "layer"
    assert titan.recipe.zero == 3
    assert titan.shape.kind == "llama"
    float8 = {"torch_compile": True, "label": "FSDP+Float8", "hardware": {"gpu": "H100"}}
    compiled = job(row(**LLAMA, **float8))
    assert compiled.execution.float8_linears
    assert compiled.execution.fused_norms
    assert not titan.execution.fused_norms
    assert found.execution.fused_norms
    assert not compiled.execution.host
    virtual = {"dp": 1, "tp": 4, "pp": 2, "layers_per_virtual_stage": 4}
    assert job(row(parallel=virtual)).recipe.chunks == 3


def test_figures_of_the_hardware_are_taken_from_the_row():
    plain = job(row(hardware={"gpu": "H100", "gpus_per_node": 8}))
    named = job(
        row(
            hardware={
                "gpu": "H100 94GB 2.4TB/s, 500W limit",
                "gpus_per_node": 4,
                "inter": "4x IB 200Gb/s",
            }
        )
    )
    assert named.cluster.device.memory_bandwidth == 2.4e12
    assert 93 < named.cluster.memory_bytes / 2**30 < 94
    assert named.cluster.device.peak("bfloat16") < plain.cluster.device.peak("bfloat16")
    assert named.cluster.inter.bandwidth == pytest.approx(22.5e9)
    assert named.cluster.devices_per_node == 4
    for name, profile in (("V100-32GB", "v100"), ("A100", "a100-80g"), ("H200", "h200")):
        assert job(row(hardware={"gpu": name})).cluster.profile == profile


def test_links_are_those_that_the_row_names():
    def cluster(**hardware):
        return job(row(hardware={"gpu": "A100-80GB", **hardware})).cluster

    plain = cluster()
    assert cluster(intra="PCIe").intra.bandwidth == 24e9
    assert cluster(intra="PCIe 3.0").intra.bandwidth == 12e9
    assert cluster(gpu="A100 PCIe 80GB").intra.bandwidth == 24e9
    assert cluster(intra="NVLink, PCIe 4.0 to the host").intra == plain.intra
    assert cluster(intra="PCIe").inter.bandwidth == plain.inter.bandwidth
    for gpu, rate in (("V100-PCIE-32GB", 12e9), ("H100 PCIe", 48e9)):
        assert cluster(gpu=gpu).intra.bandwidth == rate
    assert cluster(inter="8 x 100 Gbps").inter.bandwidth == pytest.approx(11.25e9)
    assert cluster(inter_node_Gbps=800).inter.bandwidth == pytest.approx(11.25e9)


def test_precision_is_what_the_row_says_or_what_the_device_has():
    volta, hopper = {"gpu": "V100-32GB"}, {"gpu": "H100"}
    assert job(row(precision="bfloat16")).dtype == "bfloat16"
    assert job(row(precision="float16")).dtype == "float16"
    assert job(row(precision="fp32", cpu_offload=False)).dtype == "float32"
    assert job(row(precision="bf16 compute, fp32 reduce")).dtype == "bfloat16"
    assert job(row(precision=None)).dtype == "bfloat16"
    assert job(row(precision="mixed", hardware=volta)).dtype == "float16"
    assert job(row(precision="fp8", hardware=hopper)).execution.float8_linears
    fused = {"framework": "Megatron-LM"}
    assert job(row(**fused)).shape.fused_attention
    assert not job(row(**fused, hardware=volta)).shape.fused_attention


def test_a_microbatch_or_a_number_of_chunks_that_is_not_given():
    alone = {"tp": 2, "dp": 4, "pp": 1}
    assert job(row(micro_batch=None, parallel=alone)).recipe.microbatches == 1
    chunked = {"tp": 2, "pp": 4, "dp": 1, "pp_schedule": "Interleaved1F1B"}
    assert job(row(parallel=chunked)).recipe.chunks == 2
    assert job(row(parallel={**chunked, "vpp": 3})).recipe.chunks == 3


def test_who_adds_the_gradients_of_microbatches():
    old, titan = job(row()).recipe, job(row(**{**LLAMA, "global_batch": 16})).recipe
    speed = job(row(framework="Megatron-DeepSpeed")).recipe
    assert (old.added, old.added_bytes) == (1.0, 2 + 2 * 4)
    assert (speed.added, speed.added_bytes) == (0.75, 6)
    assert titan.added == 0.5
    assert job(row(**LLAMA)).recipe.added == 0
    assert job(row(**LLAMA, torch_compile=True)).recipe.added_s == 0 < old.added_s


def _parallel(**sizes: Any) -> dict[str, Any]:
    return {"parallel": sizes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": 9}, "no multiple of tp 2 x pp 2"),
        ({"gpus": None}, "9 GPUs|0 GPUs"),
        ({"parallel": None}, "no parallel sizes"),
        ({"parallel": "tp2"}, "no parallel sizes"),
        (_parallel(tp="two"), "tp is no number: 'two'"),
        (_parallel(tp=1.5), "tp is no whole number above 0: 1.5"),
        (_parallel(tp=2, pp=2, dp=4), "leave 2 ranks for data"),
        (_parallel(tp=1, pp=1, fsdp=4, dp_replicate=2), "shards on fewer ranks"),
        (_parallel(tp=1, pp=1, hsdp=True), "replicas is no whole number"),
        (_parallel(tp=2, pp=2, ep=2), "expert parallelism"),
        (_parallel(tp=2, pp=2, pp_schedule="DualPipeV"), "no model of pipeline schedule"),
        (_parallel(tp=1, pp=8, vpp=4), "24 layers on 8 x 4 stages"),
        (_parallel(tp=2, pp=2, zero=7), "ZeRO stage 7"),
        ({"micro_batch": -1}, "micro_batch is no whole number above 0: -1"),
        ({"seq_len": 0}, "seq_len is no whole number"),
        ({"seq_len": None}, "no seq_len"),
        ({"activation_ckpt": "the odd ones"}, "no model of recomputation 'the odd ones'"),
        ({"precision": "int8"}, "no model of precision 'int8'"),
        ({"precision": "tf32"}, "no model of precision 'tf32'"),
        ({"cpu_offload": True}, "in host memory"),
        ({"activation_ckpt": "full, offloaded"}, "in host memory"),
        ({"label": "LoRA, packed"}, "adapters"),
        ({"model": "mixtral-8x7b"}, "mixture of experts"),
        ({"hardware": "MI300X"}, "no profile for 'MI300X'"),
        ({"hardware": {"gpu": "RTX A1000"}}, "no profile for 'RTX A1000'"),
        ({"hardware": None}, "no profile for ''"),
        ({"shape": {"layers": 24, "hidden": 510, "heads": 8}}, "hidden size 510 in 8 heads"),
        ({"shape": {"layers": 24, "hidden": 512, "heads": 8, "kv_heads": 3}}, "share 3"),
        ({"shape": {"layers": 24, "hidden": 512, "heads": 8, "head_dim": 128}}, "heads of 128"),
        ({"global_batch": 15}, "global batch 15"),
        ({"micro_batch": None}, "neither micro_batch nor local_batch"),
        ({"micro_batch": None, "local_batch": 8}, "neither micro_batch nor local_batch"),
        ({"precision": "fp8"}, "A100 SXM4 80GB has no float8"),
        ({"hardware": {"gpu": "B900"}}, "no profile for 'B900'"),
        ({"shape": {"layers": 2}}, "'hidden'"),
        ({"shape": {"layers": 2, "hidden": 4, "heads": 1, "experts": 8}}, "experts"),
    ],
)
def test_rows_that_cannot_be_read_are_skipped_with_the_reason(changes, said):
    with pytest.raises(RowError, match=said):
        job(row(**changes))
    (found,) = outcomes([row(**changes)])
    assert re.search(said, found.skipped)
    assert "\n" not in found.skipped
    assert scores([found])["skipped"] == 1
    assert summary([found])["mape"] is None
    assert by_group([found]) == {}
    assert found.skipped in line(found)


def test_rows_of_other_kinds_are_skipped_too():
    for odd in (None, 3, [], {}):
        (found,) = outcomes([odd])
        assert found.skipped
        assert summary([found])["skipped"] == 1
        assert found.skipped in line(found)


def test_other_spellings_of_a_row_are_the_same_row():
    shape = {"num_layers": 24, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1024}
    other = row(
        shape={**shape, "intermediate_size": 2048},
        parallel={
            "data_parallel_size": "2",
            "tensor_parallel": 2.0,
            "pipeline_parallel_degree": 2,
            "schedule": None,
        },
        hardware="A100-80GB",
    )
    for name, others in (("seq_len", "sequence_length"), ("micro_batch", "mbs"),
                         ("global_batch", "global_batch_size"), ("gpus", "num_gpus"),
                         ("activation_ckpt", "recompute")):  # fmt: skip
        other[others] = other.pop(name)
    assert job(other) == job(row())
    assert measured_seconds({**other, "measured": {"iteration_time_ms": 100}}) == 0.1
    assert measured_seconds(row(measured={"tokens_per_second": 512})) == 16 * 128 / 512
    accumulated = row(micro_batch=None, gradient_accumulation_steps=4)
    assert job(accumulated).micro_batch == 2
    capitals = {"DP": 2, "TP": 2, "PP": 2, "PP_schedule": "1F1B"}
    assert job(row(parallel=capitals)).cluster == job(row()).cluster
    for nothing in (0, -1, "nan", float("inf"), "soon"):
        assert measured_seconds(row(measured={"step_time_s": nothing})) is None
    # a name of this benchmark goes before another that says the same
    assert job(row(mbs=4)).micro_batch == 2


@pytest.mark.parametrize(
    ("said", "policy"),
    [
        (None, "none"),
        (False, "none"),
        ("No recomputation", "none"),
        ("off", "none"),
        (True, "full"),
        ("uniform", "full"),
        ("full recompute, no SP", "full"),
        ("selective", "core"),
        ("core_attn", "core"),
        ("selective, every layer", "layer"),
        ("per-op SAC", "op"),
    ],
)
def test_ways_to_say_what_is_computed_again(said, policy):
    assert job(row(framework="NeMo 24.07", activation_ckpt=said)).policy == policy


def test_zero_stages_are_those_that_a_row_or_its_framework_names():
    def stage(framework="Megatron-LM", **parallel):
        return job(row(framework=framework, parallel={"tp": 2, "pp": 2, **parallel})).recipe.zero

    assert stage() == 0
    assert stage("NeMo") == 1
    assert stage(zero="ZeRO-2") == 2
    assert stage(zero_stage=1) == 1
    assert stage(use_distributed_optimizer=True) == 1
    assert stage("NeMo", zero=0) == 0
    assert stage(fsdp=True) == 3
    shared = {"fsdp": 1, "cp": 8}
    assert job(row(**{**LLAMA, "parallel": shared})).recipe.zero == 3


def test_megatrons_of_before_and_after_flash_attention():
    new, nemo = job(row(framework="Megatron-LM")), job(row(framework="NeMo 24.07"))
    assert new.shape.fused_attention
    assert new.recipe.added == 0
    assert not new.execution.split_collectives
    assert nemo.execution.split_collectives
    for changes in (
        {"framework": "Megatron-LM (2021)"},
        {"framework": "Megatron-LM", "source": "arXiv 2104.04473 table 2"},
        {"framework": "Megatron-LM", "hardware": {"gpu": "V100-32GB"}},
    ):
        old = job(row(**changes))
        assert not old.shape.fused_attention
        assert old.recipe.added == 1
        assert old.recipe.blocking
    assert job(row(framework="Megatron-LM 2024", source="arXiv 2104.04473")).shape.fused_attention


def test_a_pipeline_of_torchtitan_splits_the_batch_of_a_rank():
    piped = {**LLAMA, "parallel": {"fsdp": 2, "pp": 4}, "local_batch": 8, "global_batch": 16}
    found = job(row(**piped))
    assert (found.micro_batch, found.recipe.microbatches) == (2, 4)


def test_variants_of_a_device():
    def device(name):
        return job(row(hardware={"gpu": name, "gpus_per_node": 8})).cluster

    plain = device("H100")
    assert device("H800").intra.bandwidth == pytest.approx(plain.intra.bandwidth * 4 / 9)
    assert device("A800").intra.bandwidth == pytest.approx(device("A100").intra.bandwidth * 2 / 3)
    card = device("NVIDIA H100 PCIe").device
    assert card.peak("bfloat16") == pytest.approx(756e12)
    assert (card.memory_bandwidth, card.multiprocessors) == (2e12, 114)
    assert device("GH200 96GB").device.peak("bfloat16") == plain.device.peak("bfloat16")
    assert device("GH200").profile == "h100-sxm"
    assert device("A100-PCIE-80GB").device.memory_bandwidth == 1.935e12


def test_a_feed_forward_width_that_is_not_given():
    shape = {"layers": 40, "hidden": 5120, "heads": 40, "vocab": 32000}
    assert job(row(**{**LLAMA, "shape": shape, "model": "llama2-13b"})).shape.ffn == 13824
    shape = {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "vocab": 32000}
    found = job(row(**{**LLAMA, "shape": shape, "model": "llama2-70b"})).shape.ffn
    assert found == pytest.approx(28672, rel=0.04)


def test_step_time_from_tokens_a_second():
    assert measured_seconds(row()) == 0.1
    tokens = row(measured={"tokens_per_s_per_gpu": 64})
    assert measured_seconds(tokens) == 16 * 128 / (64 * 8)
    assert measured_seconds(row(measured={"oom": True})) is None


def test_one_device_needs_no_parallel_sizes():
    alone = {"gpus": 1, "global_batch": 4, "parallel": {}}
    assert job(row(**alone)).recipe.microbatches == 2
    with pytest.raises(RowError, match="no parallel sizes"):
        job(row(parallel={}))


def test_tensor_ranks_hold_a_head_of_keys_and_values_each():
    """Where there are fewer heads of keys and values than ranks, ranks hold copies."""
    shape = LLAMA["shape"]

    def heads(tensor: int, narrow: int) -> int:
        sizes = {"parallel": {"tp": tensor}, "shape": {**shape, "kv_heads": narrow}}
        return job(row(**{**LLAMA, **sizes})).shape.kv_heads

    assert [heads(1, 2), heads(2, 2), heads(4, 2), heads(8, 1)] == [2, 2, 4, 8]


def test_ranks_share_a_sequence_that_they_divide():
    def shared(length: int, **parallel: Any) -> bool:
        sizes = {"tp": 2, "pp": 2, **parallel}
        return job(row(framework="Megatron-LM", seq_len=length, parallel=sizes)).sequence_parallel

    assert shared(128)
    assert not shared(127)
    assert shared(127, sequence_parallel=True)  # said, so that the row is refused when planned


def test_float8_outside_of_transformer_engine_is_compiled():
    hopper = {"hardware": {"gpu": "H100"}, "precision": "fp8"}
    for framework, compiled in (("PyTorch FSDP", True), ("torchtitan", True), ("NeMo", False),
                                ("llm-foundry (FSDP)", False), ("Megatron-LM", False)):  # fmt: skip
        execution = job(row(framework=framework, **hopper)).execution
        assert execution.host is not compiled
        assert execution.float8_linears
    assert job(row(framework="MaxText")).execution.fuse == "compiled"


def test_frameworks_compute_the_loss_in_their_own_steps():
    def passes(framework: str) -> int:
        return job(row(framework=framework)).execution.loss.passes_backward

    assert (passes("torchtitan"), passes("llm-foundry (FSDP)")) == (2, 0)


def test_attention_is_of_the_kernel_that_a_framework_has():
    def share(framework: str, gpu: str) -> float:
        cluster = job(row(framework=framework, hardware={"gpu": gpu})).cluster
        return cluster.device.efficiency["attention"].peak_fraction

    second = share("torchtitan", "A100")
    assert share("Megatron-LM", "A100") == second
    assert share("llm-foundry (FSDP)", "A100") == second / 2  # the first FlashAttention
    assert share("Megatron-LM", "H100") == 0.5 > share("torchtitan", "H100")  # cuDNN's


def test_deepspeed_sends_beside_compute_in_its_third_stage():
    def overlap(stage: int) -> bool:
        sizes = {"tp": 1, "pp": 1, "dp": 8, "zero": stage}
        return job(row(framework="DeepSpeed", parallel=sizes)).recipe.overlap

    assert [overlap(stage) for stage in range(4)] == [False, False, False, True]
