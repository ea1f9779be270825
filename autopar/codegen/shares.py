"""`fused_shares`: how much work fusion leaves of each op, for the solver to price.

The step is emitted as one device would run it and fused, once for a model: which ops meet in a
kernel hardly depends on how they are placed. What a kernel reads and writes is handed to the ops
that it stands for (`core/fused.py`); where a plan moves a value inside a kernel, the solver adds
what that costs.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.codegen.emit import Emitter
from autopar.codegen.fusion import Fusion, fuse
from autopar.codegen.fusion.rewriter import Rewriter
from autopar.core.blocks import Blocks
from autopar.core.fused import FusedShares, Inside, Share
from autopar.core.graph import TracedModel, Value, node_info, op_nodes, resolve
from autopar.core.placement import Layout, Replicate
from autopar.core.plan import NodePlan, Plan, Prediction, SolverReport
from autopar.core.strategy import OpCall, op_call
from autopar.core.work import global_flops, is_view, op_class

__all__ = ["fused_shares"]

_WHOLE: Layout = (Replicate(),)


def fused_shares(traced: TracedModel, fusion: Fusion) -> FusedShares:
    """Shares of the ops that fusion changes, by name; equal blocks have equal shares.

    A kernel with a matrix product in it is left out: its ops are priced one by one.

    Args:
        traced: the step, folded or not.
        fusion: what will be fused.
    """
    if not fusion.kernels:
        return {}
    found = _Finder(traced, fusion).run()
    classes = Blocks(traced).classes
    for name in {*found, *classes}:
        like = found.get(classes.get(name, name))
        if like is None:
            found.pop(name, None)
        else:
            found[name] = like
    return found


def _single_device(traced: TracedModel) -> Plan:
    """Everything on one device."""
    nodes = {}
    for node in op_nodes(traced.graph.nodes):
        call = op_call(node, 1)
        ends = (_WHOLE,) * len(call.operands), (_WHOLE,) * len(call.outputs)
        nodes[node.name] = NodePlan(inputs=ends[0], outputs=ends[1], variants=("",))
    nothing = Prediction(
        step_time_s=0.0, compute_time_s=0.0, comm_time_s=0.0, peak_memory_bytes=0, memory={},
        comm_bytes=(),
    )  # fmt: skip
    unsolved = SolverReport(objective=0.0, bound=0.0, gap=0.0, seconds=0.0,
                            variables=0, constraints=0)  # fmt: skip
    return Plan(
        fingerprint="", mesh_shape=(1,), axis_names=("device",), training=traced.training,
        nodes=nodes, parameters={s.target: _WHOLE for s in traced.parameters()}, shapes={},
        dtypes={}, inputs={}, modes={}, cluster={}, predicted=nothing, solver=unsolved,
    )  # fmt: skip


@dataclass(slots=True)
class _Kernel:
    """A fused call in terms of the traced graph.

    Attributes:
        call: of the emitted graph.
        reads: bytes of the operands, by the value that each shows.
        writes: bytes of the results, likewise.
        extra: bytes of operands and results that are no value of the traced graph.
        members: ops that it stands for.
    """

    call: fx.Node
    reads: Counter[Value] = field(default_factory=Counter)
    writes: Counter[Value] = field(default_factory=Counter)
    extra: int = 0
    members: list[str] = field(default_factory=list)


class _Finder:
    def __init__(self, traced: TracedModel, fusion: Fusion) -> None:
        self.phases = {n.name: node_info(traced, n).phase for n in traced.graph.nodes}
        self.calls: dict[str, OpCall] = {}
        self.operands: dict[str, tuple[Value, ...]] = {}
        for node in op_nodes(traced.graph.nodes):
            call = self.calls[node.name] = op_call(node, 1)
            self.operands[node.name] = tuple(resolve(n) for n in call.nodes)
        self.order = {name: i for i, name in enumerate(self.calls)}
        self.emitter = Emitter(traced, _single_device(traced), [0], None, torch.device("cpu"))
        self.emitter.joint()
        self.shows: dict[fx.Node, list[Value]] = {}
        for value, emitted in self.emitter.values.items():
            self.shows.setdefault(emitted, []).append(value)
        origins = [(n, str(n.meta.get("origin"))) for n in self.emitter.graph.nodes]
        self.rewriter: Rewriter = fuse(self.emitter.graph, fusion, self.emitter.builder.fake_mode)
        # an op is gone where nothing is left that computes it
        self.gone = {origin for n, origin in origins if n._erased}
        self.gone -= {o for n, o in origins if not n._erased and not _is_free(n)}
        self.gone &= {n for n in self.calls if not is_view(self.calls[n].target)}

    def run(self) -> FusedShares:
        found: FusedShares = {}
        kept: set[str] = set()
        for number, call in enumerate(self.rewriter.calls):
            if call._erased:
                continue
            kernel = self._kernel(call)
            members = [m for m in kernel.members if m in self.gone and m not in found]
            if not members or any(global_flops(self.calls[m]) for m in members):
                kept.update(members)  # as it is, one by one
                continue
            found.update(_Shares(self, kernel, members).run(number))
        for name in self.gone - found.keys() - kept:
            call_ = self.calls[name]  # nobody asks for it any more
            none = (0.0,) * len(call_.operands), (0.0,) * len(call_.outputs)
            if not global_flops(call_):
                found[name] = Share(str(call_.target), op_class(call_), *none, launches=0)
        return found

    def values_of(self, node: fx.Node) -> list[Value]:
        """Values of the traced graph that a node of the fused one shows."""
        seen = node
        while seen not in self.shows:
            if seen in self.rewriter.replaced:
                seen = self.rewriter.replaced[seen]
            elif _is_free(seen) and seen.all_input_nodes:
                seen = seen.all_input_nodes[0]
            else:
                return []
        return self.shows[seen]

    def _kernel(self, call: fx.Node) -> _Kernel:
        kernel = _Kernel(call)
        several = not isinstance(call.meta["val"], Tensor)
        results = {int(u.args[1]): u for u in call.users} if several else {0: call}  # type: ignore[arg-type]
        ends: list[str] = []
        for index, made in enumerate(pytree.tree_leaves(call.meta["val"])):
            if not isinstance(made, Tensor):
                continue
            values = self.values_of(results[index]) if index in results else []
            if values:
                kernel.writes[values[0]] += _bytes(made)
                ends += [name for name, _ in values]
            else:
                kernel.extra += _bytes(made)
        stops: set[Value] = set()
        for node in call.all_input_nodes:
            values = self.values_of(node)
            stops.update(values)
            if values:
                kernel.reads[values[0]] += _bytes(node.meta["val"])
            else:
                kernel.extra += _bytes(node.meta["val"])
        kernel.members = self._between(ends, stops, str(call.meta.get("phase")))
        return kernel

    def _between(self, ends: list[str], stops: set[Value], phase: str) -> list[str]:
        """Ops of a phase that lead to `ends` from `stops`, in graph order."""
        found: dict[str, None] = {}
        stack = list(ends)
        while stack:
            name = stack.pop()
            if name in found or name not in self.calls or self.phases[name] != phase:
                continue
            found[name] = None
            stack.extend(source for source, i in self.operands[name] if (source, i) not in stops)
        return sorted(found, key=self.order.__getitem__)

    def behind_views(self, value: Value) -> Value:
        """The value that views of the traced graph show."""
        while value[0] in self.calls and is_view(self.calls[value[0]].target):
            value = self.operands[value[0]][0]
        return value


class _Shares:
    """Hands what a kernel does to the ops that it stands for.

    Args:
        finder: knows the graph.
        kernel: the call.
        members: ops that it replaces, without views, in graph order.
    """

    def __init__(self, finder: _Finder, kernel: _Kernel, members: list[str]) -> None:
        self.finder = finder
        self.kernel = kernel
        self.members = members
        calls = {m: finder.calls[m] for m in members}
        self.calls = calls
        self.reads = {m: [0.0] * len(calls[m].operands) for m in members}
        self.writes = {m: [0.0] * len(calls[m].outputs) for m in members}

    def run(self, number: int) -> FusedShares:
        """Shares of the members, whose kernel gets a number."""
        left = self.kernel.extra
        for value, num_bytes in self.kernel.writes.items():
            left += self._written(value, num_bytes)
        for value, num_bytes in self.kernel.reads.items():
            left += self._read(value, num_bytes)
        root = self.members[-1]  # carries what is no value of the traced graph, and the launch
        self.writes[root][0] += left / self.calls[root].outputs[0].num_bytes
        kind = op_class(op_call(self.kernel.call, 1))
        inside, held = self._inside(), self._held()
        return {
            m: Share(
                target=str(call.target),
                op_class=kind,
                reads=tuple(self.reads[m]),
                writes=tuple(self.writes[m]),
                launches=int(m == root),
                inside=inside[m],
                held=held[m],
                kernel=number,
            )
            for m, call in self.calls.items()
        }

    def _written(self, value: Value, num_bytes: int) -> int:
        """Hand a result to its producer; the bytes that no member writes."""
        name, index = self.finder.behind_views(value)
        if name not in self.writes or index >= len(self.writes[name]):
            return num_bytes
        whole = self.calls[name].outputs[index].num_bytes
        self.writes[name][index] += num_bytes / whole if whole else 0.0
        return 0

    def _read(self, value: Value, num_bytes: int) -> int:
        """Hand an operand to the first member that reads it; the bytes that none does."""
        shown = self.finder.behind_views(value)
        for member in self.members:
            for index, operand in enumerate(self.finder.operands[member]):
                exact = operand == value
                if exact or self.finder.behind_views(operand) == shown:
                    whole = self.calls[member].operands[index].num_bytes
                    if whole:
                        self.reads[member][index] += num_bytes / whole
                        return 0
        return num_bytes

    def _held(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Ways to the kernel's operands, each from the last op that one leads there from."""
        left = {self.finder.behind_views(value) for value in self.kernel.reads}
        found: dict[str, tuple[tuple[int, ...], ...]] = dict.fromkeys(self.members, ())
        for member in reversed(self.members):
            ways = self._ways(member, left)
            found[member] = tuple(ways.values())
            left -= ways.keys()
        return found

    def _ways(self, member: str, wanted: set[Value]) -> dict[Value, tuple[int, ...]]:
        """The shortest way to each value, through ops that are gone."""
        found: dict[Value, tuple[int, ...]] = {}
        seen = {member}
        queue: deque[tuple[str, tuple[int, ...]]] = deque([(member, ())])
        while queue and len(found) < len(wanted):
            name, way = queue.popleft()
            for index, operand in enumerate(self.finder.operands[name]):
                value = self.finder.behind_views(operand)
                if value in wanted:
                    found.setdefault(value, (*way, index))
                elif value[0] in self.finder.gone and value[0] not in seen:
                    seen.add(value[0])
                    queue.append((value[0], (*way, index)))
        return found

    def _inside(self) -> dict[str, tuple[Inside, ...]]:
        """Operands that other members yield; those that join all members have the launches."""
        parts = {m: m for m in self.members}

        def part(name: str) -> str:
            while parts[name] != name:
                name = parts[name]
            return name

        edges: list[tuple[str, int, Value, bool]] = []
        for member, index, value in self._internal():
            a, b = part(value[0]), part(member)
            edges.append((member, index, value, a != b))
            parts[a] = b
        readers: dict[Value, list[str]] = {}
        for member, _, value, _ in edges:
            readers.setdefault(value, []).append(member)
        lost = {value: self._lost(value, after) for value, after in readers.items()}
        found: dict[str, list[Inside]] = {m: [] for m in self.members}
        for member, index, value, joins in edges:
            count = len(readers[value])
            unwritten = max(0.0, 1.0 - self.writes[value[0]][value[1]])
            num_bytes = self.calls[member].operands[index].num_bytes * count
            more = lost[value] / num_bytes if num_bytes else 0.0
            found[member].append(Inside(index, unwritten / count, joins, more))
        return {m: tuple(inside) for m, inside in found.items()}

    def _lost(self, moved: Value, readers: list[str]) -> float:
        """Bytes that members behind a value need of those before it, where the value is moved.

        A norm whose statistics are reduced over ranks reads its operand twice, for one.
        """
        behind = set(readers)
        needed: dict[Value, int] = {}
        for member in self.members:  # in graph order
            sources = [self.finder.behind_views(v) for v in self.finder.operands[member]]
            if member in behind or any(name in behind for name, _ in sources):
                behind.add(member)
                specs = self.calls[member].operands
                for index, (value, spec) in enumerate(zip(sources, specs, strict=True)):
                    if value[0] not in behind and not self.reads[member][index]:
                        needed.setdefault(value, spec.num_bytes)
        needed.pop(moved, None)
        total = 0.0
        for (name, index), num_bytes in needed.items():
            unwritten = 1.0 - self.writes[name][index] if name in self.writes else 0.0
            total += num_bytes * (1.0 + max(0.0, unwritten))
        return total

    def _internal(self) -> Iterator[tuple[str, int, Value]]:
        for member in self.members:
            for index, operand in enumerate(self.finder.operands[member]):
                value = self.finder.behind_views(operand)
                if value[0] in self.reads and not self.reads[member][index]:
                    yield member, index, value


def _bytes(x: Tensor) -> int:
    return math.prod(x.shape) * x.element_size()


def _is_free(node: fx.Node) -> bool:
    """True for what does no work of its own."""
    return node.target is operator.getitem or is_view(node.target) or _is_cast(node)


def _is_cast(node: fx.Node) -> bool:
    return node.target is torch.ops.aten._to_copy.default
