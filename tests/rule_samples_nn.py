"""Samples for `tests.bruteforce`: normalisation, attention, losses, embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  (registers ops)
from torch import Tensor
from torch._decomp.decompositions import _fused_rms_norm_backward

import autopar.core.ops
from autopar.core.recurrent import CELLS, RECURRENT, RECURRENT_BACKWARD
from tests import rule_samples_conv, rule_samples_loss
from tests.bruteforce import Sample

aten = torch.ops.aten
autopar = torch.ops.autopar
SAMPLES: list[Sample] = [*rule_samples_conv.SAMPLES, *rule_samples_loss.SAMPLES]

# torch has no CPU kernel for this one op, only the formula
_cpu = torch.library.Library("aten", "IMPL")
_cpu.impl("_fused_rms_norm_backward", _fused_rms_norm_backward, "CPU")


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def _add(name: str, op: Any, inputs: Callable[[], Sequence[Any]], *rest: Any) -> None:
    """A sample of `op(*inputs, *rest)`; inputs that are None stay out of the tensors."""

    def tensors() -> tuple[Tensor, ...]:
        return tuple(x for x in inputs() if x is not None)

    present = [x is not None for x in inputs()]

    def function(*given: Any) -> Any:
        values = iter(given)
        return op(*(next(values) if there else None for there in present), *rest)

    SAMPLES.append(Sample(name, function, tensors))


def _add_call(name: str, function: Callable[..., Any], inputs: Callable[[], Any]) -> None:
    SAMPLES.append(Sample(name, function, inputs))


# --- normalisation ----------------------------------------------------------------------------
def _layer_norm(shape: Sequence[int], parameters: int) -> None:
    size, suffix = list(shape), f"{len(shape)}d_{parameters}p"

    def inputs() -> tuple[Any, ...]:
        made = [_x(*shape) if i < parameters else None for i in range(2)]
        return (_x(4, 8, 8), *made)

    def backward() -> tuple[Tensor, ...]:
        x, weight, bias = inputs()
        _, mean, rstd = aten.native_layer_norm(x, size, weight, bias, 1e-5)
        return tuple(t for t in (_x(4, 8, 8), x, mean, rstd, weight, bias) if t is not None)

    def run(x: Any, *given: Any) -> Any:
        weight, bias = (*given, None, None)[:2]
        return aten.native_layer_norm.default(x, size, weight, bias, 1e-5)

    def run_backward(grad: Any, x: Any, mean: Any, rstd: Any, *given: Any) -> Any:
        weight, bias = (*given, None, None)[:2]
        mask = [True, parameters > 0, parameters > 1]
        return aten.native_layer_norm_backward.default(
            grad, x, size, mean, rstd, weight, bias, mask
        )

    _add_call(f"layer_norm_{suffix}", run, lambda: tuple(t for t in inputs() if t is not None))
    _add_call(f"layer_norm_backward_{suffix}", run_backward, backward)


for _shape in ((8,), (8, 8)):
    for _parameters in (0, 1, 2):
        _layer_norm(_shape, _parameters)


def _layer_norm_stats() -> tuple[Tensor, ...]:
    x, weight = _x(4, 8, 8), _x(8)
    _, mean, rstd = aten.native_layer_norm(x, [8], weight, weight, 1e-5)
    return _x(4, 8, 8), x, mean, rstd, weight


_add_call(
    "layer_norm_backward_frozen",
    lambda g, x, m, s, w: aten.native_layer_norm_backward.default(
        g, x, [8], m, s, w, None, [False, True, False]
    ),
    _layer_norm_stats,
)
_add_call(
    "rms_norm",
    lambda x, w: aten._fused_rms_norm.default(x, [8], w, None),
    lambda: (_x(4, 8, 8), _x(8)),
)
_add_call(
    "rms_norm_plain",
    lambda x: aten._fused_rms_norm.default(x, [8], None, 1e-6),
    lambda: (_x(4, 8, 8),),
)


def _rms_norm_stats() -> tuple[Tensor, ...]:
    x, weight = _x(4, 8, 8), _x(8)
    return _x(4, 8, 8), x, aten._fused_rms_norm(x, [8], weight, 1e-5)[1], weight


for _mask in ([True, True], [True, False], [False, True]):
    _add_call(
        f"rms_norm_backward_{_mask}",
        lambda g, x, s, w, mask=_mask: aten._fused_rms_norm_backward.default(g, x, [8], s, w, mask),
        _rms_norm_stats,
    )
_add_call(
    "group_norm",
    lambda x, w, b: aten.native_group_norm.default(x, w, b, 4, 8, 3, 4, 1e-5),
    lambda: (_x(4, 8, 3), _x(8), _x(8)),
)
_add_call(
    "group_norm_plain",
    lambda x: aten.native_group_norm.default(x, None, None, 4, 8, 9, 8, 1e-5),
    lambda: (_x(4, 8, 3, 3),),
)


def _group_norm_stats() -> tuple[Tensor, ...]:
    x, weight = _x(4, 8, 3), _x(8)
    _, mean, rstd = aten.native_group_norm(x, weight, weight, 4, 8, 3, 4, 1e-5)
    return _x(4, 8, 3), x, mean, rstd, weight


for _mask in ([True, True, True], [True, False, False]):
    _add_call(
        f"group_norm_backward_{sum(_mask)}",
        lambda g, x, m, s, w, mask=_mask: aten.native_group_norm_backward.default(
            g, x, m, s, w, 4, 8, 3, 4, mask
        ),
        _group_norm_stats,
    )


# --- attention --------------------------------------------------------------------------------
_MASKS: dict[str, Callable[[], Tensor | None]] = {
    "": lambda: None,
    "_bool": lambda: torch.rand(4, 1, 8, 8) > 0.4,
    "_float": lambda: _x(8, 8),
    "_keys": lambda: torch.rand(1, 4, 1, 8) > 0.3,
}


def _attention_backward_inputs(
    inputs: Callable[[], tuple[Any, ...]], causal: bool
) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        operands = inputs()
        out, lse = autopar.attention(*operands, causal, 0.5)
        return (torch.randn_like(out), *operands, out, lse)

    return make


for _causal in (False, True):
    for _heads in (4, 2, 1):
        for _kind, _make in _MASKS.items():
            if _kind and _heads != 2:
                continue

            def _qkv(heads: int = _heads, make: Any = _make) -> tuple[Any, ...]:
                return _x(4, 4, 8, 3), _x(4, heads, 8, 3), _x(4, heads, 8, 5), make()

            _name = f"{'causal' if _causal else 'full'}_{_heads}kv{_kind}"
            _add(f"attention_{_name}", autopar.attention.default, _qkv, _causal, 0.5)
            _add(
                f"attention_backward_{_name}",
                autopar.attention_backward.default,
                _attention_backward_inputs(_qkv, _causal),
                _causal,
                0.5,
            )

for _heads, _kv_heads in ((8, 2), (8, 4)):

    def _groups(heads: int = _heads, kv_heads: int = _kv_heads) -> tuple[Any, ...]:
        return _x(2, heads, 4, 3), _x(2, kv_heads, 4, 3), _x(2, kv_heads, 4, 3), None

    _name = f"{_heads}heads_{_kv_heads}kv"
    _add(f"attention_{_name}", autopar.attention.default, _groups, True, 0.5)
    _add(
        f"attention_backward_{_name}",
        autopar.attention_backward.default,
        _attention_backward_inputs(_groups, True),
        True,
        0.5,
    )


# --- losses -----------------------------------------------------------------------------------
def _logits() -> tuple[Tensor, Tensor]:
    target = _ids(16, 4, 4)
    target[0, 1] = target[2, 2] = -100
    return _x(4, 4, 16), target


def _nll_backward() -> tuple[Tensor, ...]:
    logits, target = _logits()
    return _x(4, 4), logits, target, autopar.token_nll(logits, target, -100)[1]


_add("token_nll", autopar.token_nll.default, _logits, -100)
_add("token_nll_backward", autopar.token_nll_backward.default, _nll_backward, -100)


def _nll_loss(reduction: int, weighted: bool) -> None:
    def inputs() -> tuple[Any, ...]:
        log_probs = torch.log_softmax(_x(8, 5), -1)
        weight = torch.rand(5, dtype=torch.float64) if weighted else None
        return log_probs, _ids(5, 8), weight

    def backward() -> tuple[Any, ...]:
        log_probs, target, weight = inputs()
        loss, total = aten.nll_loss_forward(log_probs, target, weight, reduction, 2)
        made = (torch.randn_like(loss), log_probs, target, weight, total)
        return tuple(t for t in made if t is not None)

    def run_backward(grad: Any, x: Any, target: Any, *rest: Any) -> Any:
        weight, total = rest if weighted else (None, *rest)
        return aten.nll_loss_backward.default(grad, x, target, weight, reduction, 2, total)

    name = f"{reduction}{'_weighted' if weighted else ''}"
    _add(f"nll_loss_{name}", aten.nll_loss_forward.default, inputs, reduction, 2)
    _add_call(f"nll_loss_backward_{name}", run_backward, backward)


for _reduction in (0, 1, 2):
    for _weighted in (False, True):
        _nll_loss(_reduction, _weighted)


def _pixels() -> tuple[Tensor, Tensor]:
    return torch.log_softmax(_x(4, 5, 2, 2), 1), _ids(5, 4, 2, 2)


def _pixels_backward() -> tuple[Tensor, ...]:
    x, target = _pixels()
    return (
        torch.randn((), dtype=x.dtype),
        x,
        target,
        aten.nll_loss2d_forward(x, target, None, 1, 2)[1],
    )


_add_call("nll_loss2d", lambda x, t: aten.nll_loss2d_forward.default(x, t, None, 1, 2), _pixels)
_add_call(
    "nll_loss2d_backward",
    lambda g, x, t, n: aten.nll_loss2d_backward.default(g, x, t, None, 1, 2, n),
    _pixels_backward,
)


# --- embeddings -------------------------------------------------------------------------------
_add("embedding", aten.embedding.default, lambda: (_x(16, 8), _ids(16, 4, 4)), 3)
for _padding, _by_frequency in ((-1, False), (3, False), (-1, True), (3, True)):
    _add(
        f"embedding_backward_{_padding}_{_by_frequency}",
        aten.embedding_dense_backward.default,
        lambda: (_x(4, 4, 8), _ids(5, 4, 4)),
        16,
        _padding,
        _by_frequency,
    )


def _bag(mode: int) -> tuple[Tensor, ...]:
    return _x(16, 8), _ids(16, 12), torch.tensor([0, 3, 3, 9])


def _bag_backward(mode: int) -> tuple[Tensor, ...]:
    weight, indices, offsets = _bag(mode)
    _, bag, sizes, argmax = aten._embedding_bag(weight, indices, offsets, False, mode)
    return _x(4, 8), indices, bag, sizes, argmax


for _mode in (0, 1, 2):
    _add(
        f"embedding_bag_{_mode}",
        aten._embedding_bag.default,
        lambda mode=_mode: _bag(mode),
        False,
        _mode,
    )
    _add(
        f"embedding_bag_backward_{_mode}",
        aten._embedding_bag_dense_backward.default,
        lambda mode=_mode: _bag_backward(mode),
        16,
        False,
        _mode,
        None,
    )


# bags of equal length: their offsets are made on the spot
def _offsets() -> Tensor:
    return torch.arange(0, 24, 3)


def _bag_of_each() -> Tensor:
    return torch.searchsorted(_offsets(), torch.arange(24), right=True) - 1


def _equal_backward(mode: int) -> tuple[Tensor, ...]:
    weight, indices = _x(16, 8), _ids(16, 24)
    _, _, sizes, argmax = aten._embedding_bag(weight, indices, _offsets(), False, mode, False, None)
    return _x(8, 8), indices, sizes, argmax


def _equal_bags(mode: int) -> None:
    _add_call(
        f"equal_bags_{mode}",
        lambda w, i: aten._embedding_bag.default(w, i, _offsets(), False, mode),
        lambda: (_x(16, 8), _ids(16, 24)),
    )
    _add_call(
        f"equal_bags_backward_{mode}",
        lambda g, i, sizes, argmax: aten._embedding_bag_dense_backward.default(
            g, i, _bag_of_each(), sizes, argmax, 16, False, mode, None, 3
        ),
        lambda: _equal_backward(mode),
    )


for _mode in (0, 1, 2):
    _equal_bags(_mode)
_add_call(
    "equal_bags_weighted",
    lambda w, i, s: aten._embedding_bag.default(w, i, _offsets(), False, 0, False, s, False, 3),
    lambda: (_x(16, 8), _ids(16, 24), _x(24)),
)
_add_call(
    "equal_bags_weighted_backward",
    lambda g, i, sizes, argmax, s: aten._embedding_bag_dense_backward.default(
        g, i, _bag_of_each(), sizes, argmax, 16, False, 0, s
    ),
    lambda: (*_equal_backward(0), _x(24)),
)
_add_call(
    "equal_bags_by_frequency",
    lambda g, i, sizes, argmax: aten._embedding_bag_dense_backward.default(
        g, i, _bag_of_each(), sizes, argmax, 16, True, 0, None
    ),
    lambda: _equal_backward(0),
)
_add_call(
    "equal_bags_sample_weights",
    lambda g, w, i, bag: aten._embedding_bag_per_sample_weights_backward.default(
        g, w, i, _offsets(), bag, 0
    ),
    lambda: (_x(8, 8), _x(16, 8), _ids(16, 24), _bag_of_each()),
)
_add(
    "embedding_bag_forward_only",
    aten._embedding_bag_forward_only.default,
    lambda: _bag(0),
    False,
    0,
)
_add_call(
    "embedding_bag_sample_weights",
    lambda g, w, i, o, bag: aten._embedding_bag_per_sample_weights_backward.default(
        g, w, i, o, bag, 0
    ),
    lambda: (_x(4, 8), *_bag(0), _bag_backward(0)[2][:0].new_tensor([0] * 3 + [2] * 6 + [3] * 3)),
)


# --- spectra ----------------------------------------------------------------------------------
def _complex() -> tuple[Tensor, ...]:
    return (torch.randn(4, 8, 4, dtype=torch.complex128),)


_add("fft_c2c", aten._fft_c2c.default, _complex, [1, 2], 0, True)
_add("fft_r2c", aten._fft_r2c.default, lambda: (_x(4, 8, 4),), [1], 0, True)
_add("fft_c2r", aten._fft_c2r.default, _complex, [1], 2, 14)


# --- mixture of experts -----------------------------------------------------------------------
def _grouped() -> tuple[Tensor, ...]:
    """Rows, four matrices, and ends of the groups: an empty group, and a row behind the last."""
    return _x(9, 8), _x(4, 8, 8), torch.tensor([2, 2, 5, 8])


_experts = torch.ops.transformers
_add_call("grouped_mm", lambda *given: _experts.grouped_mm_fallback.default(*given), _grouped)
_add_call(
    "grouped_mm_backward",
    lambda *given: _experts.grouped_mm_fallback_backward.default(*given),
    lambda: (*_grouped(), _x(9, 8)),
)


def _native_grouped() -> tuple[Tensor, ...]:
    """Small whole numbers, whose sums bfloat16 has exactly; fake tensors allow no other dtype."""
    x, w = (torch.randint(-1, 2, shape).bfloat16() for shape in ((16, 128), (4, 128, 256)))
    return x, w, torch.tensor([2, 2, 5, 16], dtype=torch.int32)


def _native_gradient() -> tuple[Tensor, ...]:
    x, _, ends = _native_grouped()
    return x.t(), torch.randint(-1, 2, (16, 256)).bfloat16(), ends


_add("native_grouped_mm", aten._grouped_mm.default, _native_grouped)
_add("native_grouped_mm_gradient", aten._grouped_mm.default, _native_gradient)


# --- recurrent layers -------------------------------------------------------------------------
def _recurrent(cell: str, *, projected: bool, bias: bool, varied: bool, reverse: bool) -> None:
    """A layer of 3 steps, 4 samples and 8 units, and its backward."""
    width, rows = 2 if projected else 8, CELLS[cell] * 8

    def tensors() -> list[Tensor | None]:
        return [
            _x(3, 4, 5),
            _x(4, width),
            _x(4, 8) if cell == "lstm" else None,
            _x(rows, 5),
            _x(rows, width),
            _x(rows) if bias else None,
            _x(rows) if bias else None,
            _x(2, 8) if projected else None,
            torch.tensor([3, 1, 2, 3]) if varied else None,
        ]

    def backward() -> list[Tensor | None]:
        return [_x(3, 4, width), _x(4, width), _x(4, 8) if cell == "lstm" else None, *tensors()]

    options = {"projected": projected, "varied": varied, "reverse": reverse}
    name = "_".join([cell, *(word for word, on in options.items() if on)])
    _add(name, lambda *given: RECURRENT(cell, *given), tensors, reverse)
    _add(
        f"{name}_backward",
        lambda g, h, c, *given: RECURRENT_BACKWARD(g, h, c, cell, *given),
        backward,
        reverse,
    )


_add("longest", autopar.longest.default, lambda: [torch.tensor([2, 5, 1, 5])], 5)
_recurrent("lstm", projected=False, bias=True, varied=False, reverse=True)
_recurrent("lstm", projected=True, bias=False, varied=False, reverse=False)
_recurrent("lstm", projected=False, bias=True, varied=True, reverse=True)
_recurrent("gru", projected=False, bias=True, varied=False, reverse=False)
_recurrent("gru", projected=False, bias=False, varied=True, reverse=False)
_recurrent("rnn_tanh", projected=False, bias=True, varied=False, reverse=True)
_recurrent("rnn_relu", projected=False, bias=True, varied=False, reverse=False)
