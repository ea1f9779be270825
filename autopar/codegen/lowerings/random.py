"""Dropout and random numbers of a block: the counter is the global index, so pass the block's."""

from __future__ import annotations

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lowering

autopar = torch.ops.autopar


def _block_offset(b: Builder, local: LocalCall, given: list[int]) -> list[int]:
    """Where this rank's output begins in the tensor that the random numbers are drawn for."""
    own = local.offset(b, local.outputs[0], local.call.outputs[0].shape)
    return [int(start) + int(more) for start, more in zip(given, own, strict=True)]


@lowering(autopar.dropout.default)
def lower_dropout(b: Builder, local: LocalCall) -> fx.Node:
    x, p, seed, salt, global_shape, offset = local.args
    here = _block_offset(b, local, offset)
    return b.call(autopar.dropout.default, x, p, seed, salt, list(global_shape), here)


@lowering(autopar.uniform.default)
def lower_uniform(b: Builder, local: LocalCall) -> fx.Node:
    seed, salt, _, global_shape, offset, dtype = local.args
    here = _block_offset(b, local, offset)
    shape = local.output_shape()
    return b.call(autopar.uniform.default, seed, salt, shape, list(global_shape), here, dtype)
