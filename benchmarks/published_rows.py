"""Rows of published runs: what was trained, on what, and how, in the terms of the cost model.

A row names sizes and a framework. What the framework does with a model (its attention kernel, what
it fuses, whether it overlaps) is in `FRAMEWORKS`, by its documentation and not by its results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost_model import Cluster
from autopar.cost_model.segments import ONE_KERNEL, Execution, LossSteps
from autopar.cost_model.training import Recipe
from benchmarks.published_hardware import RowError, cluster_of
from benchmarks.published_models import Shape

__all__ = ["Job", "RowError", "job", "measured_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """What a framework does, unless a row says otherwise.

    Attributes:
        fused_attention: no scores in memory.
        fuse, fused_norms, function_factor, again_calls, loss: see `Execution`. Without the
            compiler torch ran an RMS norm op by op until it had a kernel (pytorch pull request
            153666), and so did torchtitan's own (its pull requests 181 and 985).
        sequence_parallel: tensor ranks share the sequence between linears.
        overlap: data-parallel communication runs beside compute.
        blocking: pipeline ranks wait for their messages.
        scatter_boundary: tensor ranks send parts of a boundary.
        gradient_bytes, state_bytes: of a parameter.
        added: what adds a microbatch's gradients to those before: "autograd" all but the first,
            into a parameter's own gradient; "buffer" all of them, into one of `gradient_bytes`.
        dropout: in GPT models.
        joint_gate: Llama's gate and up projection are one product, as they are in `Shape` where
            tensor ranks share them.
        selective: what "selective" recomputes.
        early_stop: recomputation ends with the last tensor that the backward reads.
    """

    fused_attention: bool = True
    fuse: str = "none"
    fused_norms: bool = False
    function_factor: float = 1.0
    again_calls: int = 0
    loss: LossSteps = ONE_KERNEL
    sequence_parallel: bool = True
    overlap: bool = True
    blocking: bool = False
    scatter_boundary: bool = True
    gradient_bytes: int = 4
    state_bytes: int = 16
    added: str = "autograd"
    dropout: float = 0.0
    joint_gate: bool = False
    selective: str = "op"
    early_stop: bool = True


# TransformerEngine's issue 2053 times a linear behind a Python autograd function at 2.7 times
# torch's own on the host (GB200 and GH200); Megatron's layers are made of such functions.
_PYTHON_FUNCTIONS = 2.7
# Megatron's mpu/random.py: the checkpoint function reads two generator states forward; backward it
# reads two, sets two, restores two and detaches two inputs; attention's dropout forks a state in
# both passes, in four calls; and it is a Python autograd function itself, forward and backward.
_AGAIN_CALLS = 2 + 6 + 2 + 2 * 4 + round(2 * _PYTHON_FUNCTIONS)
# Megatron's mpu/cross_entropy.py: max, subtract, exp, sum and divide are kernels of their own over
# float32 logits; the rest works on masks and indices of tokens.
_LOSS = LossSteps(passes=8, kernels=5, token_ops=12, token_ops_backward=6)
_MEGATRON = Framework(
    fuse="pointwise",
    fused_norms=True,
    function_factor=_PYTHON_FUNCTIONS,
    again_calls=_AGAIN_CALLS,
    loss=_LOSS,
    state_bytes=18,
    added="buffer",
    joint_gate=True,
    selective="core",
    early_stop=False,
)
_OLD_MEGATRON = replace(
    _MEGATRON,
    fused_attention=False,
    sequence_parallel=False,
    overlap=False,
    blocking=True,
    dropout=0.1,
)
_DEEPSPEED = replace(_OLD_MEGATRON, gradient_bytes=2, state_bytes=16, added="autograd")
FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    (r"deepspeed", _DEEPSPEED),
    (r"megatron.*20(1\d|2[0-2])", _OLD_MEGATRON),
    (r"megatron|nemo", _MEGATRON),
    (r"", Framework()),
)
_CHUNKS = ("interleave", "vp", "vpp", "virtual_pipeline", "chunks")
_LLAMA = r"llama|mistral|mixtral|qwen|gemma|deepseek"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A row in the terms of the cost model.

    Attributes:
        shape, length, micro_batch, dtype: the model and one microbatch.
        tensor, context: ranks that share a stage's tensors.
        sequence_parallel: tensor ranks share the sequence.
        policy: of recomputation: "none", "core", "op", "layer" or "full".
        cluster: mesh (pipeline, data, tensor x context).
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
        RowError: sizes are missing or contradict each other.
    """
    try:
        return _job(row)
    except (KeyError, TypeError) as error:
        raise RowError(f"a key is missing or has no value: {error!r}") from error


def _job(row: Mapping[str, Any]) -> Job:
    if row["shape"].get("experts") or row["shape"].get("num_experts"):
        raise RowError("a mixture of experts, which the predicted models are not")
    framework = next(f for p, f in FRAMEWORKS if re.search(p, str(row.get("framework", "")), re.I))
    parallel = row["parallel"]
    tensor, pipeline, context = (int(parallel.get(k) or 1) for k in ("tp", "pp", "cp"))
    inner = tensor * context
    data, rest = divmod(int(row["gpus"]), inner * pipeline)
    if rest:
        raise RowError(f"{row['gpus']} GPUs are no multiple of tp {tensor} x pp {pipeline} x cp")
    micro = int(row.get("micro_batch") or row.get("local_batch") or 0)
    if not micro and pipeline == 1:  # no pipeline and no word of accumulation: one microbatch
        micro = int(row.get("global_batch") or 0) // data
    if not micro:
        raise RowError("neither micro_batch nor local_batch")
    sharing = parallel.get("sequence_parallel")
    cluster = cluster_of(row["hardware"], (pipeline, data, inner))
    if framework.function_factor > 1 and not _flash(cluster):
        framework = replace(framework, fused_attention=False)
    shape = _shape(row, framework, tensor)
    policy = _policy(str(row.get("activation_ckpt") or "none").lower(), framework)
    execution = _execution(row, framework, policy)
    host_op_s = cluster.device.host_op_s if execution.host else 0.0
    return Job(
        shape=shape,
        length=int(row["seq_len"]),
        micro_batch=micro,
        dtype=_dtype(row, execution, cluster),
        tensor=tensor,
        context=context,
        sequence_parallel=framework.sequence_parallel if sharing is None else bool(sharing),
        policy=policy,
        execution=execution,
        recipe=_recipe(row, framework, data, micro, shape.layers, host_op_s),
        cluster=cluster,
        scatter_boundary=framework.scatter_boundary,
    )


def _flash(cluster: Cluster) -> bool:
    """Megatron's fused attention is FlashAttention's, which needs bfloat16's generation."""
    return "bfloat16" in cluster.device.peak_flops


def _dtype(row: Mapping[str, Any], execution: Execution, cluster: Cluster) -> str:
    """What is not computed in float8."""
    text, rates = str(row.get("precision") or "").lower(), cluster.device.peak_flops
    if execution.float8_linears and "float8" not in rates:
        raise RowError(f"{cluster.device.name} has no float8")
    if re.search(r"fp16|float16(?<!bfloat16)|half", text):
        return "float16"
    if re.search(r"bf16|bfloat16", text):
        return "bfloat16"
    if re.search(r"fp32|float32|tf32", text) and "mixed" not in text:
        return "float32"
    return "bfloat16" if "bfloat16" in rates else "float16"


def _execution(row: Mapping[str, Any], framework: Framework, policy: str) -> Execution:
    text = f"{row.get('precision', '')} {row.get('label', '')}".lower()
    float8 = "float8" in text or "fp8" in text
    compiled = bool(row.get("torch_compile")) or "compile" in text
    if float8 and "titan" in str(row.get("framework", "")):
        compiled = True  # its float8 is made for the compiler
    return Execution(
        fuse="compiled" if compiled else framework.fuse,
        fused_norms=compiled or framework.fused_norms,
        host=not compiled,
        function_factor=framework.function_factor,
        again_calls=framework.again_calls,
        loss=framework.loss,
        float8_linears=float8,
        whole_again=policy == "full" and not framework.early_stop,
        split_collectives=bool(row.get("async_tp")) or "asynctp" in text,
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
    pipeline, context = int(parallel.get("pp") or 1), int(parallel.get("cp") or 1)
    total = int(row.get("global_batch") or micro * data)
    microbatches = total // (micro * data)
    if microbatches * micro * data != total:
        raise RowError(f"global batch {total} is no multiple of {data} x {micro}")
    zero = parallel.get("zero", parallel.get("zero_stage"))
    if zero is None:
        zero = 3 if int(parallel.get("fsdp") or 1) > 1 else 0
    chunks = _chunks(row, layers, pipeline)
    into_buffer = framework.added == "buffer"
    return Recipe(
        data=data * (context if zero == 3 else 1),
        pipeline=pipeline,
        chunks=chunks,
        microbatches=microbatches,
        schedule=_schedule(parallel, chunks),
        zero=int(zero),
        gradient_bytes=framework.gradient_bytes,
        state_bytes=framework.state_bytes,
        added=1.0 if into_buffer else 1.0 - 1.0 / microbatches,
        added_bytes=2 + 2 * (framework.gradient_bytes if into_buffer else 2),
        added_s=host_op_s,
        overlap=framework.overlap,
        blocking=framework.blocking,
    )


def _schedule(parallel: Mapping[str, Any], chunks: int) -> str:
    name = str(parallel.get("pp_schedule") or "").lower()
    if chunks > 1:
        return "interleaved"
    if "gpipe" in name:
        return "gpipe"
    return "zero-bubble" if "zero" in name or "zb" in name else "1f1b"


def _chunks(row: Mapping[str, Any], layers: int, pipeline: int) -> int:
    parallel = row["parallel"]
    if pipeline == 1:
        return 1
    for name in _CHUNKS:
        if parallel.get(name):
            return int(parallel[name])
    if parallel.get("layers_per_virtual_stage"):
        return max(1, layers // (pipeline * int(parallel["layers_per_virtual_stage"])))
    # as many as torchtitan's pipeline_parallel.py takes without a word
    return 2 if "interleave" in str(parallel.get("pp_schedule")).lower() else 1


def _policy(text: str, framework: Framework) -> str:
    if "select" in text:
        if "layer" in text:
            return "layer"
        return "op" if "op" in text.split() else framework.selective
    return "full" if "full" in text else "none"


def _shape(row: Mapping[str, Any], framework: Framework, tensor: int) -> Shape:
    given, name = row["shape"], str(row.get("model", ""))
    hidden, heads, layers = int(given["hidden"]), int(given["heads"]), int(given["layers"])
    llama = bool(given.get("kv_heads")) or re.search(_LLAMA, name, re.I) is not None
    narrow = int(given.get("kv_heads") or heads)
    vocab = int(given.get("vocab") or (32000 if llama else 51200))
    usual = _llama_ffn(name, hidden, heads, narrow, layers, vocab) if llama else 4 * hidden
    return Shape(
        kind="llama" if llama else "gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=narrow,
        ffn=int(given.get("ffn") or usual),
        vocab=-(-vocab // (128 * tensor)) * 128 * tensor,
        fused_attention=framework.fused_attention,
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
    for values in (row.get("measured") or {}, row.get("derived") or {}):
        if values.get("step_time_s"):
            return float(values["step_time_s"])
    rate = (row.get("measured") or {}).get("tokens_per_s_per_gpu")
    if rate and row.get("global_batch"):
        return float(row["global_batch"] * row["seq_len"] / (rate * row["gpus"]))
    return None
