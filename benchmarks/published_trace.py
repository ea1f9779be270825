"""Traces of published models: one of each structure, brought to the sizes of each model.

A structure is traced with primes for sizes. A whole number in its graph is then a product of the
sizes that it is made of, times a constant, and the sizes of another model take their places. Sizes
of 1 stay 1, since torch treats a dim of that size as no other. Numbers with a fraction, such as the
scale of attention, stay those of the primes: nothing is priced by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from autopar.core.graph import TracedModel
from autopar.core.late_module import late_module
from autopar.tracer.trace import trace
from benchmarks.published_models import Shape, Transformer

__all__ = ["Traces", "traced"]

# Of the factors that numbers of a graph may have. Query heads of a group come with the two of keys
# and values, hence the twins. None divides 2**63 - 1, the end of a slice that has none.
_PRIMES = {
    "micro": 131,
    "length": 157,
    "groups": 163,
    "each": 137,
    "each + 2": 139,
    "half dim": 167,
    "ffn": 173,
    "vocab": 179,
}

_LARGEST = 2**63 - 1


def traced(shape: Shape, length: int, micro: int, dtype: str) -> TracedModel:
    """The step of a model on meta.

    Args:
        shape: of the model.
        length: of a sequence.
        micro: sequences of a microbatch.
        dtype: of parameters.
    """
    with torch.device("meta"):
        model = Transformer(shape, length).to(getattr(torch, dtype)).train()
        ids = torch.zeros(micro, length, dtype=torch.long)
    return trace(model, {"ids": ids, "labels": ids})


class Traces:
    """Traces models; those that differ in sizes alone are traced once."""

    def __init__(self) -> None:
        self._traced = lru_cache(maxsize=None)(traced)

    def of(self, shape: Shape, length: int, micro: int, dtype: str) -> TracedModel:
        """As `traced`."""
        if shape.head_dim % 2:
            return self._traced(shape, length, micro, dtype)
        sizes = _sizes(shape, length, micro)
        prime = {name: 1 if size == 1 else _PRIMES[name] for name, size in sizes.items()}
        prime["each + 2"] = prime["each"] + 2
        found = self._traced(_with(shape, prime), prime["length"], prime["micro"], dtype)
        return _resized(found, {prime[name]: size for name, size in sizes.items()})


def _sizes(shape: Shape, length: int, micro: int) -> dict[str, int]:
    each = shape.heads // shape.kv_heads
    return {
        "micro": micro,
        "length": length,
        "groups": shape.kv_heads,
        "each": each,
        "each + 2": each + 2,
        "half dim": shape.head_dim // 2,
        "ffn": shape.ffn,
        "vocab": shape.vocab,
    }


def _with(shape: Shape, sizes: Mapping[str, int]) -> Shape:
    heads = sizes["groups"] * sizes["each"]
    return replace(
        shape,
        hidden=2 * sizes["half dim"] * heads,
        heads=heads,
        kv_heads=sizes["groups"],
        ffn=sizes["ffn"],
        vocab=sizes["vocab"],
    )


def _resized(found: TracedModel, sizes: Mapping[int, int]) -> TracedModel:
    """A trace with other sizes in the places of its primes.

    Args:
        found: traced with primes for sizes.
        sizes: by prime.
    """

    @cache
    def number(old: int) -> int:
        new = 1
        for prime, size in sizes.items():
            while prime > 1 and old and old % prime == 0:
                old, new = old // prime, new * size
        if old * new > _LARGEST:
            raise OverflowError(f"a tensor of {old * new} elements")
        return old * new

    @cache
    def tensor(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        where = (tuple(map(number, shape)), tuple(map(number, stride)))
        return torch.empty_strided(*where, dtype=dtype, device="meta")

    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tensor(tuple(value.shape), value.stride(), value.dtype)
        return number(value) if type(value) is int else value

    return replace(
        found,
        graph_module=late_module(_copied(found.graph, changed)),
        inputs=tuple(replace(spec, shape=tuple(map(number, spec.shape))) for spec in found.inputs),
    )


def _copied(graph: fx.Graph, changed: Callable[[Any], Any]) -> fx.Graph:
    """A graph with changed arguments and values."""
    made = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        twin = twins[node] = made.node_copy(node, twins.__getitem__)
        twin.args = map_aggregate(twin.args, changed)
        twin.kwargs = map_aggregate(twin.kwargs, changed)
        twin.meta = {"val": map_aggregate(node.meta.get("val"), changed)}
    return made
