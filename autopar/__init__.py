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
    "FrozenValueWarning",
    "InfeasiblePlanError",
    "LossScaler",
    "LostRankError",
    "ParallelModule",
    "Plan",
    "PlanMismatchError",
    "ShardingError",
    "SymmetricMemoryWarning",
    "TraceError",
    "UncheckedWarning",
    "UnsupportedOpWarning",
    "Verification",
    "load_checkpoint",
    "load_plan",
    "load_safetensors",
    "parallelize",
    "plan",
    "save_checkpoint",
    "save_safetensors",
    "simulate",
    "verify",
]

_WHERE = {
    "AdamW": "autopar.runtime.adamw",
    "PASSES": "autopar.codegen.passes",
    "Checkpoint": "autopar.runtime.resume",
    "Cluster": "autopar.cost_model",
    "ClusterError": "autopar.cost_model",
    "Constraints": "autopar.core.constraints",
    "LossScaler": "autopar.runtime.scaler",
    "ParallelModule": "autopar.runtime.module",
    "Plan": "autopar.core.plan",
    "Verification": "autopar.verification",
    "load_checkpoint": "autopar.runtime.resume",
    "load_plan": "autopar.api",
    "load_safetensors": "autopar.runtime.exchange",
    "parallelize": "autopar.api",
    "plan": "autopar.api",
    "simulate": "autopar.simulation",
    "save_checkpoint": "autopar.runtime.checkpoint",
    "save_safetensors": "autopar.runtime.exchange",
    "verify": "autopar.verification",
}


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that `import autopar` stays quick."""
    if name not in _WHERE:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value
