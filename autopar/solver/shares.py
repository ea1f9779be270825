"""Which ops of a step will be in one fused kernel, with what it leaves of their work.

Shares are found once, on the whole model (`codegen/shares.py`). Of a step that is a part of it, in
microbatches, or with recomputed ops, a kernel may have lost an op: what that would have handed over
inside the kernel is read then, and what another stage is sent is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from networkx.utils import UnionFind

from autopar.core.blocks import Blocks
from autopar.core.fused import FusedShares, Share
from autopar.core.graph import Value
from autopar.core.work import is_view

if TYPE_CHECKING:
    from autopar.solver.step import Op, Send

__all__ = ["held_by", "kernels_of", "lowest_shares", "shares_of"]


def shares_of(
    ops: Mapping[str, Op], sends: Iterable[Send], blocks: Blocks, fused: FusedShares
) -> dict[str, Share]:
    """Shares of a step's ops; those of equal blocks, which have one price, are equal.

    Args:
        ops, sends, blocks: of the step.
        fused: by the name of the op in the traced graph.
    """
    sent = {_behind_views(ops, send.value) for send in sends}
    found: dict[str, Share] = {}
    for name, op in ops.items():
        share = fused.get(op.origin)
        if share is not None and _fits(share, op):
            found[name] = _here(share, op, ops, sent)
    classes = blocks.classes
    owners = {name: classes.get(name, name) for name in ops}
    return {name: found[owner] for name, owner in owners.items() if owner in found}


def lowest_shares(
    ops: Mapping[str, Op], shares: Mapping[str, Share], blocks: Blocks
) -> dict[str, Share]:
    """Shares that are no more than an op's own, and the same for blocks that are nearly alike.

    The first block's norm has no residual in front, for one: its kernel is another one. Of ops that
    are alike, the n-th of each block of a container gets the least of what they have.
    """
    alike: dict[Hashable, list[str]] = {}
    seen: Counter[Hashable] = Counter()
    for name, op in ops.items():
        if name in blocks.place:
            block = blocks.place[name][0]
            key = op.call.target, op.call.operands, op.call.outputs, op.backward
            seen[block, key] += 1
            alike.setdefault((block.container, key, seen[block, key]), []).append(name)
    found = dict(shares)
    for names in alike.values():
        have = [shares[name] for name in names if name in shares]
        if len(set(have)) > 1 and len({s.op_class for s in have}) == 1:
            least = _least(have)
            found.update((name, least) for name in names if name in shares)
    return found


def held_by(op: Op, ops: Mapping[str, Op], share: Share | None) -> tuple[Value, ...]:
    """Values that must be in memory for an op, or for the kernel that it is the last op of.

    Args:
        op: of a step.
        ops: of that step, by name.
        share: of the op.
    """
    if share is None:
        return op.operands
    return tuple(_at_end(op, ops, way) for way in share.held)


def kernels_of(
    ops: Mapping[str, Op], shares: Mapping[str, Share], blocks: Blocks
) -> dict[str, str]:
    """By op of a fused kernel, one that stands for all of them."""
    shares = {name: share for name, share in shares.items() if name in ops}  # of a part of a step
    found: UnionFind = UnionFind(shares)
    first: dict[Hashable, str] = {}
    for name, share in shares.items():
        op, block = ops[name], blocks.place[name][0] if name in blocks.place else None
        # of equal blocks, and of what is computed again, each has its own
        if share.kernel is not None:
            key = share.kernel, block, op.recomputed, op.backward
            found.union(first.setdefault(key, name), name)
        for each in share.inside:
            found.union(name, _behind_views(ops, op.operands[each.index])[0])
    return {name: found[name] for name in shares}


def _at_end(op: Op, ops: Mapping[str, Op], way: Sequence[int]) -> Value:
    value = op.operands[way[0]]
    for index in way[1:]:
        maker = ops.get(_behind_views(ops, value)[0])
        if maker is None or index >= len(maker.operands):
            break  # of a part of a step, which begins here
        value = maker.operands[index]
    return value


def _least(shares: Sequence[Share]) -> Share:
    return replace(
        shares[0],
        reads=tuple(map(min, zip(*(s.reads for s in shares), strict=True))),
        writes=tuple(map(min, zip(*(s.writes for s in shares), strict=True))),
        launches=min(s.launches for s in shares),
        inside=tuple(x for x in shares[0].inside if all(x in s.inside for s in shares)),
        held=tuple(way for way in shares[0].held if all(way in s.held for s in shares)),
    )


def _fits(share: Share, op: Op) -> bool:
    """False for one of several ops that another one has become."""
    sizes = len(share.reads), len(share.writes)
    return share.target == str(op.call.target) and sizes == (
        len(op.operands),
        len(op.call.outputs),
    )


def _here(share: Share, op: Op, ops: Mapping[str, Op], sent: set[Value]) -> Share:
    reads, launches, inside, held = list(share.reads), share.launches, [], list(share.held)
    for each in share.inside:
        source = ops.get(_behind_views(ops, op.operands[each.index])[0])
        if source is not None and (source.recomputed, source.backward) == (
            op.recomputed,
            op.backward,
        ):
            inside.append(each)
        else:
            reads[each.index] = 1.0
            launches += each.launch
            held.append((each.index,))
    writes = (
        1.0 if not factor and (op.name, i) in sent else factor
        for i, factor in enumerate(share.writes)
    )
    return replace(
        share,
        reads=tuple(reads),
        writes=tuple(writes),
        launches=launches,
        inside=tuple(inside),
        held=tuple(held),
    )


def _behind_views(ops: Mapping[str, Op], value: Value) -> Value:
    while value[0] in ops and is_view(ops[value[0]].call.target):
        value = ops[value[0]].operands[0]
    return value
