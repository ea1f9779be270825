"""`decomposed`: which collectives of a plan are cut into pieces, and into how many.

A collective of t seconds, of which h are hidden, and the products beside it, of C seconds, take
C + t - h. In k pieces they are simulated by themselves: C_k of compute, copies included, and I_k at
waits. What hid h before hides as much of I_k, so that cutting saves about::

    saved = (C + t - h) - (C_k + max(0, I_k - h))

The k that saves most is taken for all sites that are alike. All that save something are then
emitted together and simulated as a whole; what loses there is left whole, and so is everything, if
the step does not get faster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace

from torch import fx

from autopar.codegen.passes.alone import cut_out, in_pieces
from autopar.codegen.passes.sites import Key, Reduction, Site, find_sites, key_of, shape
from autopar.core.plan import Pieces, Plan
from autopar.core.timeline import PlannedOp
from autopar.cost_model import Cluster
from autopar.cost_model.collectives import CollectiveKind
from autopar.cost_model.simulator import simulate
from autopar.search.trials import Trial

__all__ = ["decomposed", "form_of"]

_COUNTS = (2, 3, 4, 6, 8)
_MOST_TRIALS = 4
_LEAST = 1e-4  # of the step, to be saved: less is beyond what is predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Sites that are alike, and what cutting them into `count` pieces is expected to save."""

    keys: frozenset[Key]
    origins: frozenset[str]
    count: int
    saved_s: float


def decomposed(
    plan: Plan, before: Trial, run: Callable[[Plan], Trial], cluster: Cluster
) -> tuple[Plan, Trial]:
    """Cut the collectives of `plan` for which that is faster.

    Args:
        plan: as solved; with pieces already, it keeps these.
        before: its program.
        run: emits and simulates a plan.
        cluster: with the plan's mesh.

    Returns:
        The plan with its `pieces`, and its program; both as they were given where nothing is cut.
    """
    best, best_trial = plan, before
    enough_s = _LEAST * before.step_s()
    groups = [] if plan.pieces else _promising(before, plan, cluster)
    for _ in range(_MOST_TRIALS):
        if not groups:
            break
        after = run(replace(plan, pieces=_pieces(groups)))
        done = {key_of(node) for node in after.graph.nodes if "piece" in node.meta}
        groups = [group for group in groups if group.keys & done]
        if after.step_s() < best_trial.step_s() - enough_s:
            kept = (p for p in _pieces(groups) if (p.node, p.axis, p.kind) in done)
            best, best_trial = replace(plan, pieces=tuple(kept)), after
        losing = [group for group in groups if _saved(group, before, after) <= 0]
        if not losing and best_trial is after:
            break
        drop = losing or [min(groups, key=lambda group: group.saved_s)] if groups else []
        groups = [group for group in groups if group not in drop]
    return _noted(best), best_trial


def _pieces(groups: Iterable[_Group]) -> tuple[Pieces, ...]:
    rows = (
        Pieces(node=node, axis=axis, kind=kind, count=group.count)
        for group in groups
        for node, axis, kind in group.keys
    )
    return tuple(sorted(rows, key=lambda row: (row.node, row.axis, row.kind)))


def _promising(before: Trial, plan: Plan, cluster: Cluster) -> list[_Group]:
    """Groups of sites that save something, most first; no two cut the same product."""
    alike: dict[Hashable, list[Site]] = defaultdict(list)
    shares = before.shares()
    for site in find_sites(before.graph):
        # what leaves a stage is known by another name in each stage
        if key_of(site.start)[0] in plan.nodes:
            alike[form_of(site)].append(site)
    found: list[tuple[_Group, set[fx.Node]]] = []
    for sites in alike.values():
        hidden = [shares.get(key_of(site.start), 0.0) for site in sites]
        count, saved_s = _best_count(sites, hidden, cluster)
        if saved_s > 0:
            nodes = {node for site in sites for node in (*site.products, site.value, *site.body)}
            nodes |= {user for site in sites for p in site.products for user in p.users}
            group = _Group(
                keys=frozenset(key_of(site.start) for site in sites),
                origins=frozenset(str(node.meta.get("origin", "")) for node in nodes),
                count=count,
                saved_s=saved_s,
            )
            found.append((group, {p for site in sites for p in site.products}))
    chosen: list[_Group] = []
    taken: set[fx.Node] = set()
    keys: set[Key] = set()
    for group, products in sorted(found, key=lambda pair: -pair[0].saved_s):
        if taken.isdisjoint(products) and keys.isdisjoint(group.keys):
            chosen.append(group)
            taken |= products
            keys |= group.keys
    return chosen


def form_of(site: Site) -> Hashable:
    """What sites that are alike have in common."""
    _, axis, kind = key_of(site.start)
    products = tuple(
        (node.args[0], *(shape(operand) for operand in node.all_input_nodes))
        for node in site.products
    )
    sums = len(site.sums) if isinstance(site, Reduction) else 0
    form = axis, kind, site.start.meta.get("phase"), site.dim, site.split, shape(site.value)
    return *form, products, sums, len(site.value.users)


def _best_count(sites: list[Site], hidden: list[float], cluster: Cluster) -> tuple[int, float]:
    """How many pieces save most, and how much, in all sites together."""
    first = sites[0]
    kind, axis, num_bytes, times = first.start.meta["collective"]
    seconds = cluster.collective_seconds(CollectiveKind(kind), num_bytes, axis)
    latency = cluster.collective_seconds(CollectiveKind(kind), 1, axis)
    exposed = [seconds * (1 - share) for share in hidden]
    if seconds <= 2 * latency or max(exposed) <= latency:
        return 1, 0.0  # a second call costs more than can be hidden
    graph = cut_out(first)
    whole = simulate(graph, cluster)
    best = 1, 0.0
    for count in _COUNTS:
        cut = in_pieces(graph, count)
        if cut is None:
            break
        found = simulate(cut, cluster)
        waits = sum(found.exposed_s) / times
        more_s = (found.compute_s - whole.compute_s) / times
        saved = sum(
            left - more_s - max(0.0, waits - (seconds - left)) for left in exposed if left > latency
        )
        if saved * times > best[1]:
            best = count, saved * times
    return best


def _saved(group: _Group, before: Trial, after: Trial) -> float:
    """Seconds that a group's ops and collectives take less in a whole program."""

    def taken(trial: Trial) -> float:
        compute_s, exposed_s = trial.compute_s(), trial.exposed_s()
        ops = math.fsum(compute_s.get(origin, 0.0) for origin in group.origins)
        return ops + math.fsum(exposed_s.get(key, 0.0) for key in group.keys)

    return taken(before) - taken(after)


def _noted(plan: Plan) -> Plan:
    """`plan` whose collectives know of their pieces; what these take is known of the program."""
    if not plan.pieces:
        return plan
    cut = {(p.node, p.axis, p.kind): p.count for p in plan.pieces}

    def noted(op: PlannedOp) -> PlannedOp:
        moves = []
        for move in op.moves:
            key = op.name, move.axis, move.kind
            if not move.leaves and key in cut:
                move = move._replace(pieces=cut[key])
            moves.append(move)
        return replace(op, moves=tuple(moves))

    was = plan.predicted
    timeline = replace(was.timeline, ops=tuple(map(noted, was.timeline.ops)))
    return replace(plan, predicted=replace(was, timeline=timeline))
