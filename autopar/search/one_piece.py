"""Plans of a step in one piece: the best mesh, and as much hidden as the program really hides.

The search counts on a share of the gathers of parameters and of the reductions of gradients to
travel beside compute (`solver/overlap.py`). Where the simulated program hides much less, for memory
or for collectives over several axes, the step is solved again with the share that it hides, and the
faster of the two programs is taken. Where it hides so little that the rule is in doubt, the step is
solved with all communication counted, too, and under a limit with nothing else where the program of
the plan without one hides next to nothing. Where it hides about what was counted on, and is still
slower than the bound, programs of plain data parallelism are simulated, too, and of what counts
nearly as little on other meshes: the rule does not know how each overlaps. Where no limit binds,
data parallelism is looked at in any case, and where a program takes much more than was counted, so
is the plan that counts least with half of all exposed. Of all programs the fastest is taken, those
that were simulated to see what a plan hides among them. A bound takes longer than a plan, so only
that of what is taken is looked for. Under a limit so do many axes: they are searched behind few,
and with other shares only where they have the plan that counts least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.core.collector import collect_many
from autopar.core.constraints import assign_mesh
from autopar.core.plan import Plan
from autopar.cost_model import Cluster
from autopar.errors import ConstraintError, InfeasiblePlanError
from autopar.search.doubts import DOUBTED, Doubts, hoped_s, unseen_s
from autopar.search.mesh_searches import ALL_EXPOSED, MeshSearches, Searches
from autopar.search.scheduling import scheduled
from autopar.solver.discrete.time_limit import check_time, is_timed, plan_found
from autopar.solver.fit import UNLIMITED
from autopar.solver.meshes import meshes
from autopar.solver.met_plans import CLOSE
from autopar.solver.overlap import EXPOSED, NotBelow
from autopar.solver.solve import Solved, StepSearch, fits

__all__ = ["OnePiece"]

_JOINED = 1e-3  # what a mesh with joined axes must save
_HIDDEN = 0.8  # of what was counted on: less, and the step is solved again
_NEXT_TO_NONE = 0.25  # of it: the plan that counts on nothing serves
_SLOWER = 0.01  # than the bound: more, and other programs are looked at
_FAR = 0.05  # above what was counted: more, and a plan that has less to hide may be faster
_HALF = 0.5  # of what may hide, exposed: plans that send less count least then
_NEAR = 0.01  # of what counts least: less, and a plan on another mesh may be faster
_UNSEEN = 0.03  # of the step: what is not counted, that other programs are thought to have as well
_AS_FAST = 3e-3  # of a step: programs that differ by less
_STAGES = (0, 1, 3)  # of ZeRO
_TOLD = ("solver", "constraints", "memory_limit_bytes")  # what it does not
_CHOICES = ("mesh_shape", "checkpoint", "offload", "parameters", "nodes")  # what a program follows


@dataclass(frozen=True, slots=True)
class OnePiece(MeshSearches):
    """Plans a step on the whole batch, as `plan_step` has it.

    Attributes:
        kernels: as of `Plan.fusion`.
        begun: searches on each mesh that `soon` has begun, by limit, exposed share and meshes.
        programs: plans, and what they are as their programs were simulated.
        proved_s: seconds that no plan within a limit is below, by the limit.
    """

    kernels: tuple[str, ...] = ()
    begun: dict[object, Searches] = field(default_factory=dict)
    programs: list[tuple[Plan, Plan]] = field(default_factory=list)
    proved_s: dict[int, float] = field(default_factory=dict)

    def hasty(self, limit: int) -> Plan | None:
        """A plan within a limit on the mesh of the fewest axes that has one, if it is soon seen.

        Raises:
            ConstraintError: the constraints cannot hold.
        """
        alone = replace(self, searches=None)  # other searches are to go their own way
        for cluster in sorted(self._meshes(), key=lambda c: len(c.mesh_shape)):
            with suppress(InfeasiblePlanError):
                found = alone._search(cluster, limit, EXPOSED, UNLIMITED).hasty()
                if found is not None:
                    return self._program(self._finished(found))
        return None

    def soon(self, limit: int) -> Plan | None:
        """A plan within a limit that is soon found, with what its program hides, if there is one.

        The searches that have begun are gone on with.

        Raises:
            ConstraintError: the constraints cannot hold.
        """
        key = limit, EXPOSED, self.only
        if key not in self.begun:
            glanced = self._simulated if is_timed() else None
            self.begun[key] = self._begun(
                limit, EXPOSED, math.inf, UNLIMITED, glance=True, glanced=glanced
            )
        first = self.begun[key][0][1].soon()
        return None if first is None else self._program(self._finished(first))

    def plan(
        self,
        limit: int,
        exposed: float = EXPOSED,
        below_s: float = math.inf,
        doubts: Doubts | None = None,
        proved_within: int | None = UNLIMITED,
    ) -> Plan:
        """The plan that counts least, on the mesh as given or with axes joined.

        Args:
            limit: bytes per device.
            exposed, below_s, proved_within: see `solver.solve.StepSearch` and its `run`.
            doubts: asked before more sums are searched on a mesh.

        Raises:
            ConstraintError: the constraints cannot hold.
            InfeasiblePlanError: nothing fits, on any mesh.
            NotBelow: nothing is below `below_s`.
        """
        best: Plan | None = None
        bound = math.inf
        refused: list[InfeasiblePlanError] = []
        searches = self.begun.pop((limit, exposed, self.only), None)
        searches = searches or self._begun(limit, exposed, below_s, proved_within)
        for cluster, search in searches:
            search.prove_within(proved_within)
            to_beat_s = min(below_s, self._to_beat_s(cluster, best))
            free_s = self.free_s.get(cluster.mesh_shape, 0.0)
            if free_s >= to_beat_s:
                bound = min(bound, free_s)
                continue
            try:
                # the least of all meshes counts
                enough_s = bound if limit < UNLIMITED else math.inf
                found = self._solved(search, to_beat_s, doubts, enough_s)
            except NotBelow as error:
                known_s, t = error.bound, error.t
            except InfeasiblePlanError as error:
                refused.append(error)
                continue
            else:
                known_s, t = found.plan.solver.bound, found.t
                best = found.plan if found.plan.solver.objective < to_beat_s else best
            bound = min(bound, max(known_s, free_s))  # a limit makes nothing faster
            if limit >= UNLIMITED and exposed <= EXPOSED:
                # less memory, more pins and more that is exposed make no step faster
                self.free_s[cluster.mesh_shape] = known_s
            if exposed < ALL_EXPOSED:
                self.told_t[cluster.mesh_shape] = t
        # without a bound to be asked for, mixtures are in none
        bounds_all = self.only is None and proved_within is not None
        if bounds_all and exposed <= EXPOSED and math.isfinite(bound):
            self.proved_s[limit] = max(self.proved_s.get(limit, 0.0), bound)
        if best is None and math.isfinite(bound):
            raise NotBelow(bound)
        if best is None:
            raise min(refused, key=lambda error: error.required_bytes or 0)
        return _proved(best, bound)

    def _to_beat_s(self, cluster: Cluster, best: Plan | None) -> float:
        """What a plan on a mesh must stay below."""
        if best is None:
            return math.inf
        own = cluster.mesh_shape == self.cluster.mesh_shape
        joined = best.mesh_shape != self.cluster.mesh_shape
        # the mesh as given is kept where joining its axes gains nothing to speak of
        margin = 1 + _JOINED * (own and joined) - _JOINED * (not own and not joined)
        return best.solver.objective * margin

    def best(
        self,
        limit: int,
        plan: Plan | None = None,
        below_s: float = math.inf,
        proved: bool = True,
    ) -> Plan:
        """A plan within the limit with what its program hides, or a faster one.

        Args:
            limit: bytes per device.
            plan: that counts least.
            below_s: seconds that a program must stay below to be of use.
            proved: a bound is of use.

        Raises:
            ConstraintError: the constraints cannot hold.
            InfeasiblePlanError: nothing fits.
            NotBelow: nothing counts so little that its program may stay below `below_s`.
        """
        # searches that count otherwise go on with what is known, if not those of other limits
        known = self if self.searches is not None else replace(self, searches={})
        doubts = Doubts(self._hidden)
        counted = ALL_EXPOSED if plan is None and self._hides_nothing() else EXPOSED
        count_s = _most_counted_s(below_s * (1 + _NEAR), counted)
        within = UNLIMITED if proved else None
        first = plan or known.plan(limit, counted, count_s, doubts, within)
        best = known._fastest_of_others(limit, first, counted, roomy=plan is not None)
        best = replace(best, constraints=self.constraints.to_dict())
        now = best.solver
        if proved and plan is None and now.exposed != counted:
            # only what is taken is proved, as that takes longer: the bound known is of no mixtures
            best = known._in_full(limit, _proved(best, 0.0), now.exposed, now.objective)
        if doubts.founded and best.solver.exposed <= EXPOSED:
            # a plan that counts on the doubtful rule is fastest yet
            best = known._in_full(limit, best, EXPOSED, best.predicted.step_time_s)
        return best if proved else _proved(best, 0.0)

    def _fastest_of_others(self, limit: int, first: Plan, counted: float, roomy: bool) -> Plan:
        """The plan with the fastest program of the one that counts least and others.

        Args:
            limit: bytes per device.
            first: that counts least.
            counted: share that was taken to be exposed.
            roomy: no limit binds.
        """
        program, hidden = self._program(first), self._hidden(first)
        best = self._fastest(program, limit)
        missed_s = min(unseen_s(first, program), _UNSEEN * best.predicted.step_time_s)
        program_s = program.predicted.step_time_s
        for other in self._others(first, counted, hidden, program_s, roomy):
            now_s, most_s, exposed = best.predicted.step_time_s, other.most_s, other.exposed
            near = now_s - missed_s <= (1 + _SLOWER) * first.solver.bound
            if near:
                if not roomy or not other.plain:
                    break
                # soon found where no limit binds; of what is not counted they have half, or more
                most_s = (now_s - missed_s / 2) / (1 - CLOSE)
            below_s = min(most_s, _most_counted_s(now_s, exposed))
            proved = UNLIMITED if roomy and exposed != counted else None
            with suppress(ConstraintError, InfeasiblePlanError, NotBelow):
                found = other.planner._within(limit, roomy, exposed, below_s, proved)
                found = self._program(found, best if near else None, now_s)
                if exposed == counted:
                    # what was searched is less than the user asked for
                    found = _proved(found, first.solver.bound)
                best = min(best, found, key=lambda p: p.predicted.step_time_s)
        return best

    def _within(
        self,
        limit: int,
        roomy: bool,
        exposed: float,
        below_s: float,
        proved_within: int | None,
    ) -> Plan:
        """The plan within a limit; where that is `roomy`, the one without it is asked first.

        That is sooner found, as it recomputes nothing; arguments and errors as of `plan`.
        """
        if roomy:
            found = self.plan(UNLIMITED, exposed, below_s, proved_within=proved_within)
            if fits(found, self.cluster, limit):
                return replace(found, memory_limit_bytes=limit)
        return self.plan(limit, exposed, below_s, proved_within=proved_within)

    def _others(
        self, first: Plan, counted: float, hidden: float, program_s: float, roomy: bool
    ) -> Iterator[_Other]:
        """What else may have a faster program than the plan that counts least, data parallel first.

        Args:
            first: that counts least.
            counted: share that was taken to be exposed.
            hidden: what its program hides, of what was counted on.
            program_s: seconds of its program.
            roomy: no limit binds.
        """
        is_doubtful = not roomy and hidden < DOUBTED
        yield from (_Other(planner, counted, plain=True) for planner in self._data_parallel())
        shapes = [cluster.mesh_shape for cluster in meshes(self.cluster, self.constraints)]
        if not roomy and first.mesh_shape in shapes:
            # many axes take long under a limit, and few were as good
            shapes = [shape for shape in shapes if len(shape) <= len(first.mesh_shape)]
        few = replace(self, only=tuple(shapes))
        if is_doubtful:
            yield _Other(few, ALL_EXPOSED)
        if hidden < _HIDDEN and not (is_doubtful and hidden < _NEXT_TO_NONE):
            yield _Other(few, 1 - (1 - EXPOSED) * hidden)
        elif roomy and program_s > (1 + _FAR) * first.solver.objective:
            yield _Other(few, _HALF)
        near_s = (1 + _NEAR) * first.solver.objective
        for shape in shapes:
            if first.mesh_shape in shapes and shape != first.mesh_shape:
                yield _Other(replace(self, only=(shape,)), counted, near_s)

    def _in_full(self, limit: int, best: Plan, exposed: float, below_s: float) -> Plan:
        """The best plan with its bound or a faster one, with all sums searched at an exposure."""
        try:
            found = self.plan(limit, exposed, below_s)
        except NotBelow as error:
            return _proved(best, max(best.solver.bound, error.bound))
        bound = max(best.solver.bound, found.solver.bound)
        best = min(best, self._program(found), key=lambda p: p.predicted.step_time_s)
        return _proved(best, bound)

    def _data_parallel(self) -> Iterator[OnePiece]:
        """Plans that split the batch over all devices, if no axis is pinned."""
        free = all(r.name == "free" for r in assign_mesh(self.constraints, self.cluster.mesh_shape))
        if not free or self.constraints.params or not self.traced.training:
            return
        for stage in _STAGES:
            pinned = replace(self.constraints, data=self.cluster.num_devices, zero=stage)
            # searches of other constraints are of other problems
            known_t = dict(self.told_t)
            yield replace(
                self,
                constraints=pinned,
                searches=None,
                free_s={},
                told_t=known_t,
                begun={},
                proved_s={},
            )

    def _program(self, plan: Plan, like: Plan | None = None, below_s: float = math.inf) -> Plan:
        """A plan with what its program hides, in the buckets of one that is much like it.

        Other buckets are not tried where it takes much longer than `below_s`.
        """
        for known, found in self.programs:
            if all(getattr(known, name) == getattr(plan, name) for name in _CHOICES):
                told = {name: getattr(plan, name) for name in _TOLD}
                return replace(found, **told)
        collect_many()
        same_mesh = like is not None and like.mesh_shape == plan.mesh_shape
        buckets = like.buckets if like and same_mesh else ()
        check_time()
        found = scheduled(plan, self.traced, buckets=buckets, below_s=below_s)
        self.programs.append((plan, found))
        if plan.memory_limit_bytes < UNLIMITED:
            plan_found()
        return found

    def bound_s(self, limit: int) -> float:
        """Seconds that no plan within a limit counts less than, as far as is known yet."""
        return max((s for of, s in self.proved_s.items() if of >= limit), default=0.0)

    def within(self, limit: int) -> list[Plan]:
        """Plans whose programs were simulated, as plans of this search under a limit that fits."""
        pinned = self.constraints.to_dict()
        found = [program for _, program in self.programs if fits(program, self.cluster, limit)]
        return [replace(p, constraints=pinned, memory_limit_bytes=limit) for p in found]

    def _fastest(self, found: Plan, limit: int) -> Plan:
        """A plan with what its program hides, or a faster one of those looked at on the way."""
        alike = (p for _, p in self.programs if p.solver.exposed == found.solver.exposed)
        within = (p for p in alike if fits(p, self.cluster, limit))
        looked_at = (found, *within)
        least_s = min(p.predicted.step_time_s for p in looked_at)
        # of those as fast, the one of which most is proved
        near = (p for p in looked_at if p.predicted.step_time_s <= (1 + _AS_FAST) * least_s)
        fastest = min(near, key=lambda p: p.solver.objective)
        told = replace(fastest, constraints=found.constraints, memory_limit_bytes=limit)
        return _proved(told, found.solver.bound)

    def _hides_nothing(self) -> bool:
        """True where programs without a limit hide next to nothing of what was counted on."""
        free = (p for p, _ in self.programs if p.memory_limit_bytes >= UNLIMITED)
        hidden = [self._hidden(p) for p in free if p.solver.exposed == EXPOSED and hoped_s(p) > 0]
        return bool(hidden) and max(hidden) < _NEXT_TO_NONE

    def _hidden(self, plan: Plan) -> float:
        """What a plan's program hides, of what the search counted on."""
        meant_s = hoped_s(plan)
        return self._program(plan).predicted.hidden_time_s / meant_s if meant_s > 0 else 1.0

    def _simulated(self, search: StepSearch) -> None:
        """Simulate what a glance has found: the search can end with it before others have begun."""
        found = search.soon()
        if found is not None:
            self._program(self._finished(found))

    def _solved(
        self, search: StepSearch, below_s: float, doubts: Doubts | None, enough_s: float
    ) -> Solved:
        asked = None if doubts is None else lambda found: doubts(self._finished(found), below_s)
        solved = search.run(below_s, asked, enough_s)
        return replace(solved, plan=self._finished(solved.plan))

    def _finished(self, plan: Plan) -> Plan:
        return replace(plan, constraints=self.constraints.to_dict(), fusion=self.kernels)


class _Other(NamedTuple):
    """Another search: a share is exposed, and plans below some seconds are of use.

    `plain` is data parallelism, which is soon searched where no limit binds.
    """

    planner: OnePiece
    exposed: float
    most_s: float = math.inf
    plain: bool = False


def _most_counted_s(program_s: float, exposed: float) -> float:
    """Seconds that a plan may count where its program takes so many, as a rule."""
    # no more than half of what runs on two streams is hidden
    return program_s if exposed < _HALF else (1 + exposed) * program_s


def _proved(plan: Plan, bound: float) -> Plan:
    """A plan with a bound of the seconds that it counts."""
    return replace(plan, solver=plan.solver.proved(bound))
