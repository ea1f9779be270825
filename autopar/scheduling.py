"""`scheduled`: a plan with the communication that its program hides behind compute.

The solver adds up seconds as if nothing overlapped. Here the program is emitted with its passes and
simulated, and each planned collective gets the share of its seconds that was hidden::

    step = compute + Σ (seconds - hidden)        Σ hidden ≤ compute
"""

from __future__ import annotations

from dataclasses import replace

from autopar.codegen.emit import emit
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.core.timeline import PlannedMove, PlannedOp, rounded
from autopar.cost_model import Cluster
from autopar.cost_model.simulator import simulate

__all__ = ["scheduled"]

Shares = dict[tuple[str, int, str], float]


def scheduled(plan: Plan, traced: TracedModel) -> Plan:
    """`plan` with hidden and exposed communication; as it is, if it has a pipeline.

    Args:
        plan: as solved.
        traced: the graph that it was solved for, folded or not.
    """
    if plan.pipeline is not None:
        return plan
    program = emit(traced, plan, [0] * len(plan.mesh_shape))
    found = simulate(program.joint.graph, Cluster.from_dict(plan.cluster))
    shares = found.hidden_shares()
    predicted = plan.predicted
    hidden = sum(
        _hidden(op, m, shares) * m.times for op in predicted.timeline.ops for m in op.moves
    )
    scale = min(1.0, predicted.compute_time_s / hidden) if hidden else 1.0
    ops = tuple(
        replace(
            op,
            moves=tuple(
                m._replace(hidden_s=rounded(scale * _hidden(op, m, shares))) for m in op.moves
            ),
        )
        for op in predicted.timeline.ops
    )
    by_axis = [0.0] * len(plan.mesh_shape)
    for op in ops:
        for move in op.moves:
            by_axis[move.axis] += move.hidden_s * move.times
    return replace(
        plan,
        predicted=replace(
            predicted,
            step_time_s=predicted.serial_time_s - sum(by_axis),
            hidden_comm_s=tuple(by_axis),
            timeline=replace(predicted.timeline, ops=ops),
        ),
    )


def _hidden(op: PlannedOp, move: PlannedMove, shares: Shares) -> float:
    """Hidden seconds of one execution; an emitted collective is known by what it belongs to."""
    origin = move.of if move.leaves else op.name
    return move.seconds * shares.get((origin, move.axis, move.kind), 0.0)
