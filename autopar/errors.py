"""Errors that autopar raises. Each text says what happened, where, the numbers, and the fix."""

from __future__ import annotations

__all__ = [
    "AutoparError",
    "CheckpointError",
    "ConstraintError",
    "FrozenValueWarning",
    "InfeasiblePlanError",
    "LostRankError",
    "PlanMismatchError",
    "ShardingError",
    "SymmetricMemoryWarning",
    "TraceError",
    "UncheckedWarning",
    "UnsupportedOpWarning",
]


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose."""


class TraceError(AutoparError):
    """The model cannot be captured as a graph (names the user's file and line)."""


class CheckpointError(AutoparError):
    """A checkpoint cannot be written, is damaged, or is not one of this model."""


class LostRankError(AutoparError):
    """Another rank has stopped: this one cannot go on."""


class ConstraintError(AutoparError, ValueError):
    """A constraint is unknown, matches nothing, or cannot hold for this model and mesh."""


class ShardingError(AutoparError, ValueError):
    """A placement does not fit the tensor's shape or the mesh."""


class PlanMismatchError(AutoparError):
    """A saved plan does not belong to this model, mesh, inputs or version."""


class InfeasiblePlanError(AutoparError):
    """No plan fits the memory limit.

    Attributes:
        memory_limit_bytes: the limit that was asked for.
        required_bytes: the smallest limit that a plan was found for, which planning again finds
            again, or None if none was found.
        stage: of the pipeline, that does not fit; None without one.
    """

    def __init__(
        self,
        message: str,
        *,
        memory_limit_bytes: int | None = None,
        required_bytes: int | None = None,
        stage: int | None = None,
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.memory_limit_bytes = memory_limit_bytes
        self.required_bytes = required_bytes


class UnsupportedOpWarning(UserWarning):
    """An op has no sharding rule and runs replicated."""


class UncheckedWarning(UserWarning):
    """The model asks for values, and the parallel program goes on without a check or a branch."""


class FrozenValueWarning(UserWarning):
    """The model's forward changes or draws numbers that are constants of the parallel program."""


class SymmetricMemoryWarning(UserWarning):
    """A process group has no symmetric memory: the pass of that name gains nothing there."""
