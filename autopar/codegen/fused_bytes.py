"""How much less is live while each op of a program runs, once the program is fused.

Passes move collectives before kernels are made, so they would count values that no kernel writes.
Fusing a copy says what is live instead. The difference is noted at ops that no pass moves, those
that kernels replace among them, and taken to be the same up to the next one (`Lifetimes`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.codegen.fusion import Fusion, fuse
from autopar.codegen.passes.lifetimes import FUSED_BYTES, Lifetimes
from autopar.codegen.passes.order import copied
from autopar.codegen.passes.sends import is_start, is_wait
from autopar.core.host import ARRIVED, FROM_HOST
from autopar.core.work import is_view

__all__ = ["note_fused_bytes"]

_FROM_HOST = (FROM_HOST, ARRIVED)


def note_fused_bytes(graph: fx.Graph, fusion: Fusion, fake_mode: FakeTensorMode) -> None:
    """Note at the ops of a graph by how much fusing changes what is live while they run.

    Args:
        graph: as it is written; nothing but its `meta` changes.
        fusion: what will be fused.
        fake_mode: that of the graph's values.
    """
    fused = copied(graph)
    fuse(fused, fusion, fake_mode)
    alone, together = Lifetimes(graph), Lifetimes(fused)
    places = {node.name: place for place, node in enumerate(together.nodes)}
    fixed = _fixed(graph, places)
    before = -1
    waiting: list[int] = []  # positions of ops whose kernel is behind what was kept last
    for position, node in enumerate(alone.nodes):
        if node.name not in places:
            waiting.append(position)
            continue
        here = places[node.name]
        kernels = together.live[before + 1 : here]
        for each in waiting if len(kernels) else ():
            alone.nodes[each].meta[FUSED_BYTES] = int(kernels.max() - alone.live[each])
        if node in fixed:
            node.meta[FUSED_BYTES] = int(together.live[here] - alone.live[position])
        before, waiting = here, []


def _fixed(graph: fx.Graph, kept: Collection[str]) -> set[fx.Node]:
    """Ops that work on what kernels yield, which no pass moves as it does what it sends."""
    fed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name not in kept or (
            node.op == "call_function"
            and not (is_start(node) or is_wait(node) or node.target in _FROM_HOST)
            and any(source in fed for source in node.all_input_nodes)
        ):
            fed.add(node)
    return {n for n in fed if not is_view(n.target) and not all(map(is_start, _readers(n)))} | {
        graph.output_node()
    }


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a node, by way of views."""
    for user in node.users:
        if user.op == "call_function" and is_view(user.target):
            yield from _readers(user)
        else:
            yield user
