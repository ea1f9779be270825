"""Samples for `tests.bruteforce`: convolution, pooling, resampling and padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.bruteforce import Sample

aten = torch.ops.aten
SAMPLES: list[Sample] = []


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _add(name: str, op: Any, inputs: Callable[[], tuple[Tensor, ...]], *rest: Any) -> None:
    SAMPLES.append(Sample(name, lambda *given: op(*given, *rest), inputs))


def _line() -> tuple[Tensor]:
    return (_x(4, 4, 6),)


def _plane() -> tuple[Tensor]:
    return (_x(4, 4, 6, 6),)


def _cube() -> tuple[Tensor]:
    return (_x(4, 4, 4, 4, 4),)


_INPUTS: dict[int, Callable[[], tuple[Tensor]]] = {1: _line, 2: _plane, 3: _cube}


def _like_output(op: Any, inputs: Callable[[], tuple[Tensor]], *args: Any) -> Any:
    """Inputs of a backward op: (a gradient of `op`'s output, its input, its other outputs)."""

    def make() -> tuple[Tensor, ...]:
        (x,) = inputs()
        result = op(x, *args)
        out, *others = result if isinstance(result, tuple) else (result,)
        return torch.randn_like(out), x, *others

    return make


# --- convolution ------------------------------------------------------------------------------
def _convolution(transposed: bool, groups: int, bias: bool) -> None:
    window = [[1, 1], [1, 1], [1, 1], transposed, [0, 0], groups]

    def inputs() -> tuple[Tensor, ...]:
        return _x(4, 8, 5, 5), _x(8, 8 // groups, 3, 3), _x(8)

    def run(x: Any, weight: Any, *rest: Any) -> Any:
        return aten.convolution.default(x, weight, rest[0] if rest else None, *window)

    def backward(grad: Any, x: Any, weight: Any) -> Any:
        sizes = [8] if bias else None
        return aten.convolution_backward.default(
            grad, x, weight, sizes, *window, [bias, True, bias]
        )

    name = f"{'transposed_' if transposed else ''}{groups}g_{int(bias)}b"
    _add(f"convolution_{name}", run, lambda: inputs()[: 3 if bias else 2])
    _add(f"convolution_backward_{name}", backward, lambda: (_x(4, 8, 5, 5), *inputs()[:2]))


for _transposed in (False, True):
    for _groups in (1, 2, 8):
        for _bias in (False, True):
            _convolution(_transposed, _groups, _bias)


# --- pooling ----------------------------------------------------------------------------------
_add("avg_pool1d", aten.avg_pool1d.default, _line, [2])
for _dims in (2, 3):
    _two, _zero, _one = [2] * _dims, [0] * _dims, [1] * _dims
    _max = getattr(aten, f"max_pool{_dims}d_with_indices")
    _max_backward = getattr(aten, f"max_pool{_dims}d_with_indices_backward").default
    _add(f"max_pool{_dims}d", _max.default, _INPUTS[_dims], _two, _two)
    _add(
        f"max_pool{_dims}d_backward",
        lambda g, x, i, op=_max_backward, two=_two, zero=_zero, one=_one: op(
            g, x, two, two, zero, one, False, i
        ),
        _like_output(_max, _INPUTS[_dims], _two, _two),
    )
    _avg = getattr(aten, f"avg_pool{_dims}d")
    _avg_backward = getattr(aten, f"avg_pool{_dims}d_backward").default
    _add(f"avg_pool{_dims}d", _avg.default, _INPUTS[_dims], _two)
    _add(
        f"avg_pool{_dims}d_backward",
        _avg_backward,
        _like_output(_avg, _INPUTS[_dims], _two),
        *(_two, _two, _zero, False, True, None),
    )
    _size = [3, 2, 2][:_dims]
    for _name in (f"_adaptive_avg_pool{_dims}d", f"adaptive_max_pool{_dims}d"):
        _op = getattr(aten, _name)
        _add(_name, _op.default, _INPUTS[_dims], _size)
        _add(
            f"{_name}_backward",
            getattr(aten, f"{_name}_backward").default,
            _like_output(_op, _INPUTS[_dims], _size),
        )

# --- resampling -------------------------------------------------------------------------------
_RESAMPLE: dict[str, tuple[bool, ...]] = {  # and `align_corners`, where the op has it
    "upsample_nearest1d": (),
    "upsample_nearest2d": (),
    "upsample_nearest3d": (),
    "upsample_linear1d": (False,),
    "upsample_bilinear2d": (True,),
    "upsample_bicubic2d": (False,),
    "upsample_trilinear3d": (False,),
    "_upsample_nearest_exact1d": (),
    "_upsample_nearest_exact2d": (),
    "_upsample_nearest_exact3d": (),
    "_upsample_bilinear2d_aa": (False,),
    "_upsample_bicubic2d_aa": (False,),
}
for _name, _corners in _RESAMPLE.items():
    _dims = next(int(d) for d in "123" if f"{d}d" in _name)
    _op, _size = getattr(aten, _name), [9, 8, 6][:_dims]
    _add(_name, _op.default, _INPUTS[_dims], _size, *_corners)
    _add(f"{_name}_vec", _op.vec, _INPUTS[_dims], None, *_corners, [2.0, 1.5, 1.5][:_dims])
    _source = list(_INPUTS[_dims]()[0].shape)
    _add(
        f"{_name}_backward",
        getattr(aten, f"{_name}_backward").default,
        lambda size=tuple(_size): (_x(4, 4, *size),),
        *(_size, _source, *_corners),
    )
_add("pixel_shuffle", aten.pixel_shuffle.default, lambda: (_x(4, 16, 3, 3),), 2)
_add("pixel_unshuffle", aten.pixel_unshuffle.default, _plane, 2)
_add("channel_shuffle", aten.channel_shuffle.default, lambda: (_x(4, 8, 3, 3),), 2)

# --- padding ----------------------------------------------------------------------------------
for _kind in ("reflection", "replication"):
    for _dims in (1, 2, 3):
        _name, _pad = f"{_kind}_pad{_dims}d", [1, 2, 1, 0, 2, 1][: 2 * _dims]
        _op = getattr(aten, _name)
        _add(_name, _op.default, _INPUTS[_dims], _pad)
        _add(
            f"{_name}_backward",
            getattr(aten, f"{_name}_backward").default,
            _like_output(_op, _INPUTS[_dims], _pad),
            _pad,
        )


# --- sampling ---------------------------------------------------------------------------------
def _grid(dims: int) -> tuple[Tensor, ...]:
    points = torch.rand(4, *[3] * dims, dims, dtype=torch.float64) * 2 - 1
    return *_INPUTS[dims](), points


for _dims in (2, 3):
    _name = f"grid_sampler_{_dims}d"
    _add(_name, getattr(aten, _name).default, lambda dims=_dims: _grid(dims), 0, 0, False)
    for _keeps in (True, False):
        _add(
            f"{_name}_backward_{_keeps}",
            getattr(aten, f"{_name}_backward").default,
            lambda dims=_dims: (_x(4, 4, *[3] * dims), *_grid(dims)),
            *(0, 0, False, [_keeps, True]),
        )

for _dims in (2, 3):
    _add(
        f"max_unpool{_dims}d",
        getattr(aten, f"max_unpool{_dims}d").default,
        lambda dims=_dims: getattr(F, f"max_pool{dims}d")(
            _x(4, 4, *[4] * dims), 2, return_indices=True
        ),
        *([4] * _dims,) if _dims == 2 else ([4] * 3, [2] * 3, [0] * 3),
    )
_add("col2im", aten.col2im.default, lambda: (_x(4, 16, 9),), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])
