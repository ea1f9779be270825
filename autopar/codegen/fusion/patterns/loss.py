"""Cross-entropy over whole and sharded logits, and with the linear in front of it."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.codegen.fusion.matching import K, Match, Op, V, find, look_through
from autopar.codegen.fusion.registry import pattern
from autopar.codegen.fusion.rewriter import Rewriter
from autopar.core.graph import value_of

aten = torch.ops.aten
autopar = torch.ops.autopar
_IGNORED = Op(aten.eq.Scalar, V("target"), K("ignore"), given=True)
_INDEX = Op(aten.sub.Tensor, V("target"), K("start"), given=True)
_INSIDE = Op(
    aten.logical_and.default,
    Op(aten.logical_and.default,
       Op(aten.ge.Scalar, _INDEX, 0, given=True),
       Op(aten.lt.Scalar, _INDEX, K("count"), given=True), given=True),
    Op(aten.logical_not.default, _IGNORED, given=True),
    given=True,
)  # fmt: skip
_GATHERED = Op(
    aten.unsqueeze.default, Op(aten.where.ScalarOther, _INSIDE, _INDEX, 0, given=True), -1,
    given=True,
)  # fmt: skip
_TOTAL = Op(
    aten.sum.dim_IntList,
    Op(aten.exp.default, Op(aten.sub.Tensor, V("logits"), V("top"))),
    [-1],
    name="total",
)
_PICKED = Op(
    aten.where.ScalarOther,
    _INSIDE,
    Op(aten.squeeze.dim, Op(aten.gather.default, V("logits"), -1, _GATHERED), -1),
    0.0,
    name="picked",
)
_STATS = Op(aten.stack.default, [_TOTAL, _PICKED])
_SCALE = Op(aten.masked_fill.Scalar, V("grad"), _IGNORED, 0.0)
_BACKWARD = Op(
    aten.scatter_add.default,
    Op(_MUL := aten.mul.Tensor,
       Op(aten.exp.default,
          Op(aten.sub.Tensor, V("logits"), Op(aten.unsqueeze.default, V("lse"), -1))),
       Op(aten.unsqueeze.default, _SCALE, -1)),
    -1,
    _GATHERED,
    Op(aten.unsqueeze.default,
       Op(aten.where.ScalarOther, _INSIDE, Op(aten.neg.default, _SCALE), 0.0), -1),
)  # fmt: skip


@pattern("token_nll", aten.stack.default, rank=40)
def nll_stats(rewriter: Rewriter, root: fx.Node) -> bool:
    """Maximum, sum of exponentials and target of sharded logits in one pass.

    The sum is taken beside the rank's own maximum and brought to that of all ranks, which the
    program has by then: Σ exp(z − top) = s · exp(m − top).
    """
    match = find(_STATS, root)
    if match is None:
        return False
    maximum = _maximum_behind(match)
    total, picked = match["total"], match["picked"]
    if maximum is None or not rewriter.is_private(match.inner, {root, total, picked}):
        return False
    b, before = rewriter, maximum.next
    logits = look_through(match["logits"], rounding=False)
    stats = b.call(before, torch.ops.autopar_kernels.nll_stats.default, logits,
                   match["target"], match["start"], match["ignore"])  # fmt: skip
    top, own, target = (b.call(before, operator.getitem, stats, i) for i in range(3))
    b.replace(maximum, b.call(before, aten.unsqueeze.default, top, -1))
    finite = b.call(total, aten.masked_fill.Scalar, top, b.call(total, aten.isinf.default, top),
                    0.0)  # fmt: skip
    shift = b.call(
        total, aten.sub.Tensor, finite, b.call(total, aten.squeeze.dim, match["top"], -1)
    )
    b.replace(total, b.call(total, aten.mul.Tensor, own, b.call(total, aten.exp.default, shift)))
    b.replace(picked, target)
    b.counts["nll_stats"] = b.counts.get("nll_stats", 0) + 1
    return True


def _maximum_behind(match: Match) -> fx.Node | None:
    """The rank's maximum of the same logits, which was reduced over ranks to `top`."""
    node = match["top"]
    for _ in range(64):
        if node.target is aten.amax.default:
            source, dims, keep = node.args
            same = look_through(source) is look_through(match["logits"])
            ready = all(match[k] < node for k in ("target",))
            return node if same and list(dims) == [-1] and keep and ready else None
        if not node.args or not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]
    return None


@pattern("token_nll", aten.scatter_add.default, rank=20)
def nll_backward(rewriter: Rewriter, root: fx.Node) -> bool:
    """Gradient of sharded logits."""
    match = find(_BACKWARD, root)
    if match is None or not rewriter.is_private(match.inner, {root}):
        return False
    args = (match["grad"], match["logits"], match["target"], match["lse"], match["start"],
            match["ignore"])  # fmt: skip
    return rewriter.fused("nll_backward", root, args, {0: root})


@pattern("token_nll", autopar.token_nll_backward.default, rank=20)
def whole_nll_backward(rewriter: Rewriter, root: fx.Node) -> bool:
    """Gradient of whole logits, read and written in their own dtype."""
    grad, logits, target, lse, ignore = root.args
    assert isinstance(logits, fx.Node)
    narrow = look_through(logits, rounding=False)
    return rewriter.fused("nll_backward", root, (grad, narrow, target, lse, 0, ignore), {0: root})


@pattern("token_nll", autopar.token_nll.default, rank=60)
def token_nll(rewriter: Rewriter, root: fx.Node) -> bool:
    """Loss of whole logits, read in their own dtype."""
    logits, target, ignore = root.args
    assert isinstance(logits, fx.Node)
    items = {int(u.args[1]): u for u in root.users if u.target is operator.getitem}  # type: ignore[arg-type]
    narrow = look_through(logits, rounding=False)
    return bool(items) and rewriter.fused("token_nll", root, (narrow, target, ignore), items)


@pattern("linear_nll", autopar.token_nll_backward.default, rank=10, default=False)
def linear_nll(rewriter: Rewriter, root: fx.Node) -> bool:
    """Loss of x·Wᵀ without the logits, which must be read by nothing else.

    Computes the logits twice, so it runs where memory is worth a matmul.
    """
    grad, logits, target, lse, ignore = root.args
    assert isinstance(logits, fx.Node) and isinstance(lse, fx.Node)
    loss = look_through(lse).args[0]
    if not isinstance(loss, fx.Node) or loss.target is not autopar.token_nll.default:
        return False
    linear, products = look_through(logits), _past_reshapes(rewriter, root)
    while _is_flattening(linear):
        linear = look_through(linear.args[0])  # type: ignore[arg-type]
    if _past_reshapes(rewriter, linear) != {loss, root}:
        return False
    found = _linear(linear, [p for p in products if p.target is autopar.einsum.default])
    if found is None or len(products) != 2:
        return False
    x, weight, dx, dw = found
    items = {int(u.args[1]): u for u in loss.users if u.target is operator.getitem}  # type: ignore[arg-type]
    if not rewriter.fused("linear_nll", loss, (x, weight, target, ignore), items):
        return False
    args = (grad, x, weight, target, root.args[3], ignore)
    return rewriter.fused("linear_nll_backward", max(dx, dw), args, {0: dx, 1: dw})


def _is_flattening(node: fx.Node) -> bool:
    """True for another shape of the same rows."""
    if node.target not in (aten.reshape.default, aten.view.default):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return value_of(source).shape[-1] == value_of(node).shape[-1]


def _past_reshapes(rewriter: Rewriter, node: fx.Node) -> set[fx.Node]:
    """Users, seen through casts, aliases and other shapes of the same rows."""
    found: set[fx.Node] = set()
    for user in rewriter.users(node):
        found |= _past_reshapes(rewriter, user) if _is_flattening(user) else {user}
    return found


def _linear(
    linear: fx.Node, products: list[fx.Node]
) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node] | None:
    """x, W (V, D), dx and dW of logits that are x·Wᵀ and of the two products of its backward."""
    if linear.target is not autopar.einsum.default or len(products) != 2:
        return None
    equation, x, weight = linear.args
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    rows, _, rest = str(equation).partition(",")
    columns, _, out = rest.partition("->")
    if not (len(columns) == 2 and rows[-1] == columns[1] and out == rows[:-1] + columns[0]):
        return None
    gradients = {str(p.args[0]).partition("->")[2]: p for p in products}
    dx, dw = gradients.get(rows), gradients.get(columns)
    return None if dx is None or dw is None else (x, weight, dx, dw)
