"""Private names of torch, as in `_compat`, of DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, _dtensor_spec, _redistribute
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.torch_version import TorchVersion

from autopar.core.placement import Layout, Partial, Replicate, Shard

__all__ = [
    "aliasing_ops",
    "asks_subclasses_of_dtensor",
    "by_dtensors_own_way",
    "dtensor_handler",
    "dtensor_like",
    "dtensor_placements",
    "handle_dtensor_op",
    "layout_of",
    "local_of",
    "replicate_plain_tensors",
]


def _gather_any_strided_shard() -> None:
    """Let torch before 2.13 redistribute a `_StridedShard` that stands for no order of mesh axes.

    A fused QKV weight is split into three before it is sharded, on one mesh axis. 2.13 goes from
    placement to placement there, greedily; earlier ones raise ValueError.
    """
    if hasattr(_dtensor_spec, "_StridedShardNotDecodableError"):
        return
    by_order = _redistribute._gen_transform_infos_non_cached

    def by_order_or_greedily(src: Any, dst: Any, use_graph: bool | None = None) -> Any:
        try:
            return by_order(src, dst, use_graph)
        except ValueError as error:
            if "shard_order" not in str(error):
                raise
            planner = _redistribute.get_redistribute_planner(src.device_mesh, src.tensor_meta)
            return planner.generate_greedy_transform_infos(src, dst)

    _redistribute._gen_transform_infos_non_cached = by_order_or_greedily  # type: ignore[assignment]


_gather_any_strided_shard()


def dtensor_like(local: Tensor, other: DTensor) -> DTensor:
    """A DTensor of a share, placed and shaped as another is; its checks and autograd left out."""
    # as torch's own dispatch makes them: `__init__` does nothing, and takes longer than the rest
    return DTensor.__new__(DTensor, local, other._spec, requires_grad=False)


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, outside of autograd; of a plain one, the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def handle_dtensor_op(op: Any, handler: Callable[..., Any]) -> None:
    """Let `handler(op, args, kwargs)` run an op that has a DTensor among its operands."""
    DTensor._op_dispatcher._custom_op_handlers[op] = handler


def dtensor_handler(op: Any) -> Callable[..., Any] | None:
    """What runs an op that has a DTensor among its operands, if that is not torch itself."""
    found: Callable[..., Any] | None = DTensor._op_dispatcher._custom_op_handlers.get(op)
    return found


def asks_subclasses_of_dtensor() -> bool:
    """True if ops ask the `__torch_dispatch__` of a subclass of DTensor, as from torch 2.12 on."""
    return bool(TorchVersion(torch.__version__) >= "2.12")


def aliasing_ops() -> Iterator[Any]:
    """All ops of torch's that show or change the memory of an operand."""
    for schema in torch._C._jit_get_all_schemas():
        kind, _, name = schema.name.partition("::")
        if kind == "aten" and any(x.alias_info for x in (*schema.arguments, *schema.returns)):
            packet = getattr(torch.ops.aten, name, None)
            overload = schema.overload_name or "default"
            if packet is not None and overload in packet.overloads():
                yield getattr(packet, overload)


def by_dtensors_own_way(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op that has a handler as if it had none."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[op] = handler


def replicate_plain_tensors() -> None:
    """Let plain tensors beside DTensors count as the same on every rank."""
    DTensor._op_dispatcher._allow_implicit_replication = True


def dtensor_placements(layout: Layout) -> list[TorchPlacement]:
    """DTensor's placements of a layout."""
    out: list[TorchPlacement] = []
    for placement in layout:
        if placement.is_replicate:
            out.append(TorchReplicate())
        elif placement.is_partial:
            out.append(TorchPartial())
        elif placement.split > 1:
            out.append(_StridedShard(placement.dim, split_factor=placement.split))
        else:
            out.append(TorchShard(placement.dim))
    return out


def layout_of(placements: Sequence[TorchPlacement]) -> Layout:
    """The layout of DTensor's placements: the inverse of `dtensor_placements`."""
    out = []
    for placement in placements:
        if isinstance(placement, _StridedShard):
            out.append(Shard(placement.dim, int(placement.split_factor)))
        elif isinstance(placement, TorchShard):
            out.append(Shard(placement.dim))
        else:
            out.append(Partial() if isinstance(placement, TorchPartial) else Replicate())
    return tuple(out)
