"""Names for what a plan does with each weight, in the field's terms."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.core.placement import Layout
from autopar.solver.contractions import Contraction, kind_on_axis
from autopar.solver.pins import Pins
from autopar.solver.price import Decision
from autopar.solver.step import Step

__all__ = ["mode_names"]


def mode_names(step: Step, pins: Pins, decision: Decision) -> dict[str, str]:
    """Name of the parallel form of each parameter, by FQN."""
    names: dict[str, str] = {}
    for name, spec in step.parameters.items():
        uses = pins.by_weight.get(name, [])
        layout = decision.storages[name]
        if uses:
            held = _held(step, name, decision)
            stage = _stage(step, name, decision, held)
            names[spec.target] = _contraction_name(uses[0], decision, layout, held, stage)
        else:
            names[spec.target] = "sharded" if any(p.is_shard for p in layout) else "replicated"
    return names


def _held(step: Step, name: str, decision: Decision) -> list[int]:
    """Axes on which a parameter is stored sharded and gathered once for the whole step."""
    stored = decision.storages[name]
    copies = [
        decision.candidates[copy].inputs[0] for copy, owner in step.copies.items() if owner == name
    ]
    return [
        axis
        for axis, placement in enumerate(stored)
        if placement.is_shard and copies and all(c[axis].is_replicate for c in copies)
    ]


def _stage(step: Step, name: str, decision: Decision, held: Sequence[int]) -> str:
    """The ZeRO stage of a parameter that is gathered once on the axes `held`.

    Gradients are reduced straight to their shards as they are made, which is stage 2, but in
    microbatches, where their sum may wait whole until the last: stage 1.
    """
    value, index = step.gradients.get(name, ("", 0))
    made = decision.candidates.get(value)
    if not step.in_turns or made is None or all(made.outputs[index][a].is_shard for a in held):
        return "ZeRO-2"
    return "ZeRO-1"


def _contraction_name(
    contraction: Contraction, decision: Decision, layout: Layout, held: Sequence[int], stage: str
) -> str:
    candidate = decision.candidates[contraction.op.name]
    kinds = [kind_on_axis(contraction, candidate, axis) for axis in range(len(layout))]
    x = candidate.inputs[contraction.activation_index]
    parts: list[str] = []
    tensor = [k for k in kinds if k in "NK"]
    sharded = [a for a, k in enumerate(kinds) if k == "M" and layout[a].is_shard]
    gathered = [a for a in sharded if a not in held]
    if len(tensor) == 2 and gathered:
        parts.append("3D")
        gathered = gathered[1:]
    elif len(tensor) == 1 and gathered and layout[kinds.index(tensor[0])].is_shard:
        parts.append("2D" if tensor == ["N"] else "1D row + ZeRO-3")
        gathered = gathered[1:] if tensor == ["N"] else []
    elif tensor:
        split = "1D " + "+".join("column" if k == "N" else "row" for k in tensor)
        whole = not any(layout[a].is_shard for a, k in enumerate(kinds) if k in "NK")
        parts.append(f"{split}, stored whole" if whole else split)
    if any(k == "B" for k in kinds):
        parts.append("expert")
    for axis, kind in enumerate(kinds):
        if kind == "M":
            parts.append("data" if x[axis].dim == 0 else "sequence")
    if gathered:
        parts.append("ZeRO-3")
    elif sharded and set(sharded) <= set(held):
        parts.append(stage)
    return " + ".join(dict.fromkeys(parts)) or "replicated"
