"""What a framework does with a model, by its documentation and source and not by its results."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from benchmarks.segments import ONE_KERNEL, LossSteps

__all__ = ["FRAMEWORKS", "Framework", "fits_kernel", "framework_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """What a framework does, unless a row says otherwise.

    Attributes:
        fused_attention: no scores in memory.
        fuse, fused_norms, function_factor, loss: see `Execution`. Without the compiler torch ran
            an RMS norm op by op until it had a kernel (pytorch pull request 153666), and so did
            torchtitan's own (its pull requests 181 and 985).
        core_calls: host calls beside the ops of attention that is not one kernel, each forward.
        checkpoint_calls: host calls beside the ops of what is computed again, forward and backward.
        compiled: the model runs as a compiler's kernels.
        masked_softmax: a softmax kernel scales and masks, for the sizes of `fits_kernel`.
        sequence_parallel: tensor ranks share the sequence between linears.
        overlap: data-parallel communication runs beside compute.
        blocking: pipeline ranks wait for their messages.
        scatter_boundary: tensor ranks send parts of a boundary.
        gradient_bytes, state_bytes: of a parameter.
        added: what adds a microbatch's gradients to those before: "autograd" all but the first,
            into a parameter's own gradient; "buffer" all of them, into one of `gradient_bytes`;
            "product" the product that makes them.
        zero: stage of data ranks, unless the row names one or shards parameters.
        split_linears: collectives beside linears are sent in parts (see `Execution`).
        async_linears: see `Execution`: "always", "shared" where tensor ranks share the sequence, or
            "never".
        delayed_scales: see `Execution`.
        cudnn: attention is cuDNN's on Hopper.
        attention_rate: of its attention kernel over FlashAttention-2's, which profiles have.
        pipeline_batch: a pipeline splits the batch of a rank into as many microbatches as ranks.
        shards_context: ranks that share a sequence shard parameters too.
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
    core_calls: int = 0
    checkpoint_calls: tuple[int, int] = (0, 0)
    compiled: bool = False
    masked_softmax: bool = False
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
    zero: int = 0
    split_linears: bool = False
    async_linears: str = "never"
    delayed_scales: bool = False
    cudnn: bool = False
    attention_rate: float = 1.0
    pipeline_batch: bool = False
    shards_context: bool = False


# TransformerEngine's issue 2053 times a linear behind a Python autograd function at 2.7 times
# torch's own on the host (GB200 and GH200); Megatron's layers are made of such functions.
_PYTHON_FUNCTIONS = 2.7
# Megatron's mpu/random.py: the checkpoint is a Python autograd function that reads two generator
# states forward; backward it reads two, sets two, restores two and detaches two inputs.
_CHECKPOINT = (2 + round(_PYTHON_FUNCTIONS), 2 + 2 + 2 + 2 + round(_PYTHON_FUNCTIONS))
# Its model/transformer.py and fused_softmax.py: attention's dropout forks a generator state in four
# calls, the scores get an empty tensor, and the softmax's scale is made a tensor.
_CORE_CALLS = 4 + 1 + 1
# Megatron's mpu/cross_entropy.py: max, subtract, exp, sum and divide are kernels of their own over
# float32 logits; the rest works on masks and indices of tokens.
_LOSS = LossSteps(passes=8, kernels=5, token_ops=12, token_ops_backward=6)
# torch's cross_entropy without a compiler: log_softmax writes what nll_loss reads a number a token
# of, and backward a gradient of zeros is written and read beside what one kernel would move.
_TORCH_LOSS = LossSteps(passes=2, passes_backward=2, kernels=2)
_MEGATRON = Framework(
    fuse="pointwise",
    fused_norms=True,
    function_factor=_PYTHON_FUNCTIONS,
    core_calls=_CORE_CALLS,
    checkpoint_calls=_CHECKPOINT,
    masked_softmax=True,
    loss=_LOSS,
    state_bytes=18,
    # Megatron-LM's arguments.py: gradients are accumulated in the product unless that is turned
    # off, and dropout is 0.1 unless it is given
    added="product",
    dropout=0.1,
    joint_gate=True,
    selective="core",
    early_stop=False,
    # the backward of LinearWithGradAccumulationAndAsyncCommunication in its layers.py, which came
    # with sequence parallelism (Korthikanti et al. 2022, section 4.2.2)
    async_linears="always",
    delayed_scales=True,
    cudnn=True,
)
# NeMo's "Communication Overlap" page: the distributed optimizer, with its communication beside
# compute, and tensor parallelism's beside linears.
_NEMO = replace(_MEGATRON, zero=1, split_linears=True, async_linears="never")
_OLD_MEGATRON = replace(
    _MEGATRON,
    fused_attention=False,
    added="buffer",
    sequence_parallel=False,
    async_linears="shared",
    overlap=False,
    blocking=True,
)
_DEEPSPEED = replace(_OLD_MEGATRON, gradient_bytes=2, state_bytes=16, added="autograd")
# llm-foundry's modeling_mpt.py: flash-attn's cross entropy, one kernel each way, unless another is
# asked for; its float8 is TransformerEngine's. Its mpt-7b.yaml: attention of the first
# FlashAttention (`attn_impl: triton`), which the second is about twice as fast as (Dao 2023, arXiv
# 2307.08691), and gradients reduced in 16 bits (`mixed_precision: PURE`).
_FOUNDRY = Framework(delayed_scales=True, attention_rate=0.5, gradient_bytes=2)
# When a Megatron is of the years without FlashAttention: of its name, and of arXiv numbers.
_OLD_YEAR = r"\b20(1\d|2[0-2])\b"
_OLD_PAPER = r"arxiv[ :/.a-z]*(1\d|2[0-2])\d\d\.\d{4}"
FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    (r"deepspeed|neox", _DEEPSPEED),
    (r"nemo|megatron.?bridge", _NEMO),
    (r"megatron", _MEGATRON),
    # torchtitan's pipelining_utils.py and parallel_dims.py
    (r"titan", Framework(loss=_TORCH_LOSS, pipeline_batch=True, shards_context=True)),
    (r"foundry|mosaic|composer", _FOUNDRY),
    (r"\bjax\b|maxtext|\bxla\b|\balpa\b|\bpax", Framework(compiled=True)),
    (r"", Framework(loss=_TORCH_LOSS)),
)


def framework_of(name: str, source: str, flash: bool) -> Framework:
    """What a framework of this name does.

    Args:
        name, source: of the row.
        flash: the device has bfloat16, which FlashAttention's generations have.
    """
    found = next(framework for p, framework in FRAMEWORKS if re.search(p, name, re.I))
    if found is _MEGATRON:
        year, paper = re.search(_OLD_YEAR, name), re.search(_OLD_PAPER, source, re.I)
        dated = re.search(r"\b20\d\d\b", name)
        if year is not None or (paper is not None and dated is None) or not flash:
            return _OLD_MEGATRON
    if found.masked_softmax and not flash:
        found = replace(found, fused_attention=False)
    return found


def fits_kernel(length: int, matrices: int) -> bool:
    """Megatron's fused_softmax.py: whether its kernel takes the scores.

    Args:
        length: of a sequence.
        matrices: of scores on one device, sequences times heads.
    """
    return 16 < length <= 4096 and length % 4 == 0 and matrices % 4 == 0
