"""Refuses sparse and nested tensors: ranks hold parts of dense ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.tracer.diagnose import user_line

__all__ = ["refuse_given", "refuse_made"]

_DENSE = (torch.strided, torch._mkldnn)  # type: ignore[attr-defined]
_NESTED = "Pad the rows to one length, and mask what is padding."
_SPARSE = (
    "Pass its indices and values as tensors of their own; a product with a dense matrix is then "
    "torch.zeros(n, width).index_add(0, rows, values[:, None] * dense[columns])."
)


def refuse_given(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse inputs, parameters and buffers that are not dense.

    Raises:
        TraceError: there is one; says which.
    """
    for name, value in _given(model, args, kwargs):
        if isinstance(value, Tensor) and value.layout not in _DENSE:
            raise TraceError(f"{name} is a tensor of layout {value.layout}. {_remedy(value)}")


def refuse_made(graph: fx.Graph) -> None:
    """Refuse tensors of the forward that are not dense.

    Raises:
        TraceError: there is one; says the line that makes it.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.layout not in _DENSE:
            raise TraceError(
                f"cannot trace {user_line(node)}\n  It makes a tensor of layout {value.layout}, "
                f"and autopar splits dense ones. {_remedy(value)}"
            )


def _given(model: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    for kind, found in (("args", args), ("kwargs", kwargs)):
        for path, value in pytree.tree_flatten_with_path(found)[0]:
            yield f"input {kind}{pytree.keystr(path)}", value
    for name, value in model.named_parameters():
        yield f"parameter {name}", value
    for name, value in model.named_buffers():
        yield f"buffer {name}", value


def _remedy(value: Tensor) -> str:
    return _NESTED if value.is_nested else _SPARSE
