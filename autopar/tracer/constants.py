"""Values of an exported graph that depend on no input, computed on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

__all__ = ["constant", "is_repeatable"]

aten = torch.ops.aten

# elements of what is computed on the way: the mask of 16,384 positions
_LIMIT = 1 << 28


def constant(
    node: fx.Node, known: dict[fx.Node, Any], lifted: Mapping[str, Tensor] | None = None
) -> Any:
    """The value of a node that is computed from numbers alone; None for any other, or a large one.

    Args:
        node: of an exported graph.
        known: values of nodes met before.
        lifted: values of placeholders that are no inputs, by name.
    """
    if node in known:
        return known[node]
    if lifted and node.name in lifted:
        return lifted[node.name]
    known[node] = None
    fake = node.meta.get("val")
    if not isinstance(fake, Tensor) or not is_repeatable(node.target):
        return None
    if math.prod(fake.shape) > _LIMIT and not _is_view(node.target):
        return None
    values = {source: constant(source, known, lifted) for source in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None

    def swap(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return values[arg]
        return torch.device("cpu") if isinstance(arg, torch.device) else arg

    args, kwargs = map_aggregate((tuple(node.args), dict(node.kwargs)), swap)
    known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def _is_view(target: Any) -> bool:
    return target in (aten.expand.default, aten.unsqueeze.default, aten.view.default)


def is_repeatable(target: Any) -> bool:
    """True for an op that gives the same each time and writes to nothing."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and "empty" not in target._schema.name
    )
