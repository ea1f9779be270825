"""Fusion: a pass over an emitted graph that puts in hand-written and generated kernels.

`fuse(graph, fusion, fake_mode)` first puts hand-written kernels in place of the chains that they
compute (`patterns/`), then generates one kernel for each remaining chain of pointwise ops and row
reductions (`groups.py`, `source.py`). No collective is moved in or out of a kernel.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.codegen.fakes import fake_call
from autopar.codegen.fusion.generated import generate
from autopar.codegen.fusion.options import GENERATED, Fusion
from autopar.codegen.fusion.registry import PATTERNS, Pattern, pattern
from autopar.codegen.fusion.rewriter import Rewriter, sort_graph
from autopar.core.work import is_view

__all__ = ["GENERATED", "PATTERNS", "Fusion", "fuse", "pattern"]


def fuse(graph: fx.Graph, fusion: Fusion, fake_mode: FakeTensorMode) -> Rewriter:
    """Rewrite an emitted graph in place.

    Args:
        graph: forward and backward of a rank, with fake values and phases.
        fusion: what to fuse.
        fake_mode: that of the graph's values.

    Returns:
        The rewriter, which knows what was fused and replaced.
    """
    rewriter = Rewriter(graph, fake_mode)
    by_anchor: dict[int, dict[Any, list[Pattern]]] = defaultdict(lambda: defaultdict(list))
    for p in PATTERNS:
        if p.kernel in fusion.kernels:
            for anchor in p.anchors:
                by_anchor[p.rank][anchor].append(p)
    for rank in sorted(by_anchor):
        for node in reversed(list(graph.nodes)):
            if node.op != "call_function" or node._erased:
                continue
            for p in by_anchor[rank].get(node.target, ()):
                if p.rewrite(rewriter, node):
                    break
    sort_graph(graph)
    if GENERATED in fusion.kernels:
        generate(rewriter, fusion.dump)
    graph.lint()
    _refresh_views(graph, fake_mode)
    return rewriter


def _shows_operand(node: fx.Node) -> bool:
    """True if the fake value of a view has the storage of its operand's."""
    value, source = node.meta["val"], node.args[0]
    given = source.meta["val"] if isinstance(source, fx.Node) else None
    if not isinstance(value, Tensor) or not isinstance(given, Tensor):
        return False
    return value.untyped_storage()._cdata == given.untyped_storage()._cdata


def _refresh_views(graph: fx.Graph, fake_mode: FakeTensorMode) -> None:
    """Let fake values of views share the storage of what they now read."""
    for node in graph.nodes:
        if node.op == "call_function" and is_view(node.target) and not _shows_operand(node):
            node.meta["val"] = fake_call(fake_mode, node.target, node.args, node.kwargs)
