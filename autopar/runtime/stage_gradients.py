"""Gradients of a pipeline's stages, for which torch's own norm functions count all stages.

A rank of a pipeline holds only some of the parameters, so `torch.nn.utils.clip_grad_norm_` on what
it holds would clip each stage by a norm of its own. That function takes the norm of each gradient,
stacks these, and takes the norm of the stack: here the last norm is over the stacks of all stages.

All ranks must compute it, but a rank whose stages have none of the parameters in question does not
call it. So the norm of only some of a rank's gradients is refused: only where all of them are given
is it certain that all ranks come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.errors import AutoparError
from autopar.runtime.lost import naming_lost_ranks

__all__ = [
    "Line",
    "StageGradient",
    "StageNorm",
    "count_all_stages",
    "is_of_a_stage",
    "line_of",
    "lines_without_gradients",
    "of_all_stages",
]

_NORMS = {torch.linalg.vector_norm, torch.norm, Tensor.norm, torch._foreach_norm}
_KEEPING = {torch.stack, Tensor.to, Tensor.cpu, Tensor.cuda}  # of norms, what is norms still


_lines: Any = WeakTensorKeyDictionary()  # by parameter of a stage


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """The ranks that hold the stages of one model.

    Attributes:
        group: one rank of each pipeline rank.
        without: pipeline ranks none of whose parameters get gradients, from the first step on.
    """

    group: dist.ProcessGroup
    without: tuple[int, ...] = ()

    def num_gradients(self) -> int:
        """How many gradients of this rank's stages there are now that are counted in a norm."""
        own = [parameter for parameter, line in list(_lines.items()) if line is self]
        return sum(isinstance(parameter.grad, StageGradient) for parameter in own)


class StageGradient(DTensor):
    """The gradient of one stage's parameter, on the mesh of the stage.

    Attributes:
        line: the ranks that hold the other stages.
    """

    line: Line

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = _plain(func, args, kwargs)
        if func not in _NORMS:
            return found
        line = _first(StageGradient, args, kwargs).line
        if isinstance(found, (list, tuple)):
            return [_norm(x, line) for x in found]
        return _norm(found, line) if found.dim() == 0 else found


class StageNorm(Tensor):
    """Norm of one stage's gradient, or several of them stacked: whose norm is that of all stages.

    Attributes:
        line: the ranks that hold the stages.
        count: of how many gradients of this line; a stack holds other tensors' norms too.
    """

    line: Line
    count: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = _plain(func, args, kwargs)
        if func in _KEEPING:
            parts = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, StageNorm)]
            line = parts[0].line
            return _norm(found, line, sum(x.count for x in parts if x.line is line))
        if func not in _NORMS:
            return found
        norms = _first(StageNorm, args, kwargs)
        if norms.dim() != 1:
            return found
        given = {**dict(zip(("self", "ord"), args, strict=False)), **(kwargs or {})}
        order = given.get("ord", given.get("p", 2.0))
        _check_all_are_there(norms)
        return of_all_stages(found, 2.0 if order == "fro" else float(order), norms.line)


def _plain(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """What a function yields without the subclasses here."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


T = TypeVar("T", bound=Tensor)


def _first(kind: type[T], args: Sequence[Any], kwargs: Any) -> T:
    """The first operand of a kind, of which there is one."""
    return next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, kind))


def _norm(value: Tensor, line: Line, count: int = 1) -> StageNorm:
    with naming_lost_ranks("in the norm of a gradient"):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
    found = whole.as_subclass(StageNorm)
    found.line, found.count = line, count
    return found


def _check_all_are_there(norms: StageNorm) -> None:
    """Stop where a norm is of some of this rank's gradients, before it waits for other ranks."""
    given, there = norms.count, norms.line.num_gradients()
    if given < there:
        raise AutoparError(
            f"a norm is asked for of {given} of the {there} gradients that rank {dist.get_rank()} "
            "holds, and it cannot know whether ranks of other pipeline stages hold some of that "
            "set too and take part. Pass all parameters to torch.nn.utils.clip_grad_norm_, or let "
            "every rank call the parallel module's own clip_grad_norm_(max_norm, "
            "parameters=[...]), with an empty list where it has none."
        )


def of_all_stages(norm: Tensor, order: float, line: Line) -> Tensor:
    """The norm over all stages of what each has the norm of. Collective."""
    if line.without:
        raise AutoparError(
            f"no parameter of pipeline ranks {list(line.without)} gets a gradient, so that "
            "torch.nn.utils.clip_grad_norm_ finds no norm there: call the parallel module's own "
            "clip_grad_norm_(max_norm)"
        )
    wide = norm.to(torch.float64)
    infinite = math.isinf(order)
    total = wide if infinite else wide**order
    with naming_lost_ranks("in the norm of all gradients"):
        dist.all_reduce(
            total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=line.group
        )
    return (total if infinite else total ** (1.0 / order)).to(norm.dtype)


def count_all_stages(parameters: Iterable[nn.Parameter], line: Line) -> None:
    """From now on let the gradients of these parameters stand in a norm with other stages'."""

    def mark(parameter: Tensor) -> None:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and not isinstance(gradient, StageGradient):
            # not a new tensor: sums over several backwards go on in this one
            gradient.__class__ = StageGradient
            cast(StageGradient, gradient).line = line

    for parameter in parameters:
        _lines[parameter] = line
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(mark)


def is_of_a_stage(parameter: Tensor) -> bool:
    """True if the parameter is one of a pipeline's, of which this rank has some."""
    return parameter in _lines


def line_of(parameter: Tensor) -> Line | None:
    """The ranks that hold the stages of a parameter's model; None where it is of no pipeline."""
    line: Line | None = _lines.get(parameter)
    return line


def lines_without_gradients() -> list[Line]:
    """Those of whose stages this rank has no gradients at the moment."""
    known = {id(line): line for line in _lines.values()}
    return [line for line in known.values() if not line.num_gradients()]
