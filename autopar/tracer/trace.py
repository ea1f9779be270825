"""`trace`: an unmodified module and example inputs to one joint forward and backward graph.

Three steps. `torch.export` captures the module's ATen calls, before autograd, with fake tensors.
The graph is rewritten to device-neutral ops (`rewrites`, `decompositions`). Then `make_fx` runs
it under autograd, once, forward and backward, which yields the flat graph that everything later
works on. Hooks on the autograd nodes tell which forward op a backward op belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autopar._compat import lazily_compiled, leaving_transforms, without_onednn
from autopar.core.collector import paused_collector
from autopar.core.grad_modes import outside_inference_mode, without_anomaly_mode
from autopar.core.graph import InputSpec, NodeInfo, OutputSpec, Repeat, TracedModel
from autopar.tracer.accepted import check_model
from autopar.tracer.between_blocks import BetweenBlocks
from autopar.tracer.capture import Capture, export, normalize_inputs
from autopar.tracer.cleanup import (
    clean,
    drop_unread,
    free_names,
    join_constants,
    lift_constants,
    lift_tangents,
    rename,
    renamed_outputs,
    tied_parameters,
)
from autopar.tracer.decompositions import REPLACEMENTS, as_copied, decomposition_table
from autopar.tracer.derivatives import derived, no_silent_ends
from autopar.tracer.diagnose import (
    refuse_hooks,
    refuse_random,
    refuse_sparse,
    refusing_tensor_hooks,
)
from autopar.tracer.fanout import insert_fanouts
from autopar.tracer.fold import folded, in_chain
from autopar.tracer.functional import remove_mutations
from autopar.tracer.functions import FunctionCalls
from autopar.tracer.gradients import Gradients
from autopar.tracer.origins import note_phases, origins
from autopar.tracer.precision import cast_gradients, cast_last, lift_casts, low_dtype, sum_dtype
from autopar.tracer.randomness import RandomContext
from autopar.tracer.repeats import find_repeats, is_nested
from autopar.tracer.replay import Mark, Replay
from autopar.tracer.rewrites import invert_permutations, prepare_graph
from autopar.tracer.signature import (
    apply_between,
    check_no_input_mutation,
    cut_skipped,
    input_specs,
    lifted_tensors,
    written_buffer,
)
from autopar.tracer.simplify import simplify

__all__ = ["normalize_inputs", "trace"]

aten = torch.ops.aten


@paused_collector()
@lazily_compiled()
@leaving_transforms()
@outside_inference_mode()
@without_anomaly_mode()
@without_onednn()  # the ops of a graph are to run on any device
def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    training: bool | None = None,
    loss: str = "auto",
    loss_fn: Callable[..., Any] | None = None,
    fold: bool = False,
    precision: str | None = None,
    reduce_dtype: str | None = None,
) -> TracedModel:
    """Capture the step of `model` as a joint graph. No parameter is allocated.

    Args:
        model: any module, on any device including meta.
        example_inputs: tuple or dict of tensors (real, fake or meta), global batch.
        training: trace the backward too; default: the module's own mode.
        loss: "auto" takes the only scalar floating output as the loss, or of several the one that
            is called `loss`, and leaves the other outputs without gradient; "none" gives every
            floating output a gradient.
        loss_fn: called as `loss_fn(output, target)`; `target` is then the keyword input of that
            name, or the last positional one, and is not passed to the model.
        fold: let one of many equal blocks stand for the others, where the model allows it: a graph
            to plan on, in a time that does not grow with depth, but not to run.
        precision: "bf16" or "fp16" casts parameters and floating inputs; see `precision.call_in`.
        reduce_dtype: "fp32", "bf16" or "fp16": gradients are cast to it before they are summed
            over ranks, and to their parameter's dtype behind; None leaves it to the solver.

    Raises:
        TraceError: no model for `check_model`, or the forward depends on data, or is not
            capturable; names file and line.
    """
    check_model(model)
    repeats = find_repeats(model)
    capture = partial(
        _trace,
        model,
        example_inputs,
        repeats=repeats,
        training=training,
        loss=loss,
        loss_fn=loss_fn,
        precision=precision,
        reduce_dtype=reduce_dtype,
    )
    return (folded(model, repeats, capture) if fold else None) or capture(fold=False)


def _trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    repeats: Sequence[Repeat],
    fold: bool,
    training: bool | None,
    loss: str,
    loss_fn: Callable[..., Any] | None,
    precision: str | None,
    reduce_dtype: str | None,
) -> TracedModel:
    """As `trace`, with all modules that the model has now; `fold` cuts the captured forward."""
    nested = [r.container for r in repeats if is_nested(r.container)]
    args, kwargs = normalize_inputs(example_inputs)
    with_grad = model.training if training is None else training
    has_loss = with_grad and loss == "auto"
    between = BetweenBlocks(repeats, fold)
    settle = partial(cut_skipped, between, model), partial(apply_between, between, model)
    capture = Capture(model, loss_fn, low_dtype(precision), has_loss, with_grad, *settle)
    capture.training = model.training  # not .train(): submodules keep modes of their own
    calls = FunctionCalls()
    if with_grad:
        refuse_hooks(model)
    with calls.recording(), refusing_tensor_hooks():
        exported = export(capture, args, kwargs)
    calls.warn_of_cut()
    dtype = sum_dtype(reduce_dtype)
    lists = [*between.joined, *nested]
    traced = _JointTrace(capture, exported, with_grad, loss, calls, dtype, lists).run()
    return replace(
        traced,
        repeats=between.repeats,
        precision=precision or "fp32",
        reduce_dtype=reduce_dtype,
        nested=(*between.joined, *(in_chain(traced, nested) if nested else ())),
    )


class _JointTrace:
    """Builds the joint graph of one exported program and its descriptors."""

    def __init__(
        self,
        capture: Capture,
        exported: Any,
        with_grad: bool,
        loss: str,
        calls: FunctionCalls,
        reduce_dtype: torch.dtype | None,
        nested: Sequence[str],
    ) -> None:
        self.capture = capture
        self.nested = nested
        self.reduce_dtype = reduce_dtype
        self.calls = calls
        self.model = capture.wrapped
        self.exported = exported
        self.with_grad = with_grad
        self.gradients = Gradients(capture.wrapped, loss, calls)
        self.output_kinds: list[OutputSpec] = []
        self.info: dict[str, NodeInfo] = {}
        self.plain: set[str] = set()  # inputs that are no tensors: their values are in the graph
        self.marks: list[Mark] = []

    def run(self) -> TracedModel:
        gm = self.exported.graph_module
        check_no_input_mutation(self.exported)
        if self.with_grad:
            refuse_sparse(self.exported, self.model)
        specs, self.plain = input_specs(self.exported, self.model)
        self.casts = lift_casts(gm.graph, self.capture.dtype)
        prepare_graph(gm, lifted_tensors(self.exported))
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            leaves = [torch.empty(spec.shape, dtype=spec.dtype, device="cpu") for spec in specs]
            seed = torch.empty((), dtype=torch.int64, device="cpu")
        for leaf, spec in zip(leaves, specs, strict=True):
            if spec.trainable and self.with_grad:
                leaf.requires_grad_(True)
        joint = make_fx(
            lambda flat, seed: self._joint(gm, specs, flat, seed),
            decomposition_table={
                **decomposition_table(),
                # recurrent layers drop out inside of one call
                aten.bernoulli_.float: lambda x, p=0.5, generator=None: x.copy_(
                    REPLACEMENTS[aten.bernoulli.p](self.rng, x, p)
                ),
            },
        )
        with fake, no_silent_ends() if derived(gm) else nullcontext():
            graph_module = joint(leaves, seed)
        return self._finish(graph_module, specs)

    def _joint(
        self, gm: fx.GraphModule, specs: Sequence[InputSpec], flat: list[Tensor], seed: Tensor
    ) -> list[Any]:
        self.rng = RandomContext(seed)
        replay = Replay(gm, self.rng, torch.device("cpu"), self.calls, self.casts)
        with torch.set_grad_enabled(self.with_grad or bool(replay.leaves)):
            results = replay.run(*flat)
        user_outputs, updates = self._sort_outputs(list(results))
        buffers = {s.target: x for s, x in zip(specs, flat, strict=True) if s.kind == "buffer"}
        updates = [(name, as_copied(buffers[name], value)) for name, value in updates]
        self.marks += replay.marks
        outputs = [r for _, r in user_outputs]
        gradients = []
        if self.with_grad:
            gradients = self.gradients.of(replay, specs, flat, outputs, self.capture.notes.out_spec)
            self.marks += self.gradients.marks
        self.output_kinds = [
            *(OutputSpec(node="", kind="output", target=str(i)) for i, _ in user_outputs),
            *(OutputSpec(node="", kind="buffer", target=t) for t, _ in updates),
            *(OutputSpec(node="", kind="gradient", target=t) for t in self.gradients.targets),
        ]
        detached = [
            r.detach() if isinstance(r, Tensor) else r for r in (*outputs, *(u for _, u in updates))
        ]
        return [*detached, *gradients]

    def _sort_outputs(
        self, results: list[Any]
    ) -> tuple[list[tuple[int, Any]], list[tuple[str, Any]]]:
        """User outputs with their index, and buffer updates with their FQN."""
        updates: list[tuple[str, Any]] = []
        user: list[tuple[int, Any]] = []
        for spec, value in zip(self.exported.graph_signature.output_specs, results, strict=True):
            buffer = written_buffer(spec)
            if buffer is not None:
                updates.append((buffer, value))
            else:
                user.append((len(user), value))
        return user, updates

    def _finish(self, gm: fx.GraphModule, specs: Sequence[InputSpec]) -> TracedModel:
        graph = gm.graph
        remove_mutations(graph)
        invert_permutations(graph)
        free_names(graph, (spec.node for spec in specs))
        self.info = origins(graph, self.marks)
        inputs = self._named_inputs(gm, specs)
        join_constants(graph, inputs, self._constants(gm, inputs))
        outputs = self._flat_outputs(graph)
        clean(graph)
        simplify(graph, self.info)
        inputs = drop_unread(graph, inputs, self.plain)
        order = {n.name: i for i, n in enumerate(graph.nodes) if n.op == "placeholder"}
        inputs.sort(key=lambda s: order[s.node])
        self._refuse_random(graph)
        note_phases(graph, self.info, self._results_of_forward(graph))
        parameters = {s.node for s in inputs if s.kind == "parameter"}
        if self.capture.dtype is not None:
            cast_last(graph, parameters, outputs)
        if self.reduce_dtype is not None:
            cast_gradients(graph, outputs, self.info, self.reduce_dtype)
        insert_fanouts(graph, self.info, parameters, self.nested)
        gm.recompile()
        self.info = {n.name: self.info[n.name] for n in graph.nodes if n.name in self.info}
        return TracedModel(
            graph_module=gm,
            inputs=tuple(inputs),
            outputs=renamed_outputs(outputs, graph.output_node()),
            info=self.info,
            in_spec=self.exported.call_spec.in_spec,
            out_spec=self.capture.notes.out_spec,
            training=self.with_grad,
            loss_index=self.gradients.loss_index,
            beside=self.gradients.beside,
            numbers=self.capture.notes.numbers,
            tied=tuple(tied_parameters(self.model)),
            known=self.capture.notes.known_values(),
            eager_calls=self.capture.notes.eager_calls,
            state_values=self._constants(gm, inputs),
        )

    def _flat_outputs(self, graph: fx.Graph) -> tuple[OutputSpec, ...]:
        """Let the graph return a flat tuple, and describe what stands in it."""
        output = graph.output_node()
        results = tuple(pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None))
        output.args = (results,)
        constants = {str(i): x for i, x in self.capture.notes.constants.items()}

        def described(spec: OutputSpec, result: Any) -> OutputSpec:
            if isinstance(result, fx.Node):
                return replace(spec, node=result.name)
            known = constants.get(spec.target, result) if spec.kind == "output" else result
            return replace(spec, node=None, constant=known)

        return tuple(described(*pair) for pair in zip(self.output_kinds, results, strict=True))

    def _refuse_random(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function":
                source = self.info[node.name].source if node.name in self.info else ""
                refuse_random(node, source, self.capture.notes.lines)

    def _results_of_forward(self, graph: fx.Graph) -> set[fx.Node]:
        results = graph.output_node().args[0]
        assert isinstance(results, tuple)
        return {
            result
            for spec, result in zip(self.output_kinds, results, strict=True)
            if spec.kind != "gradient" and isinstance(result, fx.Node)
        }

    def _named_inputs(self, gm: fx.GraphModule, specs: Sequence[InputSpec]) -> list[InputSpec]:
        """Name the placeholders as their descriptors do; add those of seed, tangents, constants."""
        seed = InputSpec(
            node="autopar_seed", kind="seed", target="seed", shape=(), dtype=torch.int64
        )
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        for node, spec in zip(placeholders, [*specs, seed], strict=True):
            rename(node, spec.node)
        tangents = lift_tangents(gm.graph, placeholders[-1])
        return [*specs, seed, *tangents, *lift_constants(gm)]

    def _constants(self, gm: fx.GraphModule, inputs: list[InputSpec]) -> dict[str, Tensor]:
        """Values of the constants that have one, by target."""
        found: dict[str, Tensor] = {}
        beside = dict(self.capture.named_buffers())  # those of a loss function
        for spec in inputs:
            if spec.kind == "constant":
                value = self.exported.constants.get(spec.target, beside.get(spec.target))
                value = getattr(gm, spec.target, None) if value is None else value
                if isinstance(value, Tensor):
                    found[spec.target] = value
        return found
