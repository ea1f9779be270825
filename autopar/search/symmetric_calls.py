"""`with_symmetric_calls`: which collectives become one call with the products beside them.

Asked only where the pass `symmetric_memory` is to run. Let a site take C seconds of ops, in pieces
or whole, and let e seconds of its collective be exposed in the program without calls. By itself,
its call takes F seconds of ops and waits (`cost_model/overlapped_calls.py`), and saves about::

    saved = C + e - F

All sites that save something are tried together and simulated as a whole; what was expected to save
least is taken back until the step is faster, and in the end everything.

Only sites on CUDA are asked about, on a mesh axis that lies inside of nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace

from torch import fx

from autopar.codegen.emit import written
from autopar.codegen.fusion import Fusion
from autopar.codegen.passes import check_passes
from autopar.codegen.passes.alone import cut_out, in_pieces
from autopar.codegen.passes.sites import Key, Site, find_sites, key_of
from autopar.codegen.passes.symmetric import can_be_called, in_one_call
from autopar.codegen.stage_program import StageProgramWriter
from autopar.codegen.stages import staged_as_planned
from autopar.core.axis_geometry import axis_geometry
from autopar.core.calls import Pieces
from autopar.core.graph import TracedModel
from autopar.core.plan import PipelinePlan, Plan
from autopar.cost_model import Cluster
from autopar.cost_model.simulator import simulate
from autopar.search.decomposing import form_of
from autopar.search.trials import Trial

__all__ = ["with_symmetric_calls"]

_PARTS = ("prepare", "forward", "backward", "input", "weight", "finish")  # of a stage
_MOST_TRIALS = 4
_LEAST = 1e-4  # of the step, to be saved: less is beyond what is predicted

Run = Callable[[Collection[Key]], Trial]


@dataclass(frozen=True, slots=True)
class _Group:
    """Sites that are alike, and what their calls are expected to save."""

    keys: frozenset[Key]
    saved_s: float


def with_symmetric_calls(plan: Plan, traced: TracedModel, passes: Collection[str] | None) -> Plan:
    """`plan` with the collectives marked that a call is predicted to make faster.

    Args:
        plan: of the whole graph.
        traced: that graph.
        passes: that will run; without `symmetric_memory` nothing is marked.

    Returns:
        The plan with marks in `pieces`, those of the stages where there are any; as it is, where
        it has marks already.
    """
    names, cluster, fusion = check_passes(passes), Cluster.from_dict(plan.cluster), Fusion.of(plan)
    if "symmetric_memory" not in names or cluster.device_type != "cuda":
        return plan
    if plan.pipeline is not None:
        stages = _stages(plan.pipeline, traced, names, fusion, cluster)
        return replace(plan, pipeline=replace(plan.pipeline, stages=stages))
    emitter = written(traced, plan, [0] * len(plan.mesh_shape), fusion=fusion)

    def run(calls: Collection[Key]) -> Trial:
        graph = emitter.program(names, calls=calls).joint.graph
        return Trial(graph=graph, parts={"step": simulate(graph, cluster)})

    return _marked(plan, emitter.graph, run, cluster)


def _stages(
    p: PipelinePlan,
    traced: TracedModel,
    names: Collection[str],
    fusion: Fusion,
    cluster: Cluster,
) -> tuple[Plan, ...]:
    parts = staged_as_planned(traced, p)
    found = []
    for number, stage in enumerate(p.stages):
        own = parts.named(number, stage, back=True)
        zeros = [0] * len(stage.mesh_shape)
        writer = StageProgramWriter([parts.model(number)], own, zeros, fusion=fusion)

        def run(calls: Collection[Key], writer: StageProgramWriter = writer) -> Trial:
            program = writer.program(names, calls=calls)
            simulated = {
                name: simulate(part.module.graph, cluster)
                for name, part in ((n, program.parts[n]) for n in _PARTS if n in program.parts)
            }
            return Trial(graph=program.joint.graph, parts=simulated)

        marked = _marked(own, writer.graph, run, cluster)
        found.append(replace(stage, pieces=parts.named(number, marked).pieces))
    return tuple(found)


def _marked(plan: Plan, graph: fx.Graph, run: Run, cluster: Cluster) -> Plan:
    """`plan` with the sites of `graph` marked whose calls make what `run` simulates faster."""
    if plan.symmetric_calls():
        return plan
    before = run(())
    groups = _promising(plan, graph, before, cluster)
    for _ in range(_MOST_TRIALS):
        if not groups:
            break
        after = run(frozenset[Key]().union(*(group.keys for group in groups)))
        if after.step_s() < before.step_s() * (1 - _LEAST):
            return _with_marks(plan, _called(after.graph))
        groups = sorted(groups, key=lambda group: -group.saved_s)[:-1]
    return plan


def _called(graph: fx.Graph) -> set[Key]:
    """The collectives that a program has in calls."""
    found = set()
    for node in graph.nodes:
        if "overlapped" in node.meta:
            kind, axis, _, _ = node.meta["overlapped"]
            found.add((str(node.meta["origin"]), axis, kind))
    return found


def _with_marks(plan: Plan, keys: Collection[Key]) -> Plan:
    counts = plan.piece_counts()
    rows = (
        Pieces(node=key[0], axis=key[1], kind=key[2], count=counts.get(key, 1), call=key in keys)
        for key in sorted({*counts, *keys})
    )
    return replace(plan, pieces=tuple(rows))


def _promising(plan: Plan, graph: fx.Graph, before: Trial, cluster: Cluster) -> list[_Group]:
    """Groups of sites that save something."""
    counts, exposed_s = plan.piece_counts(), before.exposed_s()
    alike: dict[Hashable, list[Site]] = defaultdict(list)
    for site in find_sites(graph):
        key = key_of(site.start)
        # what leaves a stage is known by another name in each stage
        if key[0] in plan.nodes and _is_near(cluster, key[1]) and can_be_called(site):
            alike[form_of(site), counts.get(key, 1)].append(site)
    found = []
    for sites in alike.values():
        (first, *_) = sites
        times = first.start.meta["collective"][3]
        less_s = _less_compute_s(first, counts.get(key_of(first.start), 1), cluster)
        keys = [key_of(site.start) for site in sites]
        saved_s = times * sum(exposed_s.get(key, 0.0) + less_s for key in keys)
        if saved_s > 0:
            found.append(_Group(frozenset(keys), saved_s))
    return found


def _is_near(cluster: Cluster, axis: int) -> bool:
    """True if the ranks of a mesh axis are in one node."""
    return axis_geometry(cluster.mesh_shape, axis, cluster.devices_per_node).num_nodes == 1


def _less_compute_s(site: Site, count: int, cluster: Cluster) -> float:
    """Seconds of a site's ops, in `count` pieces, less those of its call and its waits."""
    alone = cut_out(site)
    called = in_one_call(alone)
    assert called is not None
    plain = in_pieces(alone, count) if count > 1 else None
    ops_s = simulate(plain or alone, cluster).compute_s
    return (ops_s - simulate(called, cluster).step_s) / site.start.meta["collective"][3]
