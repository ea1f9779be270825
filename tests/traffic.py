"""Counts what a program sends while it runs, from the collectives that it executes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.codegen.emit import emit
from autopar.core.graph import TracedModel
from autopar.core.plan import CommBytes, Plan
from autopar.runtime.shards import take_shard
from autopar.tracer.trace import normalize_inputs
from autopar.verification import whole_inputs

__all__ = ["Traffic", "bytes_of", "traffic_of_a_rank"]

c10d = torch.ops._c10d_functional
# a pipeline's receives, and the loss that its last rank shares
_RECEIVING = {torch.ops.c10d.recv_.default, torch.ops.c10d.broadcast_.default}


class Traffic(TorchDispatchMode):
    """Counts every collective that is called while the mode is on.

    Bytes are those of the collective's full buffer, as in `CommBytes`. Any collective that is not
    known here is an error, so that none goes by uncounted.

    Args:
        axes: mesh axis of each process group, by the group's name.
        alone: answer collectives here, as if all ranks held what this one holds; without a
            process group, and with values that any op can take (indices stay in range).
    """

    def __init__(self, axes: Mapping[str, int], sizes: Sequence[int], alone: bool = False) -> None:
        super().__init__()
        self.axes = axes
        self.sizes = sizes
        self.alone = alone
        self.bytes: Counter[tuple[int, str]] = Counter()
        self.count: Counter[tuple[int, str]] = Counter()
        self.sent: Counter[int] = Counter()  # bytes to other pipeline ranks, by tag

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace = func._schema.name.split("::")[0]
        if namespace == "_c10d_functional" and func is not c10d.wait_tensor.default:
            self._note(func, args)
            if self.alone:
                return _answer(func, args)
        elif namespace == "_c10d_functional" and self.alone:
            return args[0]
        elif func is torch.ops.c10d.send.default:
            self.sent[args[3]] += sum(x.numel() * x.element_size() for x in args[0])
        elif func in _RECEIVING:
            pass  # counted by who sends
        elif namespace in ("c10d", "_c10d_functional_autograd", "symm_mem"):
            raise AssertionError(f"{func} is not counted")
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: Any) -> None:
        axis = self.axes[args[-1]]
        size = self.sizes[axis]
        x = args[0]
        num_bytes = x.numel() * x.element_size()
        if func in (c10d.all_reduce.default, c10d.all_reduce_.default):
            kind = "all_reduce"
        elif func is c10d.all_gather_into_tensor.default:
            kind, num_bytes = "all_gather", num_bytes * size
            assert args[1] == size
        elif func is c10d.reduce_scatter_tensor.default:
            kind = "reduce_scatter"
            assert args[2] == size
        else:
            assert func is c10d.all_to_all_single.default, func
            sent = args[2]
            assert len(sent) == size and sum(sent) == x.shape[0]
            ring = sum(map(bool, sent)) == 1 and size > 1  # everything goes to one neighbour
            kind = "send_recv" if ring else "all_to_all"
            # else all ranks get as much, or two of them get a chunk each
            assert ring or len(set(sent)) == 1 or sorted(filter(None, sent)) == [1, 1]
        self.bytes[axis, kind] += num_bytes
        self.count[axis, kind] += 1

    def total(self) -> tuple[CommBytes, ...]:
        """What was sent, in the form and order of `plan.predicted.comm_bytes`."""
        return tuple(
            CommBytes(axis=axis, kind=kind, num_bytes=self.bytes[axis, kind], count=count)
            for (axis, kind), count in sorted(self.count.items())
        )


def bytes_of(rows: Iterable[CommBytes]) -> dict[tuple[int, str], int]:
    """Bytes by axis and kind; in how many calls they go is the buckets' affair."""
    return {(row.axis, row.kind): row.num_bytes for row in rows}


def _answer(func: Any, args: Any) -> Tensor:
    x: Tensor = args[0]
    if func is c10d.all_gather_into_tensor.default:
        return torch.cat([x] * args[1])
    if func is c10d.reduce_scatter_tensor.default:
        return x.chunk(args[2])[0].clone()
    return x.clone()


def traffic_of_a_rank(
    traced: TracedModel,
    plan: Plan,
    model: nn.Module,
    inputs: Any,
    coords: Sequence[int],
    passes: Collection[str] | None = None,
) -> tuple[CommBytes, ...]:
    """What the rank at `coords` sends while its forward and backward programs run.

    It is as many calls and bytes as the program has.
    """
    names = [f"group of axis {axis}" for axis in range(len(plan.mesh_shape))]
    program = emit(traced, plan, coords, group_names=names, passes=passes)
    args, kwargs = normalize_inputs(inputs)
    flat = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    whole = whole_inputs(traced, model, flat, seed=0)
    feeds: dict[bool, list[Tensor]] = {False: [], True: []}
    for spec, layout in program.inputs:
        value = take_shard(whole[spec.node], layout, plan.mesh_shape, coords)
        feeds[spec.kind == "tangent"].append(value)
    traffic = Traffic({n: i for i, n in enumerate(names)}, plan.mesh_shape, alone=True)
    with traffic, torch.no_grad():
        values = program.forward(*feeds[False])
        if program.backward is not None:
            program.backward([*values[program.num_results :], *feeds[True]])
    assert traffic.total() == program.comm_bytes()
    return traffic.total()
