"""`emit`: a traced step and its plan to one rank's forward and backward programs.

Ops are emitted in the traced order, forward before backward. Before each op its operands are
redistributed from the layout that they were produced in to the one that its strategy wants; then
the op's local form is appended. What the backward reads of the forward is saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.codegen import lowerings as _lowerings  # noqa: F401  (registers the lowerings)
from autopar.codegen import program_pass
from autopar.codegen.builder import Builder
from autopar.codegen.fused_bytes import note_fused_bytes
from autopar.codegen.fusion import Fusion, fuse
from autopar.codegen.lowering import LocalCall, lower
from autopar.codegen.passes import check_passes, run_last_passes, run_passes
from autopar.codegen.passes.bucket import Sizes
from autopar.codegen.passes.lifetimes import FUSED_BYTES
from autopar.codegen.passes.link_gaps import links
from autopar.codegen.passes.order import copied
from autopar.codegen.passes.sites import Key
from autopar.codegen.program import Program, tangents_of
from autopar.codegen.redistribute import emit_redistribution
from autopar.codegen.traffic import check_traffic, count_collectives
from autopar.core.blocks import Block, Blocks
from autopar.core.collector import paused_collector
from autopar.core.graph import InputSpec, OutputSpec, TracedModel, node_info, op_nodes, resolve
from autopar.core.late_module import late_module
from autopar.core.made_for import check_made_for
from autopar.core.placement import Layout, Replicate, local_shape
from autopar.core.plan import Plan
from autopar.core.recompute import recomputed
from autopar.core.strategy import op_call
from autopar.errors import AutoparError

__all__ = ["Emitter", "emit", "written"]


@paused_collector()
def emit(
    traced: TracedModel,
    plan: Plan,
    coords: Sequence[int],
    *,
    group_names: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    passes: Collection[str] | None = None,
    fusion: Any = None,
) -> Program:
    """Write the program of the rank at `coords`.

    Args:
        traced: the step that the plan is for.
        plan: layouts and variants of every op.
        coords: the rank's coordinate on each axis of the plan's mesh.
        group_names: process group of each axis; symbolic names where the program is not run
            by a process of its own.
        device: of factory results.
        passes: names out of those of `autopar.codegen.passes`; None for `PASSES`.
        fusion: what to fuse; see `Fusion.parse`.

    Raises:
        PlanMismatchError: the plan is of another graph.
        AutoparError: the emitted collectives differ from the plan's, or there is no such pass.
    """
    return written(
        traced, plan, coords, group_names=group_names, device=device, fusion=fusion
    ).program(passes)


def written(
    traced: TracedModel,
    plan: Plan,
    coords: Sequence[int],
    *,
    group_names: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    fusion: Any = None,
) -> Emitter:
    """An emitter that has written the joint graph, and can make programs of it with any passes.

    Arguments and errors are those of `emit`.
    """
    check_made_for(plan, traced)
    traced = recomputed(traced, plan.checkpoint)
    device = torch.device(device)
    chosen = Fusion.parse(fusion, device)
    emitter = Emitter(traced, plan, coords, group_names, device, chosen)
    emitter.write()
    return emitter


def axis_group_names(mesh_shape: Sequence[int]) -> list[str]:
    """Stand-ins for the process groups of the axes."""
    return [f"axis{i}" for i in range(len(mesh_shape))]


class Emitter:
    """Writes one rank's joint graph.

    Attributes:
        graph: the program.
        values: its node of each value of the traced graph.
    """

    def __init__(
        self,
        traced: TracedModel,
        plan: Plan,
        coords: Sequence[int],
        group_names: Sequence[str] | None,
        device: torch.device,
        fusion: Fusion | None = None,
    ) -> None:
        self.fusion = fusion or Fusion(kernels=frozenset())
        self.traced = traced
        self.plan = plan
        self.mesh = plan.mesh_shape
        self.whole: Layout = tuple(Replicate() for _ in self.mesh)
        self.graph = fx.Graph()
        self.builder = Builder(
            self.graph,
            mesh_shape=self.mesh,
            coords=coords,
            group_names=group_names or axis_group_names(self.mesh),
            fake_mode=FakeTensorMode(allow_non_fake_inputs=True),
            device=device,
        )
        self.blocks = Blocks(traced)
        self.values: dict[tuple[str, int], fx.Node] = {}
        self.layouts: dict[tuple[str, int], Layout] = {}
        self.nodes = {n.name: n for n in traced.graph.nodes}
        self.reduced: dict[str, fx.Node] = {}
        self.completed: dict[str, list[OutputSpec]] = {}
        for spec in traced.outputs:
            if spec.kind == "gradient" and node_info(traced, self.nodes[str(spec.node)]).phase == (
                "backward"
            ):
                owner = self._output_value(spec)[0]
                self.completed.setdefault(owner, []).append(spec)

    def joint(self) -> list[tuple[fx.Node | None, OutputSpec, Layout]]:
        """Write the joint graph; its outputs."""
        self.inputs = self._inputs()
        nodes = op_nodes(self.traced.graph.nodes)
        for phase in ("forward", "backward"):
            self.builder.phase = phase
            for node in nodes:
                if node_info(self.traced, node).phase == phase:
                    self._op(node)
            if phase == "forward":
                self._results()
        outputs = [*self.results, *self._gradients()]
        end = self.graph.output(tuple(node for node, _, _ in outputs))
        if self.traced.training:
            beside = (i for i, (_, spec, _) in enumerate(self.results) if self._is_beside(spec))
            end.meta["let_go"] = frozenset(beside)
        return outputs

    def write(self) -> None:
        """Write the joint graph and check it against the plan."""
        self.outputs = self.joint()
        check_traffic(count_collectives(self.graph), self.plan)

    def program(
        self,
        passes: Collection[str] | None,
        pieces: Mapping[Key, int] | None = None,
        calls: Collection[Key] | None = None,
        sizes: Sizes | None = None,
    ) -> Program:
        """The program after passes; the written graph itself is left as it is.

        Args:
            passes: names out of those of `autopar.codegen.passes`; None for `PASSES`.
            pieces: of collectives that are cut; default: the plan's.
            calls: collectives that may be one call with their matmuls; default: the plan's.
            sizes: bytes that close a bucket, by axis and kind; default: the plan's.
        """
        inputs, outputs = self.inputs, self.outputs
        graph = self._through(passes, pieces, calls, sizes)
        if self.fusion.kernels:
            fuse(graph, self.fusion, self.builder.fake_mode)
        self._added_passes(graph, tangents_of(inputs))
        run_last_passes(graph, passes)
        return Program(
            joint=late_module(graph),
            inputs=tuple(inputs),
            outputs=tuple((spec, layout) for _, spec, layout in outputs),
            num_results=len(self.results),
            training=self.traced.training,
            passes=check_passes(passes),
        )

    def _through(
        self,
        passes: Collection[str] | None,
        pieces: Mapping[Key, int] | None,
        calls: Collection[Key] | None = None,
        sizes: Sizes | None = None,
        resident: Mapping[str, int] | None = None,
    ) -> fx.Graph:
        """What is written, behind its passes; the arguments are those of `run_passes`."""
        graph = run_passes(
            copied(self._noted if check_passes(passes) else self.graph),
            passes,
            sizes=self.plan.bucket_sizes() if sizes is None else sizes,
            block_of=self._block,
            links=links(self.plan),
            resident=resident,
            pieces=self.plan.piece_counts() if pieces is None else pieces,
            calls=self.plan.symmetric_calls() if calls is None else calls,
        )
        for node in graph.nodes:  # the kernels come next
            node.meta.pop(FUSED_BYTES, None)
        return graph

    @cached_property
    def _noted(self) -> fx.Graph:
        """What is written, with notes of what its kernels will hold."""
        if self.fusion.kernels:
            note_fused_bytes(self.graph, self.fusion, self.builder.fake_mode)
        return self.graph

    def _added_passes(self, graph: fx.Graph, tangents: Collection[str]) -> None:
        """Run the passes of other packages."""
        context = program_pass.PassContext(
            plan=self.plan, coords=self.builder.coords, group_names=self.builder.group_names
        )
        program_pass.run_passes(graph, context, tangents)

    def _inputs(self) -> list[tuple[InputSpec, Layout]]:
        by_node = {spec.node: spec for spec in self.traced.inputs}
        found: list[tuple[InputSpec, Layout]] = []
        for node in self.traced.graph.nodes:
            if node.op != "placeholder":
                continue
            spec = by_node[node.name]
            layout = (
                self.plan.parameters[spec.target]
                if spec.kind == "parameter"
                else self.plan.inputs.get(spec.node, self.whole)
            )
            placeholder = self.graph.placeholder(node.name)
            with self.builder.fake_mode:
                placeholder.meta["val"] = torch.empty(
                    local_shape(spec.shape, layout, self.mesh),
                    dtype=spec.dtype,
                    device=self.builder.device,
                )
            self.values[node.name, 0] = placeholder
            self.layouts[node.name, 0] = layout
            found.append((spec, layout))
        return found

    def _block(self, name: str) -> Block | None:
        return self.blocks.place[name][0] if name in self.blocks.place else None

    def _op(self, node: fx.Node) -> None:
        chosen = self.plan.nodes[node.name]
        call = op_call(node, 1)
        b = self.builder
        b.origin = node.name
        operands = []
        for source, layout in zip(call.nodes, chosen.inputs, strict=True):
            value = resolve(source)
            b.times = self.blocks.edge_weight(value[0], node.name)
            operands.append(emit_redistribution(b, self.values[value], self.layouts[value], layout))
        feed = iter(operands)
        args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), lambda _: next(feed))
        local = LocalCall(
            call, args, kwargs, chosen.inputs, chosen.outputs, chosen.variants, self.mesh
        )
        b.times = self.blocks.weight(node.name)
        result = lower(b, local)
        self._record(node, result, local)
        # at once, so that the whole gradient does not outlive its reduction
        for spec in self.completed.get(node.name, ()):
            self._reduce(spec)

    def _record(self, node: fx.Node, result: fx.Node, local: LocalCall) -> None:
        value = result.meta["val"]
        for index, layout in enumerate(local.outputs):
            self.layouts[node.name, index] = layout
        if isinstance(value, (list, tuple)):
            for index, part in enumerate(value):
                if isinstance(part, torch.Tensor):
                    self.values[node.name, index] = self.builder.item(result, index)
            shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in value]
        else:
            self.values[node.name, 0] = result
            shapes = [tuple(value.shape)]
        for index, shape in enumerate(shapes):
            expected = tuple(local.output_shape(index))
            if shape is not None and shape != expected:
                raise AutoparError(
                    f"{node.target} ({node.name}) yields {shape} locally, its plan says "
                    f"{expected}: this is a defect of autopar"
                )

    def _results(self) -> None:
        """User outputs and buffers: whole where required, in their own layout beside a loss."""
        self.results: list[tuple[fx.Node | None, OutputSpec, Layout]] = []
        for spec in self.traced.outputs:
            if spec.kind == "gradient":
                continue
            if spec.node is None:
                self.results.append((None, spec, self.whole))
                continue
            value = self._output_value(spec)
            self.builder.times = self.blocks.weight(value[0])
            self.builder.origin = "result"
            target = self.layouts[value] if self._is_beside(spec) else self.whole
            node = emit_redistribution(
                self.builder, self.values[value], self.layouts[value], target
            )
            self.results.append((node, spec, target))

    def _is_beside(self, spec: OutputSpec) -> bool:
        """True for a user output that is returned beside a loss."""
        loss = self.traced.loss_index
        return loss is not None and spec.kind == "output" and spec.target != str(loss)

    def _output_value(self, spec: OutputSpec) -> tuple[str, int]:
        return resolve(self.nodes[str(spec.node)])

    def _gradients(self) -> list[tuple[fx.Node | None, OutputSpec, Layout]]:
        """Gradients in their storage layout, in the order of the outputs."""
        found: list[tuple[fx.Node | None, OutputSpec, Layout]] = []
        for spec in self.traced.outputs:
            if spec.kind == "gradient":
                if spec.target not in self.reduced:
                    self._reduce(spec)
                target = self.plan.parameters[spec.target]
                found.append((self.reduced[spec.target], spec, target))
        return found

    def _reduce(self, spec: OutputSpec) -> None:
        value = self._output_value(spec)
        self.builder.origin = f"gradient of {spec.target}"
        self.builder.times = self.blocks.weight(value[0])
        reduced = emit_redistribution(
            self.builder,
            self.values[value],
            self.layouts[value],
            self.plan.parameters[spec.target],
        )
        if reduced.op == "placeholder":  # the loss's own gradient, which is not to be written to
            reduced = self.builder.call(torch.ops.aten.clone.default, reduced)
        self.reduced[spec.target] = reduced
