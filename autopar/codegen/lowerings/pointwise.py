"""Views that only mark a tensor as conjugated: collectives send the memory, so it is computed."""

from __future__ import annotations

import torch
from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lowering

aten = torch.ops.aten


@lowering(aten._conj.default)
def lower_conj(b: Builder, local: LocalCall) -> fx.Node:
    return b.call(aten._conj_physical.default, local.args[0])
