"""The children of a parallel module: they hold its parameters and modes, and compute nothing.

A step is compiled as a whole, from the model that was given. Calls on a child take effect on that
model where they can (`train`, `eval`, `load_state_dict`), and are refused where they would have no
effect.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _IncompatibleKeys

from autopar.errors import AutoparError
from autopar.runtime.plain_state import has_plain, load_plain
from autopar.runtime.saved_shares import check_own_shares, is_from_a_file

if TYPE_CHECKING:
    from autopar.runtime.state_module import StateModule

__all__ = ["Child", "Mirror", "adopt", "as_in", "modes", "refuse_assigned"]


class Mirror(nn.Module):
    """Stands for a module of the model, of which it has the children's names and the modes."""

    _original: nn.Module

    def _mirror(self, original: nn.Module) -> None:
        # not by nn.Module's own way, which would make it a child
        object.__setattr__(self, "_original", original)

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`; a model's own `train`, as of one that stays frozen, is followed."""
        original: nn.Module = self.__dict__["_original"]
        if type(original).train is nn.Module.train:
            return super().train(mode)
        with _kept(original):
            original.train(mode)
            for mirror, module in _pairs(self, original):
                mirror.training = module.training
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            moved = fn(probe)
            if (moved.dtype, moved.device.type) != (probe.dtype, probe.device.type):
                raise AutoparError(
                    f"{name} would become {moved.dtype} on {moved.device.type}, but the step is "
                    f"compiled for {probe.dtype} on {probe.device.type}: convert or move the model "
                    "before autopar.parallelize (for mixed precision pass precision= to it)"
                )
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AutoparError(
            f"{_told(self)} cannot be pickled, with its process groups and programs: save its "
            "state_dict(), or use autopar.save_checkpoint or autopar.save_safetensors"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_registered(self, name, value):
            return  # as at the end of `module.weight += x`
        for kind in ("_modules", "_parameters"):
            if self.__dict__.get(kind, {}).get(name, value) is not value:
                raise AutoparError(f"{name!r} of {_told(self)} cannot be replaced: {_AHEAD}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "_ddp_params_and_buffers_to_ignore":  # what DDP asks first
            raise AutoparError(
                f"DistributedDataParallel around {_told(self)}, whose gradients are reduced "
                "already: leave it out"
            )
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None or name.startswith("__") or not hasattr(original, name):
                raise
            if original._parameters.get(name) is not None:
                raise AttributeError(
                    f"{name!r} of {_told(self)} is a parameter of a pipeline stage that another "
                    "rank holds: go by named_parameters(), which has those of this rank"
                ) from None
            kind, instead = type(original), "ask the model given to autopar.parallelize"
            if callable(getattr(kind, name, None)):
                instead += (
                    ", once it has the weights: model.load_state_dict(parallel.state_dict()) on "
                    "every rank (in a pipeline, from autopar.save_safetensors). What makes an "
                    "optimizer needs parallel.named_parameters() instead of the model's own"
                )
            raise AttributeError(
                f"{_told(self)} has parameters, buffers and children, and not the {name!r} of "
                f"{kind.__name__}: {instead}"
            ) from None

    def __getitem__(self, index: Any) -> Any:
        """Of a list, dict or sequence of modules, a part of it; of a slice, all of them."""
        parts = self._parts_in_order("subscriptable")
        if isinstance(index, str):
            return self._modules[index]
        return nn.ModuleList(parts[index]) if isinstance(index, slice) else parts[index]

    def __iter__(self) -> Iterator[Any]:
        parts = self._parts_in_order("iterable")
        in_dict = isinstance(self.__dict__["_original"], nn.ModuleDict)
        return iter(list(self._modules) if in_dict else parts)

    def __len__(self) -> int:
        return len(self._parts_in_order("a container"))

    def __bool__(self) -> bool:
        return True  # as a module without a length is

    def _parts_in_order(self, what: str) -> list[Any]:
        original: nn.Module = self.__dict__["_original"]
        if not isinstance(original, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            raise TypeError(f"{_told(self)}, made from {type(original).__name__}, is not {what}")
        return list(self._modules.values())

    def keys(self) -> Any:
        """Of a dict of modules, as `nn.ModuleDict` has them."""
        return self._modules.keys()

    def items(self) -> Any:
        """Of a dict of modules, as `nn.ModuleDict` has them."""
        return self._modules.items()

    def values(self) -> Any:
        """Of a dict of modules, as `nn.ModuleDict` has them."""
        return self._modules.values()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with parameters, buffers and modes of its own; what is compiled is shared."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        original: nn.Module = self.__dict__["_original"]
        memo.update((id(module), module) for module in original.modules())
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


_AHEAD = (
    "the step is compiled from the model as it was given. Change the model before "
    "autopar.parallelize"
)


def _is_registered(mirror: nn.Module, name: str, value: Any) -> bool:
    """True for the very tensor or module that a mirror has under a name."""
    kinds = ("_modules", "_parameters", "_buffers")
    kept = (mirror.__dict__.get(kind, {}) for kind in kinds)
    return value is not None and any(found.get(name) is value for found in kept)


def _told(mirror: Mirror) -> str:
    path = mirror.__dict__.get("_path", "")
    return f"the part {path} of a parallel module" if path else "a parallel module"


class _OfItsKind:
    """`isinstance` and `__class__` are those of the model's part: scripts pick parts by them."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        original = self.__dict__.get("_original")
        return type(self) if original is None else type(original)


class Child(_OfItsKind, Mirror):
    """A part of a parallel module."""

    def __init__(self, original: nn.Module, root: StateModule, path: str) -> None:
        super().__init__()
        self._mirror(original)
        self.__dict__.update(_root=root, _path=path)
        self.training = original.training

    is_set_otherwise = False  # than the model's part, in what a step is traced with

    def _get_name(self) -> str:
        return type(self.__dict__["_original"]).__name__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            AutoparError: always; says what to call.
        """
        raise AutoparError(
            f"{_told(self)} cannot be called alone, as the step is compiled as a whole: call the "
            "whole module, and return from its forward what is needed"
        )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of the whole module, with the names of this part."""
        root: StateModule = self.__dict__["_root"]
        refuse_assigned(assign)
        if is_from_a_file(state_dict.values()):
            check_own_shares(state_dict)
        if not has_plain(state_dict):
            return super().load_state_dict(state_dict, strict)
        prefix = self.__dict__["_path"] + "."
        found = load_plain(root, {prefix + k: v for k, v in state_dict.items()}, strict, prefix)
        return _IncompatibleKeys(*([n.removeprefix(prefix) for n in names] for names in found))

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_registered(self, name, value):
            return
        original = self.__dict__.get("_original")
        own = name in ("training", "grad") or name in self.__dict__
        if original is not None and not own and hasattr(original, name):
            raise AutoparError(f"{name!r} of {_told(self)} cannot be set: {_AHEAD}")
        super().__setattr__(name, value)


class BatchNormChild(Child):
    """A batch norm, whose statistics are reset and averaged as `update_bn` of torch does.

    Attributes:
        momentum: may be set; None averages over all batches since.
    """

    def __init__(self, original: nn.Module, root: StateModule, path: str) -> None:
        super().__init__(original, root, path)
        self.__dict__.update(momentum=original.momentum, _written=set())

    def reset_running_stats(self) -> None:
        """As the model's own does."""
        for name, value in (("running_mean", 0), ("running_var", 1), ("num_batches_tracked", 0)):
            if self._buffers.get(name) is not None:
                getattr(self, name).fill_(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "momentum":
            self.__dict__["momentum"] = value
        else:
            super().__setattr__(name, value)

    @property
    def is_set_otherwise(self) -> bool:  # type: ignore[override]
        """True if momentum is another than that of the model's part."""
        return bool(self.momentum != self.__dict__["_original"].momentum)

    @property
    def traced_momentum(self) -> float:
        """What the step is traced with."""
        return 1.0 if self.momentum is None else float(self.momentum)

    def averaged(self, name: str, value: Tensor) -> Tensor:
        """What a buffer becomes, of which a step made a value: with momentum None, that of a batch.

        The step is traced with a momentum of one then, as the share of a batch depends on a number
        that a trace does not have.
        """
        written: set[str] = self.__dict__["_written"]  # of the buffers, in this step
        if name in written:
            written.clear()
        written.add(name)
        if self.momentum is not None or not name.startswith("running_"):
            return value
        batches = int(self.num_batches_tracked) + ("num_batches_tracked" not in written)
        return torch.lerp(getattr(self, name), value, 1.0 / batches)


def refuse_assigned(assign: bool) -> None:
    """Stop a `load_state_dict` that would put other tensors in the place of parameters.

    Raises:
        AutoparError: it would.
    """
    if assign:
        raise AutoparError(
            "tensors cannot be assigned, as the compiled step and optimizers hold the parameters: "
            "leave assign= out, so that values are copied"
        )


def _no_hook(self: Child, *args: Any, **kwargs: Any) -> Any:
    raise AutoparError(
        f"a hook on {_told(self)} would never be called, as the step is compiled as a whole: "
        "return what it is to see from the model's forward, or register hooks on the whole module"
    )


for _name in (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
):
    setattr(Child, _name, _no_hook)


def adopt(root: StateModule, model: nn.Module) -> None:
    """Give a parallel module a child for every one of the model, in the same mode."""
    made: dict[int, Child] = {}

    def fill(mirror: Mirror, original: nn.Module, path: str) -> None:
        for name, module in original._modules.items():
            if module is None:
                continue
            below = f"{path}.{name}" if path else name
            if id(module) not in made:  # one that is there twice is one child in two places
                normal = isinstance(module, _BatchNorm)
                kind: type[Child] = BatchNormChild if normal else Child
                made[id(module)] = kind(module, root, below)
                fill(made[id(module)], module, below)
            # not by torch's functions, which refuse a name that `ParallelModule` has
            mirror._modules[name] = made[id(module)]

    root._mirror(model)
    fill(root, model, "")
    root.training = model.training
    root.__dict__["_parts"] = tuple((child.__dict__["_path"], child) for child in made.values())


def _pairs(mirror: Mirror, original: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Each module below two that have the same children, and these."""
    others = dict(original.named_modules(remove_duplicate=False))
    for name, module in mirror.named_modules(remove_duplicate=False):
        yield module, others[name]


@contextmanager
def _kept(original: nn.Module) -> Iterator[None]:
    """The modes of a model are as before afterwards."""
    before = [(m, m.training, getattr(m, "momentum", None)) for m in original.modules()]
    try:
        yield
    finally:
        for module, mode, momentum in before:
            module.training = mode
            if isinstance(module, _BatchNorm):
                module.momentum = momentum


@contextmanager
def as_in(root: Mirror) -> Iterator[None]:
    """Inside, the model is in the modes of the parallel module that was made from it."""
    original: nn.Module = root.__dict__["_original"]
    with _kept(original):
        for mirror, module in _pairs(root, original):
            module.training = mirror.training
            if type(mirror) is BatchNormChild:
                cast(_BatchNorm, module).momentum = mirror.traced_momentum
        yield


def modes(root: Mirror) -> tuple[Any, ...]:
    """Names of the parts that are in another mode than the whole is, and momenta that were set."""
    mode, parts = root.training, root.__dict__["_parts"]
    other = tuple(name for name, part in parts if part.training is not mode)
    return other + tuple((name, part.momentum) for name, part in parts if part.is_set_otherwise)
