"""Tutorial: a vision transformer, from data parallel to hybrid parallel.

    torchrun --nproc_per_node 4 examples/vit_hybrid.py
    torchrun --nproc_per_node 4 examples/vit_hybrid.py --mode zero1
    torchrun --nproc_per_node 4 examples/vit_hybrid.py --auto --precision fp16

The tutorial's arguments, and what they are here:

| tutorial | here |
| --- | --- |
| `tp_size=2` | `"tensor": {"mode": "1d", "size": 2}` |
| `pp_size=2`, `num_microbatches=4` | `"pipeline": {"size": 2, "microbatches": 4}` |
| `zero_stage=1` | `"zero": 1` |
| `cpu_offload=True` | `"offload": "optimizer"` |
| `precision="fp16"` | `precision="fp16"` of `parallelize` |
| `initial_scale`, `min_scale`, … | the same names, of `autopar.LossScaler` |
| DDP over the ranks that are left | `"data"`: world // (tp_size · pp_size) |

What the tutorial rules out goes here: `zero2-pipeline` has ZeRO-2 with a pipeline, and ZeRO needs
no half precision. Bucket sizes, overlap and kernels (`zero_bucket_size_in_m`,
`overlap_communication`, `enable_flash_attention`, …) are no constraints of autopar. The learning
rate is not multiplied by the number of ranks: the global batch does not grow with them.

With the tutorial's initial scale of 2^16 the first two steps overflow and are skipped; torch warns
that the scheduler stepped before the optimizer.

google/vit-base-patch16-224 on beans has become a small ViT with random weights on scikit-learn's
digits. HybridAdam is AdamW; learning rates warm up and then follow a cosine, as in the tutorial.
"""

from __future__ import annotations

import functools
import sys

import common
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

LAYERS, BATCH = 4, 16
WARMUP_RATIO = 0.3

TENSOR = {"mode": "1d", "size": 2}
PIPELINE = {"size": 2, "microbatches": 4, "schedule": "1f1b"}


def warmup_cosine(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    warmup = max(1, int(WARMUP_RATIO * steps))
    rising = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    falling = CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup))
    return SequentialLR(optimizer, [rising, falling], milestones=[warmup])


EXAMPLE = common.Example(
    about="Train a small ViT on handwritten digits, from data parallel to hybrid parallel.",
    modes={
        "hybrid": common.Mode(
            about="pipeline 2, tensor 2, fp16; data parallel with ZeRO-1 over what is left",
            constraints={"pipeline": PIPELINE, "tensor": TENSOR, "zero": 1},
            precision="fp16",
        ),
        "ddp": common.Mode(about="data parallel only"),
        "amp": common.Mode(about="data parallel in fp16", precision="fp16"),
        "tensor": common.Mode(
            about="tensor 4", constraints={"tensor": {"mode": "1d", "size": 4}}, precision="fp16"
        ),
        "tensor-data": common.Mode(
            about="tensor 2, data parallel over what is left",
            constraints={"tensor": TENSOR},
            precision="fp16",
        ),
        "pipeline": common.Mode(
            about="pipeline 4", constraints={"pipeline": {**PIPELINE, "size": 4}}, precision="fp16"
        ),
        "zero1": common.Mode(
            about="ZeRO-1 with the optimizer's states in host memory, fp16",
            constraints={"zero": 1, "offload": "optimizer"},
            precision="fp16",
        ),
        "zero2": common.Mode(about="ZeRO-2, fp16", constraints={"zero": 2}, precision="fp16"),
        "zero3": common.Mode(about="ZeRO-3, fp16", constraints={"zero": 3}, precision="fp16"),
        "zero2-pipeline": common.Mode(
            about="ZeRO-2 with a pipeline of 2, fp16",
            constraints={"pipeline": PIPELINE, "zero": 2},
            precision="fp16",
        ),
    },
    model=functools.partial(common.tiny_vit, LAYERS),
    batches=functools.partial(common.digits, size=BATCH),
    optimizer=functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
    scheduler=warmup_cosine,
    scaling={
        "initial_scale": 2**16,
        "min_scale": 1,
        "max_scale": 2**32,
        "growth_factor": 2,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
        "hysteresis": 2,
    },
)

if __name__ == "__main__":
    sys.exit(common.main(EXAMPLE))
