"""Registry of sharding rules: `@rule(op, …)` on a function from `OpCall` to strategies."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from autopar.core.placement import Replicate
from autopar.core.strategy import AxisStrategy, OpCall

__all__ = ["Rule", "find_rule", "registered_ops", "replicated", "rule", "stub_for"]

Rule = Callable[[OpCall], list[AxisStrategy]]
_RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule for op overloads; a second rule for one op is a ValueError.

    An op of a library that may not be loaded is given by name, `"library.op.overload"`.
    """

    def register(function: Rule) -> Rule:
        for target in targets:
            if target in _RULES:
                raise ValueError(f"{target} already has the rule {_RULES[target].__name__}")
            _RULES[target] = function
        return function

    return register


def find_rule(target: Any) -> Rule | None:
    """The rule of an op, or None."""
    return _RULES.get(target) or _RULES.get(str(target))


def registered_ops() -> tuple[Any, ...]:
    """All ops that have a rule, but for those registered by name."""
    return tuple(target for target in _RULES if not isinstance(target, str))


def replicated(call: OpCall) -> AxisStrategy:
    """Every rank of the axis does the whole op: always right."""
    return AxisStrategy(
        tuple(Replicate() for _ in call.operands), tuple(Replicate() for _ in call.outputs)
    )


def stub_for(call: OpCall) -> str:
    """Text for the warning about an op without a rule: nearest known name and a stub to paste."""
    name = str(call.target)
    near = difflib.get_close_matches(name, [str(t) for t in _RULES], n=1)
    hint = f" (nearest op with a rule: {near[0]})" if near else ""
    shapes = ", ".join(str(list(spec.shape)) for spec in call.operands)
    return (
        f"{name} on {shapes} has no sharding rule and runs replicated{hint}. To shard it:\n"
        "    from autopar.core.placement import Replicate, Shard\n"
        "    from autopar.core.strategy import AxisStrategy\n"
        "    from autopar.solver.rules.registry import replicated, rule\n"
        f"    @rule(torch.ops.{name})\n"
        "    def my_rule(call):\n"
        "        shard = AxisStrategy(inputs=(Shard(0), ...), outputs=(Shard(0), ...))\n"
        "        return [replicated(call), shard]"
    )
