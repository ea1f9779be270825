"""Rewrites of the exported graph that keep tensor dims apart for the sharding rules.

Applied in this order before autograd:

- `drop_no_ops`: metadata asserts, aliases, contiguous and casts that change nothing.
- `pick_in_turn`: ``x[arange(n), i]`` is a gather, and writes to it are a scatter.
- `say_plain_masks`: attention masks that are constants are dropped or become `is_causal`.
- `join_repeated_heads`: keys and values that are repeated for the query heads of a group are not.
- `sink_flattening`: ``linear(flatten(x))`` becomes ``flatten(linear(x))`` and adjacent views
  cancel, so that batch and sequence stay two dims, each of which can be sharded.
- `unflatten_loss`: the same for ``cross_entropy(flatten(logits), flatten(target))``.
- `unfuse_splits`: a linear whose output is split into equal parts (QKV, gate and up) gets a dim
  for the parts, so that each part can be sharded on its own features.

And in the joint graph:

- `invert_permutations`: ``y[order] = arange(n)`` behind a sort is named for what it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar.core.ops import ops
from autopar.tracer.effects import know_all_readers
from autopar.tracer.heads import join_repeated_heads
from autopar.tracer.in_turn import pick_in_turn
from autopar.tracer.masks import say_plain_masks

__all__ = ["invert_permutations", "prepare_graph"]

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_LINEARS = (aten.linear.default, aten.addmm.default, aten.mm.default)


def prepare_graph(gm: fx.GraphModule, lifted: Mapping[str, Tensor]) -> None:
    """Run all the rewrites on an exported graph, in place.

    Args:
        gm: holds the graph.
        lifted: tensors that the forward made of plain values, by the name of their placeholder.
    """
    know_all_readers(gm.graph)
    drop_no_ops(gm.graph)
    pick_in_turn(gm.graph, lifted)
    say_plain_masks(gm.graph)
    join_repeated_heads(gm.graph)
    sink_flattening(gm.graph)
    unflatten_loss(gm.graph)
    unfuse_splits(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()


def invert_permutations(graph: fx.Graph) -> None:
    """Replace writes of 0, 1, …, n - 1 to the places that a sort of n keys gives."""
    for node in list(graph.nodes):
        if node.target is not aten.index_put.default or len(node.args[1]) != 1:
            continue
        (order,) = node.args[1]
        if _is_order(order) and _counts_up(node.args[2], _shape(node)) and len(node.args) == 3:
            with graph.inserting_before(node):
                new = graph.call_function(ops.inverse_permutation.default, (order,))
            _replace(node, _with_meta(new, node, node.meta["val"]))
    graph.eliminate_dead_code()


def _is_order(node: fx.Node) -> bool:
    """True for the positions that a sort of one dim gives."""
    if node.target is not operator.getitem or node.args[1] != 1:
        return False
    sort = node.args[0]
    assert isinstance(sort, fx.Node)
    return sort.target in (aten.sort.default, aten.sort.stable) and len(_shape(node)) == 1


def _counts_up(node: Any, shape: tuple[int, ...]) -> bool:
    if not isinstance(node, fx.Node) or _shape(node) != shape:
        return False
    if node.target is aten.arange.start_step:
        return node.args in ((0, *shape), (0, *shape, 1))
    return node.target is aten.arange.default and node.args == shape


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _is_no_op(node: fx.Node) -> bool:
    if node.target in (aten.alias.default, aten.lift_fresh_copy.default, aten.detach_.default):
        return True
    if node.target in (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other):
        source = node.args[0]
        return isinstance(source, fx.Node) and source.meta["val"].dtype == node.meta["val"].dtype
    return node.target is aten.contiguous.default


def drop_no_ops(graph: fx.Graph) -> None:
    """Remove calls whose value equals their input."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif _is_no_op(node):
            _replace(node, node.args[0])


def _flattened_source(node: Any) -> fx.Node | None:
    """`x` if `node` is `x` with all but its last dim flattened into one."""
    if not isinstance(node, fx.Node) or node.target not in _VIEWS:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    inner, outer = _shape(source), _shape(node)
    if len(outer) == 2 and len(inner) > 2 and outer[-1] == inner[-1]:
        return source
    return None


def _with_meta(node: fx.Node, origin: fx.Node, value: torch.Tensor) -> fx.Node:
    node.meta = {**origin.meta, "val": value}
    return node


def _joined_last(graph: fx.Graph, node: fx.Node) -> None:
    """A view that flattens leading dims and joins heads at once becomes one view after the other.

    ``(S, B, H, D) -> (S B, H D)`` is ``(S, B, H D)``, flattened; so is it of ``(S, B H, D)``.
    """
    if node.target not in _VIEWS:
        return
    source = node.args[0]
    assert isinstance(source, fx.Node)
    inner, outer = _shape(source), _shape(node)
    lead = _lead(inner, outer) if len(outer) == 2 else None
    if lead is None:
        return
    wide_shape = [*lead, outer[1]]
    value = node.meta["val"].new_empty(wide_shape)
    with graph.inserting_before(node):
        wide = graph.call_function(aten.reshape.default, (source, wide_shape))
    node.args = (_with_meta(wide, node, value), *node.args[1:])


def _lead(inner: tuple[int, ...], outer: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dims that a view to two dims flattens into its first."""
    for count in range(2, len(inner) - 1):
        if math.prod(inner[-count:]) == outer[1]:
            return inner[:-count]
    if len(inner) == 3 and inner[2] < outer[1] and 1 < inner[0] < outer[0]:
        return (inner[0], outer[0] // inner[0]) if outer[0] % inner[0] == 0 else None
    return None


def sink_flattening(graph: fx.Graph) -> None:
    """Move flattening views of a linear's input behind it, then cancel view pairs."""
    for node in list(graph.nodes):
        _joined_last(graph, node)
    for node in list(graph.nodes):
        if node.target not in _LINEARS:
            continue
        position = 1 if node.target is aten.addmm.default else 0
        source = _flattened_source(node.args[position])
        if source is None or (node.target is aten.addmm.default and node.kwargs):
            continue
        value, lead = node.meta["val"], _shape(source)[:-1]
        wide_value = value.new_empty((*lead, value.shape[-1]))
        with graph.inserting_before(node):
            wide = _with_meta(_unflattened_linear(graph, node, source), node, wide_value)
            flat = graph.call_function(aten.view.default, (wide, list(value.shape)))
            _with_meta(flat, node, value)
        _replace(node, flat)
    _cancel_views(graph)


def _unflattened_linear(graph: fx.Graph, node: fx.Node, source: fx.Node) -> fx.Node:
    if node.target is aten.linear.default:
        return graph.call_function(aten.linear.default, (source, *node.args[1:]))
    matmul_args = (source, node.args[2 if node.target is aten.addmm.default else 1])
    product = graph.call_function(aten.matmul.default, matmul_args)
    if node.target is aten.mm.default:
        return product
    _with_meta(product, node, node.meta["val"])
    return graph.call_function(aten.add.Tensor, (product, node.args[0]))


def _cancel_views(graph: fx.Graph) -> None:
    """`view(view(x))` is one view, and none where the shape is x's own."""
    for node in list(graph.nodes):
        if node.target not in _VIEWS:
            continue
        source = node.args[0]
        while isinstance(source, fx.Node) and source.target in _VIEWS:
            source = source.args[0]
        if _shape(source) == _shape(node):
            _replace(node, source)
        elif source is not node.args[0]:
            node.target = aten.view.default if node.target is aten.view.default else node.target
            node.args = (source, list(_shape(node)))
    graph.eliminate_dead_code()


def _unviewed(node: fx.Node) -> fx.Node:
    while node.target in _VIEWS:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _undo_flattening(graph: fx.Graph, target: fx.Node, lead: tuple[int, ...]) -> fx.Node | None:
    """The un-flattened form of a flat target, through casts, if its source has shape `lead`."""
    casts: list[fx.Node] = []
    node = target
    while node.target in (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default):
        casts.append(node)
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    source = _unviewed(node)
    if _shape(source) != lead:
        return None
    for cast in reversed(casts):
        assert callable(cast.target)
        clone = graph.call_function(cast.target, (source, *cast.args[1:]), cast.kwargs)
        source = _with_meta(clone, cast, cast.meta["val"].new_empty(lead))
    return source


def unflatten_loss(graph: fx.Graph) -> None:
    """Compute a mean or sum cross-entropy on `(…, V)` logits instead of flattened ones."""
    for node in list(graph.nodes):
        if node.target is not aten.cross_entropy_loss.default:
            continue
        logits, target = node.args[0], node.args[1]
        defaults: tuple[Any, ...] = (None, 1, -100, 0.0)
        given: list[Any] = list(node.args[2:])
        weight, reduction, ignore, smoothing = (*given, *defaults[len(given) :])
        source = _flattened_source(logits)
        if source is None or weight is not None or reduction == 0 or smoothing != 0.0:
            continue
        with graph.inserting_before(node):
            wide_target = _undo_flattening(graph, target, _shape(source)[:-1])
            if wide_target is None:
                continue
            new = graph.call_function(token_loss_call, (source, wide_target, reduction, ignore))
            _with_meta(new, node, node.meta["val"])
        _replace(node, new)
    graph.eliminate_dead_code()


def token_loss_call(logits: Any, target: Any, reduction: int, ignore_index: int) -> Any:
    """Graph-level spelling of `decompositions.token_loss`."""
    from autopar.tracer.decompositions import token_loss

    return token_loss(logits, target, reduction, ignore_index)


def _equal_parts(node: fx.Node) -> int | None:
    """How many equal parts `node` splits its input's last dim into, if that is what it does."""
    if node.target not in (aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default):
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    rank = len(_shape(source))
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    if dim not in (-1, rank - 1):
        return None
    sizes = {int(v.shape[-1]) for v in node.meta["val"]}
    users_are_items = all(user.target is operator.getitem for user in node.users)
    return len(node.meta["val"]) if len(sizes) == 1 and users_are_items else None


def _linear_parts(source: fx.Node) -> tuple[Any, Any, Any, bool] | None:
    """`(x, weight, bias, weight is (out, in))` of a linear or of a matmul plus bias."""
    if source.target is aten.linear.default:
        bias = source.args[2] if len(source.args) > 2 else None
        return source.args[0], source.args[1], bias, True
    bias = None
    if source.target is aten.add.Tensor:
        source, bias = source.args  # type: ignore[assignment]
        if not isinstance(source, fx.Node) or not isinstance(bias, fx.Node):
            return None
        if bias.op != "placeholder" or len(source.users) != 1:
            return None
    if source.target is not aten.matmul.default:
        return None
    x, weight = source.args
    if not isinstance(weight, fx.Node) or weight.op != "placeholder" or len(_shape(weight)) != 2:
        return None
    return x, weight, bias, False


def unfuse_splits(graph: fx.Graph) -> None:
    """`split(x W, p)` becomes `unbind(einsum(x, W viewed as (p, n)))`."""
    for node in list(graph.nodes):
        parts = _equal_parts(node) if node.op == "call_function" else None
        source = node.args[0] if parts else None
        if parts is None or parts == 1 or not isinstance(source, fx.Node) or len(source.users) > 1:
            continue
        linear = _linear_parts(source)
        if linear is None:
            continue
        with graph.inserting_before(node):
            new = graph.call_function(split_linear_call, (*linear, parts))
            _with_meta(new, node, node.meta["val"])
        _replace(node, new)
    graph.eliminate_dead_code()


def split_linear_call(x: Any, weight: Any, bias: Any, out_first: bool, parts: int) -> Any:
    """`unbind` of a linear whose output features are `parts` × n; run while tracing."""
    lead = "abcdefgh"[: x.dim() - 1]
    if out_first:
        viewed = weight.view(parts, -1, weight.shape[1])
        out = ops.einsum(f"{lead}k,tnk->{lead}tn", x, viewed)
    else:
        viewed = weight.view(weight.shape[0], parts, -1)
        out = ops.einsum(f"{lead}k,ktn->{lead}tn", x, viewed)
    if bias is not None:
        out = out + bias.view(parts, -1)
    return out.unbind(-2)
