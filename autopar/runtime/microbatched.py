"""One execution of a step in microbatches: forward and backward run before the loss is returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.core.loss import check_has_loss
from autopar.core.placement import Layout, Replicate
from autopar.runtime.between import address, copies_of_shared
from autopar.runtime.compiled_step import tensors_in_order
from autopar.runtime.feed import local_value, next_seed
from autopar.runtime.in_step import in_step
from autopar.runtime.lost import naming_lost_ranks
from autopar.runtime.pipeline import PipelinedStep
from autopar.runtime.running import (
    called_twice,
    gradient_dtensor,
    refuse_second_order,
    whole_gradient,
)

if TYPE_CHECKING:
    from autopar.runtime.module import ParallelModule

__all__ = ["run_microbatches"]


def run_microbatches(module: ParallelModule, step: PipelinedStep, args: Any, kwargs: Any) -> Any:
    """Run all microbatches forward and backward; `loss.backward()` then hands out the gradients."""
    check_has_loss(step.traced)
    # scaled from the start: half-precision gradients would underflow on their way
    scaler = module.loss_scaler or module.torch_scaler
    module.torch_scaler = None  # it will scale this loss, too, or is no longer used
    tangent = scaler.get_scale() if scaler is not None else 1.0
    whole = whole_values(module, step, args, kwargs, tangent)
    with (
        in_step(module, step, args, kwargs),
        naming_lost_ranks("in a step of the pipeline"),
    ):
        found = step.run(whole)
    memory = {address(module.buffer(name)) for name in found.buffers}
    new_values = copies_of_shared(found.buffers.values(), memory)
    for name, value in zip(found.buffers, new_values, strict=True):
        module._set_buffer(name, value)
    outputs: list[Any] = [
        spec.constant if spec.constant is not None else found.outputs.get(int(spec.target))
        for spec in step.traced.outputs
        if spec.kind == "output"
    ]
    index = step.traced.loss_index
    if step.traced.training and torch.is_grad_enabled() and index is not None:
        gradients = [
            gradient_dtensor(module, name, found.gradients.pop(name), step.plan.parameters[name])
            if name in found.gradients
            else None
            for name in module._parameter_order
        ]
        parameters = [module.parameter(name) for name in module._parameter_order]
        # it requires a gradient on ranks too whose stages have no trainable parameter
        anchor = torch.zeros((), requires_grad=True)
        outputs[index] = MicrobatchedFunction.apply(
            outputs[index], module, tangent, gradients, anchor, *parameters
        )
    return pytree.tree_unflatten(outputs, step.traced.out_spec)


class MicrobatchedFunction(torch.autograd.Function):
    """A step in microbatches as a function whose gradients have been computed with its loss."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        module: ParallelModule,
        tangent: float,
        gradients: Sequence[Tensor | None],
        anchor: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.scaled_module = module  # see `amp_scaler.py`
        ctx.tangent = tangent
        ctx.gradients = list(gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_order()
        if ctx.gradients is None:
            raise called_twice()
        gradients, ctx.gradients = ctx.gradients, None
        factor = float(whole_gradient(grad)) / ctx.tangent
        if factor != 1.0:
            gradients = [None if g is None else g * factor for g in gradients]
        return (None, None, None, None, None, *gradients)


def whole_values(
    module: ParallelModule, step: PipelinedStep, args: Any, kwargs: Any, tangent: float
) -> dict[str, Any]:
    """Local parameters of this rank, and whole values of all else, by placeholder."""
    flat = iter(tensors_in_order(step.keywords, step.traced.training, args, kwargs))
    whole: dict[str, Any] = {}
    seed = next_seed(module, step)
    everywhere: Layout = tuple(Replicate() for _ in step.plan.mesh_shape)
    for spec in step.traced.inputs:
        if spec.kind == "tangent":
            value = torch.full(spec.shape, tangent, dtype=spec.dtype, device=module.device)
            whole[spec.node] = value
        elif spec.kind == "input":  # the caller's own: nothing writes to it
            given = next(flat)
            given = given.full_tensor() if isinstance(given, DTensor) else given
            whole[spec.node] = given.to(module.device)
        elif spec.kind != "parameter" or spec.target in module._parameter_order:
            whole[spec.node] = local_value(module, spec, everywhere, step, flat, seed)
    return whole
