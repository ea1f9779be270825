"""`ParallelModule`: an `nn.Module` that runs a plan's program on this rank.

Parameters are DTensors under the original names. `forward` runs the emitted forward, and
`backward` the emitted backward through one autograd function, so losses, optimizers, clipping and
checkpoints are used as in single-device code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autopar._compat import in_function_transform, module_has_hooks
from autopar.core.grad_modes import outside_inference_mode
from autopar.core.loss import position_of_loss
from autopar.core.plan import Plan
from autopar.errors import AutoparError
from autopar.runtime.amp_scaler import go_with_amp
from autopar.runtime.asked_values import AskedValues
from autopar.runtime.autocast import check_autocast, outside_autocast
from autopar.runtime.children import adopt, as_in, modes
from autopar.runtime.compiled_step import (
    CompiledStep,
    input_signature,
    named_inputs,
    warn_of_many,
)
from autopar.runtime.data import ShardedLoader
from autopar.runtime.gradients import clip_gradients
from autopar.runtime.in_step import check_first_batch, in_step
from autopar.runtime.local_step import step_on_shares
from autopar.runtime.lost import beat
from autopar.runtime.microbatched import run_microbatches
from autopar.runtime.names import register
from autopar.runtime.offload import offload
from autopar.runtime.pipeline import PipelinedStep
from autopar.runtime.plain_ways import go_plain_ways
from autopar.runtime.profile import profile_step
from autopar.runtime.running import run_with_autograd, run_without_autograd
from autopar.runtime.same_batch import check_same_batch
from autopar.runtime.scaler import LossScaler
from autopar.runtime.settings import FixedValues, Reachable, is_set_already
from autopar.runtime.stage_gradients import count_all_stages
from autopar.runtime.stages_without import join_norms
from autopar.runtime.state_module import StateModule
from autopar.runtime.step_text import step_text
from autopar.runtime.trainable import check_still_frozen, fill, reserved_parameters
from autopar.runtime.turns import Turns

if TYPE_CHECKING:
    from autopar.runtime.checkpoint import SaveHandle

__all__ = ["ParallelModule"]


Compile = Callable[[Any, Any, bool], "CompiledStep | PipelinedStep"]


class ParallelModule(StateModule):
    """A model that runs on a mesh as it would on one device. Made by `autopar.parallelize`.

    `module(*args, **kwargs)` takes the global batch on every rank (or this rank's shares of it,
    from `shard_dataloader`) and returns what the model returns. A loss is a plain scalar tensor;
    outputs that are sharded come as DTensors, which `.full_tensor()` gathers.
    """

    def __init__(
        self,
        model: nn.Module,
        compile_step: Compile,
        mesh: DeviceMesh | None,
        materialize: Callable[
            [Plan], tuple[DeviceMesh, dict[str, nn.Parameter], dict[str, Tensor]]
        ],
        seed: int,
        precision: str | None = None,
        reachable: Reachable = tuple,
    ) -> None:
        super().__init__(model)
        go_plain_ways()
        go_with_amp()
        self._compile = compile_step
        self._materialize = materialize
        self._steps: dict[Any, CompiledStep | PipelinedStep] = {}
        self._compared: set[Any] = set()  # signatures of which a batch was seen to be the same
        self._mesh = mesh
        self._seed = seed
        self._precision = precision
        self._calls = 0
        self._parameter_order: list[str] = []
        self._reserved: dict[str, nn.Parameter] = {}
        self._frozen: list[str] = []
        self._reachable = reachable
        self._fixed: FixedValues | None = None
        self._asked = AskedValues()
        self._turns = Turns()
        self.loss_scaler: LossScaler | None = None
        self.torch_scaler: torch.amp.GradScaler | None = None  # of the last loss in microbatches
        self.pending_save: SaveHandle | None = None
        adopt(self, model)

    def __setattr__(self, name: str, value: Any) -> None:
        if not is_set_already(self, self.__dict__.get("_original"), name, value):
            super().__setattr__(name, value)

    # --- set-up --------------------------------------------------------------------------------
    def install(self, step: CompiledStep | PipelinedStep) -> None:
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
        self._mark_parameters(step)
        self._fixed = FixedValues(self._reachable)

    def _mark_parameters(self, step: CompiledStep | PipelinedStep) -> None:
        """Let optimizers and norms know what the parameters are."""
        if isinstance(step, PipelinedStep) and step.pipeline.size > 1:
            count_all_stages(self.parameters(), step.line())
            join_norms()
        step_on_shares(self.parameters())
        if step.plan.offload == "optimizer":
            offload(self.parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        if self._plan is None:
            raise AutoparError(
                "there are no parameters to copy before the first call: pass example_inputs to "
                "autopar.parallelize"
            )
        compiled = (self._compile, self._materialize, self._mesh, self._plan, self._reachable)
        shared = (*compiled, self._fixed, self.pending_save)
        memo.update((id(x), x) for x in (*shared, *self._steps.values()) if x is not None)
        for parameter in self.parameters():  # without gradients, as torch copies parameters
            twin = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            memo[id(parameter)] = twin
        copied = super().__deepcopy__(memo)
        if self._steps:
            copied._mark_parameters(self.first_step)
        return copied

    def reserve(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Register parameters without storage, for optimizers made before the first batch."""
        self._reserved = reserved_parameters(model, mesh)
        for entry in self._names:
            if entry.owner in self._reserved:
                register(self, entry.name, self._reserved[entry.owner], entry.persistent)

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

    @property
    def random_state(self) -> dict[str, int]:
        """The seed of dropout, and how many training steps have drawn from it."""
        return {"seed": self._seed, "calls": self._calls}

    @random_state.setter
    def random_state(self, state: Mapping[str, int]) -> None:
        self._seed, self._calls = int(state["seed"]), int(state["calls"])

    # --- running -------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the global batch."""
        if in_function_transform():
            raise AutoparError(
                "a parallel module is called inside of a transform of torch.func, which cannot "
                "see into its compiled step: call it outside, and backward() for gradients"
            )
        args, kwargs = named_inputs(self._original, args, kwargs)
        check_autocast(self.device.type, self._precision)
        return self._run(args, kwargs)

    @outside_autocast
    def _run(self, args: Any, kwargs: Any) -> Any:
        step = self._step_for(args, kwargs)
        if isinstance(step, PipelinedStep):
            return run_microbatches(self, step, args, kwargs)
        with in_step(self, step, args, kwargs):
            results = run_with_autograd(self, step, args, kwargs)
        return pytree.tree_unflatten(list(results), step.traced.out_spec)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one global batch; returns the loss, detached.

        Gradients are added to each parameter's `.grad`, as `backward` does. With a `LossScaler`
        they are those of the scaled loss. Hooks on the module and on its parameters are run; hooks
        on autograd's own nodes (`register_multi_grad_hook`) need `forward` and `backward`.

        Raises:
            AutoparError: there is no scalar loss to train (the text says why), the module is in
                evaluation mode, or gradients are switched off.
        """
        if not self.training:
            raise AutoparError("train_step in evaluation mode; call .train() first")
        if not torch.is_grad_enabled():
            raise AutoparError(
                "train_step under torch.no_grad() or inference_mode(), where there are no "
                "gradients; call it outside, or call the module itself for its output"
            )
        args, kwargs = named_inputs(self._original, args, kwargs)
        check_autocast(self.device.type, self._precision)
        return self._train_step(args, kwargs)

    @outside_autocast
    def _train_step(self, args: Any, kwargs: Any) -> Tensor:
        step = self._step_for(args, kwargs)
        index = position_of_loss(step.traced)
        if isinstance(step, CompiledStep) and step.traced.training and not self._has_hooks():
            return run_without_autograd(self, step, index, args, kwargs)
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
        return profile_step(self, path, *named_inputs(self._original, args, kwargs), ranks)

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
        parameters: Tensor | Iterable[Tensor] | None = None,
    ) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, with one all-reduce. Every rank calls this.

        Args:
            max_norm, norm_type, error_if_nonfinite: as for torch's.
            parameters: those to clip that this rank holds, maybe none of them; default: all.

        Returns:
            The global norm before clipping, the same on every rank.

        Raises:
            AutoparError: the norm is not finite and `error_if_nonfinite` is set, or the order of
                the norm is not positive.
        """
        chosen = self.parameters() if parameters is None else parameters
        return clip_gradients(chosen, max_norm, norm_type, error_if_nonfinite)

    def shard_dataloader(self, loader: Iterable[Any]) -> Iterable[Any]:
        """A loader of batches of which this rank holds only its share of the rows.

        Args:
            loader: of global batches. From a `DataLoader` over a dataset with indices, only this
                rank's samples are read; batches of anything else are read whole and cut.

        Raises:
            AutoparError: there is no plan before the first call.
        """
        return ShardedLoader(loader, self)

    def signature(self, args: Any, kwargs: Any, training: bool) -> Any:
        """What a step is compiled for: modes, whether with gradients, and what inputs are like."""
        like = self._like(args, kwargs, training)
        return (*like, *self._asked.of(like, args, kwargs))

    def _like(self, args: Any, kwargs: Any, training: bool) -> tuple[Any, ...]:
        return (self.training, modes(self), training, input_signature(args, kwargs))

    def keep(
        self, step: CompiledStep | PipelinedStep, args: Any, kwargs: Any, training: bool
    ) -> None:
        """Run a step for such inputs from now on."""
        self._asked.note(self, self._like(args, kwargs, training), step)
        self._steps[self.signature(args, kwargs, training)] = step

    def _step_for(self, args: Any, kwargs: Any) -> CompiledStep | PipelinedStep:
        go_plain_ways()  # again, as torch's implicit_replication() ends it
        training = self.training and torch.is_grad_enabled()
        if self._fixed is None:
            self._fixed = FixedValues(self._reachable)
        self._fixed.check()
        self._asked.check(self)
        signature = self.signature(args, kwargs, training)
        if signature not in self._steps:
            with as_in(self), outside_inference_mode():
                step = self._compile(args, kwargs, training)
                if self._plan is None:
                    self.install(step)
            self.keep(step, args, kwargs, training)
            warn_of_many([s[3] for s in self._steps], args, kwargs)
            signature = self.signature(args, kwargs, training)
        if signature not in self._compared:
            check_first_batch(self._steps[signature], args, kwargs)
            check_same_batch(args, kwargs)
            self._compared.add(signature)
        if training:
            check_still_frozen({name: self.parameter(name) for name in self._frozen})
        return self._steps[signature]
