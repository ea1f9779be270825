"""Which fused kernels run: all, none, or some by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar import kernels as _kernels  # noqa: F401  (registers the ops)
from autopar.codegen.fusion import patterns as _patterns  # noqa: F401  (registers the patterns)
from autopar.codegen.fusion.registry import PATTERNS
from autopar.core import extensions
from autopar.core.plan import Plan
from autopar.errors import AutoparError
from autopar.kernels.registry import has_triton

__all__ = ["GENERATED", "Fusion"]

GENERATED = "generated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Which fused kernels run.

    Attributes:
        kernels: names of hand-written kernels, and `generated` for all generated ones.
        dump: folder that the sources of generated kernels are written to.
    """

    kernels: frozenset[str]
    dump: str | None = None

    @classmethod
    def parse(cls, given: Any, device: torch.device) -> Fusion:
        """From `True`, `False`, `{"off": names, "on": names, "only": names, "dump": folder}`.

        None fuses on CUDA where Triton is installed, and nowhere else: on a CPU the ops run as the
        ATen chains that they stand for, which is no faster.

        Raises:
            AutoparError: an unknown key or kernel.
        """
        extensions.load("autopar.patterns")
        names = {p.kernel for p in PATTERNS} | {GENERATED}
        usual = {p.kernel for p in PATTERNS if p.default} | {GENERATED}
        if given is None:
            given = device.type == "cuda" and has_triton()
        if isinstance(given, bool):
            return cls(kernels=frozenset(usual if given else ()))
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping) or given.keys() - {"on", "off", "only", "dump"}:
            raise AutoparError(
                f"fusion={given!r}: give True, False or a dict of 'on', 'off', 'only' and 'dump'"
            )
        lists = {key: _names(given.get(key), names) for key in ("on", "off", "only")}
        chosen = lists["only"] if "only" in given else usual
        chosen = (chosen | lists["on"]) - lists["off"]
        return cls(kernels=frozenset(chosen), dump=given.get("dump"))

    @classmethod
    def of(cls, plan: Plan) -> Fusion:
        """The kernels that a plan was priced with."""
        return cls(kernels=frozenset(plan.fusion))


def _names(given: Sequence[str] | None, known: set[str]) -> set[str]:
    found = {given} if isinstance(given, str) else set(given or ())
    unknown = sorted(found - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], sorted(known), n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        raise AutoparError(
            f"no fused kernel {unknown[0]!r}: there are {', '.join(sorted(known))}{hint}"
        )
    return found
