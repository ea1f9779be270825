"""One execution of a step in one piece: inputs bound, programs run, gradients wrapped."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._dtensors import dtensor_like, local_of
from autopar.core.graph import TracedModel, output_paths
from autopar.core.placement import Layout
from autopar.errors import AutoparError
from autopar.runtime.autocast import outside_autocast
from autopar.runtime.between import ReadAgain, address, copies_of_shared
from autopar.runtime.compiled_step import CompiledStep, kept_outputs
from autopar.runtime.counted import begin_backward, is_shared
from autopar.runtime.feed import feed, given_specs, holders
from autopar.runtime.in_step import in_step
from autopar.runtime.lost import naming_lost_ranks, tell_failure
from autopar.runtime.shards import take_shard
from autopar.runtime.state import to_dtensor

if TYPE_CHECKING:
    from autopar.runtime.module import ParallelModule

__all__ = [
    "called_twice",
    "gradient_dtensor",
    "refuse_second_order",
    "run_with_autograd",
    "run_without_autograd",
    "whole_gradient",
]


def run_with_autograd(
    module: ParallelModule, step: CompiledStep, args: Any, kwargs: Any
) -> Sequence[Any]:
    """The forward's results, with the backward behind them where gradients are wanted."""
    run = Run(module, step, feed(module, step, args, kwargs))
    parameters = [module.parameter(name) for name in module._parameter_order]
    if step.traced.training and torch.is_grad_enabled():
        run.holders = holders(module, step, args, kwargs)
        return cast(Sequence[Any], StepFunction.apply(run, *parameters))
    with torch.no_grad():
        results, _ = run.forward()
    if torch.is_grad_enabled():
        return cast(Sequence[Any], EvaluationFunction.apply(results, *parameters))
    return results


@torch.no_grad()
def run_without_autograd(
    module: ParallelModule, step: CompiledStep, loss_index: int, args: Any, kwargs: Any
) -> Tensor:
    """The loss of a training step, whose gradients are added to each parameter's `.grad`.

    The programs alone run: autograd has one node here, and takes a while for each DTensor.
    """
    scale = 1.0 if module.loss_scaler is None else module.loss_scaler.get_scale()
    with in_step(module, step, args, kwargs):
        run = Run(module, step, feed(module, step, args, kwargs))
        once = run.in_turn if step.at_once is None else run.at_once
        loss, gradients = once(loss_index, scale)
    for name, gradient in zip(module._parameter_order, gradients, strict=True):
        parameter = module.parameter(name)
        if gradient is None or not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient
    return loss


def gradient_dtensor(module: ParallelModule, name: str, value: Tensor, layout: Layout) -> DTensor:
    """A local gradient of a parameter as a DTensor."""
    value, parameter = value.contiguous(), module.parameter(name)
    if module.plan.parameters[name] == layout:
        return dtensor_like(value, parameter)
    return to_dtensor(value, tuple(parameter.shape), layout, module.mesh)


class StepFunction(torch.autograd.Function):
    """The emitted program as one differentiable call on (parameters, inputs)."""

    @staticmethod
    def forward(ctx: Any, run: Run, *parameters: Tensor) -> Any:
        results, saved = run.forward()
        run.expect_backward()
        ctx.run = run
        # not save_for_backward: autograd would hold all of it until the backward has ended
        run.saved = list(saved)
        run.read_again = ReadAgain([*run.held_inputs(), *run.held_results(results)], saved)
        run.holders = ()  # an input that is not read again may be freed
        # what has no gradient here says so when one arrives, as a sum without it would be wrong
        attached = run.differentiable | set(run.step.traced.beside)
        outputs = _told_apart(results)
        ctx.mark_non_differentiable(
            *(o for i, o in enumerate(outputs) if isinstance(o, Tensor) and i not in attached)
        )
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_second_order()
        if ctx.run.read_again is not None:
            ctx.run.read_again.check()
        for index in ctx.run.step.traced.beside:
            if grads[index] is not None:
                raise _not_the_loss(ctx.run.step.traced, index)
        gradients = ctx.run.backward(grads)
        return (None, *gradients)


class EvaluationFunction(torch.autograd.Function):
    """Results of a forward that has no backward, which says so when a gradient arrives."""

    @staticmethod
    def forward(ctx: Any, results: Sequence[Any], *parameters: Tensor) -> Any:
        outputs = tuple(results)
        ctx.mark_non_differentiable(
            *(o for o in outputs if isinstance(o, Tensor) and not o.is_floating_point())
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise AutoparError(
            "backward of a parallel module in evaluation mode, in which it computes no gradients: "
            "call .train() first (models of from_pretrained come in evaluation mode)"
        )


def whole_gradient(grad: Tensor) -> Tensor:
    """A gradient that comes from an op with DTensors, such as a norm that is added to the loss."""
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def refuse_second_order() -> None:
    """Stop a backward whose result is to be differentiated: as numbers, it would add nothing."""
    if torch.is_grad_enabled():
        raise AutoparError(
            "a parallel module computes no second derivatives, which create_graph=True asks for: "
            "what is made of gradients, such as a penalty on them, would have none. Leave "
            "create_graph out"
        )


def called_twice() -> RuntimeError:
    return RuntimeError(
        "backward was called twice on one step of a parallel module: its activations are freed by "
        "the first call, with retain_graph=True too. Call the module again, or add the losses up "
        "first."
    )


def _not_the_loss(traced: TracedModel, index: int) -> AutoparError:
    paths = output_paths(traced.out_spec)
    return AutoparError(
        f"backward reaches the output {paths[index]}, but the step has the gradients of "
        f"{paths[traced.loss_index or 0]} alone, which it took for the loss. Add them up inside "
        "the model or in loss_fn, so that the loss is all that is differentiated; or call the "
        "module without labels, so that it returns no loss and each output has its gradients."
    )


class Run:
    """One execution of a step: inputs bound, results and gradients wrapped."""

    def __init__(self, module: ParallelModule, step: CompiledStep, given: Sequence[Tensor]) -> None:
        self.module = module
        self.step = step
        self.given = given
        self.saved: list[Any] | None = None
        self.holders: Sequence[Tensor | None] = [None] * len(given)
        self.read_again: ReadAgain | None = None
        self.tangents = [s for s, _ in step.program.inputs if s.kind == "tangent"]
        self.differentiable = {int(s.target) for s in self.tangents}

    def forward(self) -> tuple[list[Any], Sequence[Any]]:
        program = self.step.program
        with naming_lost_ranks("in the forward"):
            values = self.step.forward(*self.given)
        count, values = program.num_results, self._apart(values)
        return self._wrapped(self._own_results(values[:count])), values[count:]

    def held_inputs(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Every input of the forward: its name, its value here, and the tensor that holds it."""
        for spec, value, holder in zip(
            given_specs(self.step), self.given, self.holders, strict=True
        ):
            yield f"{spec.kind} {spec.target!r}", value, holder

    def held_results(self, results: Sequence[Any]) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Every result that is a tensor, which its user holds."""
        paths = output_paths(self.step.traced.out_spec)
        for index, result in enumerate(results):
            if isinstance(result, Tensor):
                yield f"output{paths[index]}", local_of(result), result

    def _apart(self, values: Sequence[Any]) -> Sequence[Any]:
        """Values of which none shares memory with a buffer that is about to be written."""
        updated = {spec.target for spec, _ in self.step.program.outputs if spec.kind == "buffer"}
        if not updated:
            return values
        given = zip(given_specs(self.step), self.given, strict=True)
        return copies_of_shared(values, {address(v) for spec, v in given if spec.target in updated})

    def _own_results(self, values: Sequence[Any]) -> Sequence[Any]:
        """Values of which none is what the module keeps: a later step may write to that."""
        given = zip(given_specs(self.step), self.given, strict=True)
        kinds = ("parameter", "buffer", "constant")
        return copies_of_shared(values, {address(v) for spec, v in given if spec.kind in kinds})

    def _wrapped(self, values: Sequence[Any]) -> list[Any]:
        """User outputs: sharded ones as DTensors; buffers are stored on the way."""
        out: list[Any] = []
        for value, (spec, layout) in zip(values, self.step.program.outputs, strict=False):
            if spec.kind == "buffer":
                self.module._set_buffer(spec.target, value)
            elif spec.node is None:
                out.append(spec.constant)
            elif any(not p.is_replicate for p in layout):
                shape = _global_shape(value, layout, self.step.plan.mesh_shape)
                out.append(to_dtensor(value, shape, layout, self.module.mesh))
            else:
                out.append(value)
        return out

    def backward(self, grads: Sequence[Tensor | None]) -> list[Any]:
        run = self.step.backward
        assert run is not None
        if self.saved is None:
            raise called_twice()
        values, self.saved = self.saved, None
        values += self._tangents(grads)
        if self._is_shared():
            self.module._turns.pay()
            begin_backward()
        with naming_lost_ranks("in the backward"):
            try:
                values = list(run(values))
            except Exception as error:
                if self.step.communicates:
                    tell_failure(error, self.step.plan.num_devices)
                raise
        used = {i for i, grad in enumerate(grads) if grad is not None}
        unused = (n for n, behind in self.step.reached_from.items() if not behind & used)
        return self._gradients(values, frozenset(unused))

    def expect_backward(self) -> None:
        """Note that ranks would part where one of them goes on without it."""
        if self._is_shared():
            self.module._turns.owe()

    def _is_shared(self) -> bool:
        return self.step.communicates and is_shared(self.step.plan.num_devices)

    def in_turn(self, loss: int, tangent: float) -> tuple[Tensor, list[Any]]:
        """Forward, then backward: the loss, and the gradients of `tangent` times it."""
        results, saved = self.forward()
        self.saved = list(saved)
        grads: list[Tensor | None] = [None] * len(results)
        grads[loss] = torch.full_like(results[loss], tangent)
        found: Tensor = results[loss]
        del results, saved
        return found, self.backward(grads)

    def at_once(self, loss: int, tangent: float) -> tuple[Tensor, list[Any]]:
        """Forward and backward in one: the loss, and the gradients of `tangent` times it."""
        program, run = self.step.program, self.step.at_once
        assert run is not None
        grads: list[Tensor | None] = [None] * program.num_results
        for spec in self.tangents:
            if int(spec.target) == loss:
                grads[loss] = torch.full(
                    spec.shape, tangent, dtype=spec.dtype, device=self.module.device
                )
        given, tangents = iter(self.given), iter(self._tangents(grads))
        kinds = [spec.kind for spec, _ in program.inputs]
        values = [next(tangents if kind == "tangent" else given) for kind in kinds]
        with naming_lost_ranks("in train_step"):
            values = list(self._apart(run(*values)))
        told: dict[str, Tensor] = {}
        for position in kept_outputs(program, loss):
            output, _ = program.outputs[position]
            if output.kind == "buffer":
                self.module._set_buffer(output.target, values.pop(0))
            elif output.kind == "output":
                told[output.target] = values.pop(0)
        return told[str(loss)], self._gradients(values)

    def _tangents(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """This rank's shares of the gradients of results, zeros for those without."""
        found = []
        for spec, layout in self.step.program.inputs:
            if spec.kind == "tangent":
                grad = grads[int(spec.target)]
                if grad is None:
                    grad = torch.zeros(spec.shape, dtype=spec.dtype, device=self.module.device)
                shares = self.step.plan.mesh_shape, self.module.coords
                found.append(take_shard(whole_gradient(grad), layout, *shares))
        return found

    def _gradients(self, values: list[Any], unused: Collection[str] = frozenset()) -> list[Any]:
        """Gradients as DTensors, in the order of the parameters; `values` is emptied.

        Those of `unused` parameters are zeros, of outputs that no loss was made of: None.
        """
        program = self.step.program
        found: dict[str, Tensor] = {}
        held: set[int] = set()
        outputs = program.outputs[program.num_results :]
        assert len(values) == len(outputs)
        for i, (output, layout) in enumerate(outputs):
            value, values[i] = values[i], None  # what is copied is let go before the next is
            value = value.contiguous()
            if value.data_ptr() in held:  # of two parameters that are only added
                value = value.clone()
            held.add(value.data_ptr())
            name = output.target
            found[name] = gradient_dtensor(self.module, name, value, layout)
        return [
            None if name in unused else found.get(name) for name in self.module._parameter_order
        ]


def _told_apart(results: Sequence[Any]) -> tuple[Any, ...]:
    """Results of which none is another one's object: autograd marks objects, not places.

    A loss that is returned detached as well would otherwise have no gradient either.
    """
    seen: set[int] = set()
    found: list[Any] = []
    for result in results:
        again = isinstance(result, Tensor) and id(result) in seen
        found.append(result.detach() if again else result)
        seen.add(id(result))
    return tuple(found)


def _global_shape(value: Tensor, layout: Layout, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    shape = list(value.shape)
    for placement, size in zip(layout, mesh_shape, strict=True):
        if placement.is_shard:
            shape[placement.dim] *= size
    return tuple(shape)
