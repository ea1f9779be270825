"""`localise`: from the step on the whole batch to the step on one of m microbatches.

The placements over the microbatches (`solver/microbatch.py`) are those of a mesh axis, so the local
form of each op comes from the same lowerings. The result has three parts:

- the *prologue*: what depends on inputs but not on parameters, and is needed for the whole batch,
  such as the number of labels that count. It runs once a step, on the whole batch;
- *hoisted* ops of the body: those that no input reaches. They run once a step, before the turns;
- the *body*: what runs for each microbatch. Its losses and its gradients add up to the step's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.codegen import lowerings as _lowerings  # noqa: F401  (registers the lowerings)
from autopar.codegen.builder import Builder, pack
from autopar.codegen.lowering import LocalCall, lower
from autopar.core.graph import (
    InputSpec,
    NodeInfo,
    OutputSpec,
    TracedModel,
    Value,
    dependents,
    kept_in_turns,
    node_info,
    op_nodes,
    resolve,
    tensor_meta,
)
from autopar.core.late_module import late_module
from autopar.core.placement import Placement, Replicate, local_shape
from autopar.core.plan import NodePlan
from autopar.core.strategy import op_call
from autopar.errors import AutoparError

__all__ = ["Feed", "Microbatch", "localise"]

_WHOLE = Replicate()
_LASTING = ("parameter", "buffer", "constant")


@dataclass(frozen=True, slots=True)
class Feed:
    """Where an input of the body comes from.

    Attributes:
        prologue: index among the prologue's results; None for an input of the step.
        source: placeholder of the step, where it is one.
        dim: of which a microbatch gets its share; None for the whole value.
        runs: parts of that dim, each of which it gets its share of.
    """

    prologue: int | None
    source: str
    dim: int | None
    runs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """The parts of a step in microbatches.

    Attributes:
        body: forward and backward of one microbatch.
        prologue: `(*placeholders named in prologue_inputs) -> results`, on the whole batch.
        prologue_inputs: placeholders of the step that it reads, by name.
        feeds: by name, the inputs of the body that are not placeholders of the step.
    """

    body: TracedModel
    prologue: fx.GraphModule
    prologue_inputs: tuple[str, ...]
    feeds: Mapping[str, Feed]


def localise(
    traced: TracedModel, time: Mapping[str, NodePlan], microbatches: int, turn: int = 0
) -> Microbatch:
    """The step on one microbatch.

    Args:
        traced: the step on the whole batch.
        time: placement of every op over the microbatches.
        microbatches: how many there are.
        turn: which one; only what draws random numbers or counts rows depends on it.

    Raises:
        AutoparError: the placements do not fit the graph.
    """
    return _Localiser(traced, time, microbatches, turn).run()


class _Localiser:
    def __init__(
        self, traced: TracedModel, time: Mapping[str, NodePlan], microbatches: int, turn: int
    ) -> None:
        self.traced = traced
        self.time = time
        self.mesh = (microbatches,)
        self.nodes = {n.name: n for n in traced.graph.nodes}
        self.specs = {s.node: s for s in traced.inputs}
        self.weighted = dependents(traced, "parameter")
        self.fed = dependents(traced, "input", "seed")
        # the loss's own gradient comes with each turn, though it is the same at all
        self.arrives = self.fed | dependents(traced, "tangent")
        self.graph = fx.Graph()
        self.builder = Builder(
            self.graph,
            mesh_shape=self.mesh,
            coords=(turn,),
            group_names=["microbatch"],
            fake_mode=FakeTensorMode(allow_non_fake_inputs=True),
            device=self._device(),
        )
        self.info: dict[str, NodeInfo] = {}
        self.hoisted: set[str] = set()
        self.values: dict[tuple[str, int, Placement], fx.Node] = {}
        self.inputs: list[InputSpec] = []
        self.feeds: dict[str, Feed] = {}
        self.whole: list[Value] = []  # the prologue's results

    def _device(self) -> torch.device:
        found = (tensor_meta(n) for n in self.traced.graph.nodes)
        return next((v.device for v in found if v is not None), torch.device("cpu"))

    def run(self) -> Microbatch:
        kept = kept_in_turns(self.traced)
        calls = (n for n in op_nodes(self.traced.graph.nodes) if n.name in kept)
        self.body = [n for n in calls if not self._is_prologue(n)]
        self._placeholders()
        for node in self.body:
            self._emit(node)
        outputs, results = self._outputs()
        self.graph.output(tuple(results))
        prologue, prologue_inputs = self._prologue()
        self._drop_dead()
        body = replace(
            self.traced,
            graph_module=late_module(self.graph),
            inputs=tuple(self.inputs),
            outputs=tuple(outputs),
            info=self.info,
            microbatches=self.mesh[0],
            hoisted=frozenset(self.hoisted),
        )
        return Microbatch(
            body=body, prologue=prologue, prologue_inputs=prologue_inputs, feeds=self.feeds
        )

    # --- what is where -------------------------------------------------------------------------
    def _is_whole(self, node: fx.Node) -> bool:
        plan = self.time[node.name]
        return all(x[0].is_replicate for x in (*plan.inputs, *plan.outputs))

    def _is_prologue(self, node: fx.Node) -> bool:
        if self.mesh == (1,):
            return False  # all of the step is whole
        return node.name in self.fed and self._is_whole(node) and node.name not in self.weighted

    def _uses(self, node: fx.Node) -> Iterator[tuple[Value, Placement]]:
        """Values that an op of the body reads, each with its placement over the microbatches."""
        call = op_call(node, 1)
        for source, layout in zip(call.nodes, self.time[node.name].inputs, strict=True):
            yield resolve(source), layout[0]

    def _placeholders(self) -> None:
        for spec in self.traced.inputs:
            if spec.kind not in ("input", "tangent"):
                self._placeholder(spec, spec.node, (spec.node, 0, _WHOLE))
                if spec.kind in _LASTING:
                    self.hoisted.add(spec.node)
        for node in self.body:
            for value, wanted in self._uses(node):
                key = (*value, wanted)
                if key not in self.values and not self._made_inside(value, wanted):
                    self._arriving(value, wanted)
        # what leaves the step as it comes in, or from the prologue
        for output in self.traced.outputs:
            if output.node is not None and output.kind in ("gradient", "buffer"):
                value = resolve(self.nodes[output.node])
                producer = self.nodes[value[0]]
                outside = producer.op == "placeholder" or self._is_prologue(producer)
                if outside and (*value, _WHOLE) not in self.values:
                    self._arriving(value, _WHOLE)

    def _made_inside(self, value: Value, wanted: Placement) -> bool:
        """True if an op of the body yields the value with this placement."""
        producer = self.nodes[value[0]]
        if producer.op == "placeholder" or self._is_prologue(producer):
            return False
        return self.time[value[0]].outputs[value[1]][0] == wanted

    def _arriving(self, value: Value, wanted: Placement) -> None:
        """An input of the body: a share of an input, or a result of the prologue."""
        if value[0] in self.weighted:
            raise AutoparError(
                f"{value[0]} is computed from parameters and would be split over microbatches: "
                "this is a defect of autopar"
            )
        producer = self.nodes[value[0]]
        source = self.specs.get(value[0])
        dim = wanted.dim if wanted.is_shard else None
        given = self._spec(value)
        shape = local_shape(given.shape, (wanted,), self.mesh)
        suffix = "" if source is not None and source.kind == "input" else "_whole"
        name = f"{producer.name}{suffix}{'' if dim in (0, None) else f'_{dim}'}"
        if wanted.split > 1:
            name += f"_in_{wanted.split}"
        if value[1]:
            name += f"_output_{value[1]}"
        if dim is None and not suffix:
            name += "_all"
        index = None
        if source is None or source.kind != "input":
            if value not in self.whole:
                self.whole.append(value)
            index = self.whole.index(value)
        spec = InputSpec(
            node=name,
            kind="input",
            target=name,
            shape=tuple(shape),
            dtype=given.dtype,
        )
        self._placeholder(spec, name, (*value, wanted))
        self.feeds[name] = Feed(index, value[0], dim, wanted.split)

    def _spec(self, value: Value) -> torch.Tensor:
        found = self.nodes[value[0]].meta["val"]
        if isinstance(found, (list, tuple)):
            found = found[value[1]]
        assert isinstance(found, torch.Tensor)
        return found

    def _placeholder(self, spec: InputSpec, name: str, key: tuple[str, int, Placement]) -> None:
        node = self.graph.placeholder(name)
        assert node.name == name, f"{name} is taken"
        given = self._spec((key[0], key[1]))
        with self.builder.fake_mode:
            node.meta["val"] = torch.empty(spec.shape, dtype=given.dtype, device=given.device)
        self.values[key] = node
        self.inputs.append(spec)

    # --- the body ------------------------------------------------------------------------------
    def _emit(self, node: fx.Node) -> None:
        plan = self.time[node.name]
        b = self.builder
        b.origin = node.name
        operands = iter([self.values[(*value, wanted)] for value, wanted in self._uses(node)])
        args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), lambda _: next(operands))
        before = next(iter(reversed(self.graph.nodes)), None)
        local = LocalCall(
            op_call(node, 1), args, kwargs, plan.inputs, plan.outputs, plan.variants, self.mesh
        )
        self._record(node, lower(b, local))
        self._describe(node, before)

    def _record(self, node: fx.Node, result: fx.Node) -> None:
        plan = self.time[node.name]
        value = result.meta["val"]
        if result.target is pack:
            parts: dict[int, Any] = dict(enumerate(result.args))
        elif isinstance(value, (list, tuple)):
            parts = {
                i: self.builder.item(result, i)
                for i, part in enumerate(value)
                if isinstance(part, torch.Tensor)
            }
        else:
            parts = {0: result}
        for index, part in parts.items():
            if isinstance(part, fx.Node):
                self.values[node.name, index, plan.outputs[index][0]] = part

    def _describe(self, node: fx.Node, before: fx.Node | None) -> None:
        """Origin of the new nodes; those that no input reaches run once a step."""
        origin = node_info(self.traced, node)
        hoisted = node.name not in self.arrives and self._is_whole(node)
        if hoisted:
            origin = replace(origin, phase="forward")
        for new in reversed(self.graph.nodes):
            if new is before:
                break
            self.info[new.name] = origin
            if hoisted:
                self.hoisted.add(new.name)

    def _outputs(self) -> tuple[list[OutputSpec], list[fx.Node | None]]:
        specs: list[OutputSpec] = []
        results: list[fx.Node | None] = []
        for spec in self.traced.outputs:
            if spec.node is None or not self.traced.leaves_turns(spec):
                specs.append(replace(spec, node=None))
                results.append(None)
                continue
            value = resolve(self.nodes[spec.node])
            made, held = next(
                (n, p) for (name, i, p), n in self.values.items() if (name, i) == value
            )
            if spec.kind == "gradient":
                made = self._accumulator(made, held, spec.node)
            specs.append(replace(spec, node=made.name))
            results.append(made)
        return specs, results

    def _accumulator(self, gradient: fx.Node, held: Placement, origin: str) -> fx.Node:
        """A place to reduce at each turn; else the sum of all turns is reduced once.

        What no input reaches, as the gradient of a term beside a mean, is the same at all turns.
        """
        made = gradient
        if held.is_replicate and self.mesh != (1,):
            made = self._behind(made, origin, torch.ops.aten.div.Tensor, self.mesh[0])
        return self._behind(made, origin, torch.ops.aten.alias.default)

    def _behind(self, made: fx.Node, origin: str, op: Any, *rest: Any) -> fx.Node:
        """An op on a gradient that keeps its shape."""
        with self.graph.inserting_after(made):
            new = self.graph.call_function(op, (made, *rest))
        new.meta["val"] = made.meta["val"]
        given = node_info(self.traced, self.nodes[origin])
        self.info[new.name] = replace(given, phase="backward")
        return new

    def _drop_dead(self) -> None:
        self.graph.eliminate_dead_code()
        alive = {n.name for n in self.graph.nodes}
        for node in list(self.graph.nodes):
            if node.op == "placeholder" and node.name in self.feeds and not node.users:
                self.graph.erase_node(node)
                alive.discard(node.name)
        self.inputs = [s for s in self.inputs if s.node in alive]
        self.feeds = {name: feed for name, feed in self.feeds.items() if name in alive}
        self.hoisted &= alive
        self.info = {name: info for name, info in self.info.items() if name in alive}

    # --- the prologue --------------------------------------------------------------------------
    def _prologue(self) -> tuple[fx.GraphModule, tuple[str, ...]]:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        wanted: set[fx.Node] = set()
        stack = [self.nodes[name] for name, _ in self.whole]
        while stack:
            node = stack.pop()
            if node not in wanted:
                wanted.add(node)
                stack.extend(node.all_input_nodes)
        read = [n for n in self.traced.graph.nodes if n in wanted and n.op == "placeholder"]
        for node in self.traced.graph.nodes:
            if node in wanted:
                env[node] = (
                    graph.placeholder(node.name)
                    if node.op == "placeholder"
                    else graph.node_copy(node, env.__getitem__)
                )
        results = []
        for name, index in self.whole:
            node = env[self.nodes[name]]
            if isinstance(self.nodes[name].meta["val"], (list, tuple)):
                node = graph.call_function(operator.getitem, (node, index))
            results.append(node)
        graph.output(tuple(results))
        return late_module(graph), tuple(n.name for n in read)
