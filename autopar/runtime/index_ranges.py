"""Names inputs that hold an index out of range, such as a token beyond the vocabulary.

Kernels report an index out of range but not where it comes from; a rank that holds a shard of a
table reports nothing, and looks up zeros. So the indices with which the traced graph looks things
up are computed once more on the CPU: for the first batch of each kind, and when a step has failed.
Lookups in shards (`shared_lookups`) are watched in every batch, as no step fails there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from autopar._dtensors import local_of
from autopar.core.graph import TracedModel, node_info
from autopar.core.ops import REARRANGING, ops
from autopar.core.plan import Plan
from autopar.errors import AutoparError

__all__ = ["Lookup", "check_indices", "naming_indices", "shared_lookups", "watch_indices"]

aten = torch.ops.aten

_INDEX = re.compile(r"index.* out of (range|bounds)")  # as kernels on the CPU say
_MOST_NODES = 64  # between inputs and an index: more are a computation of its own
_MOST_ELEMENTS = 1 << 24
_MOST_WATCHED = 1 << 18  # elements of each value on the way to an index, in every batch

# ops whose second argument picks rows of the first, and whose third picks along the dim in between
_ROWS = (
    aten.embedding.default,
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
)
_ALONG = (
    aten.gather.default,
    aten.index_select.default,
    aten.index_add.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
)
_SHOWING = REARRANGING | {aten.slice.Tensor, aten.alias.default}  # which take no time
_VIEWS = (aten.view.default, aten._unsafe_view.default)  # of what may have other strides here
_LOSS = ops.token_nll.default


class Lookup(NamedTuple):
    """A tensor that is looked up with an index.

    Attributes:
        node: the op.
        table, key: its operands.
        dim: of the table.
        size: rows or classes that there are.
        ignored: the one value beyond them that is allowed.
        from_end: negative ones count from the end.
    """

    node: fx.Node
    table: fx.Node
    key: fx.Node
    dim: int
    size: int
    ignored: int | None = None
    from_end: bool = False


@contextmanager
def naming_indices(
    traced: TracedModel, inputs: Callable[[], Sequence[Tensor]], device: torch.device
) -> Iterator[None]:
    """Where a step fails inside because of an index out of range, say which input holds it.

    Args:
        traced: what runs.
        inputs: yields the tensors of the batch, in the order of the trace.
        device: that the step runs on.

    Raises:
        AutoparError: an input holds one; else the error is the one that came.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        batch = inputs()
        # nothing can be read any more of a GPU on which a kernel failed
        readable = device.type == "cpu" or not any(x.device.type == device.type for x in batch)
        told = _out_of_range(traced, batch) if readable else None
        shares = any(isinstance(value, DTensor) for value in batch)
        if told is None and shares and _INDEX.search(str(error)):
            told = f"{error}\n  This rank's share holds no such index: another rank's does."
        if told is None:
            raise
        raise AutoparError(told) from error


def check_indices(traced: TracedModel, inputs: Sequence[Tensor]) -> None:
    """Refuse a batch that holds an index out of range.

    Raises:
        AutoparError: one of its tensors does; names the tensor, the value and the range.
    """
    told = _out_of_range(traced, inputs)
    if told is not None:
        raise AutoparError(told)


def shared_lookups(traced: TracedModel, plan: Plan) -> tuple[Lookup, ...]:
    """Lookups in tensors of which each rank holds some rows: none is found for an index beyond.

    Ops of a microbatch have other names: there, all count.
    """
    plans = (plan,) if plan.pipeline is None else plan.pipeline.stages
    found = []
    for each in _lookups(traced):
        nodes = [p.nodes[each.node.name] for p in plans if each.node.name in p.nodes]
        if not nodes or any(x.dim == each.dim for n in nodes for x in n.inputs[0] if x.is_shard):
            found.append(each)
    return tuple(found)


def watch_indices(traced: TracedModel, lookups: Sequence[Lookup], inputs: Sequence[Tensor]) -> None:
    """Look for indices out of range at little cost: the extremes of each, without a wait for a GPU.

    Raises:
        AutoparError: a tensor of the batch holds one; of one on a GPU, the GPU says so later.
    """
    specs = [spec for spec in traced.inputs if spec.kind == "input"]
    given = {spec.node: value for spec, value in zip(specs, inputs, strict=True)}
    for found in lookups:
        value = _watched(found, given)
        if value is None or value.numel() == 0:
            continue
        low = -found.size if found.from_end else 0
        if found.ignored is not None:
            value = value.masked_fill(value == found.ignored, low)
        least, most = value.aminmax()
        inside = (least >= low) & (most < found.size)
        if value.device.type != "cpu":
            torch._assert_async(inside, f"an index is out of range: {_what(traced, found)}")
        elif not bool(inside):
            check_indices(traced, inputs)


def _watched(found: Lookup, given: Mapping[str, Tensor]) -> Tensor | None:
    """The index, or this rank's share of it; None where it takes long to have."""
    needed = _way_to(found, given)
    read = [n.name for n in needed if n.op == "placeholder"]
    shown = all(n.op == "placeholder" or n.target in _SHOWING for n in needed)
    small = all(n.meta["val"].numel() <= _MOST_WATCHED for n in needed)
    near = all(given[name].device.type == "cpu" for name in read)
    if not needed or not (shown or (small and near)):
        return None
    return _computed(needed, {name: local_of(given[name].detach()) for name in read})


def _way_to(found: Lookup, given: Mapping[str, Tensor]) -> list[fx.Node]:
    """Nodes in order that make an index, or a share of it, from inputs; none if none do."""
    shares = any(isinstance(value, DTensor) for value in given.values())
    source = _picked(found.key, given) if shares else found.key
    needed = sorted(_needed(source)) if source is not None else []
    read = [n.name for n in needed if n.op == "placeholder"]
    return needed if read and all(name in given for name in read) else []


def _out_of_range(traced: TracedModel, inputs: Sequence[Tensor]) -> str | None:
    """What to say of the first index that is out of range; None where all are in it."""
    specs = [spec for spec in traced.inputs if spec.kind == "input"]
    given = {spec.node: value for spec, value in zip(specs, inputs, strict=True)}
    names = {spec.node: spec.target for spec in specs}
    for found in _lookups(traced):
        needed = _way_to(found, given)
        if not needed:
            continue
        read = [n.name for n in needed if n.op == "placeholder"]
        here = {n: given[n].detach() for n in read}
        index = _computed(needed, {n: _local(value) for n, value in here.items()})
        low = -found.size if found.from_end else 0
        outside = (index < low) | (index >= found.size)
        if found.ignored is not None:
            outside &= index != found.ignored
        if bool(outside.any()):
            bad = index[outside]
            held = {names[n]: here[n] for n in read}
            return _text(traced, found, int(bad[0]), bad.numel(), held)
    return None


def _local(value: Tensor) -> Tensor:
    """A tensor on the CPU; of one that is shared out, what is here."""
    return local_of(value).cpu()


def _picked(index: fx.Node, given: Mapping[str, Tensor]) -> fx.Node | None:
    """The node with all values of an index, which can be had of a share of an input; else None."""
    while index.target in REARRANGING:
        index = index.all_input_nodes[0]
    node, cut = index, list[Any]()
    while node.target is aten.slice.Tensor:
        cut.append(node.args[1] if len(node.args) > 1 else 0)
        node = node.all_input_nodes[0]
    held = given.get(node.name)
    if held is None or any(_local(held).shape[dim] != held.shape[dim] for dim in cut):
        return None
    return index


def _lookups(traced: TracedModel) -> Iterator[Lookup]:
    for node in traced.graph.nodes:
        if node.op == "call_function" and node_info(traced, node).phase == "forward":
            yield from (each for each in _of(node) if each.key.meta["val"].dtype != torch.bool)


def _of(node: fx.Node) -> Iterator[Lookup]:
    """What an op looks up."""
    args: Any = node.args
    if node.target in _ROWS:
        yield Lookup(node, args[0], args[1], 0, args[0].meta["val"].shape[0])
    elif node.target is _LOSS:
        shape = args[0].meta["val"].shape
        yield Lookup(node, args[0], args[1], len(shape) - 1, shape[-1], args[2])
    elif node.target in _ALONG and args[0].meta["val"].dim():
        dim = args[1] % args[0].meta["val"].dim()
        size = args[0].meta["val"].shape[dim]
        key = _from_end(args[2], size)
        yield Lookup(node, args[0], key or args[2], dim, size, from_end=key is not None)
    elif node.target is aten.index.Tensor:
        for dim, (size, index) in enumerate(zip(args[0].meta["val"].shape, args[1], strict=False)):
            if index is not None:
                yield Lookup(node, args[0], index, dim, size, from_end=True)


def _from_end(index: fx.Node, size: int) -> fx.Node | None:
    """The index behind one to which `size` was added where it is negative; None for others."""
    while index.target in (*REARRANGING, aten.expand.default):
        index = index.all_input_nodes[0]
    if index.target is not aten.where.self:
        return None
    (below, wrapped, key), pair = index.args, (index.args[2], size)
    spelled = [(aten.lt.Scalar, (key, 0)), (aten.add.Tensor, pair)]
    made = [(n.target, n.args) for n in (below, wrapped) if isinstance(n, fx.Node)]
    return key if isinstance(key, fx.Node) and made == spelled else None


def _needed(index: fx.Node) -> list[fx.Node]:
    """Nodes that an index is computed from, itself included; none where they are many."""
    found = {index}
    stack = [index]
    while stack:
        new = [n for n in stack.pop().all_input_nodes if n not in found]
        found.update(new)
        stack += new
        sizes = (getattr(n.meta.get("val"), "numel", int)() for n in new)
        if len(found) > _MOST_NODES or any(size > _MOST_ELEMENTS for size in sizes):
            return []
    return list(found)


def _computed(needed: Sequence[fx.Node], given: Mapping[str, Tensor]) -> Tensor:
    """The value of the last of some nodes."""
    values: dict[fx.Node, Any] = {}
    for node in needed:
        if node.op == "placeholder":
            values[node] = given[node.name]
            continue
        target: Any = aten.reshape.default if node.target in _VIEWS else node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        values[node] = target(*args, **kwargs)
    found: Tensor = values[needed[-1]]
    return found


def _text(
    traced: TracedModel, found: Lookup, value: int, count: int, inputs: Mapping[str, Tensor]
) -> str:
    where = node_info(traced, found.node).source or str(found.node.target)
    low, what = (-found.size if found.from_end else 0), _what(traced, found)
    allowed = f"{low} to {found.size - 1}"
    if found.ignored is not None:
        allowed += f", and {found.ignored}, which is ignored"
    for name, tensor in inputs.items():
        places = (_local(tensor) == value).nonzero()
        if len(places):
            share = " of this rank's share" if isinstance(tensor, DTensor) else ""
            held = f"input {name} holds {value} at {places[0].tolist()}{share}"
            break
    else:
        held = f"{value} is computed from input {', '.join(inputs)}"
    return (
        f"{held}, which is out of range at {where}\n  {what}: allowed are {allowed}"
        f" ({count} value{'s are' if count > 1 else ' is'} not). Correct the data, or give the "
        "model as many rows or classes as the data has."
    )


def _what(traced: TracedModel, found: Lookup) -> str:
    """The table, or classes, that there are."""
    if found.node.target is _LOSS:
        return f"the loss has {found.size} classes"
    table = found.table
    while table.op == "call_function" and len(table.all_input_nodes) == 1:
        table = table.all_input_nodes[0]
    names = {spec.node: spec.target for spec in traced.inputs if spec.kind == "parameter"}
    name = names.get(table.name)
    if name is not None and found.node.target in _ROWS:
        return f"parameter {name} has {found.size} rows"
    return f"{found.node.target} picks out of {found.size}"
