"""HiGHS as PuLP calls it, without the banner that it prints when it is made."""

from __future__ import annotations

import math

import highspy
import pulp

__all__ = ["BOUND_ALONE", "HiGHS"]

BOUND_ALONE = {
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
}
"""Options where a bound is wanted and no solution: nothing is searched beside the tree.

Versions of HiGHS that do not know them search as ever.
"""


class _Silent(highspy.Highs):
    """Prints nothing, from the start: the banner comes before PuLP can say so."""

    def enableCallbacks(self) -> None:  # noqa: N802
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


class HiGHS(pulp.HiGHS):
    """HiGHS on one thread, with the status of a search that a limit of nodes ended.

    Args:
        gap_abs: of the objective, at which it ends; None for HiGHS's own.
        **options: of HiGHS, by their names.
    """

    def __init__(self, gap_abs: float | None = None, **options: float) -> None:
        # relative gaps would be of an objective without the constant that tables share
        gaps = {"gapRel": 0.0, "gapAbs": gap_abs} if gap_abs is not None else {}
        super().__init__(msg=False, threads=1, random_seed=0, **gaps, **options)

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:  # noqa: N802
        """Make the solver, as PuLP does, of a class that is silent."""
        lp.solverModel = _Silent()
        gaps = {"mip_rel_gap": self.gapRel, "mip_abs_gap": self.gapAbs}
        own = {"output_flag": self.msg, "threads": self.threads, **gaps}
        for name, value in {**own, **self.optionsDict}.items():
            if value is not None:
                lp.solverModel.setOptionValue(name, value)

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:  # noqa: N802
        """Values and status; a limit of nodes is a status that PuLP does not know."""
        if lp.solverModel.getModelStatus() != highspy.HighsModelStatus.kSolutionLimit:
            return super().findSolutionValues(lp)
        values = list(lp.solverModel.getSolution().col_value)
        if not math.isfinite(lp.solverModel.getObjectiveValue()):
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
        for variable in lp.variables():
            variable.varValue = values[variable.index]
        return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible
