"""Layer norm and RMS norm, with the residual add in front and its gradient behind."""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from autopar.codegen.fusion.matching import K, Match, Op, V, find, look_through
from autopar.codegen.fusion.registry import pattern
from autopar.codegen.fusion.rewriter import Rewriter
from autopar.core.graph import value_of

aten = torch.ops.aten
_MUL, _ADD = aten.mul.Tensor, aten.add.Tensor


def _square(given: bool) -> list[Op]:
    return [
        Op(aten.pow.Tensor_Scalar, V("x"), 2, given=given),
        Op(_MUL, V("x"), V("x"), given=given),
    ]


def _rstd(square: Op) -> list[Op]:
    """1/rms, with the mean as one op or as sum over size."""
    means = (
        Op(aten.mean.dim, square, K("dims"), True),
        Op((aten.div.Tensor, aten.div.Scalar), Op(aten.sum.dim_IntList, square, K("dims"), True),
           K("size")),
    )  # fmt: skip
    return [
        Op(aten.rsqrt.default, Op((_ADD, aten.add.Scalar), mean, K("eps")), name="rstd")
        for mean in means
    ]


_FORWARD = [
    Op(_MUL, V("weight"), Op(_MUL, V("x"), rstd))
    for square in _square(False)
    for rstd in _rstd(square)
]
# gradient of x through the square, with the mean as sum over size, as the tracer leaves it
_SQUARE_GRAD = Op(
    _MUL,
    Op(aten.expand.default,
       Op((aten.mul.Scalar, _MUL),
          Op((aten.div.Scalar, aten.div.Tensor),
             Op(_MUL,
                Op((aten.mul.Scalar, _MUL),
                   Op(aten.sum.dim_IntList, Op(_MUL, V("g"), V("x")), K("dims"), True), -0.5),
                Op(aten.pow.Tensor_Scalar, V("rstd"), 3)),
             K("size")),
          2.0),
       K("shape")),
    V("x"),
)  # fmt: skip
_SCALED = Op(_MUL, V("g"), V("rstd"))
_BACKWARD = [
    Op(_ADD, Op(_ADD, V("through"), _SCALED), _SQUARE_GRAD),
    Op(_ADD, V("through"), Op(_ADD, _SCALED, _SQUARE_GRAD)),
    Op(_ADD, _SCALED, _SQUARE_GRAD),
]


def _over_last(x: fx.Node, dims: object) -> bool:
    rank = value_of(x).dim()
    return isinstance(dims, (list, tuple)) and list(dims) in ([-1], [rank - 1])


def _is_row(weight: fx.Node, x: fx.Node) -> bool:
    return tuple(value_of(weight).shape) == tuple(value_of(x).shape[-1:])


def _sum_behind(x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The operands of the residual add that yields `x`."""
    source = look_through(x, rounding=False)
    if source.target is not _ADD or len(source.args) != 2 or source.kwargs:
        return None
    a, b = source.args
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return None
    if not value_of(a).shape == value_of(b).shape == value_of(x).shape:
        return None
    if not value_of(a).dtype == value_of(b).dtype == value_of(source).dtype:
        return None
    return a, b


def _same_phase(a: fx.Node, b: fx.Node) -> bool:
    return bool(a.meta.get("phase") == b.meta.get("phase"))


@pattern("rms_norm", _MUL, rank=60)
def rms_norm(rewriter: Rewriter, root: fx.Node) -> bool:
    """weight · x / √(mean x² + ε), after x = a + b where there is one."""
    match = next((m for m in (find(p, root) for p in _FORWARD) if m is not None), None)
    if match is None or not _over_last(match["x"], match["dims"]):
        return False
    x, weight, rstd = match["x"], match["weight"], match["rstd"]
    size = value_of(x).shape[-1]
    if match.bound.get("size", size) != size or not _is_row(weight, x):
        return False
    if not rewriter.is_private(match.inner, {root, rstd}):
        return False
    parts = _sum_behind(x)
    if parts is not None and _same_phase(x, root):
        outputs = {0: root, 1: x, 2: rstd}
        if rewriter.fused("add_rms_norm", root, (*parts, weight, match["eps"]), outputs):
            return True
    return rewriter.fused("rms_norm", root, (x, weight, match["eps"]), {0: root, 1: rstd})


def _weight_products(match: Match) -> tuple[fx.Node, fx.Node] | None:
    """grad and weight behind g = grad · weight."""
    g = look_through(match["g"])
    if g.target is not _MUL or g.meta.get("phase") != match.root.meta.get("phase"):
        return None
    for grad, weight in (g.args, g.args[::-1]):
        if isinstance(grad, fx.Node) and isinstance(weight, fx.Node):
            if _is_row(weight, match["x"]):
                return look_through(grad, rounding=False), weight
    return None


def _weight_sum(grad: fx.Node, match: Match) -> fx.Node | None:
    """Σ_rows grad · x · rstd, where the graph has it."""
    rank = value_of(match["x"]).dim()
    normal = Op(_MUL, V("x"), V("rstd"), given=True)
    wanted = Op(aten.sum.dim_IntList, Op(_MUL, V("grad"), normal), list(range(rank - 1)), K("keep"))
    seen = _nearby(grad, 3)
    for node in seen:
        if node.target is aten.sum.dim_IntList:
            found = find(wanted, node)
            if found is not None and all(
                look_through(found[k]) is look_through(v)
                for k, v in (("x", match["x"]), ("rstd", match["rstd"]), ("grad", grad))
            ):
                return node
    return None


def _nearby(node: fx.Node, steps: int) -> list[fx.Node]:
    """Users of a node within some steps."""
    found: dict[fx.Node, None] = {}
    last = [node, look_through(node)]
    for _ in range(steps):
        last = [user for n in last for user in n.users if user not in found]
        found.update(dict.fromkeys(last))
    return list(found)


@pattern("rms_norm", _ADD, rank=20)
def rms_norm_backward(rewriter: Rewriter, root: fx.Node) -> bool:
    """Gradients of x and of the weight; with the residual stream's gradient where it is added."""
    match = next((m for m in (find(p, root) for p in _BACKWARD) if m is not None), None)
    if match is None or not _over_last(match["x"], match["dims"]):
        return False
    if match["size"] != value_of(match["x"]).shape[-1]:
        return False
    factors = _weight_products(match)
    if factors is None or not rewriter.is_private(match.inner, {root}):
        return False
    grad, weight = factors
    total = _weight_sum(grad, match)
    through = match.bound.get("through")
    if through is not None and value_of(through).shape != value_of(root).shape:
        return False
    args = (grad, match["x"], match["rstd"], weight, through)
    outputs = {0: root} if total is None else {0: root, 1: total}
    return rewriter.fused("rms_norm_backward", root, args, outputs)


def _items(node: fx.Node) -> dict[int, fx.Node]:
    return {
        int(u.args[1]): u  # type: ignore[arg-type]
        for u in node.users
        if u.target is operator.getitem
    }


@pattern("layer_norm", aten.native_layer_norm.default, rank=60)
def layer_norm(rewriter: Rewriter, root: fx.Node) -> bool:
    """Layer norm of a sum; one without a residual is left to ATen, whose kernel is as good."""
    x, shape, weight, bias, eps = root.args
    assert isinstance(x, fx.Node) and isinstance(shape, (list, tuple))
    parts = _sum_behind(x)
    if parts is None or len(shape) != 1 or not _same_phase(look_through(x), root):
        return False
    items = _items(root)
    outputs = {0: items.get(0), 1: look_through(x, rounding=False), 2: items.get(1),
               3: items.get(2)}  # fmt: skip
    found = {k: v for k, v in outputs.items() if v is not None}
    if 0 not in found:
        return False
    return rewriter.fused("add_layer_norm", root, (*parts, weight, bias, eps), found)


@pattern("layer_norm", aten.native_layer_norm_backward.default, rank=20)
def layer_norm_backward(rewriter: Rewriter, root: fx.Node) -> bool:
    """Gradients of a layer norm, with that of the residual stream added."""
    grad, x, shape, mean, rstd, weight, _, mask = root.args
    items = _items(root)
    if 0 not in items or not isinstance(shape, (list, tuple)) or len(shape) != 1:
        return False
    if not (isinstance(mask, (list, tuple)) and mask[0]):
        return False
    last, through = items[0], None
    adds = [u for u in rewriter.users(items[0]) if u.target is _ADD and not u.kwargs]
    if len(rewriter.users(items[0])) == 1 and adds:
        (last,) = adds
        others = [a for a in last.args if isinstance(a, fx.Node)]
        others = [a for a in others if look_through(a) is not items[0]]
        if len(others) != 1 or not _addable(others[0], last, items[0]):
            last = items[0]
        else:
            through = others[0]
    outputs = {0: last, **{k: v for k, v in items.items() if k}}
    if through is None:
        return False
    return rewriter.fused(
        "layer_norm_backward", last, (grad, x, mean, rstd, weight, through), outputs
    )


def _addable(other: fx.Node, total: fx.Node, item: fx.Node) -> bool:
    shapes = {tuple(value_of(n).shape) for n in (other, total, item)}
    return len(shapes) == 1 and math.prod(value_of(item).shape) > 0
