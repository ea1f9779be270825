"""`ParallelModule`: an `nn.Module` that runs a plan's program on this rank.

Parameters are DTensors under the original names. `forward` runs the emitted forward, and
`backward` the emitted backward through one autograd function, so losses, optimizers, clipping and
checkpoints are used as in single-device code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils import _pytree as pytree

from autopar._compat import dtensor_like, module_has_hooks
from autopar.core.placement import Layout
from autopar.core.plan import Plan
from autopar.errors import AutoparError
from autopar.runtime.compiled_step import CompiledStep, input_signature, position_of_loss
from autopar.runtime.data import ShardedLoader
from autopar.runtime.gradients import clip_gradients
from autopar.runtime.local_step import step_on_shares
from autopar.runtime.lost import beat, naming_lost_ranks
from autopar.runtime.names import StateName, owner_of, register
from autopar.runtime.offload import offload
from autopar.runtime.pipeline import PipelinedStep
from autopar.runtime.plain_state import has_plain, load_plain
from autopar.runtime.profile import profile_step
from autopar.runtime.running import Run, StepFunction, TurnsFunction, feed, whole_values
from autopar.runtime.scaler import LossScaler
from autopar.runtime.stage_gradients import count_all_stages
from autopar.runtime.state import to_dtensor
from autopar.runtime.step_text import step_text
from autopar.runtime.trainable import check_still_frozen, fill, reserved_parameters

if TYPE_CHECKING:
    from autopar.runtime.checkpoint import SaveHandle

__all__ = ["ParallelModule"]


Compile = Callable[[Any, Any, bool, bool], "CompiledStep | PipelinedStep"]


class ParallelModule(nn.Module):
    """A model that runs on a mesh as it would on one device. Made by `autopar.parallelize`.

    `module(*args, **kwargs)` takes the global batch on every rank (or shares from
    `shard_dataloader`) and returns what the model returns. Beside a scalar loss, other outputs
    come as DTensors, sharded as they were computed; `.full_tensor()` gathers one.
    """

    def __init__(
        self,
        compile_step: Compile,
        mesh: DeviceMesh | None,
        materialize: Callable[
            [Plan], tuple[DeviceMesh, dict[str, nn.Parameter], dict[str, Tensor]]
        ],
        names: Sequence[StateName],
        seed: int,
    ) -> None:
        super().__init__()
        self._compile = compile_step
        self._materialize = materialize
        self._names = tuple(names)
        self._steps: dict[Any, CompiledStep | PipelinedStep] = {}
        self._plan: Plan | None = None
        self._mesh = mesh
        self._seed = seed
        self._calls = 0
        self._parameter_order: list[str] = []
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._reserved: dict[str, nn.Parameter] = {}
        self._frozen: list[str] = []
        self.loss_scaler: LossScaler | None = None
        self.pending_save: SaveHandle | None = None

    # --- set-up --------------------------------------------------------------------------------
    def install(self, step: CompiledStep | PipelinedStep, signature: Any) -> None:
        """Adopt the first plan: create this rank's parameters and buffers."""
        if self._reserved and isinstance(step, PipelinedStep) and step.pipeline.size > 1:
            raise AutoparError(
                "a rank of a pipeline holds some of the parameters, so it must be known before "
                "the optimizer is made: pass example_inputs to autopar.parallelize"
            )
        self._plan = step.plan
        beat()
        self._mesh, parameters, buffers = self._materialize(step.plan)
        self._frozen = [name for name, p in parameters.items() if not p.requires_grad]
        for name, reserved in self._reserved.items():
            fill(reserved, parameters[name])
            parameters[name] = reserved
        values: dict[str, Tensor] = {**parameters, **buffers}
        for entry in self._names:
            if entry.owner in values:  # a rank of a pipeline has the parameters of its stages
                register(self, entry.name, values[entry.owner], entry.persistent)
        self._parameter_order = list(parameters)
        if isinstance(step, PipelinedStep):
            step.warn_of_dropped_outputs()
            if step.pipeline.size > 1:
                count_all_stages(self.parameters(), step.line())
        step_on_shares(parameters.values())
        if step.plan.offload == "optimizer":
            offload(parameters.values())
        self._steps[signature] = step

    def reserve(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Register parameters without storage, for optimizers made before the first batch."""
        self._reserved = reserved_parameters(model, mesh)
        for entry in self._names:
            if entry.owner in self._reserved:
                register(self, entry.name, self._reserved[entry.owner], entry.persistent)

    @property
    def plan(self) -> Plan:
        """The plan of the first input signature."""
        if self._plan is None:
            raise AutoparError("there is no plan before the first call; pass example_inputs")
        return self._plan

    @property
    def compiled(self) -> CompiledStep:
        """The step of the first input signature: trace, plan and this rank's program."""
        step = self.first_step
        if isinstance(step, PipelinedStep):
            raise AutoparError(
                "a step in microbatches has a program for each stage: see first_step.programs"
            )
        return step

    @property
    def first_step(self) -> CompiledStep | PipelinedStep:
        """The step of the first input signature, in microbatches or not."""
        if not self._steps:
            raise AutoparError("nothing is compiled before the first call; pass example_inputs")
        return next(iter(self._steps.values()))

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that the plan's layouts refer to."""
        assert self._mesh is not None
        return self._mesh

    @property
    def coords(self) -> tuple[int, ...]:
        """This rank's coordinate on each mesh axis."""
        return tuple(self.mesh.get_coordinate() or ())

    @property
    def device(self) -> torch.device:
        return torch.device(self.mesh.device_type)

    def parameter(self, name: str) -> DTensor:
        """`get_parameter`, without walking the path each time."""
        owner, leaf = self._owner(name)
        found = owner._parameters[leaf]
        assert isinstance(found, DTensor)
        return found

    def buffer(self, name: str) -> Tensor:
        """`get_buffer`, without walking the path each time."""
        owner, leaf = self._owner(name)
        found = owner._buffers[leaf]
        assert found is not None
        return found

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        if name not in self._owners:
            self._owners[name] = owner_of(self, name)
        return self._owners[name]

    def saved_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers that this rank holds, each tied one once, by FQN."""
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        kept = {entry.owner for entry in self._names if entry.persistent}
        return {name: held[name] for name in held if name in kept}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As `nn.Module.load_state_dict`; full tensors, as one device has them, are sharded.

        Every rank passes the same full tensors, on any device; a rank of a pipeline may leave out
        what other stages hold.

        Returns:
            Missing and unexpected names, as torch does.

        Raises:
            CheckpointError: names or shapes of full tensors do not fit; nothing is changed then.
            AutoparError: there are no parameters to fill before the first call.
        """
        if not has_plain(state_dict):
            return super().load_state_dict(state_dict, strict, assign)
        if self._plan is None:
            raise AutoparError(
                "there is nothing to load into before the first call; pass example_inputs"
            )
        if assign:
            raise AutoparError("full tensors cannot be assigned, as ranks hold shares of them")
        return _IncompatibleKeys(*load_plain(self, state_dict, strict))

    @property
    def names(self) -> tuple[StateName, ...]:
        """Every FQN of the model's state, of all stages; a tied tensor has several."""
        return self._names

    @property
    def random_state(self) -> dict[str, int]:
        """The seed of dropout, and how many training steps have drawn from it."""
        return {"seed": self._seed, "calls": self._calls}

    @random_state.setter
    def random_state(self, state: Mapping[str, int]) -> None:
        self._seed, self._calls = int(state["seed"]), int(state["calls"])

    def _set_buffer(self, name: str, value: Tensor) -> None:
        with torch.no_grad():
            self.buffer(name).copy_(value)

    # --- running -------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the global batch."""
        step = self._step_for(args, kwargs)
        if isinstance(step, PipelinedStep):
            return self._in_turns(step, args, kwargs)
        run = Run(self, step, feed(self, step, args, kwargs))
        if step.traced.training and torch.is_grad_enabled():
            parameters = [self.parameter(n) for n in self._parameter_order]
            results: Sequence[Any] = StepFunction.apply(run, *parameters)
        else:
            with torch.no_grad():
                results, _ = run.forward()
        return pytree.tree_unflatten(list(results), step.traced.out_spec)

    def _in_turns(self, step: PipelinedStep, args: Any, kwargs: Any) -> Any:
        """All microbatches' forwards and backwards; `backward` then hands the gradients over."""
        # scaled from the start: half-precision gradients would underflow on their way
        scaler = self.loss_scaler
        tangent = scaler.get_scale() if scaler is not None else 1.0
        whole = whole_values(self, step, args, kwargs, tangent)
        with naming_lost_ranks("in a step of the pipeline"):
            found = step.run(whole)
        for name, value in found.buffers.items():
            self._set_buffer(name, value)
        outputs: list[Any] = [
            spec.constant if spec.constant is not None else found.outputs.get(int(spec.target))
            for spec in step.traced.outputs
            if spec.kind == "output"
        ]
        index = step.traced.loss_index
        if step.traced.training and torch.is_grad_enabled() and index is not None:
            layouts, shapes = step.plan.parameters, step.plan.shapes
            gradients = [
                self._gradient(name, found.gradients.pop(name), layouts[name], shapes[name])
                if name in found.gradients
                else None
                for name in self._parameter_order
            ]
            parameters = [self.parameter(name) for name in self._parameter_order]
            # it requires a gradient on ranks too whose stages have no trainable parameter
            anchor = torch.zeros((), requires_grad=True)
            loss = outputs[index]
            outputs[index] = TurnsFunction.apply(loss, tangent, gradients, anchor, *parameters)
        return pytree.tree_unflatten(outputs, step.traced.out_spec)

    def _gradient(
        self, name: str, value: Tensor, layout: Layout, shape: tuple[int, ...]
    ) -> DTensor:
        """A local gradient as a DTensor."""
        if self.plan.parameters[name] == layout:
            return dtensor_like(value.contiguous(), self.parameter(name))
        return to_dtensor(value.contiguous(), shape, layout, self.mesh)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one global batch; returns the loss, detached.

        Gradients are added to each parameter's `.grad`, as `backward` does. With a `LossScaler`
        they are those of the scaled loss. Hooks on the module and on its parameters are run; hooks
        on autograd's own nodes (`register_multi_grad_hook`) need `forward` and `backward`.

        Raises:
            AutoparError: the model has no scalar loss; pass `loss_fn=` to `parallelize`.
        """
        if not self.training:
            raise AutoparError("train_step in evaluation mode; call .train() first")
        step = self._step_for(args, kwargs)
        index = position_of_loss(step.traced)
        if isinstance(step, CompiledStep) and step.traced.training and not self._has_hooks():
            return self._without_autograd(step, index, args, kwargs)
        output = self(*args, **kwargs)
        loss = output if isinstance(output, Tensor) else pytree.tree_leaves(output)[index]
        (loss if self.loss_scaler is None else self.loss_scaler.scale(loss)).backward()
        return loss.detach()

    def _has_hooks(self) -> bool:
        """True if a forward, or a gradient that arrives, calls something of the user's."""
        if module_has_hooks(self):
            return True
        parameters = (self.parameter(name) for name in self._parameter_order)
        return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)

    @torch.no_grad()
    def _without_autograd(self, step: CompiledStep, index: int, args: Any, kwargs: Any) -> Tensor:
        """Both programs in turn: autograd has one node here, and takes a while for each DTensor."""
        run = Run(self, step, feed(self, step, args, kwargs))
        results, saved = run.forward()
        run.saved = list(saved)
        loss = results[index]
        scale = 1.0 if self.loss_scaler is None else self.loss_scaler.get_scale()
        tangents: list[Tensor | None] = [None] * len(results)
        tangents[index] = torch.full_like(loss, scale)
        del results, saved
        for name, gradient in zip(self._parameter_order, run.backward(tangents), strict=True):
            parameter = self.parameter(name)
            if gradient is None or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
        return loss

    def profile_step(
        self, path: str | Path, *args: Any, ranks: int | None = None, **kwargs: Any
    ) -> Tensor:
        """A `train_step` that is measured; call it on every rank, after a few steps to warm up.

        The first rank writes a Chrome trace with two processes for each rank, the step as it was
        predicted and as it ran, in the same lanes: compute, and communication on each mesh axis.

        Args:
            path: file; compressed where the name ends in `.gz`.
            *args, **kwargs: the global batch.
            ranks: how many of the first ranks to write; default: as many as a browser can open.

        Returns:
            The loss, as `train_step` does.
        """
        return profile_step(self, path, args, kwargs, ranks)

    def print_program(self, rank: int | None = None) -> None:
        """Print the program of a rank, with placements and the user's lines as comments.

        Of a plan in microbatches, the order of the rank's actions and, of each of its stages, the
        parts that run.

        Args:
            rank: of the mesh, in row-major order; default: this one.

        Raises:
            AutoparError: there is no such rank, or no program before the first call.
        """
        if not self._steps:
            raise AutoparError("there is no program before the first call; pass example_inputs")
        print(step_text(self.first_step, rank), end="")

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        parameters: Iterable[Tensor] | None = None,
    ) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, with one all-reduce. Every rank calls it.

        Args:
            parameters: what this rank holds of those to clip, maybe nothing; default: all.

        Returns:
            The global norm before clipping, the same on every rank.
        """
        chosen = self.parameters() if parameters is None else parameters
        return clip_gradients(chosen, max_norm, norm_type, error_if_nonfinite)

    def shard_dataloader(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Batches of `loader` of which this rank loads and holds only its share."""
        return ShardedLoader(loader, self)

    def _signature(self, args: Any, kwargs: Any) -> Any:
        training = self.training and torch.is_grad_enabled()
        return (self.training, training, input_signature(args, kwargs))

    def _step_for(self, args: Any, kwargs: Any) -> CompiledStep | PipelinedStep:
        signature = self._signature(args, kwargs)
        if signature not in self._steps:
            training = self.training and torch.is_grad_enabled()
            step = self._compile(args, kwargs, training, self.training)
            if self._plan is None:
                self.install(step, signature)
            self._steps[signature] = step
        if self.training and torch.is_grad_enabled():
            check_still_frozen({name: self.parameter(name) for name in self._frozen})
        return self._steps[signature]
