"""Programs of a plan that are tried: what they take, and with which buckets they take least."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from autopar.codegen.passes.sites import Key
from autopar.core.plan import Plan
from autopar.cost_model.simulator import Simulation

__all__ = ["Trial", "bucketed"]

_LIKELY = 1 / 8  # of the bytes that close a bucket: most programs take least with about so many
_LEAST = 1 / 64
_JOINING = 5e-3  # of the step: what copies into buckets take at least, for others to be tried
_HOPELESS = 1.03  # times what another plan takes: other buckets save less
_GAIN = 1e-4  # of the step: less is beyond what is predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A program and what its parts are expected to take.

    Attributes:
        graph: forward and backward.
        parts: simulations of what runs in one go, by name.
        last: of the last backward with "finish" beside it, where a program has that.
        code: yields what a rank runs, by part.
    """

    graph: fx.Graph
    parts: Mapping[str, Simulation]
    last: Simulation | None = None
    code: Callable[[], Mapping[str, fx.Graph]] = dict

    def step_s(self) -> float:
        """Seconds of the step."""
        compute_s = sum(part.compute_s for part in self.parts.values())
        exposed_s = sum(sum(p.exposed_s) + p.exposed_copy_s for p in self.parts.values())
        return compute_s + exposed_s

    def joining_s(self) -> float:
        """Seconds of copies into buckets and out of them."""
        spans = (span for part in self.parts.values() for span in part.spans)
        return sum(s.duration_s * s.times for s in spans if s.packs and s.kind == "bucket")

    def is_same_with(self, num_bytes: int) -> bool:
        """True if buckets that so many bytes close would be those that the program has.

        Of a folded program that is not known: other blocks may go into the same buckets.
        """
        sent = [n.meta["collective"] for n in self.graph.nodes if "collective" in n.meta]
        return all(times == 1 and size < num_bytes for _, _, size, times in sent)

    def shares(self) -> dict[Key, float]:
        """Part of the seconds of each collective that is hidden."""
        found: dict[Key, float] = {}
        for part in self.parts.values():
            found.update(part.hidden_shares())
        if self.last is not None:
            beside = self.last.hidden_shares()
            found.update((key, beside[key]) for key in self.parts["finish"].hidden_shares())
        return found

    def compute_s(self) -> dict[str, float]:
        """Seconds of ops by origin, of one execution of each."""
        found: dict[str, float] = defaultdict(float)
        for span in (span for part in self.parts.values() for span in part.spans):
            if span.stream == "compute":
                found[span.origin] += span.duration_s
        return found

    def exposed_s(self) -> dict[Key, float]:
        """Seconds of collectives that are exposed, of one execution of each."""
        found: dict[Key, float] = defaultdict(float)
        for span in (span for part in self.parts.values() for span in part.spans):
            if isinstance(span.stream, int):
                found[span.origin, span.stream, span.kind] += span.duration_s - span.hidden_s
        return found


def bucketed(
    plan: Plan, run: Callable[[Plan], Trial], below_s: float = math.inf
) -> tuple[Plan, Trial]:
    """`plan` with the buckets that serve best, and its program.

    A smaller bucket has more latency and fewer bytes that are copied into it: collectives hide
    beside compute, and copies do not.

    Args:
        plan: as solved.
        run: emits and simulates a plan.
        below_s: step of another plan.
    """
    best, trial = plan, run(plan)
    if not _joins(trial) or trial.step_s() > _HOPELESS * below_s:
        return best, trial

    def serves(share: float) -> bool:
        nonlocal best, trial
        rows = [replace(row, num_bytes=int(share * row.num_bytes)) for row in plan.buckets]
        if trial.is_same_with(min((row.num_bytes for row in rows), default=0)):
            return False
        smaller = replace(plan, buckets=tuple(rows))
        after = run(smaller)
        if after.step_s() >= trial.step_s() * (1 - _GAIN):
            return False
        best, trial = smaller, after
        return True

    fewer = serves(_LIKELY)
    if fewer and not _joins(trial):
        return best, trial
    if fewer and serves(_LIKELY / 2):
        share = _LIKELY / 4
        while share >= _LEAST and _joins(trial) and serves(share):
            share /= 2
    else:
        share = _LIKELY * 2
        while share < 1 and serves(share):
            share *= 2
    return best, trial


def _joins(trial: Trial) -> bool:
    """True if copies into buckets take enough for others to be tried."""
    return trial.joining_s() > _JOINING * trial.step_s()
