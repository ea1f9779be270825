"""`verify`: run a plan for all its ranks in this process and compare with the unsharded module."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.codegen.emit import emit
from autopar.codegen.program import Program
from autopar.codegen.stage_unfolding import unfolded_plan
from autopar.core.graph import InputSpec, TracedModel
from autopar.core.made_for import check_is_plan
from autopar.core.ops import RANDOM
from autopar.core.plan import Plan
from autopar.runtime.lockstep import Strided, mesh_coords, run_lockstep
from autopar.runtime.shards import assemble, take_shard
from autopar.runtime.virtual_stages import run_stages
from autopar.search.symmetric_calls import with_symmetric_calls
from autopar.tracer.capture import Capture
from autopar.tracer.containers import kept_attributes
from autopar.tracer.precision import low_dtype
from autopar.tracer.trace import normalize_inputs, trace

__all__ = ["Verification", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Relative errors, ‖parallel − single‖ / ‖single‖, of each tensor.

    A gradient that is zero but for rounding (a key bias before softmax) has no relative error, nor
    has such a buffer (the mean of what is centred): its norm counts as at least 1e-6 of the largest
    gradient's or updated buffer's, or 1e-4 of it below float64.

    Attributes:
        outputs: by output index, the loss included.
        gradients: by parameter FQN.
        buffers: by FQN; those that the trace updates, and those that the module does.
    """

    outputs: Mapping[str, float]
    gradients: Mapping[str, float]
    buffers: Mapping[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """Name and relative error of the tensor that differs most."""
        everything = {
            **{f"output {k}": v for k, v in self.outputs.items()},
            **{f"gradient of {k}": v for k, v in self.gradients.items()},
            **{f"buffer {k}": v for k, v in self.buffers.items()},
        }
        return max(everything.items(), key=lambda item: item[1], default=("nothing", 0.0))


def verify(
    plan: Plan,
    model: nn.Module,
    example_inputs: Any,
    *,
    seed: int = 0,
    loss_fn: Any = None,
    traced: TracedModel | None = None,
    passes: Collection[str] | None = None,
    fusion: Any = None,
) -> Verification:
    """Run a plan for all its ranks in this process, and compare it with the unsharded module.

    Compared are the loss, all outputs, the gradient of every parameter and updated buffers. The
    reference is the module itself (and `loss_fn`), run eagerly; where it draws random numbers, it
    is the traced step run unsharded, which draws the same numbers as any plan.

    Args:
        plan: made for this model and these inputs.
        model: with real weights; float64 tells rounding from mistakes best.
        example_inputs: as for `autopar.plan`, with real values.
        seed: of dropout and random numbers.
        loss_fn: as for `autopar.plan`.
        traced: the model's whole trace, if at hand, to save the time of another.
        passes, fusion: as for `autopar.parallelize`.

    Returns:
        The relative error of each tensor; `.worst` names the largest.

    Raises:
        PlanMismatchError: the plan is for another model or input.
        AutoparError: it is no plan.
    """
    check_is_plan(plan)
    options: dict[str, Any] = {
        "training": plan.training,
        "loss_fn": loss_fn,
        "precision": plan.precision,
        "reduce_dtype": plan.reduce_dtype,
    }
    if traced is None:
        traced = trace(model, example_inputs, **options)
    if plan.repeats:
        folded = trace(model, example_inputs, **options, fold=True)
        plan = unfolded_plan(plan, folded, traced)
    plan = with_symmetric_calls(plan, traced, passes)
    args, kwargs = normalize_inputs(example_inputs)
    flat = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    whole = whole_inputs(traced, model, flat, seed)
    expected = reference(traced, model, args, kwargs, whole, loss_fn)
    if plan.pipeline is None:
        found = _run_in_one(traced, plan, whole, passes, fusion)
    else:
        found = run_stages(traced, plan.pipeline, whole, passes=passes, fusion=fusion)
        # beside the loss, a step in microbatches returns nothing
        expected = {k: v for k, v in expected.items() if k[0] != "output" or k in found}
    kept = {("buffer", name): value for name, value in model.named_buffers()}
    return _compared({**{k: kept[k] for k in expected if k in kept}, **found}, expected)


def _compared(
    found: Mapping[tuple[str, str], Tensor], expected: Mapping[tuple[str, str], Tensor]
) -> Verification:
    """The error of each tensor, by kind and name; one that is missing counts as zeros."""
    errors: dict[str, dict[str, float]] = {"output": {}, "gradient": {}, "buffer": {}}
    floats = {k: v for k, v in expected.items() if v.is_floating_point() or v.is_complex()}
    largest = {
        kind: max((float(v.norm()) for (k, _), v in floats.items() if k == kind), default=0.0)
        for kind in ("gradient", "buffer")
    }
    for (kind, target), value in found.items():
        floor = largest.get(kind, 0.0) * (1e-6 if value.dtype is torch.float64 else 1e-4)
        single = expected.get((kind, target))
        single = torch.zeros_like(value) if single is None else single
        errors[kind][target] = relative_error(value, single, floor)
    for kind, target in expected.keys() - found.keys():
        value = expected[kind, target]
        errors[kind][target] = relative_error(torch.zeros_like(value), value)
    return Verification(
        outputs=errors["output"], gradients=errors["gradient"], buffers=errors["buffer"]
    )


def _run_in_one(
    traced: TracedModel,
    plan: Plan,
    whole: Mapping[str, Tensor],
    passes: Collection[str] | None,
    fusion: Any,
) -> dict[tuple[str, str], Tensor]:
    """Outputs of the programs of all ranks, run in lockstep."""
    coords = mesh_coords(plan.mesh_shape)
    programs = [emit(traced, plan, c, passes=passes, fusion=fusion) for c in coords]
    feeds = [_feed(p, whole, plan, c) for p, c in zip(programs, coords, strict=True)]
    results = run_lockstep([p.joint.graph for p in programs], feeds, plan.mesh_shape)
    return _assembled(programs[0], results, plan.mesh_shape)


def relative_error(value: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """‖value − expected‖ / max(‖expected‖, floor), or the plain norm where both are 0.

    Elements that are the same infinity do not count; a nan is an infinite error.
    """
    if value.shape != expected.shape:
        return float("inf")
    wide = torch.complex128 if value.is_complex() or expected.is_complex() else torch.float64
    value, expected = value.to(wide), expected.to(wide)
    if expected.isinf().any():
        same = (value == expected) & expected.isinf()
        value, expected = (x.masked_fill(same, 0.0) for x in (value, expected))
    difference = (value - expected).norm()
    norm = max(float(expected.norm()), floor)
    error = float(difference / norm) if norm > 0 else float(difference)
    return error if error == error else float("inf")


def whole_inputs(
    traced: TracedModel, model: nn.Module, flat: Sequence[Tensor], seed: int
) -> dict[str, Tensor]:
    """Global value of every placeholder, by node name."""
    state = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    user = iter(flat)
    values: dict[str, Tensor] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            spec = next(s for s in traced.inputs if s.node == node.name)
            values[node.name] = _whole(spec, traced, state, user, seed)
    return values


def _whole(
    spec: InputSpec, traced: TracedModel, state: Mapping[str, Tensor], user: Any, seed: int
) -> Tensor:
    if spec.kind in ("parameter", "buffer"):
        return state[spec.target].detach()
    if spec.kind == "constant":
        return traced.state_values[spec.target]
    if spec.kind == "seed":
        return torch.tensor(seed)
    if spec.kind == "tangent":
        generator = torch.Generator().manual_seed(7)
        if not spec.shape:
            return torch.ones((), dtype=spec.dtype)
        return torch.randn(spec.shape, dtype=spec.dtype, generator=generator)
    value = next(user)
    assert isinstance(value, Tensor)
    return value


def _feed(
    program: Program, whole: Mapping[str, Tensor], plan: Plan, coords: Sequence[int]
) -> list[Tensor]:
    return [
        take_shard(whole[spec.node], layout, plan.mesh_shape, coords)
        for spec, layout in program.inputs
    ]


def _assembled(
    program: Program, results: Sequence[tuple[Any, ...]], mesh_shape: Sequence[int]
) -> dict[tuple[str, str], Tensor]:
    """Global value of every output from the parts of all ranks."""
    found: dict[tuple[str, str], Tensor] = {}
    for index, (spec, layout) in enumerate(program.outputs):
        if spec.node is not None:
            parts = [result[index] for result in results]
            found[spec.kind, spec.target] = assemble(parts, layout, mesh_shape)
    return found


def reference(
    traced: TracedModel,
    model: nn.Module,
    args: Any,
    kwargs: Any,
    whole: Mapping[str, Tensor],
    loss_fn: Any,
) -> dict[tuple[str, str], Tensor]:
    """Outputs, gradients and updated buffers of one device."""
    if any(n.target in RANDOM for n in traced.graph.nodes):
        return _replay(traced, whole)
    return _eager(traced, model, args, kwargs, whole, loss_fn)


def _replay(traced: TracedModel, whole: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    feed = [whole[n.name] for n in traced.graph.nodes if n.op == "placeholder"]
    results = Strided(traced.graph_module).run(*feed)
    return {
        (spec.kind, spec.target): value
        for spec, value in zip(traced.outputs, results, strict=True)
        if spec.node is not None
    }


def _eager(
    traced: TracedModel,
    model: nn.Module,
    args: Any,
    kwargs: Any,
    whole: Mapping[str, Tensor],
    loss_fn: Any,
) -> dict[tuple[str, str], Tensor]:
    buffers = [
        (module, key, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
    ]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    # a forward that takes a derivative by an input may call requires_grad_ for it
    args, kwargs = pytree.tree_map_only(Tensor, torch.detach, (args, kwargs))
    # a cache whose length is kept in an attribute is as empty as its buffer in the next run
    with torch.set_grad_enabled(traced.training), kept_attributes(model):
        output = Capture(model, loss_fn, low_dtype(traced.precision)).called(args, kwargs)
    leaves = pytree.tree_leaves(output)
    found = _updated(traced, model, before)
    for spec in traced.outputs:
        if spec.kind == "output" and spec.node is not None:
            found["output", spec.target] = leaves[int(spec.target)].detach()
    found.update(_gradients(model, _roots(traced, leaves, whole)))
    with torch.no_grad():
        for module, key, buffer, value in buffers:
            module._buffers[key] = buffer  # the forward may have put another there
            if buffer is not None and value is not None:
                buffer.copy_(value)
    return found


def _updated(
    traced: TracedModel, model: nn.Module, before: Mapping[str, Tensor]
) -> dict[tuple[str, str], Tensor]:
    """Buffers that the trace updates, and those that a forward did, known to the trace or not."""
    updated = {spec.target for spec in traced.outputs if spec.kind == "buffer"}
    after = dict(model.named_buffers())
    updated |= {name for name in after.keys() & before if not _same(after[name], before[name])}
    return {("buffer", name): after[name].clone() for name in sorted(updated)}


def _same(value: Tensor, other: Tensor) -> bool:
    """True if no element differs; nan is as nan."""
    if value.shape != other.shape:
        return False
    return bool(((value == other) | (value.isnan() & other.isnan())).all())


def _gradients(
    model: nn.Module, roots: Sequence[tuple[Tensor, Tensor]]
) -> dict[tuple[str, str], Tensor]:
    """The gradient of every parameter that gets one, known to the trace or not.

    By `backward` rather than `grad`, which torch's reentrant checkpoints refuse.
    """
    if not roots:
        return {}
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    kept = [p.grad for _, p in parameters]
    for _, parameter in parameters:
        parameter.grad = None
    torch.autograd.backward([root for root, _ in roots], [tangent for _, tangent in roots])
    found = {("gradient", name): p.grad for name, p in parameters if p.grad is not None}
    for (_, parameter), grad in zip(parameters, kept, strict=True):
        parameter.grad = grad
    return found


def _roots(
    traced: TracedModel, leaves: Sequence[Any], whole: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """The outputs that have a gradient, each with the one that it gets."""
    if not traced.training:
        return []
    tangents = {int(s.target): whole[s.node] for s in traced.inputs if s.kind == "tangent"}
    if not tangents:  # the trace has found nothing that trains
        scalars = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad and not x.dim()]
        return [(x, torch.ones_like(x)) for x in scalars]
    return [(leaves[index], tangent) for index, tangent in tangents.items()]
