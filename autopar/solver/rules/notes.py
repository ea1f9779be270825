"""What rules ask of an op's place in the graph, written down once for the whole of it."""

from __future__ import annotations

from autopar.core.graph import TracedModel
from autopar.solver.rules.contraction import note_factors
from autopar.solver.rules.derivatives import note_activated
from autopar.solver.rules.joined import note_joined
from autopar.solver.rules.own_order import note_orders

__all__ = ["note_places"]


def note_places(traced: TracedModel) -> None:
    """Write it into the meta of nodes.

    Args:
        traced: a traced step; done before it is copied, so that recomputed values have it too.
    """
    note_orders(traced.graph)
    note_factors(traced)
    note_activated(traced)
    note_joined(traced)
