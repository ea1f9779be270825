"""What one op of an emitted program does: its flops, and the bytes that it moves."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.core.loops import bytes_read_again, steps_in_turn
from autopar.core.reshapes import rows_are_runs
from autopar.core.strategy import op_call
from autopar.core.work import LOOKUPS, global_flops, is_view, op_class

__all__ = ["EmittedWork", "emitted_work"]

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.contiguous.default)


class EmittedWork(NamedTuple):
    """Of one execution on one rank.

    Attributes:
        op_class: of the op; "view" where it makes no storage, and of a reshape that must copy, that
            of the copy.
        dtype: of the first output.
        flops: floating-point operations; 0 for classes that count bytes.
        moved: bytes that are read and written.
        steps: that run one behind the other (`steps_in_turn`).
    """

    op_class: str
    dtype: str
    flops: float = 0.0
    moved: float = 0.0
    steps: int = 1


def emitted_work(node: fx.Node) -> EmittedWork | None:
    """The work of an emitted op; None where it has no tensor to make.

    Where data decide how much a rank has to do, `flops_share` in its `meta` is the even share.
    """
    outputs = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    if node.target is operator.getitem or not outputs:
        return None
    dtype = str(outputs[0].dtype).removeprefix("torch.")
    operands = [
        n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)
    ]
    if _shares_storage(outputs, operands):
        return EmittedWork("view", dtype)
    call = op_call(node, 1)
    kind = op_class(call)
    if kind == "view" or node.target in _COPIES:  # a reshape that must copy, for one
        runs = all(rows_are_runs(tuple(x.shape), x.stride()) for x in operands)
        kind = "memory" if runs else "transpose"
    written = sum(_bytes(x) for x in outputs)
    lookup = node.target in LOOKUPS
    moved = 2 * written if lookup else written + sum(_bytes(x) for x in operands)
    flops = 0.0 if is_view(node.target) else global_flops(call)
    share = node.meta.get("flops_share", 1.0)
    return EmittedWork(
        kind, dtype, flops * share, float(moved + bytes_read_again(call)), steps_in_turn(call)
    )


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _shares_storage(outputs: Iterable[Tensor], operands: Iterable[Tensor]) -> bool:
    held = {x.untyped_storage()._cdata for x in operands}
    return all(x.untyped_storage()._cdata in held for x in outputs)
