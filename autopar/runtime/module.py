"""`ParallelModule`: an `nn.Module` that runs a plan's program on this rank.

Parameters are DTensors under the original names. `forward` runs the emitted forward, and
`backward` the emitted backward through one autograd function, so losses, optimizers, clipping and
checkpoints are used as in single-device code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils import _pytree as pytree

from autopar._compat import dtensor_like, dtensor_placements, module_has_hooks
from autopar.codegen.emit import Program, emit
from autopar.codegen.fusion import Fusion
from autopar.codegen.listing import program_text
from autopar.core.graph import InputSpec, TracedModel
from autopar.core.placement import Layout, Replicate
from autopar.core.plan import Plan
from autopar.errors import AutoparError
from autopar.runtime.data import ShardedLoader
from autopar.runtime.gradients import clip_gradients
from autopar.runtime.inductor import CompiledProgram
from autopar.runtime.lost import beat, naming_lost_ranks
from autopar.runtime.offload import offload
from autopar.runtime.pipeline import PipelinedStep
from autopar.runtime.plain_state import has_plain, load_plain
from autopar.runtime.profile import profile_step
from autopar.runtime.scaler import LossScaler
from autopar.runtime.shards import take_shard
from autopar.runtime.stage_gradients import count_all_stages
from autopar.runtime.state import to_dtensor

if TYPE_CHECKING:
    from autopar.runtime.checkpoint import SaveHandle

__all__ = ["CompiledStep", "ParallelModule", "StateName"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """A traced step with its plan and this rank's program, for one input signature.

    `compiled` runs in place of the program's graphs, where a backend made it.
    """

    traced: TracedModel
    plan: Plan
    program: Program
    fusion: Fusion
    compiled: CompiledProgram | None = None

    @property
    def forward(self) -> Callable[..., Any]:
        """The program's forward, compiled where it is."""
        return self.program.forward if self.compiled is None else self.compiled.forward

    @property
    def backward(self) -> Callable[..., Any] | None:
        """The program's backward, compiled where it is; None for inference."""
        return self.program.backward if self.compiled is None else self.compiled.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class StateName:
    """One FQN of the model's state: the FQN that owns its tensor, and whether it is saved."""

    name: str
    owner: str
    persistent: bool


Compile = Callable[[Any, Any, bool, bool], "CompiledStep | PipelinedStep"]


class _Step(torch.autograd.Function):
    """The emitted program as one differentiable call on (parameters, inputs)."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *parameters: Tensor) -> Any:
        results, saved = run.forward()
        ctx.run = run
        # not save_for_backward: autograd would hold all of it until the backward has ended
        run.saved = list(saved)
        differentiable = run.differentiable
        outputs = tuple(results)
        ctx.mark_non_differentiable(
            *(o for i, o in enumerate(outputs) if isinstance(o, Tensor) and i not in differentiable)
        )
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        gradients = ctx.run.backward(grads)
        return (None, *gradients)


class _InTurns(torch.autograd.Function):
    """A step in microbatches, whose gradients are there when its loss is."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        tangent: float,
        gradients: Sequence[Tensor | None],
        anchor: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.tangent = tangent
        ctx.gradients = list(gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.gradients is None:
            raise _called_twice()
        gradients, ctx.gradients = ctx.gradients, None
        factor = float(grad) / ctx.tangent
        if factor != 1.0:
            gradients = [None if g is None else g * factor for g in gradients]
        return (None, None, None, None, *gradients)


def _called_twice() -> RuntimeError:
    return RuntimeError(
        "backward was called twice on one step of a parallel module: its activations are freed by "
        "the first call. Call the module again, or add the losses up first."
    )


class _Run:
    """One execution of a step: inputs bound, results and gradients wrapped."""

    def __init__(self, module: ParallelModule, step: CompiledStep, feed: Sequence[Tensor]) -> None:
        self.module = module
        self.step = step
        self.feed = feed
        self.saved: list[Any] | None = None
        self.tangents = [s for s, _ in step.program.inputs if s.kind == "tangent"]
        self.differentiable = {int(s.target) for s in self.tangents}

    def forward(self) -> tuple[list[Any], Sequence[Any]]:
        program = self.step.program
        with naming_lost_ranks("in the forward"):
            values = self.step.forward(*self.feed)
        count = program.num_results
        return self._wrapped(values[:count]), values[count:]

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
        program, plan = self.step.program, self.step.plan
        run = self.step.backward
        assert run is not None
        if self.saved is None:
            raise _called_twice()
        values, self.saved = self.saved, None
        tangents = []
        for spec, layout in program.inputs:
            if spec.kind == "tangent":
                grad = grads[int(spec.target)]
                if grad is None:
                    grad = torch.zeros(spec.shape, dtype=spec.dtype, device=self.module.device)
                tangents.append(take_shard(grad, layout, plan.mesh_shape, self.module.coords))
        values += tangents
        with naming_lost_ranks("in the backward"):
            values = run(values)
        found: dict[str, Tensor] = {}
        held: set[int] = set()
        outputs = program.outputs[program.num_results :]
        for value, (output, layout) in zip(values, outputs, strict=True):
            value = value.contiguous()
            if value.data_ptr() in held:  # of two parameters that are only added
                value = value.clone()
            held.add(value.data_ptr())
            name = output.target
            found[name] = self.module._gradient(name, value, layout, plan.shapes[name])
        return [found.get(name) for name in self.module._parameter_order]


def _global_shape(value: Tensor, layout: Layout, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    shape = list(value.shape)
    for placement, size in zip(layout, mesh_shape, strict=True):
        if placement.is_shard:
            shape[placement.dim] *= size
    return tuple(shape)


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
        for name, reserved in self._reserved.items():
            # in place, so that an optimizer made before the first batch holds the real parameter
            torch.utils.swap_tensors(reserved, parameters[name])
            parameters[name] = reserved
        values: dict[str, Tensor] = {**parameters, **buffers}
        # a rank of a pipeline has the parameters of its stages
        self._names = tuple(entry for entry in self._names if entry.owner in values)
        for entry in self._names:
            _register(self, entry.name, values[entry.owner], entry.persistent)
        self._parameter_order = list(parameters)
        if isinstance(step, PipelinedStep):
            step.warn_of_dropped_outputs()
        if isinstance(step, PipelinedStep) and step.pipeline.size > 1:
            count_all_stages(self.parameters(), step.line())
        if step.plan.offload == "optimizer":
            offload(parameters.values())
        self._steps[signature] = step

    def reserve(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Register parameters without storage, for optimizers made before the first batch."""
        whole: Layout = tuple(Replicate() for _ in range(mesh.ndim))
        for name, parameter in model.named_parameters():
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            tensor = to_dtensor(empty, tuple(parameter.shape), whole, mesh)
            self._reserved[name] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        for entry in self._names:
            if entry.owner in self._reserved:
                _register(self, entry.name, self._reserved[entry.owner], entry.persistent)

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
        found = self.mesh.get_coordinate()
        assert found is not None
        return tuple(found)

    @property
    def device(self) -> torch.device:
        return torch.device(self.mesh.device_type)

    def parameter(self, name: str) -> DTensor:
        """`get_parameter`, without walking the path each time."""
        if name not in self._owners:
            path, _, leaf = name.rpartition(".")
            self._owners[name] = self.get_submodule(path), leaf
        owner, leaf = self._owners[name]
        found = owner._parameters[leaf]
        assert isinstance(found, DTensor)
        return found

    def saved_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers that this rank holds, each tied one once, by FQN."""
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        kept = {entry.owner for entry in self._names if entry.persistent}
        return {name: held[name] for name in held if name in kept}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As `nn.Module.load_state_dict`; full tensors, as one device has them, are sharded.

        Every rank passes the same full tensors, on any device.

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

    def names(self) -> list[tuple[str, str]]:
        """`(name, owner)` of every FQN of the state; a tied tensor has several."""
        return [(entry.name, entry.owner) for entry in self._names]

    @property
    def random_state(self) -> dict[str, int]:
        """The seed of dropout, and how many training steps have drawn from it."""
        return {"seed": self._seed, "calls": self._calls}

    @random_state.setter
    def random_state(self, state: Mapping[str, int]) -> None:
        self._seed, self._calls = int(state["seed"]), int(state["calls"])

    def _set_buffer(self, name: str, value: Tensor) -> None:
        with torch.no_grad():
            self.get_buffer(name).copy_(value)

    # --- running -------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the global batch."""
        step = self._step_for(args, kwargs)
        if isinstance(step, PipelinedStep):
            return self._in_turns(step, args, kwargs)
        feed = self._feed(step, args, kwargs)
        run = _Run(self, step, feed)
        if step.traced.training and torch.is_grad_enabled():
            parameters = [self.parameter(n) for n in self._parameter_order]
            results: Sequence[Any] = _Step.apply(run, *parameters)
        else:
            with torch.no_grad():
                results, _ = run.forward()
        return pytree.tree_unflatten(list(results), step.traced.out_spec)

    def _in_turns(self, step: PipelinedStep, args: Any, kwargs: Any) -> Any:
        """All microbatches' forwards and backwards; `backward` then hands the gradients over."""
        # scaled from the start: half-precision gradients would underflow on their way
        scaler = self.loss_scaler
        tangent = scaler.get_scale() if scaler is not None else 1.0
        whole = self._whole(step, args, kwargs, tangent)
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
                self._gradient(name, found.gradients[name], layouts[name], shapes[name])
                if name in found.gradients
                else None
                for name in self._parameter_order
            ]
            parameters = [self.parameter(name) for name in self._parameter_order]
            # it requires a gradient on ranks too whose stages have no trainable parameter
            anchor = torch.zeros((), requires_grad=True)
            loss = outputs[index]
            outputs[index] = _InTurns.apply(loss, tangent, gradients, anchor, *parameters)
        return pytree.tree_unflatten(outputs, step.traced.out_spec)

    def _whole(self, step: PipelinedStep, args: Any, kwargs: Any, tangent: float) -> dict[str, Any]:
        """Local parameters of this rank, and whole values of all else, by placeholder."""
        flat = iter([x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)])
        whole: dict[str, Any] = {}
        seed = self._seed + self._calls
        if step.traced.training:
            self._calls += 1
        everywhere: Layout = tuple(Replicate() for _ in step.plan.mesh_shape)
        for spec in step.traced.inputs:
            if spec.kind == "tangent":
                value = torch.full(spec.shape, tangent, dtype=spec.dtype, device=self.device)
                whole[spec.node] = value
            elif spec.kind == "input":  # the caller's own: nothing writes to it
                given = next(flat)
                given = given.full_tensor() if isinstance(given, DTensor) else given
                whole[spec.node] = given.to(self.device)
            elif spec.kind != "parameter" or spec.target in self._parameter_order:
                whole[spec.node] = self._local(spec, everywhere, step, flat, seed)
        return whole

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
        index = step.traced.loss_index
        if index is None:
            raise AutoparError(
                "train_step needs a scalar loss among the model's outputs; pass loss_fn= to "
                "autopar.parallelize, or labels to the model"
            )
        if isinstance(step, CompiledStep) and step.traced.training and not self._has_hooks():
            return self._without_autograd(step, index, args, kwargs)
        output = self(*args, **kwargs)
        loss = pytree.tree_leaves(output)[index] if not isinstance(output, Tensor) else output
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
        run = _Run(self, step, self._feed(step, args, kwargs))
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

        Args:
            rank: of the mesh, in row-major order; default: this one.

        Raises:
            AutoparError: there is no such rank, or no program before the first call.
        """
        if not self._steps:
            raise AutoparError("there is no program before the first call; pass example_inputs")
        step = self.first_step
        if isinstance(step, PipelinedStep):
            self._print_stages(step)
            return
        program = step.program
        if rank is not None:
            shape = step.plan.mesh_shape
            if not 0 <= rank < math.prod(shape):
                raise AutoparError(f"rank {rank}: the mesh {shape} has {math.prod(shape)} ranks")
            coords = [int(c) for c in np.unravel_index(rank, shape)]
            program = emit(
                step.traced, step.plan, coords, passes=program.passes, fusion=step.fusion
            )
        print(program_text(program, step.traced, step.plan), end="")

    def _print_stages(self, step: PipelinedStep) -> None:
        for stage, program in step.programs.items():
            for part in ("prepare", "forward", "backward", "finish"):
                print(f"# stage {stage}: {part}")
                print(program.parts[part].module.code)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_` on all parameters, with one all-reduce.

        Returns:
            The global norm before clipping, the same on every rank.
        """
        return clip_gradients(self.parameters(), max_norm, norm_type, error_if_nonfinite)

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
        return self._steps[signature]

    def _feed(self, step: CompiledStep, args: Any, kwargs: Any) -> list[Tensor]:
        """Local value of every placeholder of the forward program."""
        flat = iter([x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)])
        seed = self._seed + self._calls
        if step.traced.training:
            self._calls += 1
        feed: list[Tensor] = []
        for spec, layout in step.program.inputs:
            if spec.kind == "tangent":
                continue
            feed.append(self._local(spec, layout, step, flat, seed))
        return feed

    def _local(
        self,
        spec: InputSpec,
        layout: Layout,
        step: CompiledStep | PipelinedStep,
        flat: Any,
        seed: int,
    ) -> Tensor:
        if spec.kind == "parameter":
            return self.parameter(spec.target)._local_tensor.detach()
        if spec.kind == "buffer":
            return self.get_buffer(spec.target)
        if spec.kind == "constant":
            return step.traced.state_values[spec.target].to(self.device)
        if spec.kind == "seed":
            return torch.tensor(seed, device=self.device)
        value = next(flat)
        if isinstance(value, DTensor):
            here = value.device_mesh == self.mesh
            if here and list(value.placements) == dtensor_placements(layout):
                local: Tensor = value._local_tensor
                return local
            return take_shard(value.full_tensor(), layout, step.plan.mesh_shape, self.coords)
        assert isinstance(value, Tensor)
        return take_shard(value.to(self.device), layout, step.plan.mesh_shape, self.coords)


def input_signature(args: Any, kwargs: Any) -> Any:
    """What a compiled step is for: structure, shapes, dtypes and constants of the inputs."""
    leaves, spec = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
    described = tuple(
        (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves
    )
    return described, str(spec)


def _register(root: nn.Module, path: str, value: Tensor, persistent: bool) -> None:
    """Put a parameter or buffer at a dotted path, making plain modules on the way."""
    *parents, leaf = path.split(".")
    module = root
    for name in parents:
        child = module._modules.get(name)
        if child is None:
            child = nn.Module()
            module.add_module(name, child)
        module = child
    if isinstance(value, nn.Parameter):
        module.register_parameter(leaf, value)
    else:
        module.register_buffer(leaf, value, persistent=persistent)
