"""Tutorial: train GPT with pipeline, 1D tensor parallelism, fp16 and recomputation.

    torchrun --nproc_per_node 4 examples/gpt_hybrid.py
    torchrun --nproc_per_node 4 examples/gpt_hybrid.py --mode interleaved
    torchrun --nproc_per_node 4 examples/gpt_hybrid.py --auto

The tutorial's configuration is `NUM_MICRO_BATCHES=192, parallel=dict(pipeline=2,
tensor=dict(mode="1d", size=2)), fp16=dict(mode=AMP_TYPE.NAIVE)` with `checkpoint=True` and a
microbatch of one sequence; `interleaved` is its `NUM_CHUNKS=2`. Here the batch is 8 sequences, so
there are 8 microbatches of one. The model is transformers' GPT-2, not written in stages: its
embedding and head are one weight, which autopar holds once and sends to the other stage.

GPT-2 XL on web text has become four small blocks on the bytes of Python's standard library. Windows
have no padding, so there is no attention mask. fp16 is on fp32 master weights with dynamic loss
scaling, where the tutorial casts the model. Adam, its learning rate and weight decay are kept.
"""

from __future__ import annotations

import functools
import sys

import common
import torch

LAYERS, BATCH, LENGTH = 4, 8, 32
PIPELINE = {"size": 2, "microbatches": 8}
TENSOR = {"mode": "1d", "size": 2}

EXAMPLE = common.Example(
    about="Train a small GPT-2 on source code with hybrid parallelism.",
    modes={
        "hybrid": common.Mode(
            about="pipeline 2 × 1D tensor 2",
            constraints={
                "pipeline": {**PIPELINE, "schedule": "1f1b"},
                "tensor": TENSOR,
                "checkpoint": "full",
            },
            precision="fp16",
        ),
        "interleaved": common.Mode(
            about="the same with two chunks on each pipeline rank",
            constraints={
                "pipeline": {**PIPELINE, "schedule": "interleaved", "chunks": 2},
                "tensor": TENSOR,
                "checkpoint": "full",
            },
            precision="fp16",
        ),
        "pipeline": common.Mode(
            about="pipeline 2 only, data parallel over what is left",
            constraints={
                # a microbatch of two sequences, one for each of two ranks that share it
                "pipeline": {**PIPELINE, "microbatches": BATCH // 2, "schedule": "1f1b"},
                "checkpoint": "full",
            },
            precision="fp16",
        ),
    },
    model=functools.partial(common.tiny_gpt, LAYERS, LENGTH),
    batches=functools.partial(common.source_text, size=BATCH, length=LENGTH),
    optimizer=functools.partial(torch.optim.Adam, lr=0.00015, weight_decay=1e-2),
)

if __name__ == "__main__":
    sys.exit(common.main(EXAMPLE))
