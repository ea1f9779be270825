"""Probes of ops whose seconds go by the bytes that they read and write.

They take turns through as many operands as do not fit a cache, for in a step few ops find their own
there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.core import ops as _ops  # noqa: F401  (registers the autopar ops)
from autopar.cost_model.probe import Probe, normal

__all__ = ["byte_probes", "update_probe"]

aten = torch.ops.aten
autopar_ops = torch.ops.autopar

_COLD_BYTES = 64 << 20  # more than the caches of most CPUs


def byte_probes(
    device: str, dtype: str, group: int, count: int, columns: int, chosen: str
) -> Iterator[Probe]:
    """Ops whose seconds go by the bytes they read and write.

    Args:
        device: "cpu" or "cuda".
        dtype: dtype name.
        group: see `Probe`.
        count: elements, a multiple of `columns`.
        columns: length of the rows; less where there would be but one row.
        chosen: ops that curves are made of, "measured", or of their two common classes, "plain";
            "held out" ones of the same classes; or "all".
    """
    size = count * getattr(torch, dtype).itemsize
    turns = max(1, min(64, _COLD_BYTES // size))
    width = min(count // 2, columns)  # of one row nothing is added up
    made = (torch.rand(count, device=device).to(getattr(torch, dtype)) for _ in range(2))
    x, y = (m.view(-1, width) for m in made)
    calls = [_calls(x.clone(), y.clone(), chosen) for _ in range(turns)]
    for index, (op_class, op, units, _) in enumerate(calls[0]):
        if chosen == "plain" and op_class not in ("memory", "pointwise"):
            continue
        if op_class == "random" and count > 1 << 20:
            continue  # seconds each, where it is slow
        yield Probe(
            op_class, dtype, "bytes", group, units * size, int(units * size),
            _in_turns([call[index][3] for call in calls]), f"{op} {count // width}x{width}",
        )  # fmt: skip


def update_probe(device: str, dtype: str, group: int, count: int) -> Probe:
    """AdamW of `count` elements in one pass and in place, which no op of a program is."""
    size = count * getattr(torch, dtype).itemsize
    turns = max(1, min(16, _COLD_BYTES // (4 * size)))
    update: Any = torch._fused_adamw_

    def made() -> Callable[[], object]:
        parameter, gradient = (
            normal(device, dtype, count),
            normal(device, dtype, count),
        )
        states = torch.zeros_like(parameter), torch.zeros_like(parameter)
        lists = [[x] for x in (parameter, gradient, *states)]
        step = torch.ones((), device=device)
        options: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01}
        options |= {"eps": 1e-8, "amsgrad": False, "maximize": False}
        return lambda: update(*lists, [], [step], **options)

    run = _in_turns([made() for _ in range(turns)])
    return Probe("update", dtype, "bytes", group, 7.0 * size, 7 * size, run, f"adamw {count}")


def _in_turns(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Calls one after the other; a result is let go when the next one is there."""
    turns = itertools.cycle(calls)
    kept: list[object] = [None]

    def run() -> None:
        kept[0] = next(turns)()

    return run


_Call = tuple[str, str, float, Callable[[], object]]  # class, name, bytes in units of `x`, call


def _calls(x: Tensor, y: Tensor, chosen: str) -> list[_Call]:
    """Those that `byte_probes` is asked for."""
    gelu: _Call = ("special_gelu", "gelu", 2.0, lambda: aten.gelu.default(x))
    if chosen == "held out":
        return [*_common_calls(x, y), gelu, *_held_out_calls(x, y)]
    others = _held_out_calls(x, y) if chosen == "all" else []
    return [*_common_calls(x, y), gelu, *_measured_calls(x, y), *others]


def _common_calls(x: Tensor, y: Tensor) -> list[_Call]:
    """Of classes with one op, which curves are made of and checked on."""
    rows, width = x.shape
    seed = torch.zeros((), dtype=torch.int64, device=x.device)
    weight = y[0].contiguous()
    ids = torch.arange(rows, device=x.device).flip(0)
    labels = torch.zeros(rows, dtype=torch.int64, device=x.device)
    nll, lse = autopar_ops.token_nll.default(x, labels, -100)
    return [
        ("lookup", "embedding", 2.0, lambda: aten.embedding.default(x, ids)),
        ("tanh", "tanh", 2.0, lambda: aten.tanh.default(x)),
        ("random", "dropout", 2.0,
         lambda: autopar_ops.dropout.default(x, 0.1, seed, 1, [rows, width], [0, 0])),
        ("loss", "token nll", 1.0, lambda: autopar_ops.token_nll.default(x, labels, -100)),
        ("loss_backward", "token nll backward", 2.0,
         lambda: autopar_ops.token_nll_backward.default(nll, x, labels, lse, -100)),
        ("memory", "clone", 2.0, lambda: aten.clone.default(x)),
        ("norm", "layer norm", 2.0,
         lambda: aten.native_layer_norm.default(x, [width], weight, weight, 1e-5)),
        ("transpose", "transpose", 2.0,
         lambda: aten.clone.default(x.t(), memory_format=torch.contiguous_format)),
    ]  # fmt: skip


def _measured_calls(x: Tensor, y: Tensor) -> list[_Call]:
    """What only curves are made of."""
    width = x.shape[1]
    weight = y[0].contiguous()
    _, mean, rstd = aten.native_layer_norm.default(x, [width], weight, weight, 1e-5)
    backward_norm = [mean, rstd, weight, weight, [True, True, True]]
    soft = aten._softmax.default(x, -1, False)
    gelu_tanh = {"approximate": "tanh"}
    # runs, as masks have: where it is random, a processor takes most of the time to guess wrong
    chosen_half = (torch.arange(width, device=x.device) < width // 2).repeat(x.shape[0], 1)
    return [
        ("pointwise", "add", 3.0, lambda: aten.add.Tensor(x, y)),
        ("pointwise", "mul", 3.0, lambda: aten.mul.Tensor(x, y)),
        ("pointwise", "relu", 2.0, lambda: aten.relu.default(x)),
        ("select", "where", 3.25, lambda: aten.where.self(chosen_half, x, y)),
        ("special", "sin", 2.0, lambda: aten.sin.default(x)),
        ("special", "erf", 2.0, lambda: aten.erf.default(x)),
        ("special_exp", "exp", 2.0, lambda: aten.exp.default(x)),
        ("special_exp", "log", 2.0, lambda: aten.log.default(x)),
        ("special_sigmoid", "silu", 2.0, lambda: aten.silu.default(x)),
        ("special_sigmoid", "silu backward", 3.0, lambda: aten.silu_backward.default(x, y)),
        ("special_gelu", "gelu backward", 3.0, lambda: aten.gelu_backward.default(x, y)),
        ("special_gelu_tanh", "gelu tanh", 2.0, lambda: aten.gelu.default(x, **gelu_tanh)),
        ("special_gelu_tanh_backward", "gelu tanh backward", 3.0,
         lambda: aten.gelu_backward.default(x, y, **gelu_tanh)),
        ("reduction", "sum rows", 1.0, lambda: aten.sum.dim_IntList(x, [1])),
        ("reduction_leading", "sum columns", 1.0, lambda: aten.sum.dim_IntList(x, [0])),
        ("softmax", "softmax", 2.0, lambda: aten._softmax.default(x, -1, False)),
        ("softmax_backward", "softmax backward", 3.0,
         lambda: aten._softmax_backward_data.default(x, soft, -1, x.dtype)),
        ("norm_backward", "layer norm backward", 3.0,
         lambda: aten.native_layer_norm_backward.default(y, x, [width], *backward_norm)),
    ]  # fmt: skip


def _held_out_calls(x: Tensor, y: Tensor) -> list[_Call]:
    """What curves are only checked on."""
    return [
        ("pointwise", "sub", 3.0, lambda: aten.sub.Tensor(x, y)),
        ("pointwise", "div", 3.0, lambda: aten.div.Tensor(x, y)),
        ("special_sigmoid", "sigmoid", 2.0, lambda: aten.sigmoid.default(x)),
        ("reduction", "mean rows", 1.0, lambda: aten.mean.dim(x, [1])),
        ("softmax", "log_softmax", 2.0, lambda: aten._log_softmax.default(x, -1, False)),
    ]
