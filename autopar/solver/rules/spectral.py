"""Fourier transforms: linear, the transformed dims whole."""

from __future__ import annotations

import torch

from autopar.core.strategy import AxisStrategy, OpCall
from autopar.solver.rules.dims import dim_names, several_dims
from autopar.solver.rules.labels import by_labels, linear_rows
from autopar.solver.rules.registry import rule

aten = torch.ops.aten


@rule(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def fft_rule(call: OpCall) -> list[AxisStrategy]:
    spec = call.operands[0]
    names = dim_names(spec, several_dims(call.arg(1, "dim"), len(spec.shape)))
    return by_labels(call, [names], [names]) + linear_rows(call, [(0,)])
