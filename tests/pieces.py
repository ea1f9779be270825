"""Plans whose products and collectives are cut into pieces, where that pays or everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autopar
from autopar.codegen.emit import emit
from autopar.codegen.passes.sites import find_sites, key_of
from autopar.codegen.stage_program import emit_stage
from autopar.core.graph import TracedModel
from autopar.core.overlapped import GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from autopar.core.plan import Pieces, Plan
from autopar.cost_model import Cluster
from autopar.runtime.stage_values import stages_at_turns

CALLS = (GATHER_MATMUL, MATMUL_REDUCE_SCATTER)


class Gated(nn.Module):
    """A Llama-style block: RMS norms, attention, a gated MLP; no biases, no casts."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.post_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.post_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Blocks over embedded tokens, and a loss."""

    def __init__(self, layers: int = 1, width: int = 16, heads: int = 4, vocab: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Gated(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def tokens(batch: int, length: int, vocab: int = 24) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (2, batch, length), generator=generator)
    return {"ids": ids[0], "labels": ids[1]}


def paying(ranks: int) -> Cluster:
    """A cluster where a product takes about as long as the collective beside it, a call nothing."""
    plain = Cluster.from_profile("cpu-gloo", devices_per_node=ranks)
    efficiency = {
        name: replace(found, ramp_s=0.0) for name, found in plain.device.efficiency.items()
    }
    device = replace(
        plain.device,
        memory_bandwidth=1e13,
        kernel_overhead_s=1e-10,
        peak_flops=dict.fromkeys(plain.device.peak_flops, 1e9),
        efficiency=efficiency,
        curves=(),
    )
    link = replace(plain.intra, latency_s=1e-10, base_latency_s=1e-10, bandwidth=1e9, lines=())
    return replace(plain, device=device, intra=link, inter=link)


def forced(plan: Plan, traced: TracedModel, count: int) -> Plan:
    """`plan` with all that can be cut in `count` pieces, the stages of a pipeline included."""
    if plan.pipeline is None:
        graph = emit(traced, plan, [0] * len(plan.mesh_shape), passes=()).joint.graph
        return replace(plan, pieces=_all(graph, plan, count))
    (first, *_) = stages_at_turns(traced, plan.pipeline)
    stages = []
    for number, stage in enumerate(plan.pipeline.stages):
        own = first.named(number, stage, back=True)
        program = emit_stage([first.model(number)], own, [0] * len(stage.mesh_shape), passes=())
        stages.append(replace(stage, pieces=_all(program.joint.graph, stage, count)))
    return replace(plan, pipeline=replace(plan.pipeline, stages=tuple(stages)))


def _all(graph: fx.Graph, plan: Plan, count: int) -> tuple[Pieces, ...]:
    keys = {key_of(site.start) for site in find_sites(graph)}
    return tuple(
        Pieces(node=node, axis=axis, kind=kind, count=count)
        for node, axis, kind in sorted(keys)
        if node in plan.nodes
    )


def cut(graph: fx.Graph) -> dict[Any, list[fx.Node]]:
    """The pieces of each collective of a program, in order."""
    found: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if "piece" in node.meta:
            found.setdefault(key_of(node), []).append(node)
    return found


def calls(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that are a collective and the products beside it."""
    return [node for node in graph.nodes if node.target in CALLS]


def behind_a_reader(graph: fx.Graph) -> fx.Graph:
    """The graph with an op behind each output, so that no reduction leaves the step."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    outputs = copy.graph_copy(graph, copies)
    for old, new in copies.items():
        new.meta = dict(old.meta)
    read = []
    for node in outputs:
        read.append(copy.call_function(torch.ops.aten.neg.default, (node,)))
        read[-1].meta = {**node.meta, "val": -node.meta["val"]}
        read[-1].meta.pop("collective", None)
    copy.output(tuple(read))
    return copy


def trained(ranks: int, passes: Any, backend: str, path: str) -> tuple[Any, list[Tensor]]:
    """A real rank's model under the plan at `path`, and the gradients of its two steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = Llama(1).double().train(), tokens(1, 20)
    mesh = init_device_mesh("cpu", (ranks,))
    plan = Plan.load(path)
    parallel = autopar.parallelize(model, mesh, inputs, plan=plan, passes=passes, backend=backend)
    for _ in range(2):
        parallel.zero_grad()
        parallel.train_step(**inputs)
    grads = [p.grad.full_tensor().clone() for p in parallel.parameters() if p.grad is not None]
    return parallel, grads
