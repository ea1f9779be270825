"""autopar: an automatic parallelizer for PyTorch.

    model = autopar.parallelize(model, mesh)

takes an unmodified `nn.Module` and a device mesh and returns a module that trains on all of its
devices with the numbers of one. `autopar.plan` decides without devices; `autopar.verify` proves a
plan in one process.
"""

from __future__ import annotations

from typing import Any

from autopar.errors import (
    AutoparError,
    CheckpointError,
    ConstraintError,
    FrozenValueWarning,
    InfeasiblePlanError,
    LostRankError,
    PlanMismatchError,
    ShardingError,
    SymmetricMemoryWarning,
    TraceError,
    UncheckedWarning,
    UnsupportedOpWarning,
)

__version__ = "0.1.0"

__all__ = [
    "PASSES",
    "AdamW",
    "AutoparError",
    "Checkpoint",
    "CheckpointError",
    "Cluster",
    "ClusterError",
    "ConstraintError",
    "Constraints",
    "Explanation",
    "FrontierPoint",
    "FrozenValueWarning",
    "InfeasiblePlanError",
    "LossScaler",
    "LostRankError",
    "ParallelModule",
    "Plan",
    "PlanMismatchError",
    "SaveHandle",
    "ShardingError",
    "Simulation",
    "SymmetricMemoryWarning",
    "TraceError",
    "UncheckedWarning",
    "UnsupportedOpWarning",
    "Verification",
    "explain",
    "extend",
    "frontier",
    "load_checkpoint",
    "load_plan",
    "load_safetensors",
    "parallelize",
    "plan",
    "render_explanation",
    "render_frontier",
    "save_checkpoint",
    "save_safetensors",
    "simulate",
    "verify",
]

_WHERE = {
    "PASSES": "autopar.codegen.passes",
    "AdamW": "autopar.runtime.adamw",
    "Checkpoint": "autopar.runtime.resume",
    "Cluster": "autopar.cost_model",
    "ClusterError": "autopar.cost_model",
    "Constraints": "autopar.core.constraints",
    "Explanation": "autopar.explanation",
    "FrontierPoint": "autopar.memory_frontier",
    "LossScaler": "autopar.runtime.scaler",
    "ParallelModule": "autopar.runtime.module",
    "Plan": "autopar.core.plan",
    "SaveHandle": "autopar.runtime.checkpoint",
    "Simulation": "autopar.cost_model.simulator",
    "Verification": "autopar.verification",
    "explain": "autopar.explanation",
    "frontier": "autopar.memory_frontier",
    "load_checkpoint": "autopar.runtime.resume",
    "load_plan": "autopar.api",
    "load_safetensors": "autopar.runtime.exchange",
    "parallelize": "autopar.api",
    "plan": "autopar.api",
    "render_explanation": "autopar.explanation",
    "render_frontier": "autopar.memory_frontier",
    "save_checkpoint": "autopar.runtime.checkpoint",
    "save_safetensors": "autopar.runtime.exchange",
    "simulate": "autopar.simulation",
    "verify": "autopar.verification",
}


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that `import autopar` stays quick."""
    import importlib

    if name == "extend":
        return importlib.import_module("autopar.extend")
    if name not in _WHERE:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
