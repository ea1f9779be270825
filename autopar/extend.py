"""What a package outside autopar adds: the decorators, and the words that they speak in.

See docs/extending.md. Names are loaded on first use: a module of lowerings does not bring in the
solver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.codegen.builder import Builder
    from autopar.codegen.fusion.matching import K, Op, V, find
    from autopar.codegen.fusion.registry import pattern
    from autopar.codegen.fusion.rewriter import Rewriter
    from autopar.codegen.lowering import LocalCall, lowering
    from autopar.codegen.program_pass import PassContext, program_pass
    from autopar.core.placement import Partial, Placement, Replicate, Shard
    from autopar.core.schedule import Action, pipeline_schedule
    from autopar.core.strategy import AxisStrategy, Communication, OpCall
    from autopar.core.work import op_work
    from autopar.cost_model.catalogue import register_profile
    from autopar.solver.rules.labels import by_labels, linear_rows, replicated
    from autopar.solver.rules.registry import rule

__all__ = [
    "Action",
    "AxisStrategy",
    "Builder",
    "Communication",
    "K",
    "LocalCall",
    "Op",
    "OpCall",
    "Partial",
    "PassContext",
    "Placement",
    "Replicate",
    "Rewriter",
    "Shard",
    "V",
    "by_labels",
    "find",
    "linear_rows",
    "lowering",
    "op_work",
    "pattern",
    "pipeline_schedule",
    "program_pass",
    "register_profile",
    "replicated",
    "rule",
]

_WHERE = {
    "autopar.codegen.builder": ("Builder",),
    "autopar.codegen.fusion.matching": ("K", "Op", "V", "find"),
    "autopar.codegen.fusion.registry": ("pattern",),
    "autopar.codegen.fusion.rewriter": ("Rewriter",),
    "autopar.codegen.lowering": ("LocalCall", "lowering"),
    "autopar.codegen.program_pass": ("PassContext", "program_pass"),
    "autopar.core.placement": ("Partial", "Placement", "Replicate", "Shard"),
    "autopar.core.schedule": ("Action", "pipeline_schedule"),
    "autopar.core.strategy": ("AxisStrategy", "Communication", "OpCall"),
    "autopar.core.work": ("op_work",),
    "autopar.cost_model.catalogue": ("register_profile",),
    "autopar.solver.rules.labels": ("by_labels", "linear_rows", "replicated"),
    "autopar.solver.rules.registry": ("rule",),
}


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            value = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'autopar.extend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
