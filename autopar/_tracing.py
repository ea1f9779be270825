"""Private names of torch, as in `_compat`, for what runs while a model is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import _functorch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

__all__ = ["compile_questions", "has_memory", "node_of"]

Answer = Callable[[FrameType], bool]
"""Called with the frame of a model's code that asks."""

_PASSED_ON = ("is_compiling", "is_exporting", "wrapper")  # torch's functions that ask each other
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


def has_memory(tensor: Tensor) -> bool:
    """False for what a transform of `torch.func` stands a tensor's part by."""
    return tensor.layout is torch.strided and not _functorch.is_functorch_wrapped_tensor(tensor)
