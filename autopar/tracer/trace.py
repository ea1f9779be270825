"""`trace`: an unmodified module and example inputs to one joint forward and backward graph.

Three steps. `torch.export` captures the module's ATen calls, before autograd, with fake tensors.
The graph is rewritten to device-neutral ops (`rewrites`, `decompositions`). Then `make_fx` runs
it under autograd, once, forward and backward, which yields the flat graph that everything later
works on. Hooks on the autograd nodes tell which forward op a backward op belongs to.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from autopar.core.graph import InputSpec, NodeInfo, OutputSpec, Repeat, TracedModel
from autopar.errors import TraceError
from autopar.tracer.decompositions import REPLACEMENTS, RandomContext, decomposition_table
from autopar.tracer.diagnose import explain_failure, refuse_data_dependent
from autopar.tracer.fanout import insert_fanouts
from autopar.tracer.fold import find_repeats, is_sound, shortened
from autopar.tracer.functional import remove_mutations
from autopar.tracer.functions import FunctionCalls, custom_function
from autopar.tracer.rewrites import prepare_graph

__all__ = ["normalize_inputs", "trace"]

aten = torch.ops.aten


def normalize_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` of example inputs given as a tuple, a dict, or a single tensor."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Sequence):
        return tuple(example_inputs), {}
    raise TraceError(
        f"example_inputs is a {type(example_inputs).__name__}; pass a tuple of positional "
        "arguments or a dict of keyword arguments, with the global batch"
    )


_PREFIX = "wrapped."


class _Notes:
    """What a capture learns on the side."""

    out_spec: Any = None
    dropped: Sequence[str] = ()


class _Capture(nn.Module):
    """The model, then the loss function if there is one, with the output flattened to leaves.

    Leaves that are neither tensors nor plain constants (a key-value cache) become None: they
    cannot leave a compiled step. The structure of the output is kept on the side.
    """

    def __init__(self, wrapped: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.loss_fn = loss_fn
        # Export restores attributes and containers after the call, but not opaque objects.
        self.notes = _Notes()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.loss_fn is None:
            output = self.wrapped(*args, **kwargs)
        else:
            target = kwargs.pop("target") if "target" in kwargs else args[-1]
            output = self._with_loss(args, kwargs, target)
        leaves, self.notes.out_spec = pytree.tree_flatten(output)
        self.notes.dropped = [
            type(x).__name__
            for x in leaves
            if not isinstance(x, (Tensor, int, float, bool, str, type(None)))
        ]
        return [x if isinstance(x, (Tensor, int, float, bool)) else None for x in leaves]

    def _with_loss(self, args: Any, kwargs: Any, target: Any) -> Any:
        assert self.loss_fn is not None
        inputs = args[:-1] if args and args[-1] is target else args
        return self.loss_fn(self.wrapped(*inputs, **kwargs), target)


def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    training: bool | None = None,
    loss: str = "auto",
    loss_fn: Callable[..., Any] | None = None,
    fold: bool = False,
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

    Raises:
        TraceError: the forward depends on data, or is not capturable; names file and line.
    """
    repeats = find_repeats(model) if fold else ()
    if repeats:
        folded = _trace_folded(model, example_inputs, training, loss, loss_fn, repeats)
        if folded is not None:
            return folded
    args, kwargs = normalize_inputs(example_inputs)
    with_grad = model.training if training is None else training
    capture = _Capture(model, loss_fn)
    capture.training = model.training  # not .train(): submodules keep modes of their own
    calls = FunctionCalls()
    with calls.recording():
        exported = _export(capture, args, kwargs)
    return _JointTrace(capture, exported, with_grad, loss, calls).run()


def _trace_folded(
    model: nn.Module,
    example_inputs: Any,
    training: bool | None,
    loss: str,
    loss_fn: Callable[..., Any] | None,
    repeats: tuple[Repeat, ...],
) -> TracedModel | None:
    """The folded graph, or None where the blocks turn out not to be alike."""
    with shortened(model, repeats) as notes:
        try:
            traced = trace(model, example_inputs, training=training, loss=loss, loss_fn=loss_fn)
        except TraceError:
            return None  # tracing it whole tells whether the model is at fault
    folded = replace(traced, repeats=repeats)
    return folded if not notes.fault and is_sound(folded) else None


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _export(capture: _Capture, args: Any, kwargs: Any) -> Any:
    on_meta = any(p.is_meta for p in capture.parameters())
    if on_meta:
        args, kwargs = pytree.tree_map(_to_meta, (args, kwargs))
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            raise TraceError(
                f"input {name!r} requires a gradient; gradients of inputs are not produced. "
                "Detach it, or register it as an nn.Parameter of the model."
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(capture, args, kwargs, strict=False)
            refuse_data_dependent(capture.wrapped, exported.graph_module)
            if any(_mutates(node) for node in exported.graph.nodes):
                exported = exported.run_decompositions({})
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(explain_failure(capture.wrapped, error)) from error
    return exported


def _mutates(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in (aten.detach_.default, aten.lift_fresh.default):
        return False
    if node.target is aten.batch_norm.default:
        return bool(node.args[5])
    if node.target is aten.instance_norm.default:
        return node.args[3] is not None and bool(node.args[5])
    return node.target._schema.is_mutable


class _Replay(fx.Interpreter):
    """Runs the exported graph with the replacement calls, noting each op's autograd range."""

    def __init__(
        self,
        gm: fx.GraphModule,
        rng: RandomContext,
        device: torch.device,
        calls: FunctionCalls,
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.rng = rng
        self.device = device
        self.calls = calls
        self.ranges: list[tuple[int, int, fx.Node]] = []
        self.marks: list[tuple[fx.Node, fx.Node]] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        first = torch._C._autograd._get_sequence_nr()
        before = _last_node()
        result = super().run_node(n)
        self.ranges.append((first, torch._C._autograd._get_sequence_nr(), n))
        self.marks.append((before, n))
        return result

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
        capture: _Capture,
        exported: Any,
        with_grad: bool,
        loss: str,
        calls: FunctionCalls,
    ) -> None:
        self.capture = capture
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

    def run(self) -> TracedModel:
        gm = self.exported.graph_module
        self._check_no_input_mutation()
        prepare_graph(gm)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        device = torch.device("cpu")
        specs = self._input_specs()
        with fake:
            leaves = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
            seed = torch.empty((), dtype=torch.int64, device=device)
        for leaf, spec in zip(leaves, specs, strict=True):
            if spec.trainable and self.with_grad:
                leaf.requires_grad_(True)
        joint = make_fx(
            lambda flat, seed: self._joint(gm, specs, flat, seed),
            decomposition_table=decomposition_table(),
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

    def _input_specs(self) -> list[InputSpec]:
        """Descriptors of the exported graph's placeholders, in order."""
        signature = self.exported.graph_signature
        trainable = {
            name: p.requires_grad for name, p in self.model.named_parameters(remove_duplicate=False)
        }
        owner = dict(_tied_parameters(self.model))
        specs: list[InputSpec] = []
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        for node in self.exported.graph.nodes:
            if node.op != "placeholder":
                continue
            value = node.meta.get("val")
            is_tensor = isinstance(value, Tensor)
            shape = tuple(int(s) for s in value.shape) if is_tensor else ()
            dtype = value.dtype if is_tensor else torch.int64
            kind: Any = "input"
            target = node.name
            if node.name in signature.inputs_to_parameters:
                kind = "parameter"
                target = signature.inputs_to_parameters[node.name].removeprefix(_PREFIX)
                target = owner.get(target, target)
            elif node.name in signature.inputs_to_buffers:
                target = signature.inputs_to_buffers[node.name].removeprefix(_PREFIX)
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
        rng = RandomContext(seed)
        replay = _Replay(gm, rng, torch.device("cpu"), self.calls)
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
                updates.append((spec.target.removeprefix(_PREFIX), value))
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
        self._collect_info(graph)
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        output = next(iter(reversed(graph.nodes)))
        names = [s.node for s in specs] + ["autopar_seed"]
        inputs: list[InputSpec] = []
        for node, name in zip(placeholders, names, strict=True):
            _rename(node, name)
        inputs.extend(specs)
        inputs.append(
            InputSpec(node="autopar_seed", kind="seed", target="seed", shape=(), dtype=torch.int64)
        )
        inputs.extend(self._lift_tangents(graph, placeholders[-1]))
        inputs.extend(_lift_constants(gm))
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
        _clean(graph)
        inputs = _drop_unread(graph, inputs)
        order = {n.name: i for i, n in enumerate(graph.nodes) if n.op == "placeholder"}
        inputs.sort(key=lambda s: order[s.node])
        forward = {
            arg
            for spec, arg in zip(self.output_kinds, output.args[0], strict=True)
            if spec.kind != "gradient" and isinstance(arg, fx.Node)
        }
        self._phases(graph, forward)
        insert_fanouts(graph, self.info)
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
            outputs=_renamed_outputs(outputs, output),
            info=self.info,
            in_spec=self.exported.call_spec.in_spec,
            out_spec=self.capture.notes.out_spec,
            training=self.with_grad,
            loss_index=self.loss_index,
            tied=tuple(_tied_parameters(self.model)),
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
                self.info[node.name] = NodeInfo("forward", _module_of(current), _source_of(current))
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


def _renamed_outputs(outputs: tuple[OutputSpec, ...], output: fx.Node) -> tuple[OutputSpec, ...]:
    """Descriptors with the names that the nodes have after the clean-up."""
    values: Any = output.args[0]
    return tuple(
        OutputSpec(
            node=arg.name if isinstance(arg, fx.Node) else None,
            kind=spec.kind,
            target=spec.target,
            constant=spec.constant,
        )
        for spec, arg in zip(outputs, values, strict=True)
    )


def _rename(node: fx.Node, name: str) -> None:
    node.name = node.graph._graph_namespace.create_name(name, None)
    node.target = node.name
    if node.name != name:
        raise TraceError(f"two inputs of the graph are called {name!r}")


_IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)


def _same_as_input(node: fx.Node) -> fx.Node | None:
    """The input that a call merely repeats, if it does."""
    if node.target in _IDENTITIES or node.target is aten.clone.default:
        return node.args[0]  # type: ignore[return-value]
    source = node.args[0] if node.args else None
    if node.target in (aten.slice.Tensor, aten.expand.default, aten.view.default):
        assert isinstance(source, fx.Node)
        same = tuple(source.meta["val"].shape) == tuple(node.meta["val"].shape)
        return source if same else None
    if node.target is aten.cat.default and isinstance(source, (list, tuple)):
        filled = [x for x in source if x.meta["val"].numel()]
        if len(filled) == 1:
            return filled[0]
        node.args = (filled, *node.args[1:])
    return None


def _clean(graph: fx.Graph) -> None:
    """Drop calls that repeat their input, and what nothing uses."""
    for node in list(graph.nodes):
        same = _same_as_input(node) if node.op == "call_function" else None
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _drop_unread(graph: fx.Graph, inputs: list[InputSpec]) -> list[InputSpec]:
    """Drop placeholders that nothing reads: tied names beyond the one in use, unused state."""
    by_name = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    read = {s.target for s in inputs if s.kind == "parameter" and by_name[s.node].users}
    kept: list[InputSpec] = []
    seen: set[str] = set()
    for spec in inputs:
        node = by_name[spec.node]
        unread = not node.users
        if spec.kind == "parameter":
            drop = unread and (spec.target in read or spec.target in seen)
            seen.add(spec.target)
        else:
            drop = unread and spec.kind in ("buffer", "constant")
        if drop:
            graph.erase_node(node)
        else:
            kept.append(spec)
    return kept


def _lift_constants(gm: fx.GraphModule) -> list[InputSpec]:
    """Turn `get_attr` tensors into placeholders, so that codegen sees inputs only."""
    specs: list[InputSpec] = []
    graph = gm.graph
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(gm, str(node.target))
        with graph.inserting_after(last):
            placeholder = graph.placeholder(str(node.target))
        placeholder.meta = {"val": node.meta.get("val", value)}
        node.replace_all_uses_with(placeholder)
        graph.erase_node(node)
        last = placeholder
        specs.append(
            InputSpec(
                node=placeholder.name,
                kind="constant",
                target=str(node.target),
                shape=tuple(value.shape),
                dtype=value.dtype,
            )
        )
    return specs


def _tied_parameters(model: nn.Module) -> list[tuple[str, str]]:
    """`(alias, owner)` for each name of a parameter beyond its first."""
    owners: dict[int, str] = {}
    tied: list[tuple[str, str]] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        if owner != name:
            tied.append((name, owner))
    return tied


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return paths[-1].removeprefix(_PREFIX.rstrip(".")).lstrip(".") if paths else ""


def _source_of(node: fx.Node) -> str:
    """`file:line` of the innermost frame outside torch."""
    trace_text = node.meta.get("stack_trace") or ""
    lines = [line for line in trace_text.splitlines() if line.strip().startswith("File ")]
    for line in reversed(lines):
        if "/torch/" in line:
            continue
        path, _, rest = line.strip()[5:].partition(", line ")
        return f"{path.strip(chr(34))}:{rest.split(',')[0]}"
    return ""


def signature_names(model: nn.Module) -> list[str]:
    """Names of the parameters of `model.forward`."""
    return list(inspect.signature(model.forward).parameters)
