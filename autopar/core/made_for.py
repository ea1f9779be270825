"""Whether something is a plan, and was made for a graph."""

from __future__ import annotations

from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.errors import AutoparError, PlanMismatchError

__all__ = ["check_is_plan", "check_made_for"]


def check_is_plan(value: object) -> None:
    """Refuse what is no plan, such as the path of one.

    Raises:
        AutoparError: it is none.
    """
    if not isinstance(value, Plan):
        raise AutoparError(
            f"plan is a {type(value).__name__}; pass a Plan, such as autopar.load_plan(path)"
        )


def check_made_for(plan: Plan, traced: TracedModel) -> None:
    """Refuse a plan of another graph.

    Args:
        plan: of a step, or of a pipeline stage.
        traced: the graph that it is to be used for, folded if the plan's is.

    Raises:
        PlanMismatchError: it was made for another one.
    """
    if plan.fingerprint != traced.fingerprint():
        raise PlanMismatchError(
            f"the plan is for graph {plan.fingerprint}, this model and input trace to "
            f"{traced.fingerprint()}: another model, input shape, dtype or version of the code. "
            "Give the model and inputs that it was made for, or plan again"
        )
