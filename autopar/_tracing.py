"""Private names of torch, as in `_compat`, for what runs while a model is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import _functorch
from torch._export.passes import replace_set_grad_with_hop_pass
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot

__all__ = [
    "compile_questions",
    "flex_outputs",
    "grad_modes_in_autocast",
    "has_memory",
    "is_sliced",
    "made_for",
    "makes_mask",
    "mapped_over_scores",
    "node_of",
    "proxies_of",
    "put_proxies",
    "quick_module_lists",
    "replaced_functions",
    "says_nothing",
]

Answer = Callable[[FrameType], bool]
"""Called with the frame of a model's code that asks."""

_PASSED_ON = ("is_compiling", "is_exporting", "wrapper")  # torch's functions that ask each other
# functions of torch that would compile what they call, or refuse to, and call it else
_PLAINLY = ("nonrecursive_disable_wrapper", "invoke_subgraph_placeholder")
_TORCH_DIR = str(Path(torch.__file__).parent)
_answers: list[Answer] = []


@contextmanager
def compile_questions(answer: Answer) -> Iterator[None]:
    """Let `answer` say what `torch.compiler.is_compiling()` and `is_exporting()` do to a model.

    torch's own code hears the truth, which its capture needs.
    """
    questions: tuple[Any, ...] = (torch.compiler.is_compiling, torch.compiler.is_exporting)
    kept = [question.__code__ for question in questions]
    _answers.append(answer)
    # the code of the functions, as models may have imported these themselves
    for question, form in zip(questions, (_is_compiling, _is_exporting), strict=True):
        question.__code__ = form.__code__
    try:
        yield
    finally:
        _answers.pop()
        for question, code in zip(questions, kept, strict=True):
            question.__code__ = code


# These two run with the globals of torch's module.
def _is_compiling() -> bool:
    from autopar import _tracing

    return _tracing._answered(torch.compiler._is_compiling_flag)


def _is_exporting() -> bool:
    from autopar import _tracing

    return _tracing._answered(torch.compiler._is_exporting_flag)


def _answered(truth: bool) -> bool:
    if not truth or not _answers:
        return truth
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in _PASSED_ON:
        frame = frame.f_back
    if frame is not None and frame.f_code.co_name in _PLAINLY:
        return False
    if frame is None or frame.f_code.co_filename.startswith(_TORCH_DIR):
        return truth
    return _answers[-1](frame)


def node_of(tensor: Tensor) -> fx.Node | None:
    """What makes a tensor in the graph that is being traced; None for a constant of it."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot: Any = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def proxies_of(tensors: Iterable[Tensor]) -> list[Any]:
    """What stands for tensors in the graph that is being traced; None for constants of it."""
    mode = get_proxy_mode()
    return [None if mode is None else get_proxy_slot(x, mode.tracer, None) for x in tensors]


def put_proxies(tensors: Iterable[Tensor], proxies: Iterable[Any]) -> None:
    """Let what stood for tensors do so again: an op that returns its operand takes its place."""
    mode = get_proxy_mode()
    for tensor, proxy in zip(tensors, proxies, strict=True):
        if mode is not None and proxy is not None:
            set_proxy_slot(tensor, mode.tracer, proxy)


def has_memory(tensor: Tensor) -> bool:
    """False for what a transform of `torch.func` stands a tensor's part by."""
    return tensor.layout is torch.strided and not _functorch.is_functorch_wrapped_tensor(tensor)


# --- functions of torch that are called by other ones, which run in their place


@contextmanager
def quick_module_lists() -> Iterator[None]:
    """Let an item of an `nn.ModuleList` be found without a look at the others.

    Where modules are shared, an export wraps all children of a list for each look at one, so that a
    loop over indices takes a time that grows with their square.
    """
    kind: Any = nn.ModuleList
    get, length = kind.__getitem__, kind.__len__

    def item(modules: Any, index: Any) -> Any:
        if isinstance(index, slice):
            return get(modules, index)
        return getattr(modules, modules._get_abs_string_index(index))

    kind.__getitem__, kind.__len__ = item, lambda modules: len(vars(modules)["_modules"])
    try:
        yield
    finally:
        kind.__getitem__, kind.__len__ = get, length


@contextmanager
def grad_modes_in_autocast() -> Iterator[None]:
    """Let an export keep where gradients are switched off inside of an autocast region.

    It cuts the graph there. A part that begins inside of a region enters it once more, and torch,
    which looks for the switch at the beginning of a part, would take gradients to stay on.
    """
    switches: Any = replace_set_grad_with_hop_pass
    first = switches.nodes_first

    def first_behind_regions(nodes: Any, condition: Callable[[fx.Node], bool]) -> fx.Node | None:
        entered = torch.amp.autocast_mode._enter_autocast
        found: fx.Node | None = first(nodes, lambda n: n.target is not entered and condition(n))
        return found

    switches.nodes_first = first_behind_regions
    try:
        yield
    finally:
        switches.nodes_first = first


@contextmanager
def replaced_functions(forms: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Calls of torch's functions of these names are calls of `forms`, with the same arguments.

    Their code is replaced, as models may have imported or compiled these functions themselves.
    """
    functions = [getattr(import_module(_PLACES[name]), name) for name in forms]
    kept = [function.__code__ for function in functions]
    _forms.append(forms)
    try:
        for name, function in zip(forms, functions, strict=True):
            function.__code__ = _call_form.__code__.replace(co_name=name)
        yield
    finally:
        _forms.pop()
        for function, code in zip(functions, kept, strict=True):
            function.__code__ = code


_FLEX = "torch.nn.attention.flex_attention"  # imported late: it takes a second
_PLACES = {
    "flex_attention": _FLEX,
    "create_mask": _FLEX,
    "cond": "torch._higher_order_ops.cond",
    "scan": "torch._higher_order_ops.scan",
    "associative_scan": "torch._higher_order_ops.associative_scan",
    "map": "torch._higher_order_ops.map",
}
_forms: list[Mapping[str, Callable[..., Any]]] = []


def _call_form(*args: Any, **kwargs: Any) -> Any:
    """Runs with the globals of torch's module, under the name of the function replaced."""
    import sys

    from autopar import _tracing

    return _tracing._forms[-1][sys._getframe().f_code.co_name](*args, **kwargs)


def flex_outputs(out: Any, lse: Any, most: Any, return_lse: bool, return_aux: Any) -> Any:
    """What `flex_attention` returns on request."""
    from torch.nn.attention.flex_attention import AuxOutput

    if return_aux is None:
        return (out, lse) if return_lse else out
    return out, AuxOutput(
        lse=lse if return_aux.lse else None, max_scores=most if return_aux.max_scores else None
    )


def mapped_over_scores(mod: Any, score: tuple[Tensor, ...], indices: list[Tensor]) -> Tensor:
    """A function of one score, of all of them, as torch maps it."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    with TransformGetItemToIndex():
        found: Tensor = _vmap_for_bhqkv(mod, prefix=(0,) * len(score))(*score, *indices)
    return found


def makes_mask(mod: Any) -> bool:
    """True for a `mask_mod`, False for a `score_mod`."""
    from torch.nn.attention import flex_attention as flex

    return flex._get_mod_type(mod) is flex._ModificationType.MASK_MOD


def says_nothing(block_mask: Any) -> bool:
    """True for the mask that allows everything."""
    from torch.nn.attention import flex_attention as flex

    return block_mask is None or block_mask.mask_mod is flex.noop_mask


def is_sliced(block_mask: Any) -> bool:
    """True where a part of a mask was taken, of which torch knows the blocks alone."""
    from torch.nn.attention import flex_attention as flex

    return block_mask.mask_mod is flex._sliced_mask_mod_error


def made_for(block_mask: Any) -> tuple[int, int] | None:
    """How many queries and keys a mask is for; None for any."""
    from torch.nn.attention import flex_attention as flex

    large = flex._LARGE_SPARSE_BLOCK_SIZE
    if tuple(block_mask.BLOCK_SIZE) == (large, large):
        return None
    return block_mask.shape[-2], block_mask.shape[-1]
