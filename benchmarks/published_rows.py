"""Rows of published runs: what was trained, on what, and how, in the terms of the cost model.

A row names sizes and a framework; `published_frameworks` has what the framework does with a model.
What a row says that this benchmark has no model of is an error, so that it is skipped and not
predicted as something else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost_model import Cluster
from autopar.cost_model.profile import Efficiency
from benchmarks.published_frameworks import Framework, fits_kernel, framework_of
from benchmarks.published_hardware import RowError, cluster_of
from benchmarks.published_models import Shape
from benchmarks.published_schema import count, flag, normal
from benchmarks.segments import ONE_KERNEL, Execution
from benchmarks.step_cost import Recipe

__all__ = ["Job", "RowError", "job", "measured_seconds"]


_CHUNKS = ("interleave", "vp", "vpp", "virtual_pipeline", "chunks")
_LLAMA = r"llama|mistral|qwen|gemma|deepseek"
_EXPERTS = r"mixtral|moe|\d+x\d+b|dbrx|deepseek-?v[23]|grok|\da\d+b"
_NOTHING = ("", "none", "no", "false", "off", "0", "null", "n/a", "disabled", "without")
_SCHEDULES = (
    (r"gpipe|afab|all.?forward", "gpipe"),
    (r"zero|zb", "zero-bubble"),
    (r"1f1b|one.?f|interleav|flush|^$|none|null|default", "1f1b"),
)
# TransformerEngine's page on attention: cuDNN's goes before FlashAttention on Hopper. Its share of
# the peak is assumed: FlashAttention-2's 0.35 times the least speedup, 1.5, that Shah et al. 2024
# (arXiv 2407.08608) state of kernels made for Hopper
_CUDNN_ATTENTION = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A row in the terms of the cost model.

    Attributes:
        shape, length, micro_batch, dtype: the model and one microbatch.
        tensor, context: ranks that share a stage's tensors.
        sequence_parallel: tensor ranks share the sequence.
        policy: of recomputation: "none", "core", "op", "layer" or "full".
        cluster: mesh (pipeline, data x context, tensor).
    """

    shape: Shape
    length: int
    micro_batch: int
    dtype: str
    tensor: int
    context: int
    sequence_parallel: bool
    policy: str
    execution: Execution
    recipe: Recipe
    cluster: Cluster
    scatter_boundary: bool


def job(row: Mapping[str, Any]) -> Job:
    """Read a row.

    Raises:
        RowError: sizes are missing or contradict each other, or there is no model of them.
    """
    given = normal(row)
    try:
        return _job(given)
    except (KeyError, TypeError) as error:
        raise RowError(f"a key is missing or has no value: {error!r}") from error
    except (ValueError, ArithmeticError, AttributeError) as error:
        if isinstance(error, RowError):
            raise
        raise RowError(f"a value cannot be read: {error}") from error


def _job(row: dict[str, Any]) -> Job:
    _check_modelled(row)
    parallel = row["parallel"]
    tensor, pipeline, context = (count(parallel.get(k), k, 1) for k in ("tp", "pp", "cp"))
    inner = tensor * context
    gpus = count(row["gpus"], "gpus")
    data, rest = divmod(gpus, inner * pipeline)
    if rest or not gpus:
        raise RowError(f"{gpus} GPUs are no multiple of tp {tensor} x pp {pipeline} x cp {context}")
    _check_ranks(parallel, data, context)
    cluster = cluster_of(row["hardware"], (pipeline, data * context, tensor))
    flash = "bfloat16" in cluster.device.peak_flops
    framework = framework_of(str(row.get("framework") or ""), str(row.get("source") or ""), flash)
    micro = _micro_batch(row, framework, data, pipeline)
    length = count(row["seq_len"], "seq_len")
    if not length:
        raise RowError("no seq_len")
    shared = framework.sequence_parallel and length % inner == 0
    if (said := parallel.get("sequence_parallel")) is not None:
        shared = flag(said)
    dtype = _dtype(row, cluster)
    shape = _shape(row, framework, tensor, micro, dtype)
    policy = _policy(row.get("activation_ckpt"), framework)
    execution = _execution(row, framework, shape, policy, shared)
    if execution.float8_linears and "float8" not in cluster.device.peak_flops:
        raise RowError(f"{cluster.device.name} has no float8")
    host_op_s = cluster.device.host_op_s if execution.host else 0.0
    return Job(
        shape=shape,
        length=length,
        micro_batch=micro,
        dtype=dtype,
        tensor=tensor,
        context=context,
        sequence_parallel=shared,
        policy=policy,
        execution=execution,
        recipe=_recipe(row, framework, data, micro, shape.layers, host_op_s),
        cluster=_with_attention(cluster, framework),
        scatter_boundary=framework.scatter_boundary,
    )


def _check_modelled(row: dict[str, Any]) -> None:
    """That nothing in a row is of a kind that has no model here."""
    if not row["parallel"] and count(row.get("gpus"), "gpus") != 1:
        raise RowError("no parallel sizes")
    shape, name = row["shape"], str(row.get("model") or "")
    if count(shape.get("experts"), "experts") > 1 or re.search(_EXPERTS, name, re.I):
        raise RowError("a mixture of experts, which the predicted models are not")
    if count(row["parallel"].get("ep"), "ep", 1) > 1:
        raise RowError("expert parallelism, which the predicted models have no use for")
    said = f"{name} {row.get('label') or ''} {row.get('activation_ckpt') or ''}".lower()
    offloads = [k for part in (row, row["parallel"]) for k in part if "offload" in k.lower()]
    if "offload" in said or any(flag((row | row["parallel"])[key]) for key in offloads):
        raise RowError("states or activations in host memory")
    if re.search(r"\blora\b|\bpeft\b", said):
        raise RowError("adapters of a model whose weights stay")
    dim = count(shape.get("head_dim"), "head_dim")
    if dim and dim * count(shape["heads"], "heads") != count(shape["hidden"], "hidden"):
        raise RowError(f"heads of {dim} that do not make up the hidden size")


def _check_ranks(parallel: Mapping[str, Any], data: int, context: int) -> None:
    """That the ranks that a row names are as many as its GPUs leave for data."""
    named = {k: count(parallel.get(k), k, 1) for k in ("dp", "fsdp", "replicas")}
    several = {k: n for k, n in named.items() if n > 1}
    if not several or all(n in (data, data * context) for n in several.values()):
        return
    if math.prod(several.values()) in (data, data * context):
        raise RowError(f"shards on fewer ranks than share the batch: {several}")
    raise RowError(f"{several} where the other sizes leave {data} ranks for data")


def _micro_batch(row: Mapping[str, Any], framework: Framework, data: int, pipeline: int) -> int:
    """Sequences of a microbatch, from what a row says of its batch."""
    total = count(row.get("global_batch"), "global_batch")
    if micro := count(row.get("micro_batch"), "micro_batch"):
        return micro
    if parts := count(row.get("microbatches"), "microbatches"):
        return max(1, total // (data * parts))
    local = count(row.get("local_batch"), "local_batch")
    if pipeline == 1:
        micro = local or total // data  # no word of accumulation: one microbatch
    elif framework.pipeline_batch and local:
        micro = max(1, local // pipeline)
    if not micro:
        raise RowError("neither micro_batch nor local_batch says what a microbatch is")
    return micro


def _with_attention(cluster: Cluster, framework: Framework) -> Cluster:
    """The cluster with the rate of attention that the framework's kernel has."""
    device = cluster.device
    plain = device.efficiency["attention"]
    share = plain.peak_fraction * framework.attention_rate
    if framework.cudnn and framework.fused_attention and "float8" in device.peak_flops:
        share = _CUDNN_ATTENTION
    own = Efficiency(peak_fraction=share, ramp_s=plain.ramp_s)
    device = replace(device, efficiency={**device.efficiency, "attention": own})
    return replace(cluster, device=device)


def _dtype(row: Mapping[str, Any], cluster: Cluster) -> str:
    """What is not computed in float8."""
    text, rates = str(row.get("precision") or "").lower(), cluster.device.peak_flops
    if re.search(r"int8|int4|fp4|float4|tf32", text):
        raise RowError(f"no model of precision {text!r}")
    if re.search(r"fp16|float16(?<!bfloat16)|half", text):
        return "float16"
    if re.search(r"bf16|bfloat16", text):
        return "bfloat16"
    if re.search(r"fp32|float32", text) and "mixed" not in text:
        return "float32"
    return "bfloat16" if "bfloat16" in rates else "float16"


def _execution(
    row: Mapping[str, Any], framework: Framework, shape: Shape, policy: str, shared: bool
) -> Execution:
    text = f"{row.get('precision', '')} {row.get('label', '')}".lower()
    float8 = re.search(r"float8|fp8|e4m3|e5m2", text) is not None
    compiled = framework.compiled or flag(row.get("torch_compile")) or "compile" in text
    if float8 and not framework.delayed_scales:
        compiled = True  # torchao's float8, which is made for the compiler
    core = 0 if shape.fused_attention else framework.core_calls
    forward, backward = framework.checkpoint_calls if policy != "none" else (0, 0)
    return Execution(
        fuse="compiled" if compiled else framework.fuse,
        fused_norms=compiled or framework.fused_norms,
        host=not compiled,
        function_factor=framework.function_factor,
        forward_calls=core + forward,
        again_calls=core + backward,
        loss=ONE_KERNEL if compiled else framework.loss,
        float8_linears=float8,
        delayed_scales=framework.delayed_scales,
        whole_again=policy == "full" and not framework.early_stop,
        split_collectives=framework.split_linears or flag(row.get("async_tp")) or "asynctp" in text,
        async_linears=framework.async_linears == "always"
        or (framework.async_linears == "shared" and shared),
    )


def _recipe(
    row: Mapping[str, Any],
    framework: Framework,
    data: int,
    micro: int,
    layers: int,
    host_op_s: float,
) -> Recipe:
    parallel = row["parallel"]
    pipeline, context = (count(parallel.get(k), k, 1) for k in ("pp", "cp"))
    total = count(row.get("global_batch"), "global_batch", micro * data)
    microbatches = total // (micro * data)
    if microbatches * micro * data != total:
        raise RowError(f"global batch {total} is no multiple of {data} x {micro}")
    chunks = _chunks(row, layers, pipeline)
    if pipeline * chunks > layers:
        raise RowError(f"{layers} layers on {pipeline} x {chunks} stages")
    into_buffer = framework.added == "buffer"
    added = {"buffer": 1.0, "product": 0.0}.get(framework.added, 1.0 - 1.0 / microbatches)
    zero = _zero(parallel, framework, context)
    return Recipe(
        data=data * context,
        pipeline=pipeline,
        chunks=chunks,
        microbatches=microbatches,
        schedule=_schedule(parallel, chunks),
        zero=zero,
        gradient_bytes=framework.gradient_bytes,
        state_bytes=framework.state_bytes,
        added=added,
        added_bytes=2 + 2 * (framework.gradient_bytes if into_buffer else 2),
        added_s=host_op_s,
        # DeepSpeed's config.py: stage 3 alone sends beside compute unless asked for
        overlap=framework.overlap or zero == 3,
        blocking=framework.blocking,
    )


def _zero(parallel: Mapping[str, Any], framework: Framework, context: int) -> int:
    """ZeRO stage of the data ranks."""
    stage = parallel.get("zero")
    if isinstance(stage, str):
        digits = re.search(r"\d", stage)
        stage = int(digits[0]) if digits else flag(stage)
    if stage is not None:
        if not 0 <= int(stage) <= 3:
            raise RowError(f"ZeRO stage {stage}")
        return int(stage)
    if count(parallel.get("fsdp"), "fsdp", 1) > 1 or (framework.shards_context and context > 1):
        return 3
    return 1 if flag(parallel.get("distributed_optimizer")) else framework.zero


def _schedule(parallel: Mapping[str, Any], chunks: int) -> str:
    name = str(parallel.get("pp_schedule") or "").lower()
    found = next((schedule for p, schedule in _SCHEDULES if re.search(p, name)), None)
    if found is None:
        raise RowError(f"no model of pipeline schedule {name!r}")
    return "interleaved" if chunks > 1 and found != "gpipe" else found


def _chunks(row: Mapping[str, Any], layers: int, pipeline: int) -> int:
    parallel = row["parallel"]
    if pipeline == 1:
        return 1
    for name in _CHUNKS:
        if parallel.get(name):
            return count(parallel[name], name, 1)
    if each := count(parallel.get("layers_per_virtual_stage"), "layers_per_virtual_stage"):
        return max(1, layers // (pipeline * each))
    # as many as torchtitan's pipeline_parallel.py takes without a word
    return 2 if "interleave" in str(parallel.get("pp_schedule")).lower() else 1


def _policy(said: Any, framework: Framework) -> str:
    """What is computed again: "none", "core", "op", "layer" or "full"."""
    text = str(said if said is not None else "").strip().lower()
    if text in _NOTHING or re.match(r"(none|no|without|off)\b", text):
        return "none"
    if "select" in text or re.search(r"\bsac\b", text):
        if re.search(r"core|attention|attn", text):
            return "core"
        if re.search(r"layers?\b", text):
            return "layer"
        return "op" if re.search(r"\bops?\b", text) else framework.selective
    if re.search(r"core", text):
        return "core"
    if re.search(r"full|uniform|block|true|yes|\bon\b|\ball\b|every|1$", text):
        return "full"
    raise RowError(f"no model of recomputation {text!r}")


def _shape(
    row: Mapping[str, Any], framework: Framework, tensor: int, micro: int, dtype: str
) -> Shape:
    given, name = row["shape"], str(row.get("model") or "")
    hidden, heads, layers = (count(given[k], k) for k in ("hidden", "heads", "layers"))
    if not hidden or not heads or not layers or hidden % heads:
        raise RowError(f"{layers} layers of hidden size {hidden} in {heads} heads")
    narrow = count(given.get("kv_heads"), "kv_heads", heads)
    llama = bool(given.get("kv_heads")) or re.search(_LLAMA, name, re.I) is not None
    if heads % narrow:
        raise RowError(f"{heads} heads share {narrow} of keys and values")
    if tensor % narrow == 0:
        narrow = tensor  # ranks that share a head of keys and values hold a copy each
    vocab = count(given.get("vocab"), "vocab", 32000 if llama else 51200)
    usual = _llama_ffn(name, hidden, heads, narrow, layers, vocab) if llama else 4 * hidden
    length = count(row["seq_len"], "seq_len")
    fits = fits_kernel(length, micro * heads // tensor) and dtype != "float32"
    return Shape(
        kind="llama" if llama else "gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=narrow,
        ffn=count(given.get("ffn"), "ffn", usual),
        vocab=-(-vocab // (128 * tensor)) * 128 * tensor,
        fused_attention=framework.fused_attention,
        masked_softmax=fits or not framework.masked_softmax,
        dropout=0.0 if llama else framework.dropout,
        joint_gate=framework.joint_gate or tensor > 1,
    )


def _llama_ffn(name: str, hidden: int, heads: int, narrow: int, layers: int, vocab: int) -> int:
    """Two thirds of 4 H, or what the size in the model's name leaves for it."""
    usual = -(-8 * hidden // 3 // 256) * 256
    attention = hidden * hidden * (2 + 2 * narrow / heads)
    size = re.search(r"(\d+(?:\.\d+)?)b", name, re.I)
    if size is None:
        return usual
    left = (float(size[1]) * 1e9 - 2 * vocab * hidden) / layers - attention
    found = left / (3 * hidden)
    return usual if abs(found / usual - 1) < 0.1 else round(found / 1024) * 1024


def measured_seconds(row: Mapping[str, Any]) -> float | None:
    """The published step time; from tokens a second where that is what was published."""
    row = normal(row)
    for values in (row["measured"], row["derived"]):
        if seconds := _number(values.get("step_time_s")):
            return seconds
        if milliseconds := _number(values.get("step_time_ms")):
            return milliseconds / 1e3
    tokens = (_number(row.get("global_batch")) or 0.0) * (_number(row.get("seq_len")) or 0.0)
    gpus = _number(row.get("gpus")) or 0.0
    rate = (_number(row["measured"].get("tokens_per_s_per_gpu")) or 0.0) * gpus
    rate = rate or _number(row["measured"].get("tokens_per_s")) or 0.0
    return tokens / rate if tokens and rate else None


def _number(value: Any) -> float | None:
    """A finite number above 0, or None."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and number > 0 else None
