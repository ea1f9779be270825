"""A matmul and its collective as a program of their own, whole and in pieces, to be priced."""

from __future__ import annotations

from torch import fx

from autopar.codegen.passes.order import copied, reorder, show_anew
from autopar.codegen.passes.piece_writers import write_pieces
from autopar.codegen.passes.sites import Reduction, Site, find_sites

__all__ = ["cut_out", "in_pieces"]


def cut_out(site: Site) -> fx.Graph:
    """A program of a site alone: what it reads goes in, what others read of it comes out."""
    sums = site.sums if isinstance(site, Reduction) else ()
    inside = {*site.products, *sums, *site.body}
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in (n for n in site.start.graph.nodes if n in inside):
        for source in node.all_input_nodes:
            if source not in env:
                env[source] = graph.placeholder(source.name)
                env[source].meta.update(source.meta)
        env[node] = graph.node_copy(node, env.__getitem__)
    ends = [n for n in inside if any(user not in inside for user in n.users)]
    graph.output(tuple(env[n] for n in sorted(ends)))
    return graph


def in_pieces(graph: fx.Graph, count: int) -> fx.Graph | None:
    """The program of one site (`cut_out`) in `count` pieces; None where its sizes are too small."""
    trial = copied(graph)
    keys = {node: float(i) for i, node in enumerate(trial.nodes)}
    (site,) = find_sites(trial, alone=True)
    made = write_pieces(site, count, keys)
    reorder(trial, keys)
    show_anew(trial, made)
    return trial if made else None
