"""What the cost model expects of a plan, and how good the solver proved it to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.core.calls import CommBytes
from autopar.core.flights import ALONE, Waits
from autopar.core.held import Held
from autopar.core.timeline import Timeline

__all__ = ["Prediction", "SolverReport"]

_ROUNDING = 1e-6  # of the objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model expects of one training step on one device.

    Attributes:
        step_time_s: compute plus exposed communication and copies plus bubble plus the update.
        compute_time_s: of all ops, with `packing_s`.
        comm_time_s: of all collectives, hidden or not.
        hidden_comm_s: of these, what runs beside compute, per mesh axis; empty where the emitted
            program has not been simulated, which counts as nothing hidden.
        peak_memory_bytes: highest point of the step, states included.
        memory: bytes by kind at the peak.
        comm_bytes: per mesh axis and collective.
        timeline: op by op.
        phases: of a step in microbatches, seconds of "prepare" and "finish" once, and of "forward",
            "input" and "weight" (the two parts of the backward) for each microbatch.
        update_s: of the optimizer, as if its states were on the device.
        offload_s: what updating on the host takes longer than on the device, transfers included.
        host_bytes: in host memory, optimizer states and activations.
        host_activation_bytes: of these, activations, of all microbatches that wait at once.
        copy_time_s: of all copies of activations to host memory and back.
        exposed_copy_s: of these, what compute stands still for: as the emitted program is
            simulated, and the search's estimate (`solver/beside.py`) until then.
        packing_s: of copies into the order of ranks and out of it: as the emitted program has them,
            with those into buckets and out of these; until then those of parameters and gradients.
        unseen_compute_s: what `compute_time_s` is more than the search has counted.
        bubble_s: what a rank of a pipeline waits for other ranks.
        held: of a stage of a step in microbatches, what it holds when.
    """

    step_time_s: float
    compute_time_s: float
    comm_time_s: float
    peak_memory_bytes: int
    memory: Mapping[str, int]
    comm_bytes: tuple[CommBytes, ...]
    hidden_comm_s: tuple[float, ...] = ()
    timeline: Timeline = field(default_factory=Timeline)
    phases: Mapping[str, float] = field(default_factory=dict)
    update_s: float = 0.0
    offload_s: float = 0.0
    host_bytes: int = 0
    host_activation_bytes: int = 0
    copy_time_s: float = 0.0
    exposed_copy_s: float = 0.0
    packing_s: float = 0.0
    unseen_compute_s: float = 0.0
    bubble_s: float = 0.0
    held: Held | None = None

    @property
    def hidden_time_s(self) -> float:
        """Communication that runs beside compute."""
        return sum(self.hidden_comm_s)

    @property
    def exposed_time_s(self) -> float:
        """Communication that compute stands still for."""
        return self.comm_time_s - self.hidden_time_s

    @property
    def serial_time_s(self) -> float:
        """The step if no communication overlapped."""
        updated_s = self.update_s + self.offload_s
        return self.compute_time_s + self.comm_time_s + updated_s + self.exposed_copy_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """How good the plan is, proved: objective and bound in seconds, gap as a fraction.

    The objective leaves out what parameters and gradients may travel beside compute, all but the
    share `exposed` at most (`solver/overlap.py`); 1 counts all communication, as in microbatches.
    Of a pipeline's stage a second of a turn counts `waits` (`core/flights.py`). `out_of_time`: the
    user's time limit ended the search.
    """

    objective: float
    bound: float
    gap: float
    seconds: float
    variables: int
    constraints: int
    exposed: float = 1.0
    waits: Waits = ALONE
    out_of_time: bool = False

    @property
    def status(self) -> str:
        """``"optimal"`` where the bound is the objective but for rounding, else ``"bounded"``."""
        return "optimal" if self.gap <= _ROUNDING else "bounded"

    def proved(self, bound: float) -> SolverReport:
        """The report with another bound, which is the objective at most, and its gap."""
        bound = min(bound, self.objective)
        gap = max(0.0, 1 - bound / self.objective) if self.objective else 0.0
        return replace(self, bound=bound, gap=gap)
