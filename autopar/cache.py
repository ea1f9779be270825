"""Plans kept between runs, by everything that they depend on.

The key covers the graph with all its arguments, the cluster, the constraints, the limit, the
optimizer, and the sources of autopar and of what extends it, so that no plan outlives what made it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

import torch

from autopar.core import extensions
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.cost_model import Cluster, optimizer_state_bytes, optimizer_text
from autopar.errors import PlanMismatchError

__all__ = ["PlanCache", "cache_directory"]


def cache_directory() -> Path:
    """`$AUTOPAR_CACHE_DIR`, or `autopar` in the user's cache folder."""
    given = os.environ.get("AUTOPAR_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"


@lru_cache(maxsize=1)
def _sources() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class PlanCache:
    """A folder of plans, one file each.

    Args:
        directory: made when the first plan is kept; default: `cache_directory()`.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or cache_directory()

    def key(
        self,
        traced: TracedModel,
        cluster: Cluster,
        constraints: Constraints,
        memory_limit: int | None,
        optimizer: object,
        fusion: Collection[str] = (),
        several: bool = False,
        time_limit: float | None = None,
    ) -> str:
        """Hash of all that a plan depends on; `several` searches know of each other's plans."""
        parts = {
            "graph": traced.digest(),
            "cluster": cluster.to_dict(),
            "constraints": constraints.to_dict(),
            "limit": [memory_limit, several, time_limit],
            "optimizer": [optimizer_text(optimizer), optimizer_state_bytes(optimizer, 1 << 20)],
            "fusion": sorted(fusion),
            "torch": torch.__version__,
            "autopar": _sources(),
            "extensions": extensions.digest(),
        }
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def get(self, key: str) -> Plan | None:
        """The plan of a key; None if there is none, or, with a warning, if its file is damaged."""
        path = self.directory / f"{key}.json"
        try:
            return Plan.load(path) if path.exists() else None
        except (PlanMismatchError, OSError) as error:
            warnings.warn(
                f"the cached plan {path} cannot be read ({error}): planning again", stacklevel=2
            )
            return None

    def put(self, key: str, plan: Plan) -> None:
        """Keep a plan; a folder that cannot be written is reported and otherwise ignored."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # a name of its own: several processes may plan the same thing at once
            handle, scratch = tempfile.mkstemp(dir=self.directory, suffix=".part")
            os.close(handle)
            Path(scratch).write_text(json.dumps(plan.to_dict()))
            Path(scratch).replace(self.directory / f"{key}.json")
        except OSError as error:
            warnings.warn(f"the plan was not cached in {self.directory}: {error}", stacklevel=2)
