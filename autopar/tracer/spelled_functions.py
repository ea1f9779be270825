"""Functions of torch that `torch.export` cannot capture, in plain ones (`spelled`)."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from itertools import combinations, combinations_with_replacement, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.core.ops import ops
from autopar.tracer.diagnose import innermost_line

__all__ = ["spelled_function"]

_LINEAR_CROSS_ENTROPY: Any = getattr(F, "linear_cross_entropy", False)  # not in every version
_IS_BOOL = re.compile(r"\bis (not )?(True|False)\b")
_Padded = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def spelled_function(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], padded: _Padded
) -> Any:
    """What a function returns, computed in another way; None for a function that is captured.

    Args:
        func, args, kwargs: the call.
        padded: targets of `ctc_loss` and their lengths, with each sample's in a row of its own.
    """
    if func in (torch.bincount, torch.Tensor.bincount):
        return _bincount(func, *args, **kwargs)
    if func is _LINEAR_CROSS_ENTROPY:
        return func(*args, **{**kwargs, "options": None})
    if func is torch.combinations:
        return _combinations(*args, **kwargs)
    if func in (torch.cov, torch.Tensor.cov):
        return _cov(*args, **kwargs)
    if func in (torch.corrcoef, torch.Tensor.corrcoef):
        return _corrcoef(*args)
    if func is torch.normal and (len(args) == 3 or "size" in kwargs):
        return _normal(*args, **kwargs)
    if func in (F.ctc_loss, torch.ctc_loss):
        return _ctc_loss(padded, *args, **kwargs)
    if func is F.instance_norm:
        return _instance_norm(*args, **kwargs)
    if func is torch.instance_norm:
        x, weight, bias, mean, var, *rest = args
        return _instance_norm(x, mean, var, weight, bias, *rest[:3])
    if func is torch.Tensor.fill_diagonal_:
        return _fill_diagonal(*args, **kwargs)
    if func in (torch.equal, torch.Tensor.equal):
        return _equal(*args, **kwargs)
    return None


def _bincount(func: Any, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if not minlength:
        found: Tensor = func(x, weights)
        return found
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.to(torch.float64)
    return weights.new_zeros(minlength).index_add(0, x.to(torch.int64), weights)


def _fill_diagonal(x: Tensor, value: Any, wrap: bool = False) -> Tensor:
    """Of a matrix; a tall one has it again below a row left out, if it wraps."""
    if x.dim() != 2:
        return x.fill_diagonal_(value, wrap)
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    rows = rows % (x.shape[1] + 1) if wrap else rows
    return x.masked_fill_(rows.unsqueeze(1) == columns, value)


def _equal(x: Tensor, other: Tensor) -> Tensor | bool:
    """A truth that may be asked for, or known; the function itself has to have it at once."""
    if _IS_BOOL.search(innermost_line(traceback.extract_stack())):
        return torch.equal(x, other)  # no tensor is True
    return x.shape == other.shape and (x == other).all()


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """As many as the length of x says, by their places; a mask would pick them."""
    x = input  # as torch names it
    if x.dim() != 1:
        return torch.combinations(x, r, with_replacement)
    choose = combinations_with_replacement if with_replacement else combinations
    places = list(choose(range(x.shape[0]), r))
    if not places or not r:
        return x.new_empty(0 if not r else (0, r))
    return x[torch.tensor(places, device=x.device)]


def _cov(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Covariances of the rows of x (variables, observations), or the variance of one row."""
    x, kwargs = input, {k: v for k, v in kwargs.items() if v is not None}
    if x.dim() == 1 and not args and not kwargs.keys() - {"correction"}:
        return _cov(x.unsqueeze(0), **kwargs).squeeze()
    if x.dim() != 2 or args or kwargs.keys() - {"correction"}:
        return torch.cov(x, *args, **kwargs)
    centred = x - x.mean(1, keepdim=True)
    divisor = max(0, x.shape[1] - kwargs.get("correction", 1))
    return centred @ centred.mH / divisor if divisor else torch.cov(x, **kwargs)


def _corrcoef(x: Tensor) -> Tensor:
    """Correlations of the rows of x (variables, observations)."""
    covariance = _cov(x)
    if covariance.dim() != 2:
        return torch.corrcoef(x)
    deviation = covariance.diagonal().real.sqrt()
    found = covariance / deviation.unsqueeze(1) / deviation.unsqueeze(0)
    if not found.is_complex():
        return found.clamp(-1, 1)
    return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))


def _normal(
    mean: float, std: float, size: Any, *, generator: None = None, **options: Any
) -> Tensor:
    return torch.randn(size, **options) * std + mean


def _instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if running_mean is None or running_var is None or not use_input_stats:
        stats = (running_mean, running_var)
        return F.instance_norm(x, *stats, weight, bias, use_input_stats, momentum, eps)
    with torch.no_grad():
        inside = list(range(2, x.dim()))
        var, mean = torch.var_mean(x.to(running_mean.dtype), inside, correction=1)
        running_mean.add_((mean.mean(0) - running_mean) * momentum)
        running_var.add_((var.mean(0) - running_var) * momentum)
    return F.instance_norm(x, None, None, weight, bias, True, momentum, eps)


def _ctc_loss(
    padded: _Padded,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Of (T, N, C), or of one sample (T, C); a mean is over samples, each over its length."""
    steps, long = (_lengths(x, log_probs.device) for x in (input_lengths, target_lengths))
    batch = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    targets, checked = padded(targets, long)
    losses = ops.ctc(batch, targets, steps, checked, blank, zero_infinity)
    if reduction in ("mean", 1):
        return (losses / long.clamp(min=1).to(losses)).mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses if log_probs.dim() == 3 else losses.squeeze(0)


def _lengths(given: Any, device: torch.device) -> Tensor:
    """Lengths as a tensor; of numbers, made from runs, which the meta device keeps."""
    if isinstance(given, Tensor):
        return given.reshape(-1)
    runs = [(value, len(list(same))) for value, same in groupby(given)]
    return torch.cat([torch.full((count,), value, device=device) for value, count in runs])
