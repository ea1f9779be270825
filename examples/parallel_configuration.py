"""Tutorial: configure the combination of parallelization, one mode for each of its rows.

    torchrun --nproc_per_node 4 examples/parallel_configuration.py --mode 2d
    torchrun --nproc_per_node 8 examples/parallel_configuration.py --mode 2.5d
    torchrun --nproc_per_node 4 examples/parallel_configuration.py --auto

| tutorial | `--mode` | ranks |
| --- | --- | --- |
| no `parallel` at all: data parallel | `data` | any |
| `tensor=dict(size=4, mode="1d")` | `1d` | 4 |
| `tensor=dict(size=4, mode="2d")` | `2d` | 4 |
| `tensor=dict(size=8, mode="2.5d", depth=2)` | `2.5d` | 8 |
| `tensor=dict(size=8, mode="3d")` | `3d` | 8 |
| `pipeline=dict(size=4)`, `num_microbatches=4` | `pipeline` | 4 |
| the same with `num_model_chunks=2` | `interleaved` | 4 |
| `pipeline` of 2 and `tensor=dict(size=4, mode="2d")` | `pipeline-2d` | 8 |
| sequence parallel | `sequence` | 4 |

Ranks that a row leaves over split the batch, as in the tutorial. `sequence` is ring attention, that
of the paper which the page names (Li et al., 2021, arXiv 2105.13120). The page trains no model of
its own; here it is a small GPT-2 of eight blocks, the least for four ranks of two chunks.
"""

from __future__ import annotations

import functools
import sys

import common
import torch

LAYERS, BATCH, LENGTH = 8, 8, 32
PIPELINE = {"size": 4, "microbatches": 4}

EXAMPLE = common.Example(
    about="Train a small GPT-2 in any row of the parallel configuration page.",
    modes={
        "2d": common.Mode(
            about="2D tensor parallel on 4 ranks", constraints={"tensor": {"mode": "2d", "size": 4}}
        ),
        "data": common.Mode(about="data parallel on all ranks"),
        "1d": common.Mode(
            about="1D tensor parallel on 4 ranks", constraints={"tensor": {"mode": "1d", "size": 4}}
        ),
        "2.5d": common.Mode(
            about="2.5D tensor parallel on 8 ranks, depth 2",
            constraints={"tensor": {"mode": "2.5d", "size": 8, "depth": 2}},
        ),
        "3d": common.Mode(
            about="3D tensor parallel on 8 ranks", constraints={"tensor": {"mode": "3d", "size": 8}}
        ),
        "pipeline": common.Mode(
            about="4 stages on 4 ranks, 1F1B",
            constraints={"pipeline": {**PIPELINE, "schedule": "1f1b"}},
        ),
        "interleaved": common.Mode(
            about="8 stages on 4 ranks",
            constraints={"pipeline": {**PIPELINE, "schedule": "interleaved", "chunks": 2}},
        ),
        "pipeline-2d": common.Mode(
            about="2 stages of 2D tensor parallel on 8 ranks",
            constraints={
                "pipeline": {"size": 2, "microbatches": 4, "schedule": "1f1b"},
                "tensor": {"mode": "2d", "size": 4},
            },
        ),
        "sequence": common.Mode(
            about="ring attention on 4 ranks",
            constraints={"sequence": {"mode": "ring", "size": 4}},
        ),
    },
    model=functools.partial(common.tiny_gpt, LAYERS, LENGTH),
    batches=functools.partial(common.source_text, size=BATCH, length=LENGTH),
    optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
)

if __name__ == "__main__":
    sys.exit(common.main(EXAMPLE))
