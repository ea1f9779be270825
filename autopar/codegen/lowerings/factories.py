"""Ops that make a tensor: local size, this rank's device, and the dtype that was traced.

The dtype is written out since some depend on `torch.get_default_dtype()` at run time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lowering

aten = torch.ops.aten


def _options(b: Builder, local: LocalCall) -> dict[str, Any]:
    return {"dtype": local.call.outputs[0].dtype, "device": b.device}


@lowering(aten.full.default)
def lower_full(b: Builder, local: LocalCall) -> fx.Node:
    value = local.call.arg(1, "fill_value")
    return b.call(aten.full.default, local.output_shape(), value, **_options(b, local))


@lowering(aten.new_full.default)
def lower_new_full(b: Builder, local: LocalCall) -> fx.Node:
    value = local.call.arg(2, "fill_value")
    return b.call(aten.full.default, local.output_shape(), value, **_options(b, local))


@lowering(aten.zeros.default, aten.new_zeros.default)
def lower_zeros(b: Builder, local: LocalCall) -> fx.Node:
    return b.call(aten.zeros.default, local.output_shape(), **_options(b, local))


@lowering(aten.ones.default, aten.new_ones.default)
def lower_ones(b: Builder, local: LocalCall) -> fx.Node:
    return b.call(aten.ones.default, local.output_shape(), **_options(b, local))


@lowering(
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
def lower_empty(b: Builder, local: LocalCall) -> fx.Node:
    """Strides are the local tensor's own: views of it become reshapes."""
    return b.call(aten.empty.memory_format, local.output_shape(), **_options(b, local))


@lowering(
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.logspace.default,
    aten.eye.default,
    aten.eye.m,
    aten.scalar_tensor.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
)
def lower_whole_factory(b: Builder, local: LocalCall) -> fx.Node:
    return b.call(local.call.target, *local.args, **{**local.kwargs, **_options(b, local)})
