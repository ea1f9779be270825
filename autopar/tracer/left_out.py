"""Outputs beside a loss whose size depends on values: a compiled step returns None for them."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.export.graph_signature import ConstantArgument
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autopar.core.graph import output_paths
from autopar.errors import UncheckedWarning
from autopar.tracer.effects import drop_dead

__all__ = ["leave_out", "warn_of_left_out"]


def leave_out(exported: Any, out_spec: Any) -> tuple[str, ...]:
    """Drop them, as `image_hidden_states` of those images that a mask picks, in place.

    Returns:
        where they stand in the output; none if no output is called `loss`
    """
    output = exported.graph.output_node()
    results = list(output.args[0])
    specs = exported.graph_signature.output_specs
    user = [i for i, spec in enumerate(specs) if spec.kind.name == "USER_OUTPUT"]
    values = {i: getattr(results[i], "meta", {}).get("val") for i in user}
    tensors = {i: v for i, v in values.items() if isinstance(v, Tensor)}
    unknown = [i for i, v in tensors.items() if free_unbacked_symbols(v)]
    paths = dict(zip(user, output_paths(out_spec), strict=True))
    scalars = [i for i, v in tensors.items() if not v.dim() and v.is_floating_point()]
    if sum(paths[i] in (".loss", "['loss']") for i in scalars) != 1:
        return ()
    for i in unknown:
        results[i] = None
        specs[i].arg = ConstantArgument(name="", value=None)
    output.args = (tuple(results),)
    drop_dead(exported.graph_module)
    return tuple(paths[i] for i in unknown)


def warn_of_left_out(model: Any, paths: tuple[str, ...]) -> None:
    if paths:
        warnings.warn(
            f"{type(model).__name__}: output{', output'.join(paths)} has as many rows as a mask "
            "picks, which no plan knows: the parallel program returns None for it, and it gets "
            "no gradient",
            UncheckedWarning,
            stacklevel=2,
        )
