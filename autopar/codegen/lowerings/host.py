"""Copies from host memory: where one begins, and where its value is waited for."""

from __future__ import annotations

from torch import fx

from autopar.codegen.builder import Builder
from autopar.codegen.lowering import LocalCall, lowering
from autopar.core.host import ARRIVED, FROM_HOST


@lowering(FROM_HOST)
def lower_from_host(b: Builder, local: LocalCall) -> fx.Node:
    return b.call(ARRIVED, b.call(FROM_HOST, local.args[0], device=b.device))
