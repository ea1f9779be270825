"""What the server of ranks has done before it forks them, so that no rank pays for it.

Importing this traces two models: what torch imports at a first trace, and fake values of what the
tests' models call, are there then. The solver stays away, as some ranks look for it.
"""

from __future__ import annotations

import gc

import torch

from autopar.tracer.trace import trace
from tests import zoo


def _warm() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)  # a fork has no threads
    # of a torch built for CUDA, autograd has threads that it would miss in a fork
    backward = not torch.backends.cuda.is_built()
    for build in (zoo.vit, zoo.gpt2):
        model, batch = build()
        trace(model, batch, training=backward)
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


_warm()
gc.collect()
gc.freeze()  # a rank that looked through it would copy its pages
