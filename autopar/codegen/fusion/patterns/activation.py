"""Gated activations, and bias + activation + dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.codegen.fusion.matching import K, Match, Op, V, find, look_through
from autopar.codegen.fusion.registry import pattern
from autopar.codegen.fusion.rewriter import Rewriter
from autopar.core.graph import value_of

aten = torch.ops.aten
_MUL, _ADD = aten.mul.Tensor, aten.add.Tensor
_DROPOUT = torch.ops.autopar.dropout.default
_RANDOM = (K("p"), V("seed"), K("salt"), K("global_shape"), K("offset"))
_NO_DROPOUT: tuple[Any, ...] = (0.0, None, 0, [], [])
_TIMES, _PLUS = (_MUL, aten.mul.Scalar), (_ADD, aten.add.Scalar)
_ROOT_2_OVER_PI = 0.7978845608028654

_HALF = Op(_TIMES, V("z"), 0.5)
_TANH = Op(
    aten.tanh.default,
    Op(_TIMES,
       Op(_ADD, V("z"), Op(_TIMES, Op(aten.pow.Tensor_Scalar, V("z"), 3), 0.044715)),
       _ROOT_2_OVER_PI),
    name="tanh",
)  # fmt: skip
_GELU_TANH = Op(_MUL, _HALF, Op(_PLUS, _TANH, 1.0))
# what autograd makes of it; the forward's values are given
_INNER = Op(
    _TIMES,
    Op(aten.tanh_backward.default,
       Op(_MUL, V("grad"), Op(_TIMES, V("z"), 0.5, given=True)), V("tanh")),
    _ROOT_2_OVER_PI,
)  # fmt: skip
_CUBE = Op(
    _MUL,
    Op(_TIMES, _INNER, 0.044715),
    Op(_TIMES, Op(aten.pow.Tensor_Scalar, V("z"), 2), 3.0),
)
_STRAIGHT = Op(_TIMES, Op(_MUL, V("grad"), Op(_PLUS, V("tanh"), 1.0, given=True)), 0.5)
_GELU_TANH_BACKWARD = [
    Op(_ADD, Op(_ADD, _INNER, _CUBE), _STRAIGHT),
    Op(_ADD, _INNER, Op(_ADD, _CUBE, _STRAIGHT)),
    Op(_ADD, Op(_ADD, _INNER, _STRAIGHT), _CUBE),
]


def _gelu(node: fx.Node) -> str:
    return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"


def activation_of(node: fx.Node) -> tuple[str, fx.Node] | None:
    """Name and operand of the activation that a node computes."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is aten.silu.default:
        return "silu", source
    if node.target is aten.relu.default:
        return "relu", source
    if node.target is aten.gelu.default:
        return _gelu(node), source
    match = find(_GELU_TANH, node) if node.target is _MUL else None
    return None if match is None else ("gelu_tanh", match["z"])


@pattern("gated", aten.silu_backward.default, aten.gelu_backward.default, rank=20)
def gated_backward(rewriter: Rewriter, root: fx.Node) -> bool:
    """Gradients of gate and up from grad · up and grad · act(gate)."""
    product, gate = root.args[0], root.args[1]
    assert isinstance(product, fx.Node) and isinstance(gate, fx.Node)
    act = "silu" if root.target is aten.silu_backward.default else _gelu(root)
    factors = find(Op(_MUL, V("grad"), V("up")), look_through(product))
    if factors is None or not rewriter.is_private({factors.root, root}, {root}):
        return False
    for grad, up in ((factors["grad"], factors["up"]), (factors["up"], factors["grad"])):
        other = _gradient_of_up(rewriter, grad, gate, act)
        shapes = {tuple(value_of(n).shape) for n in (grad, up, gate)}
        if (
            other is not None
            and len(shapes) == 1
            and other.meta.get("phase") == root.meta.get("phase")
        ):
            args = (grad, gate, up, act)
            return rewriter.fused("gated_backward", root, args, {0: root, 1: other})
    return False


def _gradient_of_up(rewriter: Rewriter, grad: fx.Node, gate: fx.Node, act: str) -> fx.Node | None:
    """The product of `grad` and act(gate)."""
    for user in rewriter.users(look_through(grad)):
        if user.target is not _MUL or user.kwargs:
            continue
        for arg in user.args:
            known = activation_of(look_through(arg)) if isinstance(arg, fx.Node) else None
            if known and known[0] == act and look_through(known[1]) is look_through(gate):
                return user
    return None


@pattern("gated", _MUL, rank=60)
def gated(rewriter: Rewriter, root: fx.Node) -> bool:
    """act(gate) · up."""
    if root.kwargs or len(root.args) != 2:
        return False
    for first, up in (root.args, root.args[::-1]):
        if not (isinstance(first, fx.Node) and isinstance(up, fx.Node)):
            return False
        inner = look_through(first)
        if inner.target is _MUL:
            continue  # the spelled-out GELU is a product too, and is replaced before
        known = activation_of(inner)
        if known is None or inner.meta.get("phase") != root.meta.get("phase"):
            continue
        act, gate = known
        shapes = {tuple(value_of(n).shape) for n in (gate, up, root)}
        if len(shapes) == 1 and rewriter.is_private({inner, root}, {root}):
            return rewriter.fused("gated", root, (gate, up, act), {0: root})
    return False


def _biased(z: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """x and the bias behind z = x + bias."""
    source = look_through(z, rounding=False)
    match = find(Op(_ADD, V("a"), V("b")), source)
    if match is not None:
        for x, bias in ((match["a"], match["b"]), (match["b"], match["a"])):
            if value_of(bias).dim() == 1 and value_of(x).shape == value_of(source).shape:
                if value_of(bias).shape[0] == value_of(x).shape[-1] and value_of(x).dim() > 1:
                    return x, bias
    return z, None


def _dropped(rewriter: Rewriter, node: fx.Node) -> tuple[fx.Node, tuple[Any, ...]]:
    """The dropout that alone reads a node, and its numbers."""
    users = rewriter.users(node)
    if len(users) == 1:
        (user,) = users
        match = find(Op(_DROPOUT, V("x"), *_RANDOM), user)
        if match is not None and user.meta.get("phase") == node.meta.get("phase"):
            return user, _numbers(match)
    return node, _NO_DROPOUT


def _numbers(match: Match) -> tuple[Any, ...]:
    return tuple(match[k] for k in ("p", "seed", "salt", "global_shape", "offset"))


@pattern("bias_act", aten.gelu.default, aten.relu.default, _MUL, rank=65)
def bias_act(rewriter: Rewriter, root: fx.Node) -> bool:
    """dropout(act(x + bias)); a lone GELU or ReLU is left to ATen, a spelled-out GELU is not."""
    known = activation_of(root)
    if known is None:
        return False
    act, z = known
    x, bias = _biased(z)
    spelled = root.target is _MUL
    last, random = _dropped(rewriter, root)
    if bias is None and last is root and not spelled:
        return False
    if spelled:
        match = find(_GELU_TANH, root)
        assert match is not None
        if not rewriter.is_private(match.inner, {root}):
            return False
    return rewriter.fused("bias_act", last, (x, bias, act, *random), {0: last})


@pattern(
    "bias_act",
    aten.gelu_backward.default,
    aten.threshold_backward.default,
    _ADD,
    rank=30,
)
def bias_act_backward(rewriter: Rewriter, root: fx.Node) -> bool:
    """Gradient of x + bias from that of dropout(act(x + bias))."""
    spelled = root.target is _ADD
    if spelled:
        match = next((m for m in (find(p, root) for p in _GELU_TANH_BACKWARD) if m), None)
        if match is None or not rewriter.is_private(match.inner, {root}):
            return False
        act, grad, z = "gelu_tanh", match["grad"], match["z"]
    else:
        grad, z = root.args[0], root.args[1]
        assert isinstance(grad, fx.Node) and isinstance(z, fx.Node)
        act = _gelu(root) if root.target is aten.gelu_backward.default else "relu"
        if act == "relu":
            known = activation_of(look_through(z)) if root.args[2] == 0 else None
            if known is None or known[0] != "relu":
                return False
            z = known[1]
    x, bias = _biased(z)
    dropped = find(Op(_DROPOUT, V("x"), *_RANDOM), look_through(grad))
    random = _NO_DROPOUT
    if dropped is not None and rewriter.is_private({dropped.root, root}, {root}):
        if dropped.root.meta.get("phase") == root.meta.get("phase"):
            grad, random = dropped["x"], _numbers(dropped)
    if bias is None and random is _NO_DROPOUT and not spelled:
        return False
    return rewriter.fused("bias_act_backward", root, (grad, x, bias, act, *random), {0: root})
