"""Tutorial: train a vision transformer with a pipeline.

    torchrun --nproc_per_node 4 examples/vit_pipeline.py
    torchrun --nproc_per_node 4 examples/vit_pipeline.py --mode interleaved
    torchrun --nproc_per_node 4 examples/vit_pipeline.py --auto

The tutorial's configuration is `NUM_MICRO_BATCHES=4, parallel=dict(pipeline=2)`, with two chunks of
the model on each rank where the schedule is interleaved. The ranks that are left split the batch.
The model is not made into an `nn.Sequential`, and no tensor shape is set: cuts are between blocks
of the unmodified module, and the plan knows all shapes.

`uniform` cuts by number of layers. `balanced` leaves the cut to the solver, which weighs the time
of each stage on this cluster, where the tutorial's weighs parameters. ViT-L/16 on CIFAR-10 has
become a small ViT on scikit-learn's digits. Adam, its learning rate and the loss are kept.
"""

from __future__ import annotations

import functools
import sys

import common
import torch

LAYERS, BATCH = 4, 16
PIPELINE = {"size": 2, "microbatches": 4}

EXAMPLE = common.Example(
    about="Train a small ViT on handwritten digits with a pipeline.",
    modes={
        "uniform": common.Mode(
            about="as many layers on each rank, 1F1B",
            constraints={
                "pipeline": {**PIPELINE, "schedule": "1f1b", "cuts": [f"vit.layers.{LAYERS // 2}"]}
            },
        ),
        "balanced": common.Mode(
            about="cut where the solver finds it best, 1F1B",
            constraints={"pipeline": {**PIPELINE, "schedule": "1f1b"}},
        ),
        "interleaved": common.Mode(
            about="two chunks of the model on each rank",
            constraints={"pipeline": {**PIPELINE, "schedule": "interleaved", "chunks": 2}},
        ),
    },
    model=functools.partial(common.tiny_vit, LAYERS),
    batches=functools.partial(common.digits, size=BATCH),
    optimizer=functools.partial(torch.optim.Adam, lr=0.001, weight_decay=0),
)

if __name__ == "__main__":
    sys.exit(common.main(EXAMPLE))
