"""Recomputation of activations, as a rewrite of the traced graph.

Before the first backward op of a block, what its backward reads of its forward is computed again
from the block's inputs (Chen et al. 2016, arXiv 1604.06174). "full" keeps a block's inputs only;
"selective" keeps the results of contractions, convolutions, recurrent layers and attention too, and
repeats what is cheap (after Korthikanti et al. 2022, arXiv 2205.05198, who repeat the ops that hold
much memory and cost little). "host" is "full", and what a block alone keeps for it waits in host
memory (`core/away.py`). The copies are backward ops like any other, so the solver, the price, the
live memory and the emitted program need to know no more.
Random ops are functions of a counter: a copy draws the same numbers.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from autopar.core.apart import told_apart
from autopar.core.away import sent_away
from autopar.core.block_kinds import Checkpoint, kinds_of, labels_of, sections_of
from autopar.core.blocks import Blocks
from autopar.core.graph import NodeInfo, TracedModel
from autopar.core.late_module import late_module
from autopar.core.recurrent import RECURRENT

__all__ = ["recomputed"]

_KEPT_BY_SELECTIVE = (
    torch.ops.autopar.einsum.default,
    torch.ops.autopar.attention.default,
    RECURRENT,
    torch.ops.aten.convolution.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
)


def recomputed(traced: TracedModel, checkpoint: Checkpoint) -> TracedModel:
    """The step with the copies that each block's kind of recomputation asks for.

    A folded graph gets a stand-in for each run of equal blocks of one kind, or of one section of
    these (`told_apart`).

    Args:
        traced: the step; returned as it is where no block is recomputed.
        checkpoint: the kind of all blocks, or of each run of them.

    Raises:
        ConstraintError: blocks that repeat cannot be told apart.
    """
    if checkpoint == "none" or not traced.training:
        return traced
    if not isinstance(checkpoint, str):
        blocks = Blocks(traced).every()
        traced = told_apart(traced, labels_of(checkpoint, blocks))
        traced = replace(traced, sections=sections_of(checkpoint))
    graph = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(traced.graph, twins)
    graph.output(results).meta = dict(traced.graph.output_node().meta)
    info = dict(traced.info)
    names = {twin.name: node.name for node, twin in twins.items()}
    assert all(new == old for new, old in names.items()), "a copied graph keeps its names"
    members = Blocks(traced).members
    kinds = kinds_of(checkpoint, members)
    for block, nodes in members.items():
        if kinds[block] != "none":
            inside = [twins[node] for node in nodes]
            _Repeater(graph, info, inside, kinds[block], traced.hoisted).run()
    module = late_module(graph)
    found = replace(traced, graph_module=module, info=info)
    if "host" in kinds.values():
        sent_away(found, info, {block for block, kind in kinds.items() if kind == "host"})
    return found


class _Repeater:
    """Puts the copies of one block into the graph."""

    def __init__(
        self,
        graph: fx.Graph,
        info: dict[str, NodeInfo],
        nodes: list[fx.Node],
        kind: str,
        hoisted: frozenset[str],
    ) -> None:
        self.graph = graph
        self.info = info
        self.kind = kind
        self.hoisted = hoisted
        calls = [n for n in nodes if n.op == "call_function"]
        self.forward = {n for n in calls if info[n.name].phase == "forward"}
        self.backward = [n for n in calls if info[n.name].phase == "backward"]
        self.copies: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        inside = set(self.backward)
        # what another block's backward reads is saved for it already
        self.kept = {
            node
            for node in self.forward
            if any(
                self.info[u.name].phase == "backward" and u not in inside
                for u in node.users
                if u.op == "call_function"
            )
        }
        readers = [n for n in self.backward if any(self._again(a) for a in n.all_input_nodes)]
        if not readers:
            return
        with self.graph.inserting_before(readers[0]):
            for node in readers:
                for operand in node.all_input_nodes:
                    if self._again(operand):
                        self._copy(operand)
        for node in readers:
            node.args = fx.map_arg(node.args, lambda n: self.copies.get(n, n))
            node.kwargs = fx.map_arg(node.kwargs, lambda n: self.copies.get(n, n))

    def _again(self, node: fx.Node) -> bool:
        if node not in self.forward or node in self.kept or node.name in self.hoisted:
            return False
        source = node
        while source.target in (operator.getitem, torch.ops.aten.alias.default):
            source = source.all_input_nodes[0]
        if source.op == "placeholder":
            return False  # whether a parameter's copy is kept is the solver's choice
        return self.kind != "selective" or source.target not in _KEPT_BY_SELECTIVE

    def _copy(self, node: fx.Node) -> fx.Node:
        """The copy of a forward node, after those of what it reads."""
        stack = [node]
        while stack:
            top = stack[-1]
            waiting = [a for a in top.all_input_nodes if self._again(a) and a not in self.copies]
            if waiting and top not in self.copies:
                stack.extend(waiting)
                continue
            stack.pop()
            if top not in self.copies:
                twin = self.graph.node_copy(top, lambda n: self.copies.get(n, n))
                twin.meta["again"] = top.name
                twin.meta.setdefault("origin", top.name)
                origin = self.info[top.name]
                self.info[twin.name] = replace(origin, phase="backward", recomputed=True)
                self.copies[top] = twin
        return self.copies[node]
