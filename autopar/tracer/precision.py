"""Mixed precision: a module run on low-precision copies of its parameters and inputs.

    y = f(x.to(low); θ.to(low)),    ∂L/∂θ comes back through the cast in θ's own dtype

so the parameters stay fp32 masters (Micikevicius et al. 2018, arXiv 1710.03740). The casts enter
the joint graph at their first use and are ops like any other: the solver places them, and decides
for each whether to communicate in front of the cast or behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from autopar.core.graph import NodeInfo, OutputSpec
from autopar.core.ops import NARROW, REARRANGING
from autopar.errors import AutoparError

__all__ = [
    "LossFn",
    "call_in",
    "cast_gradients",
    "cast_last",
    "lift_casts",
    "low_dtype",
    "sum_dtype",
]

_LOW: Mapping[str | None, torch.dtype | None] = {
    None: None,
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
LossFn = Callable[..., Any]


def low_dtype(precision: str | None) -> torch.dtype | None:
    """The dtype that a precision computes in; None where the model runs as it is.

    Raises:
        AutoparError: an unknown precision.
    """
    if precision not in _LOW:
        known = ", ".join(repr(name) for name in _LOW if name)
        raise AutoparError(f"precision {precision!r} is unknown: use one of {known}")
    return _LOW[precision]


def sum_dtype(name: str | None) -> torch.dtype | None:
    """The dtype that gradients are summed over ranks in; None where it is not set.

    Raises:
        AutoparError: an unknown one.
    """
    if name is None:
        return None
    if name not in _LOW:
        raise AutoparError(f"reduce_dtype {name!r} is unknown: use one of 'fp32', 'bf16', 'fp16'")
    return _LOW[name] or torch.float32


def call_in(
    dtype: torch.dtype | None, model: nn.Module, args: Any, kwargs: Any, loss: LossFn | None = None
) -> Any:
    """Call a module on copies of its parameters and floating inputs in a dtype.

    Args:
        dtype: of the copies; None calls the module as it is.
        model: its buffers, and the parameters of norms with running statistics, stay as they are.
        args, kwargs: of the module.
        loss: called on the output, whose floating tensors are in fp32 for it.

    Returns:
        What the module or `loss` returns, scalars in at least fp32.
    """
    if dtype is None:
        output = model(*args, **kwargs)
        return output if loss is None else loss(output)
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: _cast(x, dtype), (args, kwargs))
    values = _copies(model, dtype)
    output = torch.func.functional_call(model, values, args, kwargs, tie_weights=False)
    if loss is not None:
        output = loss(pytree.tree_map_only(Tensor, _widened, output))
    return pytree.tree_map_only(Tensor, lambda x: x if x.dim() else _widened(x), output)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _widened(x: Tensor) -> Tensor:
    return _cast(x, torch.promote_types(x.dtype, torch.float32))


def _copies(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every parameter by each of its names, a tied one cast once."""
    kept = {
        id(parameter)
        for module in model.modules()
        # kernels take the affine parameters in the dtype of the running statistics
        if isinstance(module, _NormBase) and module.track_running_stats
        for parameter in module.parameters(recurse=False)
    }
    cast: dict[int, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = id(parameter)
        if key not in cast:
            cast[key] = parameter if key in kept else _cast(parameter, dtype)
        values[name] = cast[key]
    return values


_CASTS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)


def lift_casts(graph: fx.Graph, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Take the casts of an exported graph's floating inputs out of it.

    They stand at its head, where nobody can tell which module they belong to. Without them the
    placeholders are of the low dtype; whoever runs the graph casts each at its first use.

    Returns:
        The dtype of each placeholder that is to be cast, by name.
    """
    casts: dict[str, torch.dtype] = {}
    if dtype is None:
        return casts
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, Tensor):
            continue
        for user in list(node.users):
            if user.target is torch.ops.aten._assert_tensor_metadata.default:
                graph.erase_node(user)
        users = list(node.users)
        if (
            users
            and value.dtype != dtype
            and all(user.target in _CASTS and user.meta["val"].dtype == dtype for user in users)
        ):
            node.meta["val"] = users[0].meta["val"]
            casts[node.name] = dtype
            for user in users:
                user.replace_all_uses_with(node)
                graph.erase_node(user)
    return casts


_COPY = torch.ops.aten._to_copy.default


def cast_last(graph: fx.Graph, parameters: Collection[str], outputs: Sequence[OutputSpec]) -> None:
    """Swap ``view(cast(parameter))`` and, of a gradient, ``cast(view(gradient))``.

    A parameter is stored as the view that reads it wants (strided, for a fused weight), and a cast
    between the two would have to offer the same placements. Gradients are not rounded on the way.
    """
    for parameter in [n for n in graph.nodes if n.op == "placeholder" and n.name in parameters]:
        for cast in [n for n in parameter.users if n.target is _COPY]:
            while (view := _only_view(list(cast.users))) is not None:
                source, low = cast.args[0], view.meta["val"]
                assert isinstance(source, fx.Node)
                view.replace_all_uses_with(cast)
                view.replace_input_with(cast, source)
                view.append(cast)
                cast.replace_input_with(source, view)
                view.meta["val"] = low.to(source.meta["val"].dtype)
                cast.meta["val"] = low
    output = graph.output_node()
    for cast in [n for n in output.all_input_nodes if n.target is _COPY and len(n.users) == 1]:
        while (
            view := _only_view([n for n in cast.all_input_nodes if len(n.users) == 1])
        ) is not None:
            source, wide = view.args[0], cast.meta["val"]
            assert isinstance(source, fx.Node)
            cast.replace_all_uses_with(view)
            view.replace_input_with(source, cast)
            view.prepend(cast)
            cast.replace_input_with(view, source)
            cast.meta["val"] = source.meta["val"].to(wide.dtype)
            view.meta["val"] = wide
    _drop_roundings(graph, outputs)


def _drop_roundings(graph: fx.Graph, outputs: Sequence[OutputSpec]) -> None:
    """Keep a gradient that is computed in its parameter's dtype: ``wide(low(g))`` becomes g.

    Autograd rounds it to the dtype of the copy that the forward read, as of a group norm or of what
    a model computes in fp32 itself. Rounding cannot be shared by ranks or microbatches that each
    have a part of the sum.
    """
    results = graph.output_node().args[0]
    for spec, node in zip(outputs, results, strict=True):  # type: ignore[arg-type]
        while isinstance(node, fx.Node) and node.target in REARRANGING - {_COPY}:
            node = node.args[0]
        if spec.kind != "gradient" or not isinstance(node, fx.Node) or node.target is not _COPY:
            continue
        low = node.args[0]
        if not isinstance(low, fx.Node) or low.target is not _COPY:
            continue
        source = low.args[0]
        assert isinstance(source, fx.Node)
        if source.meta["val"].dtype == node.meta["val"].dtype:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            if not low.users:
                graph.erase_node(low)


def _only_view(nodes: list[fx.Node]) -> fx.Node | None:
    (node,) = nodes if len(nodes) == 1 else (None,)
    return node if node is not None and node.target in REARRANGING - {_COPY} else None


def cast_gradients(
    graph: fx.Graph, outputs: Sequence[OutputSpec], info: dict[str, NodeInfo], dtype: torch.dtype
) -> None:
    """Bring each gradient to a dtype and back, so that it can be summed over ranks in between.

    A gradient that comes from that dtype, or is of it, is left as it is.
    """
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    for index, (spec, node) in enumerate(zip(outputs, results, strict=True)):
        if spec.kind != "gradient" or not isinstance(node, fx.Node) or _passes(node, dtype):
            continue
        low = node.meta["val"].to(dtype)
        narrow = graph.call_function(NARROW, (node, dtype))
        wide = graph.call_function(_COPY, (narrow,), {"dtype": node.meta["val"].dtype})
        node.append(narrow)
        narrow.append(wide)
        for new, value in ((narrow, low), (wide, node.meta["val"])):
            new.meta["val"] = value
            known = info.get(node.name)
            if known is not None:
                info[new.name] = known
        results[index] = wide
    output.args = (tuple(results),)


def _passes(node: fx.Node, dtype: torch.dtype) -> bool:
    """True if a gradient has a dtype somewhere behind the op that computes it."""
    while node.meta["val"].dtype != dtype:
        source = node.args[0] if node.target in REARRANGING else None
        if not isinstance(source, fx.Node):
            return False
        node = source
    return True
