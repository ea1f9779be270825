"""Replaces calls that `torch.export` cannot capture by ones that it can, while a forward runs.

- ``x.data`` is ``x.detach()``: the same memory without a gradient; ``x.data = y`` writes y there,
  which is then noticed as any other write, and ``x.data = x.data`` does nothing.
- ``bincount(x, minlength=n)`` has as many bins as the largest value asks for; here it has n, and a
  value beyond them is an error when it runs.
- ``ctc_loss`` makes a tensor whose shape depends on the longest target, for its own backward.
- ``lstm``, ``gru`` and ``rnn`` unroll all steps; one op stands for a layer and a direction, or for
  a cell.
- A packed sequence has as many rows as its lengths say: here, those of the padded batch
  (`packed_rows`).
- ``cov`` and ``corrcoef`` compare weights that they were not given.
- ``linear_cross_entropy`` in chunks is an op that computes gradients in the forward; as a product
  and a loss, its classes are split.
- ``masked_select(x, mask)`` is ``x[mask]``: of one mask, all pick as many rows to torch.
- ``combinations`` are picked by a mask to torch, and as many as a length says.
- ``normal`` with numbers and a size is ``randn``, scaled.
- A batch norm without a momentum, whose running mean is that of all batches, makes a Python number
  of how many there were.
- An instance norm writes its running statistics, which export forgets.
- ``fill_diagonal_`` writes through strides; a mask says where.
- A function of TorchScript runs as Python: its ops would seem to pass no gradient on.
- A copy of a tensor by the module `copy` is a clone.
- A module that a forward moves to where it is, `self.to(x.device)`, stays as it is.
- ``inference_mode`` is ``no_grad``, which export keeps.
- A loop over the places where a mask picks anything gets all places (`hit_loops`).
- ``nn.TransformerEncoder`` drops padding where there are no gradients (`padded_layers`).
- Layers of ``nn.Transformer`` look into a mask for whether it is causal, which is a hint alone:
  the mask holds without it, and one that depends on no input is looked at later (`masks`).
- ``equal(x, y)`` is the tensor ``(x == y).all()``, whose truth may be known or asked by a check.
- A list of flags that indexes a tensor is a list of places: how many it picks is known.
- A random number is compared with one that it is sure to be above or below (`sure_draws`).
- Tensors that are made of numbers on the meta device, where these are lost, are made on the CPU
  (`numbers_kept`).

- A derivative that the forward takes is one op (`derivatives`); forward-mode ones are refused.

What may be refused later is noted with its line: torch keeps those of methods called `forward`
alone.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.tracer.derivatives import DERIVING, Derivatives
from autopar.tracer.diagnose import SYMBOLIC, innermost_line
from autopar.tracer.hit_loops import HitLoops
from autopar.tracer.known_values import plainly
from autopar.tracer.numbers_kept import numbers_on_meta, with_places
from autopar.tracer.outside_tensors import OutsideTensors
from autopar.tracer.packed_rows import LAYERS, PackedRows
from autopar.tracer.padded_layers import encoder_forward
from autopar.tracer.randomness import draws
from autopar.tracer.recurrent import recurrent_call
from autopar.tracer.same_masks import SameMasks
from autopar.tracer.spelled_functions import spelled_function
from autopar.tracer.sure_draws import SureDraws

__all__ = ["Spelled"]

_SELECTING = (torch.masked_select, torch.Tensor.masked_select)
_BATCH_NORM = nn.modules.batchnorm._BatchNorm.forward
_APPLY = nn.Module._apply
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_FREEZING = (
    torch.Tensor.requires_grad_,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Spelled(TorchFunctionMode):
    """Says what runs inside in a way that can be captured.

    Args:
        lines: filled with the user's line of each number that depends on values or is drawn, of
            each function that draws random numbers, and of `vmap`, by name.
        looped: filled with the lines of loops over all places of a mask instead of some.
        outside: filled with what is read past the module's parameters.
        graded: the step has gradients.
    """

    def __init__(
        self,
        lines: dict[str, str],
        looped: dict[str, None],
        outside: OutsideTensors,
        graded: bool,
    ) -> None:
        super().__init__()
        self.lines = lines
        self.graded = graded
        self.loops = HitLoops(looped)
        self.same = SameMasks()
        self.derivatives = Derivatives()
        self.packed = PackedRows(self.same)
        self.draws = SureDraws(lines)
        self.outside = outside
        # what `.data` gave, by id, of which tensor, and how often that had been given another
        self.data: dict[int, tuple[Tensor, Tensor, int]] = {}
        self.assigned: list[Tensor] = []  # whose `.data` was, each time
        # what a mask picked, by id: the result, what from, the mask
        self.picked: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __enter__(self) -> Any:
        layers = [(layer, "forward") for layer in (*LAYERS, nn.TransformerEncoder)]
        self.originals = [(*place, getattr(*place)) for place in (*_INNER, *_MODE, *layers)]
        for owner, name, original in self.originals:
            if (inner := _INNER.get((owner, name))) is not None:
                new: Any = partial(inner, self.lines, original)
            elif owner is nn.TransformerEncoder:
                new = encoder_forward(self.graded, original)
            else:
                new = _MODE.get((owner, name)) or self.packed.forward_of(original)
            setattr(owner, name, new)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for owner, name, original in self.originals:
            setattr(owner, name, original)
        super().__exit__(*error)

    def _times_assigned(self, x: Tensor) -> int:
        return sum(x is other for other in self.assigned)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.outside.note((*args, *kwargs.values()))
        if func == _DATA:
            data = args[0].detach()
            self.data[id(data)] = data, args[0], self._times_assigned(args[0])
            return data
        if func == _SET_DATA:
            _, of, before = self.data.get(id(args[1]), (None, None, 0))
            is_own = of is args[0]
            if not is_own or self._times_assigned(args[0]) != before:
                self.assigned.append(args[0])
                _set_data(args[0], args[1], is_own)
            return None  # its own memory stays its own
        if func is torch.Tensor.__deepcopy__:
            return _deep_copy(*args)
        if (made := numbers_on_meta(func, args, kwargs)) is not None:
            return made
        if func in _INDEXING:
            args = (args[0], with_places(*args[:2]), *args[2:])
        if kwargs.get("generator") is not None:
            _refuse_generator(func)
        kwargs = {k: x for k, x in kwargs.items() if k != "generator"}  # it chooses another op
        if (found := spelled_function(func, args, kwargs, self._padded)) is not None:
            return found
        if (found := recurrent_call(func, args, kwargs)) is not None:
            return found
        if func in _FREEZING and isinstance(args[0], nn.Parameter):
            _refuse_freezing(*args, **kwargs)
        self.derivatives.note(func, args)
        if func in DERIVING:
            return self.derivatives.take(func, args, kwargs)
        if (found := self.packed.called(func, args)) is not None:
            return found
        args, kwargs = self.packed.picked(func, (args, kwargs))
        if (places := self.loops.all_places(func, args)) is not None:
            return places
        if func in _SELECTING and len(args) == 2 and not kwargs:
            func, args = torch.Tensor.__getitem__, self._as_index(*args)
        args = self.same.picking(func, args)
        if (sure := self.draws.compared(func, args)) is not None:
            return sure
        result = func(*args, **kwargs)
        self.draws.note(func, args, result)
        self.same.note(func, args, kwargs, result)
        self.loops.note(func, args, kwargs, result)
        self._note(func, result)
        if func is torch.Tensor.__getitem__ and len(args) == 2 and not kwargs:
            source, mask = args
            if isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.shape == source.shape:
                # copies, as either may be written to before the result is read
                self.picked[id(result)] = result, source.clone(), mask.clone()
        return result

    def _as_index(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """What `masked_select` picks from, and the mask over all its dims."""
        shape = torch.broadcast_shapes(x.shape, mask.shape)
        wide = mask.expand(shape)
        self.same.note(torch.Tensor.expand, (mask, shape), {}, wide)
        return x.expand(shape), mask if mask.shape == shape else wide

    def _padded(self, targets: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Targets and lengths for `autopar::ctc`: those that a mask picked out of rows and joined
        stand in rows (N, S) again, each as long as its length says; what is behind is not read.

        Where lengths do not add up to what was picked, they exceed S, which the op refuses.
        """
        if id(targets) not in self.picked:
            return targets, lengths
        _, source, mask = self.picked[id(targets)]
        lengths, width = lengths.to(source.device), source.shape[-1]
        ends = lengths.cumsum(0)
        steps = torch.arange(1, width + 1, device=source.device)
        wanted = (ends - lengths).unsqueeze(1) + steps
        places = torch.searchsorted(mask.flatten().cumsum(0), wanted)
        rows = source.flatten()[places.clamp(max=source.numel() - 1)]
        return rows, torch.where(lengths.sum() == mask.sum(), lengths, width + 1)

    def _note(self, func: Any, result: Any) -> None:
        """Keep the line of what may be refused."""
        name = getattr(func, "__name__", "")
        unknown = [name] if draws(name) else []
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, (Tensor, *SYMBOLIC)):
                unknown += map(str, free_unbacked_symbols(value))
        for each in unknown:
            if each not in self.lines:
                self.lines[each] = innermost_line(traceback.extract_stack())


def _refuse_generator(func: Any) -> NoReturn:
    raise TraceError(
        f"cannot trace {innermost_line(traceback.extract_stack())}\n  "
        f"{getattr(func, '__name__', func)} draws from a generator of its own, which ranks would "
        "not share. Leave out generator=, or pass the drawn numbers in as an input."
    )


def _set_data(x: Tensor, value: Tensor, is_own: bool) -> None:
    if is_own:
        raise TraceError(
            f"cannot trace {innermost_line(traceback.extract_stack())}\n  .data of a tensor "
            "becomes what it was before another assignment, which wrote to that memory here. "
            "Compute with the other values without assigning them."
        )
    if x.shape != value.shape or x.dtype != value.dtype:
        raise TraceError(
            f"cannot trace {innermost_line(traceback.extract_stack())}\n  .data of a tensor of "
            f"shape {tuple(x.shape)} and {x.dtype} becomes one of shape {tuple(value.shape)} and "
            f"{value.dtype}, and a program's tensors keep their sizes. Give the new one a name of "
            "its own, or replace it between steps."
        )
    x.detach().copy_(value)


def _deep_copy(x: Tensor, memo: dict[int, Any]) -> Tensor:
    """Of a leaf, as torch allows; of what is made without one, a leaf too."""
    if id(x) not in memo:
        memo[id(x)] = x.detach().clone()
    copied: Tensor = memo[id(x)]
    return copied


def _applied(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """A function of a module's tensors, which cannot be exchanged here, unless it changes none."""
    if recurse:
        for child in module.children():
            child._apply(fn)
    own = (*module._parameters.values(), *module._buffers.values())
    if all(x is None or _is_kept(fn, x) for x in own):
        return module
    return _APPLY(module, fn, recurse=False)


def _is_kept(fn: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """True for a conversion by a method of torch's, such as `to`, to what a tensor is already."""
    if fn.__module__ != nn.Module.__module__:
        return False  # what it does may depend on more than dtype and device
    with plainly():
        other = torch.ones((), dtype=x.dtype, device=x.device)
        return fn(other) is other and other._version == 0


def _noted_vmap(lines: dict[str, str], original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    lines.setdefault("vmap", innermost_line(traceback.extract_stack()))
    return original(*args, **kw)


def _hinted(_lines: object, _original: object, _mask: Any, hint: Any = None, *_: Any) -> bool:
    return hint is True


def _refuse_derivative(*_args: Any, **_options: Any) -> NoReturn:
    raise TraceError(
        f"cannot trace {innermost_line(traceback.extract_stack())}\n  The forward takes a "
        "derivative, and training would take one of that: autopar traces one backward, and a "
        "parallel module has no second derivative outside of it either. Write the derivative out "
        "with plain ops, as that of a linear layer is a product with its weight."
    )


def _refuse_freezing(parameter: nn.Parameter, value: bool = True, **kwargs: Any) -> None:
    wanted = kwargs.get("requires_grad", value)
    if wanted != parameter.requires_grad:
        raise TraceError(
            f"cannot trace {innermost_line(traceback.extract_stack())}\n  requires_grad of a "
            f"parameter of shape {tuple(parameter.shape)} becomes {wanted} in the forward, and a "
            "plan is for parameters that train throughout. Set it before the model is planned, or "
            "use parameter.detach() in the forward."
        )


def _enter_inference(mode: torch.inference_mode) -> None:
    mode.autopar_before = torch.is_grad_enabled()  # type: ignore[attr-defined]
    torch._C._set_grad_enabled(not mode.mode)


def _leave_inference(mode: torch.inference_mode, *_error: object) -> None:
    torch._C._set_grad_enabled(mode.autopar_before)  # type: ignore[attr-defined]


def _batch_norm(module: nn.modules.batchnorm._BatchNorm, x: Tensor) -> Tensor:
    count, mean, var = module.num_batches_tracked, module.running_mean, module.running_var
    counts = module.training and module.track_running_stats and module.momentum is None
    if not counts or count is None or mean is None or var is None:
        return _BATCH_NORM(module, x)
    module._check_input_dim(x)
    with torch.no_grad():
        count.add_(1)
        others = [dim for dim in range(x.dim()) if dim != 1]
        now_var, now_mean = torch.var_mean(x.to(mean.dtype), others, correction=1)
        share = 1.0 / count.to(mean.dtype)
        mean.add_((now_mean - mean) * share)
        var.add_((now_var - var) * share)
    return F.batch_norm(x, None, None, module.weight, module.bias, True, 0.0, module.eps)


def _as_python(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of TorchScript as the Python that it was made of."""
    made_of = getattr(function, "_torchdynamo_inline", None)
    if made_of is None:
        raise TraceError(
            f"cannot trace {innermost_line(traceback.extract_stack())}\n  The function "
            f"{function.name} is TorchScript, and what it was made from is not known. Call the "
            "Python function instead."
        )
    return made_of(*args, **kwargs)


# methods of torch's -> what is called instead
_MODE: dict[tuple[Any, str], Callable[..., Any]] = {
    (nn.modules.batchnorm._BatchNorm, "forward"): _batch_norm,
    (nn.Module, "_apply"): _applied,
    (torch.jit.ScriptFunction, "__call__"): _as_python,
    (torch.inference_mode, "__enter__"): _enter_inference,
    (torch.inference_mode, "__exit__"): _leave_inference,
}
# torch's functions that are called by their place -> what is called instead
_INNER: dict[tuple[Any, str], Callable[..., Any]] = {
    (torch._functorch.apis, "vmap_impl"): _noted_vmap,
    (torch._functorch.eager_transforms, "_jvp_with_argnums"): _refuse_derivative,
    (torch.nn.modules.transformer, "_detect_is_causal_mask"): _hinted,
}
