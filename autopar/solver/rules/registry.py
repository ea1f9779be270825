"""Registry of sharding rules: `@rule(op, …)` on a function from `OpCall` to strategies."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from autopar.core import extensions
from autopar.core.strategy import AxisStrategy, OpCall

__all__ = [
    "Rule",
    "combination",
    "facts",
    "facts_of",
    "find_rule",
    "goes_together",
    "registered_ops",
    "registrar",
    "rule",
    "stub_for",
]

Rule = Callable[[OpCall], list[AxisStrategy]]
_RULES: dict[Any, Rule] = {}
Combination = Callable[[OpCall, Sequence[AxisStrategy], Sequence[int]], bool]
_Facts = TypeVar("_Facts", bound=Callable[[OpCall], Hashable])
_Function = TypeVar("_Function")
_COMBINATIONS: dict[Any, Combination] = {}
_FACTS: dict[Any, Callable[[OpCall], Hashable]] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule for op overloads; a second rule for one op is a ValueError.

    An op of a library that may not be loaded is given by name, `"library.op.overload"`. The rule of
    `torch.Tag.pointwise` is that of ops with this tag that have none of their own.
    """

    def register(function: Rule) -> Rule:
        for target in targets:
            known = extensions.taken(_RULES, target)
            if known is not None and not extensions.is_same(known, function):
                raise ValueError(f"{target} already has the rule {known.__name__}")
            _RULES[target] = function
        extensions.note("rule", map(str, targets), function)
        return function

    return register


def find_rule(target: Any) -> Rule | None:
    """The rule of an op, or None."""
    extensions.load("autopar.rules")
    tag = torch.Tag.pointwise if torch.Tag.pointwise in getattr(target, "tags", ()) else None
    return _RULES.get(target) or _RULES.get(str(target)) or _RULES.get(tag)


def registrar(table: dict[Any, Any], targets: Sequence[Any]) -> Callable[[_Function], _Function]:
    """A decorator that puts a function into a table, for each of some ops."""

    def register(function: _Function) -> _Function:
        table.update(dict.fromkeys(targets, function))
        return function

    return register


def combination(*targets: Any) -> Callable[[Combination], Combination]:
    """Register what tells of ops whether rows may be combined: the call, one an axis, axis sizes.

    For ops with rows that are not independent of those on other axes.
    """
    return registrar(_COMBINATIONS, targets)


def goes_together(call: OpCall, rows: Sequence[AxisStrategy], mesh: Sequence[int]) -> bool:
    """True if an op may run by these rows, one for each mesh axis."""
    function = _COMBINATIONS.get(call.target)
    return function is None or function(call, rows, mesh)


def registered_ops() -> tuple[Any, ...]:
    """All ops that have a rule, but for those registered by name or by a tag."""
    extensions.load("autopar.rules")
    return tuple(target for target in _RULES if not isinstance(target, (str, torch.Tag)))


def facts(*targets: Any) -> Callable[[_Facts], _Facts]:
    """Register what the rows of ops depend on beside the call, such as what made an operand."""
    return registrar(_FACTS, targets)


def facts_of(call: OpCall) -> Hashable:
    """What an op's rows depend on beside its arguments and shapes; None for most ops."""
    function = _FACTS.get(call.target)
    return None if function is None else function(call)


def stub_for(call: OpCall) -> str:
    """Text for the warning about an op without a rule: nearest known name and a stub to paste.

    The stub is right as it is: it keeps the op replicated. Its comment offers shards of dim 0.
    """
    name = str(call.target)
    near = difflib.get_close_matches(name, [str(t) for t in _RULES], n=1)
    hint = f" (nearest op with a rule: {near[0]})" if near else ""
    shapes = ", ".join(str(list(spec.shape)) for spec in call.operands)
    lead = call.outputs[0].shape[:1] if call.outputs else ()
    first, whole = "Shard(0)", "Replicate()"
    inputs = [first if lead and spec.shape[:1] == lead else whole for spec in call.operands]
    outputs = [first if lead and spec.shape[:1] == lead else whole for spec in call.outputs]
    return (
        f"{name} on {shapes} has no sharding rule and runs replicated{hint}. To shard it, paste "
        "this and see docs/extending.md:\n\n"
        "from autopar.extend import AxisStrategy, Replicate, Shard, replicated, rule\n\n\n"
        f'@rule("{name}")\n'
        f"def {re.sub(r'[^0-9a-zA-Z_]', '_', name)}_rule(call):\n"
        f'    """{_schema(call)}"""\n'
        "    return [\n"
        "        replicated(call),\n"
        "        # where rows are independent of each other:\n"
        f"        # AxisStrategy(inputs=({_listed(inputs)}), outputs=({_listed(outputs)})),\n"
        "    ]\n"
    )


def _schema(call: OpCall) -> str:
    return str(getattr(call.target, "_schema", call.target))


def _listed(placements: list[str]) -> str:
    return ", ".join(placements) + "," * (len(placements) == 1)
