"""Searches all variants of a step, of recomputation and of where the optimizer is, for one sum.

A sum counts the seconds of compute and those of what may hide (`overlap.Weights`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from autopar.core.blocks import Block
from autopar.cost_model import Offloaded, offload_seconds
from autopar.errors import ConstraintError
from autopar.solver.discrete.time_limit import check_time
from autopar.solver.exclude import Excluded, exclude
from autopar.solver.fit import UNLIMITED, Fit
from autopar.solver.hiding_mixture import between
from autopar.solver.known import Variants, may_leave, variants_of
from autopar.solver.mixed_bound import least_mixed
from autopar.solver.mixture import free_blocks, mixtures, uniform_checkpoints
from autopar.solver.overlap import Found, NotBelow, Weights, weights_at
from autopar.solver.variant import Variant

__all__ = ["SumSearch"]

_SAME = 1e-9  # of t
_NEAR = 5e-3  # of a bound, to what it need not exceed
_PROVED = 1e-2  # gap with which none that takes long is looked for


class _Told(NamedTuple):
    """What the search of a sum has told.

    Attributes:
        t: of the sum.
        free_s: that no plan is below: a limit makes none faster, nor does computing again.
        price: of a byte, at which the limit bounds plans best.
    """

    t: float
    free_s: float
    price: float


@dataclass(frozen=True, slots=True)
class SumSearch:
    """The search of a step; arguments as of `solve.StepSearch`.

    Args:
        variants: makes the variants of the step.
        optimizer, without, proved_within: see there.
    """

    variants: Variants
    optimizer: object
    without: Excluded | None
    proved_within: int | None
    _known: dict[Weights, list[Variant]] = field(default_factory=dict, repr=False)  # begun
    _told: list[_Told] = field(default_factory=list, repr=False)

    def first(self, weights: Weights) -> Variant | None:
        """The plan of the first variant that has one, if there is one.

        Raises:
            ConstraintError, InfeasiblePlanError: see `__call__`.
        """
        tried = self._begun(weights, sys.float_info.max, math.inf)
        found = min(tried, key=lambda f: f.seconds)
        return None if found.search.memory.best is None else found

    def soon(self, weights: Weights, below_s: float = math.inf) -> Variant | None:
        """The best plan of a sum with which its search begins, if there is one.

        Raises:
            ConstraintError, InfeasiblePlanError, NotBelow: see `__call__`.
        """
        tried = self._known[weights] = self._begun(weights, 0.0, below_s)
        best = min(tried, key=lambda f: f.seconds)
        return None if best.search.memory.best is None else best

    def forget_but(self, t: float) -> None:
        """Let go of the searches that have begun, but those of one sum."""
        for weights in [w for w in self._known if not math.isclose(w.t, t, abs_tol=_SAME)]:
            del self._known[weights]

    def __call__(
        self,
        weights: Weights,
        enough_s: float = 0.0,
        below_s: float = math.inf,
        least_s: float = math.inf,
    ) -> Found:
        """The best plan of a sum.

        Args:
            weights: of the sum.
            enough_s: the search ends once a plan is below.
            below_s: seconds that a plan must stay below to be of use.
            least_s: seconds that another search's plans may be below, which no bound need exceed.

        Raises:
            ConstraintError: nothing is left without `without`.
            InfeasiblePlanError: nothing fits.
            NotBelow: nothing costs less than `below_s`.
        """
        traced, wanted = self.variants.traced, self.variants.wanted
        cluster = self.variants.offers.cluster
        tried = self._known.pop(weights, None) or self._begun(weights, enough_s, below_s)
        self._finish(tried, enough_s, below_s, least_s)
        alike = min(tried, key=lambda f: f.seconds)
        price = max(found.search.memory.price for found in tried)
        self._told.append(_Told(weights.t, tried[0].search.memory.approximate().bound, price))
        uniform_kinds, limited = tuple(tried), self.variants.limit < UNLIMITED
        # stages of pipelines are solved many times, and each mixture takes a search
        apart = limited and self.variants.ports is None
        if self._may_mix and (apart or len(tried) > 1) and _fastest(tried) > enough_s:
            uniform = uniform_checkpoints(traced, wanted.checkpoint, may_leave(cluster, wanted))
            free = self._apart() if apart else free_blocks(traced, wanted.checkpoint)
            make = partial(self.variants.make, weights)
            tried += mixtures(tried, uniform, free, make, below_s, apart)
        best = min(tried, key=lambda f: f.seconds)
        if best.search.memory.best is None:
            if math.isfinite(below_s):
                raise NotBelow(min(found.search.memory.bound for found in tried), weights.t)
            alike = best = self._lightest(uniform_kinds)
        bound = min(found.search.memory.bound for found in tried)
        return Found(best, bound, None if alike.search.memory.best is None else alike)

    def mixed(self, waiting: Found, hidden: Found, t: float, exposed: float) -> Found | None:
        """A plan with some blocks as in one plan, and some as in another (`hiding_mixture`).

        Args:
            waiting: has more to hide than compute hides.
            hidden: has less.
            t: of the sum in which the mixture counts.
            exposed: share of the seconds that may hide, which does not.
        """
        first, second = (found.alike or found.variant for found in (waiting, hidden))
        held = first.search.optimizer
        if not self._may_mix or held is not second.search.optimizer:
            return None
        make = partial(self.variants.make, weights_at(t, exposed), held)
        return between(first, second, self._apart(), make, exposed)

    @property
    def _may_mix(self) -> bool:
        return self.without is None and self.variants.traced.training

    def _apart(self) -> list[Block]:
        """Blocks that may be placed apart, or recomputed so, in the order in which they run."""
        pin = self.variants.wanted.checkpoint
        return free_blocks(self.variants.traced, None if isinstance(pin, str) else pin)

    def of_any(self, weights: Weights, bound: float, enough_s: float) -> float:
        """What no plan of a sum is below, that of mixtures among them.

        Args:
            weights: of the sum, which was searched.
            bound: of what was searched: each way of recomputation of all blocks.
            enough_s: beyond which a bound is of no use.
        """
        given = self.variants
        pin, free = given.wanted.checkpoint, free_blocks(given.traced, given.wanted.checkpoint)
        limited = given.limit < UNLIMITED
        if self.without is not None or not given.traced.training or len(free) < 2 or not limited:
            return bound  # without a limit, nothing that is recomputed makes a step faster
        told = next(x for x in self._told if math.isclose(x.t, weights.t, abs_tol=_SAME))
        if told.free_s >= min(bound, enough_s) * (1 - _PROVED) or isinstance(pin, Mapping):
            return min(bound, told.free_s)
        # a gap of less is not looked at elsewhere either
        enough_s = min(bound, enough_s) * (1 - _NEAR)
        mixed_s = least_mixed(given, self.optimizer, weights, told.price, enough_s)
        return min(bound, max(told.free_s, mixed_s))

    def _begun(self, weights: Weights, enough_s: float, below_s: float) -> list[Variant]:
        """Variants of a step whose searches have begun, none more once one is below `enough_s`."""
        given, wanted = self.variants, self.variants.wanted
        kinds = variants_of(given.traced, given.offers.cluster, wanted, self.optimizer)
        tried: list[Variant] = []
        done: list[object] = []  # optimizers, where they are, that later kinds are no faster with
        for checkpoint, held in kinds:
            if tried and _fastest(tried) <= enough_s:
                break  # the least bound of all is below that
            if any(held is which for which in done):
                continue
            check_time()
            if isinstance(held, Offloaded) and tried and _no_offload_beats(tried, held):
                break
            found = given.make(weights, held, checkpoint)
            without = self.without
            if without is not None and not exclude(without, found.step, found.search.built):
                continue
            tried.append(found)
            price = max((f.search.memory.price for f in tried), default=0.0)
            beat_s = min(below_s, _fastest(tried))
            fit = found.search.start(beat_s, price, self.proved_within)
            # what saves memory costs time: an unlimited plan is the fastest of this kind and of
            # those that come later
            free_s = found.search.memory.approximate().bound
            if len(tried) == 1 and free_s >= below_s:
                self._told.append(_Told(weights.t, free_s, 0.0))
                raise NotBelow(free_s, weights.t)
            if fit is not None and fit is found.search.memory.free:
                if len(tried) == 1:
                    break
                done.append(held)
            elif self.without is None and found.search.memory.is_slow(beat_s):
                done.append(held)
        if not tried:
            assert self.without is not None
            raise ConstraintError(f"the step has no {self.without.name}")
        return tried

    def _lightest(self, tried: Sequence[Variant]) -> Variant:
        """The variant with the plan of the least memory, where searches under the limit find none.

        Raises:
            InfeasiblePlanError: it does not fit.
        """
        cluster, limit = self.variants.offers.cluster, self.variants.limit
        host = cluster.host_memory_bytes
        held: list[tuple[Variant, Fit]] = []
        for variant in reversed(tried):  # the last take the least memory, mostly
            rival = min((fit.peak for _, fit in held), default=math.inf)
            fit = variant.search.lightest(self.without, rival)
            if fit is not None and (host is None or fit.price.host_bytes <= host):
                held.insert(0, (variant, fit))
        if not held:
            raise min(tried, key=lambda f: f.search.memory.least().peak).search.does_not_fit()
        best, fit = min(held, key=lambda row: row[1].peak)
        if fit.peak > limit:
            raise best.search.does_not_fit(fit)
        memory = best.search.memory
        seconds = memory.seed(fit.solution.chosen).solution.objective
        memory.bound = min(memory.bound, seconds)  # rows count a little more than plans take
        return best

    def _finish(
        self, tried: Sequence[Variant], enough_s: float, below_s: float, least_s: float
    ) -> None:
        """Search to the end, or until a plan is below `enough_s`."""
        if self.proved_within is None:
            least_s = -math.inf  # no bound is asked for
        for found in sorted(tried, key=lambda f: f.search.memory.bound):
            if _fastest(tried) <= enough_s:
                break
            memory = found.search.memory
            memory.finish(min(below_s, _fastest(tried)), least_s)
            least_s = min(least_s, memory.bound)


def _fastest(tried: Sequence[Variant]) -> float:
    return min(found.seconds for found in tried)


def _no_offload_beats(tried: list[Variant], offloaded: Offloaded) -> bool:
    """True if no plan with the offloaded optimizer can beat the best one.

    Each costs at least an unlimited plan without recomputation, and the transfer of shards that
    are split over all devices.
    """
    first = tried[0]
    cluster = first.search.cluster
    least_s = sum(
        offload_seconds(
            cluster.device, offloaded,
            first.step.specs[name, 0].num_bytes // math.prod(cluster.mesh_shape),
            first.step.parameters[name].dtype,
        ) * first.step.blocks.copies(name)
        for name in first.step.gradients
    )  # fmt: skip
    return _fastest(tried) <= first.search.memory.approximate().bound + least_s
