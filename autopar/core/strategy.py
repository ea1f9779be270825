"""What a sharding rule says: the ways to run one op over ONE mesh axis.

A rule maps an `OpCall` to `AxisStrategy` rows. The solver expands rows over all mesh axes (one
row per axis) and drops combinations whose shards are not even. Codegen runs a chosen row with
the lowering of its `variant`, or by calling the op on local tensors where that is "".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.core.graph import tensor_meta, tensor_operands
from autopar.core.placement import Placement

__all__ = ["AxisStrategy", "Communication", "OpCall", "TensorSpec", "op_call"]


class TensorSpec(NamedTuple):
    """Global shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


class Communication(NamedTuple):
    """A collective inside an op, over the axis of its row.

    `kind` as in `CollectiveKind`; the buffer has the bytes of the local part of operand `tensor`
    (or of output `~tensor` where negative), times `times`. A `nested` one is made anew for each
    rank on the axes before with a row of the same variant: rings go around inside of rings.
    """

    kind: str
    tensor: int
    times: float = 1.0
    nested: bool = False


class AxisStrategy(NamedTuple):
    """Placements on one mesh axis of each tensor operand and each output of an op.

    Attributes:
        inputs: one per tensor operand, in the order of `tensor_operands`.
        outputs: one per tensor output.
        variant: which lowering runs it; "" calls the op on the local tensors.
        comm: collectives inside the lowering.
        copied: tensors whose local part it copies, once each time: operand i, or output `~i`.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    variant: str = ""
    comm: tuple[Communication, ...] = ()
    copied: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op with the global shapes of its operands: what a rule looks at.

    Attributes:
        target: the op overload.
        args, kwargs: as in the graph; tensors are `fx.Node`s.
        operands: tensor arguments in flattened order, one entry per use.
        outputs: tensor results.
        axis_size: ranks on the mesh axis.
        nodes: the operand nodes.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    axis_size: int
    nodes: tuple[fx.Node, ...]

    def arg(self, position: int, name: str = "", default: Any = None) -> Any:
        """A non-tensor argument by position or name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def operand_index(self, position: int) -> int | None:
        """Index among the operands of the tensor at argument `position`; None if it is none."""
        index = 0
        for i, arg in enumerate(self.args):
            count = _count_nodes(arg)
            if i == position:
                return index if count else None
            index += count
        return None


def _count_nodes(value: Any) -> int:
    if isinstance(value, fx.Node):
        return 1
    if isinstance(value, (list, tuple)):
        return sum(_count_nodes(v) for v in value)
    return 0


def _specs(value: Any) -> tuple[TensorSpec, ...]:
    if isinstance(value, torch.Tensor):
        return (TensorSpec(tuple(int(s) for s in value.shape), value.dtype),)
    if isinstance(value, (list, tuple)):
        return tuple(
            TensorSpec(tuple(int(s) for s in v.shape), v.dtype)
            if isinstance(v, torch.Tensor)
            else TensorSpec((), torch.int64)
            for v in value
        )
    return ()


def op_call(node: fx.Node, axis_size: int) -> OpCall:
    """The `OpCall` of a graph node whose operands all yield one tensor each."""
    operands = tensor_operands(node)
    specs = []
    for operand in operands:
        value = tensor_meta(operand)
        assert value is not None, f"{operand} yields several tensors"
        specs.append(TensorSpec(tuple(int(s) for s in value.shape), value.dtype))
    return OpCall(
        target=node.target,
        args=tuple(node.args),
        kwargs=dict(node.kwargs),
        operands=tuple(specs),
        outputs=_specs(node.meta.get("val")),
        axis_size=axis_size,
        nodes=tuple(operands),
    )
