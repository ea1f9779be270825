"""`trace`: an unmodified module and example inputs to one joint forward and backward graph.

Three steps. `torch.export` captures the module's ATen calls, before autograd, with fake tensors.
The graph is rewritten to device-neutral ops (`rewrites`, `decompositions`). Then `make_fx` runs
it under autograd, once, forward and backward, which yields the flat graph that everything later
works on. Hooks on the autograd nodes tell which forward op a backward op belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from autopar.core.graph import InputSpec, NodeInfo, OutputSpec, Repeat, TracedModel
from autopar.errors import TraceError
from autopar.tracer.capture import PREFIX, Capture, export, normalize_inputs
from autopar.tracer.cleanup import (
    clean,
    drop_unread,
    lift_constants,
    module_of,
    rename,
    renamed_outputs,
    source_of,
    tied_parameters,
)
from autopar.tracer.decompositions import REPLACEMENTS, RandomContext, decomposition_table
from autopar.tracer.diagnose import (
    refuse_hooks,
    refuse_random,
    refusing_tensor_hooks,
    user_line,
)
from autopar.tracer.fanout import insert_fanouts
from autopar.tracer.fold import find_repeats, is_sound, shortened
from autopar.tracer.functional import remove_mutations
from autopar.tracer.functions import FunctionCalls, custom_function
from autopar.tracer.no_grad import runs_without_grad
from autopar.tracer.precision import cast_gradients, cast_last, lift_casts, low_dtype, sum_dtype
from autopar.tracer.rewrites import invert_permutations, prepare_graph

__all__ = ["normalize_inputs", "trace"]

aten = torch.ops.aten


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
        loss: "auto" takes the only scalar floating output as the loss and leaves the other
            outputs without gradient; "none" gives every floating output a gradient.
        loss_fn: called as `loss_fn(output, target)`; `target` is then the keyword input of that
            name, or the last positional one, and is not passed to the model.
        fold: let one of many equal blocks stand for the others, where the model allows it: a graph
            to plan on, in a time that does not grow with depth, but not to run.
        precision: "bf16" or "fp16" casts parameters and floating inputs; see `precision.call_in`.
        reduce_dtype: "fp32", "bf16" or "fp16": gradients are cast to it before they are summed
            over ranks, and to their parameter's dtype behind; None leaves it to the solver.

    Raises:
        TraceError: the forward depends on data, or is not capturable; names file and line.
    """
    repeats = find_repeats(model) if fold else ()
    if repeats:
        options = {
            "training": training,
            "loss": loss,
            "loss_fn": loss_fn,
            "precision": precision,
            "reduce_dtype": reduce_dtype,
        }
        folded = _trace_folded(model, example_inputs, repeats, options)
        if folded is not None:
            return folded
    args, kwargs = normalize_inputs(example_inputs)
    with_grad = model.training if training is None else training
    capture = Capture(model, loss_fn, low_dtype(precision))
    capture.training = model.training  # not .train(): submodules keep modes of their own
    calls = FunctionCalls()
    if with_grad:
        refuse_hooks(model)
    with calls.recording(), refusing_tensor_hooks():
        exported = export(capture, args, kwargs)
    traced = _JointTrace(capture, exported, with_grad, loss, calls, sum_dtype(reduce_dtype)).run()
    return replace(traced, precision=precision or "fp32", reduce_dtype=reduce_dtype)


def _trace_folded(
    model: nn.Module,
    example_inputs: Any,
    repeats: tuple[Repeat, ...],
    options: dict[str, Any],
) -> TracedModel | None:
    """The folded graph, or None where the blocks turn out not to be alike."""
    with shortened(model, repeats) as notes:
        try:
            traced = trace(model, example_inputs, **options)
        except TraceError:
            return None  # tracing it whole tells whether the model is at fault
    folded = replace(traced, repeats=repeats)
    return folded if not notes.fault and is_sound(folded) else None


class _Replay(fx.Interpreter):
    """Runs the exported graph with the replacement calls, noting each op's autograd range."""

    def __init__(
        self,
        gm: fx.GraphModule,
        rng: RandomContext,
        device: torch.device,
        calls: FunctionCalls,
        casts: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.casts = dict(casts or {})
        self.rng = rng
        self.device = device
        self.calls = calls
        self.ranges: list[tuple[int, int, fx.Node]] = []
        self.marks: list[tuple[fx.Node, fx.Node]] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            self._cast_operands(n)
            return super().run_node(n)
        first = torch._C._autograd._get_sequence_nr()
        before = _last_node()
        self._cast_operands(n)
        with torch.no_grad() if runs_without_grad(n) else nullcontext():
            try:
                result = super().run_node(n)
            except RuntimeError as error:  # shapes or dtypes that export's fakes let pass
                raise TraceError(f"cannot trace {user_line(n)}\n  {error}") from error
        self.ranges.append((first, torch._C._autograd._get_sequence_nr(), n))
        self.marks.append((before, n))
        return result

    def _cast_operands(self, n: fx.Node) -> None:
        """Cast inputs at their first use, so that the casts count for its module."""
        for operand in n.all_input_nodes:
            dtype = self.casts.pop(operand.name, None)
            if dtype is not None:
                self.env[operand] = self.env[operand].to(dtype)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, part, *operands = args
            with torch.set_grad_enabled(enabled):
                return _Replay(part, self.rng, self.device, self.calls).run(*operands)
        if target is custom_function:
            return self.calls.run(*args)
        if target is aten._assert_tensor_metadata.default:
            return None  # it may name the meta device
        replacement = REPLACEMENTS.get(target)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self.device}
        args = tuple(self.device if isinstance(a, torch.device) else a for a in args)
        if target is aten.view.default:
            target = aten.reshape.default  # a rewrite may have changed the strides
        if replacement is not None:
            return replacement(self.rng, *args, **kwargs)
        return super().call_function(target, args, kwargs)


def _last_node() -> fx.Node:
    mode = get_proxy_mode()
    assert mode is not None
    graph = mode.tracer.graph
    return next(iter(reversed(graph.nodes)), None) or graph._root


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
    ) -> None:
        self.capture = capture
        self.reduce_dtype = reduce_dtype
        self.calls = calls
        self.model = capture.wrapped
        self.exported = exported
        self.with_grad = with_grad
        self.loss_mode = loss
        self.loss_index: int | None = None
        self.grad_targets: list[str] = []
        self.output_kinds: list[OutputSpec] = []
        self.tangent_specs: list[InputSpec] = []
        self.info: dict[str, NodeInfo] = {}
        self.plain: set[str] = set()  # inputs that are no tensors: their values are in the graph

    def run(self) -> TracedModel:
        gm = self.exported.graph_module
        self._check_no_input_mutation()
        specs = self._input_specs()
        self.casts = lift_casts(gm.graph, self.capture.dtype)
        prepare_graph(gm)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        device = torch.device("cpu")
        with fake:
            leaves = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
            seed = torch.empty((), dtype=torch.int64, device=device)
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
        with fake:
            graph_module = joint(leaves, seed)
        return self._finish(graph_module, specs)

    def _check_no_input_mutation(self) -> None:
        mutated = self.exported.graph_signature.user_inputs_to_mutate
        if mutated:
            names = ", ".join(sorted(set(mutated.values())))
            raise TraceError(
                f"the forward changes its input {names} in place. Clone it first, so that the "
                "caller's tensor stays as it was on every rank."
            )
        for spec in self.exported.graph_signature.output_specs:
            if spec.kind.name == "PARAMETER_MUTATION":
                raise TraceError(
                    f"the forward changes its parameter {spec.target.removeprefix(PREFIX)} in "
                    "place. Compute a new tensor from it (torch.nn.utils.parametrize does), or "
                    "change it between steps."
                )

    def _input_specs(self) -> list[InputSpec]:
        """Descriptors of the exported graph's placeholders, in order."""
        signature = self.exported.graph_signature
        trainable = {
            name: p.requires_grad for name, p in self.model.named_parameters(remove_duplicate=False)
        }
        owner = dict(tied_parameters(self.model))
        specs: list[InputSpec] = []
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        for node in self.exported.graph.nodes:
            if node.op != "placeholder":
                continue
            value = node.meta.get("val")
            is_tensor = isinstance(value, Tensor)
            if not is_tensor:
                self.plain.add(node.name)
            shape = tuple(int(s) for s in value.shape) if is_tensor else ()
            dtype = value.dtype if is_tensor else torch.int64
            kind: Any = "input"
            target = node.name
            if node.name in signature.inputs_to_parameters:
                kind = "parameter"
                target = signature.inputs_to_parameters[node.name].removeprefix(PREFIX)
                target = owner.get(target, target)
            elif node.name in signature.inputs_to_buffers:
                target = signature.inputs_to_buffers[node.name].removeprefix(PREFIX)
                kind = "buffer" if target in buffers else "constant"
            elif node.name in signature.inputs_to_lifted_tensor_constants:
                kind = "constant"
                target = signature.inputs_to_lifted_tensor_constants[node.name]
            specs.append(
                InputSpec(
                    node=node.name,
                    kind=kind,
                    target=target,
                    shape=shape,
                    dtype=dtype,
                    trainable=kind == "parameter" and trainable.get(target, False),
                )
            )
        return specs

    def _joint(
        self, gm: fx.GraphModule, specs: list[InputSpec], flat: list[Tensor], seed: Tensor
    ) -> list[Any]:
        self.rng = RandomContext(seed)
        replay = _Replay(gm, self.rng, torch.device("cpu"), self.calls, self.casts)
        with torch.set_grad_enabled(self.with_grad):
            results = replay.run(*flat)
        user_outputs, updates = self._sort_outputs(gm, list(results))
        self._mark_forward(replay)
        outputs = [r for _, r in user_outputs]
        gradients = self._gradients(replay, specs, flat, outputs) if self.with_grad else []
        self.output_kinds = [
            *(OutputSpec(node="", kind="output", target=str(i)) for i, _ in user_outputs),
            *(OutputSpec(node="", kind="buffer", target=t) for t, _ in updates),
            *(OutputSpec(node="", kind="gradient", target=t) for t in self.grad_targets),
        ]
        detached = [
            r.detach() if isinstance(r, Tensor) else r for r in (*outputs, *(u for _, u in updates))
        ]
        return [*detached, *gradients]

    def _sort_outputs(
        self, gm: fx.GraphModule, results: list[Any]
    ) -> tuple[list[tuple[int, Any]], list[tuple[str, Any]]]:
        """User outputs with their index, and buffer updates with their FQN."""
        signature = self.exported.graph_signature
        updates: list[tuple[str, Any]] = []
        user: list[tuple[int, Any]] = []
        for spec, value in zip(signature.output_specs, results, strict=True):
            if spec.kind.name == "BUFFER_MUTATION":
                updates.append((spec.target.removeprefix(PREFIX), value))
            else:
                user.append((len(user), value))
        return user, updates

    def _gradients(
        self, replay: _Replay, specs: list[InputSpec], flat: list[Tensor], outputs: list[Any]
    ) -> list[Any]:
        differentiable = [
            (i, r)
            for i, r in enumerate(outputs)
            if isinstance(r, Tensor) and r.requires_grad and r.is_floating_point()
        ]
        scalars = [(i, r) for i, r in differentiable if r.dim() == 0]
        if self.loss_mode == "auto" and len(scalars) == 1:
            self.loss_index = scalars[0][0]
            differentiable = scalars
        trainable = [(s, p) for s, p in zip(specs, flat, strict=True) if s.trainable]
        if not differentiable or not trainable:
            return []
        tangents = []
        for index, result in differentiable:
            # A tangent enters as a fresh tensor; `_finish` turns its node into a placeholder.
            tangent = torch.empty_like(result, requires_grad=False)
            _last_node().meta["autopar_tangent"] = index
            tangents.append(tangent)
        self._hook_backward(replay, [r for _, r in differentiable])
        gradients = torch.autograd.grad(
            [r for _, r in differentiable],
            [p for _, p in trainable],
            tangents,
            allow_unused=True,
        )
        kept = [
            (s.target, g) for (s, _), g in zip(trainable, gradients, strict=True) if g is not None
        ]
        self.grad_targets = [target for target, _ in kept]
        return [g for _, g in kept]

    def _hook_backward(self, replay: _Replay, roots: list[Tensor]) -> None:
        """Before each autograd node runs, note which forward op it differentiates."""
        owner: dict[int, fx.Node] = {}
        for first, last, node in replay.ranges:
            for number in range(first, last):
                owner[number] = node
        self.backward_marks: list[tuple[fx.Node, fx.Node]] = []
        stack = [r.grad_fn for r in roots]
        seen = set(stack)

        def mark(node: fx.Node) -> Any:
            return lambda _grads: self.backward_marks.append((_last_node(), node))

        while stack:
            fn = stack.pop()
            if fn is None:
                continue
            origin = owner.get(fn._sequence_nr())
            if origin is not None:
                fn.register_prehook(mark(origin))
            for parent, _ in fn.next_functions:
                if parent is not None and parent not in seen:
                    seen.add(parent)
                    stack.append(parent)

    def _mark_forward(self, replay: _Replay) -> None:
        self.forward_marks = replay.marks

    def _finish(self, gm: fx.GraphModule, specs: list[InputSpec]) -> TracedModel:
        graph = gm.graph
        remove_mutations(graph)
        invert_permutations(graph)
        self._collect_info(graph)
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        output = next(iter(reversed(graph.nodes)))
        names = [s.node for s in specs] + ["autopar_seed"]
        inputs: list[InputSpec] = []
        for node, name in zip(placeholders, names, strict=True):
            rename(node, name)
        inputs.extend(specs)
        inputs.append(
            InputSpec(node="autopar_seed", kind="seed", target="seed", shape=(), dtype=torch.int64)
        )
        inputs.extend(self._lift_tangents(graph, placeholders[-1]))
        inputs.extend(lift_constants(gm))
        results = list(pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None))
        outputs = tuple(
            OutputSpec(
                node=r.name if isinstance(r, fx.Node) else None,
                kind=spec.kind,
                target=spec.target,
                constant=None if isinstance(r, fx.Node) else r,
            )
            for spec, r in zip(self.output_kinds, results, strict=True)
        )
        output.args = (tuple(results),)
        clean(graph)
        inputs = drop_unread(graph, inputs, self.plain)
        order = {n.name: i for i, n in enumerate(graph.nodes) if n.op == "placeholder"}
        inputs.sort(key=lambda s: order[s.node])
        forward = {
            arg
            for spec, arg in zip(self.output_kinds, output.args[0], strict=True)
            if spec.kind != "gradient" and isinstance(arg, fx.Node)
        }
        for node in graph.nodes:
            if node.op == "call_function":
                refuse_random(node, self.info[node.name].source if node.name in self.info else "")
        self._phases(graph, forward)
        parameters = {s.node for s in inputs if s.kind == "parameter"}
        if self.capture.dtype is not None:
            cast_last(graph, parameters)
        if self.reduce_dtype is not None:
            cast_gradients(graph, outputs, self.info, self.reduce_dtype)
        insert_fanouts(graph, self.info, parameters)
        gm.recompile()
        self.info = {n.name: self.info[n.name] for n in graph.nodes if n.name in self.info}
        values = {
            spec.target: value
            for spec in inputs
            if spec.kind == "constant"
            and (value := self._constant_value(gm, spec.target)) is not None
        }
        return TracedModel(
            graph_module=gm,
            inputs=tuple(inputs),
            outputs=renamed_outputs(outputs, output),
            info=self.info,
            in_spec=self.exported.call_spec.in_spec,
            out_spec=self.capture.notes.out_spec,
            training=self.with_grad,
            loss_index=self.loss_index,
            tied=tuple(tied_parameters(self.model)),
            state_values=values,
        )

    def _constant_value(self, gm: fx.GraphModule, target: str) -> Tensor | None:
        value = self.exported.constants.get(target)
        if value is None:
            value = getattr(gm, target, None)
        return value if isinstance(value, Tensor) else None

    def _collect_info(self, graph: fx.Graph) -> None:
        """Walk the graph, handing each node the origin whose mark precedes it."""
        starts: dict[fx.Node, list[fx.Node]] = {}
        for before, origin in (*self.forward_marks, *getattr(self, "backward_marks", [])):
            starts.setdefault(before, []).append(origin)
        current: fx.Node | None = None
        for origin in starts.get(graph._root, []):
            current = origin
        for node in graph.nodes:
            if node.op == "call_function" and current is not None:
                self.info[node.name] = NodeInfo("forward", module_of(current), source_of(current))
            for origin in starts.get(node, []):
                current = origin

    def _lift_tangents(self, graph: fx.Graph, after: fx.Node) -> list[InputSpec]:
        specs: list[InputSpec] = []
        for node in list(graph.nodes):
            if "autopar_tangent" not in node.meta:
                continue
            index = node.meta["autopar_tangent"]
            value = node.meta["val"]
            name = f"tangent_{index}"
            with graph.inserting_after(after):
                placeholder = graph.placeholder(name)
            placeholder.meta = {"val": value}
            node.replace_all_uses_with(placeholder)
            graph.erase_node(node)
            after = placeholder
            specs.append(
                InputSpec(
                    node=placeholder.name,
                    kind="tangent",
                    target=str(index),
                    shape=tuple(value.shape),
                    dtype=value.dtype,
                )
            )
        return specs

    def _phases(self, graph: fx.Graph, forward_results: set[fx.Node]) -> None:
        """Forward is what the user's outputs and the buffers need; the rest is backward.

        What depends on no gradient but is only used by the backward (a power for a derivative)
        counts as backward where it stands behind the first op that does.
        """
        needed: set[fx.Node] = set()
        stack = list(forward_results)
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack.extend(node.all_input_nodes)
        started = False
        for node in graph.nodes:
            if node.op == "placeholder":
                continue
            started = started or any(n.name.startswith("tangent_") for n in node.all_input_nodes)
            info = self.info.get(node.name, NodeInfo("forward", "", ""))
            if node not in needed and (started or not forward_results):
                info = NodeInfo("backward", info.module, info.source)
            self.info[node.name] = info
