"""Seconds of the ops of an emitted program, by the curves of a device."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.core.loops import bytes_read_again, steps_in_turn
from autopar.core.reshapes import rows_are_runs
from autopar.core.strategy import op_call
from autopar.core.work import LOOKUPS, global_flops, is_view, op_class
from autopar.cost_model.compute import compute_seconds_array
from autopar.cost_model.profile import DeviceProfile

__all__ = ["node_seconds"]

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.contiguous.default)


def node_seconds(node: fx.Node, device: DeviceProfile) -> float:
    """Seconds of one emitted op by the device's curves.

    Where data decide how much a rank has to do, `flops_share` in its `meta` is the even share.
    """
    value = node.meta.get("val")
    outputs = [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]
    if node.target is operator.getitem or not outputs:
        return 0.0
    operands = [
        n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)
    ]
    if _shares_storage(outputs, operands):
        return device.view_overhead_s
    call = op_call(node, 1)
    kind = op_class(call)
    if kind == "view" or node.target in _COPIES:  # a reshape that must copy, for one
        runs = all(rows_are_runs(tuple(x.shape), x.stride()) for x in operands)
        kind = "memory" if runs else "transpose"
    written = sum(_bytes(x) for x in outputs)
    lookup = node.target in LOOKUPS
    moved = 2 * written if lookup else written + sum(_bytes(x) for x in operands)
    moved += bytes_read_again(call)
    flops = 0.0 if is_view(node.target) else global_flops(call)
    seconds = compute_seconds_array(
        device,
        kind,
        str(outputs[0].dtype).removeprefix("torch."),
        np.array(flops * node.meta.get("flops_share", 1.0)),
        np.array(float(moved)),
        steps_in_turn(call),
    )
    return float(seconds)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _shares_storage(outputs: Iterable[Tensor], operands: Iterable[Tensor]) -> bool:
    held = {x.untyped_storage()._cdata for x in operands}
    return all(x.untyped_storage()._cdata in held for x in outputs)
