"""What a program is given: the local value of each placeholder, and who holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._dtensors import dtensor_placements
from autopar.core.graph import InputSpec, TracedModel
from autopar.core.placement import Layout
from autopar.errors import AutoparError
from autopar.runtime.compiled_step import CompiledStep, tensors_in_order
from autopar.runtime.pipeline import PipelinedStep
from autopar.runtime.shards import take_shard

if TYPE_CHECKING:
    from autopar.runtime.module import ParallelModule

__all__ = ["feed", "given_specs", "holders", "local_value", "next_seed"]


def given_specs(step: CompiledStep) -> list[InputSpec]:
    """The inputs of the forward program, in its order."""
    return [spec for spec, _ in step.program.inputs if spec.kind != "tangent"]


def holders(
    module: ParallelModule, step: CompiledStep, args: Any, kwargs: Any
) -> list[Tensor | None]:
    """The user's tensor behind every input of the forward program; None where there is none."""
    flat = iter(tensors_in_order(step.keywords, step.traced.training, args, kwargs))
    found: list[Tensor | None] = []
    for spec in given_specs(step):
        if spec.kind == "parameter":
            found.append(module.parameter(spec.target))
        elif spec.kind == "buffer":
            found.append(module.buffer(spec.target))
        else:
            found.append(next(flat) if spec.kind == "input" else None)
    return found


def feed(module: ParallelModule, step: CompiledStep, args: Any, kwargs: Any) -> list[Tensor]:
    """Local value of every placeholder of the forward program."""
    flat = iter(tensors_in_order(step.keywords, step.traced.training, args, kwargs))
    seed = next_seed(module, step)
    layouts = dict(step.program.inputs)
    return [
        local_value(module, spec, layouts[spec], step, flat, seed) for spec in given_specs(step)
    ]


def next_seed(module: ParallelModule, step: CompiledStep | PipelinedStep) -> int:
    """The seed of this call. The next one has another, if this one trains or draws numbers."""
    seed = module._seed + module._calls
    if step.traced.training or any(spec.kind == "seed" for spec in step.traced.inputs):
        module._calls += 1
    return seed


def _constant(traced: TracedModel, spec: InputSpec) -> Tensor:
    """A tensor that the forward makes from numbers.

    Raises:
        AutoparError: it was made on the meta device, where numbers are lost.
    """
    value = traced.state_values[spec.target]
    if value.is_meta:
        readers = traced.nodes()[spec.node].users
        where = next((traced.info[n.name].source for n in readers if n.name in traced.info), "")
        raise AutoparError(
            f"{where or 'the forward'} makes a tensor of shape {spec.shape} from numbers on the "
            "meta device, where they are lost. Build the model on the CPU, or make the tensor in "
            "a buffer of the module, or with device='cpu'"
        )
    return value


def local_value(
    module: ParallelModule,
    spec: InputSpec,
    layout: Layout,
    step: CompiledStep | PipelinedStep,
    flat: Any,
    seed: int,
) -> Tensor:
    if spec.kind == "parameter":
        return module.parameter(spec.target)._local_tensor.detach()
    if spec.kind == "buffer":
        return module.buffer(spec.target)
    if spec.kind == "constant":
        return _constant(step.traced, spec).to(module.device)
    if spec.kind == "seed":
        return torch.tensor(seed, device=module.device)
    value = next(flat)
    if isinstance(value, DTensor):
        here = value.device_mesh == module.mesh
        if here and list(value.placements) == dtensor_placements(layout):
            local: Tensor = value._local_tensor
            return local
        return take_shard(value.full_tensor(), layout, step.plan.mesh_shape, module.coords)
    assert isinstance(value, Tensor)
    return take_shard(value.to(module.device), layout, step.plan.mesh_shape, module.coords)
