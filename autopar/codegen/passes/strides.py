"""What is known of the strides that values will have when a graph runs."""

from __future__ import annotations

import operator

from torch import Tensor, fx

from autopar.codegen.accumulate import add_up
from autopar.codegen.passes.sends import is_wait
from autopar.core.work import lays_out_contiguously

__all__ = ["is_contiguous"]


def is_contiguous(node: fx.Node) -> bool:
    """True if a value is known to be contiguous, by the ops that it is made by."""
    stack, seen = [node], {node}
    while stack:
        here = stack.pop()
        value = here.meta.get("val")
        if isinstance(value, Tensor) and sum(size > 1 for size in value.shape) <= 1:
            if value.is_contiguous():  # and not a column of a matrix
                continue
            return False
        if is_wait(here) or here.target is add_up:
            continue
        maker = here.args[0] if here.target is operator.getitem else here
        assert isinstance(maker, fx.Node)
        known = lays_out_contiguously(maker.target, maker.args)
        if known is False:
            return False
        fresh = () if known else [n for n in maker.all_input_nodes if n not in seen]
        stack += fresh
        seen.update(fresh)
    return True
