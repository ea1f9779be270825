"""The module as `torch.export` sees it: inputs by name, outputs as flat leaves."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar._compat import register_dataclasses
from autopar._tracing import grad_modes_in_autocast, quick_module_lists
from autopar.core.eager_calls import EagerCall
from autopar.core.graph import KnownValue
from autopar.errors import TraceError
from autopar.tracer.caches import emptying_caches
from autopar.tracer.calls import check_loss_fn, explain_call
from autopar.tracer.checks import Answers, drop_assertions, passing_checks, warn_of
from autopar.tracer.containers import same_containers
from autopar.tracer.diagnose import (
    NOWHERE,
    SYMBOLIC,
    asks_for_values,
    explain_failure,
    place_of,
    refuse_data_dependent,
    refuse_mixed,
    refuse_packed,
    refuse_vmap,
)
from autopar.tracer.eager_answers import telling_eager, warn_of_compiled
from autopar.tracer.eager_functions import EagerFunctions
from autopar.tracer.effects import changes_in_place, know_all_readers
from autopar.tracer.frozen_values import Frozen, putting_back, warn_of_frozen
from autopar.tracer.higher_order import HigherOrder, warn_of_both
from autopar.tracer.known_values import KnownValues, Sources, warn_of_known
from autopar.tracer.layouts import refuse_given, refuse_made
from autopar.tracer.left_out import leave_out, warn_of_left_out
from autopar.tracer.no_grad import keep_written_gradients, mark_no_grad, restore_lines
from autopar.tracer.outside_tensors import OutsideTensors, say_own
from autopar.tracer.packed_rows import PackedRows
from autopar.tracer.picked_places import say_picked
from autopar.tracer.precision import call_in
from autopar.tracer.shared_buffers import read_shared_once
from autopar.tracer.skipped_calls import Unlike
from autopar.tracer.spelled import Spelled

__all__ = ["PREFIX", "Capture", "export", "normalize_inputs"]


def normalize_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` of example inputs given as a tuple, a dict, or a single tensor."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Sequence):
        return tuple(example_inputs), {}
    raise TraceError(
        f"example_inputs is a {type(example_inputs).__name__}; pass a tuple of positional "
        "arguments or a dict of keyword arguments, with the global batch"
    )


PREFIX = "wrapped."
_CONSTANTS = (str, bytes, complex, torch.dtype, Enum)


class Notes:
    """What a capture learns on the side."""

    out_spec: Any = None
    constants: Mapping[int, Any] = MappingProxyType({})
    frozen: Frozen
    outside: OutsideTensors
    numbers: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    both_sides: tuple[str, ...] = ()
    eager_calls: tuple[EagerCall, ...] = ()
    packed: PackedRows | None = None

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}
        self.frozen = Frozen()
        self.outside = OutsideTensors()
        self.known: KnownValues | None = None

    def known_values(self) -> tuple[KnownValue, ...]:
        """Of inputs and buffers, what the capture is for."""
        return () if self.known is None else self.known.values()


class Capture(nn.Module):
    """The model, then the loss function if there is one, with the output flattened to leaves.

    Leaves that are neither tensors nor plain constants (a key-value cache) become None: they
    cannot leave a compiled step. The structure of the output is kept on the side, and so are
    constants that torch.export knows nothing of.
    """

    def __init__(
        self,
        wrapped: nn.Module,
        loss_fn: Callable[..., Any] | None,
        dtype: torch.dtype | None = None,
        has_loss: bool = False,
        graded: bool = True,
        cut: Callable[[Any], None] = lambda exported: None,
        settle: Callable[[Any], None] = lambda exported: None,
    ) -> None:
        super().__init__()
        self.wrapped = wrapped
        # a name of its own: a loss with class weights is a module with buffers
        self.autopar_loss_fn = loss_fn
        self.dtype = dtype
        self.has_loss = has_loss
        self.graded = graded
        self.cut = cut  # is called with what is exported, at once
        self.settle = settle  # is called with what is exported, before writes are taken out of it
        # Export restores attributes and containers after the call, but not opaque objects.
        self.notes = Notes()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        known = self.notes.known
        beside = nullcontext() if known is None else known.of(self.wrapped, args, kwargs)
        with putting_back(self.wrapped) as self.notes.frozen, self.notes.outside.noted(), beside:
            output = self.called(args, kwargs)
        register_dataclasses(output)
        leaves, self.notes.out_spec = pytree.tree_flatten(output)
        packed = self.notes.packed
        if packed is not None and any(map(packed.is_stand_in, leaves)):
            raise TraceError(
                f"cannot trace {type(self.wrapped).__name__}: it returns a packed sequence, which "
                "has as many rows as its lengths say. Return what pad_packed_sequence makes of it."
            )
        self.notes.numbers = tuple(i for i, x in enumerate(leaves) if isinstance(x, SYMBOLIC))
        self.notes.constants = {i: x for i, x in enumerate(leaves) if isinstance(x, _CONSTANTS)}
        return [x if isinstance(x, (Tensor, int, float, bool)) else None for x in leaves]

    def called(self, args: Any, kwargs: Any) -> Any:
        """What the model returns, or the loss function of it and the target."""
        if self.autopar_loss_fn is None:
            return call_in(self.dtype, self.wrapped, args, kwargs)
        if "target" not in kwargs and not args:
            raise TraceError(
                f"loss_fn= needs a target, and the inputs are {', '.join(kwargs)}: pass it as "
                "the keyword target, or as the last positional input"
            )
        if "target" not in kwargs:
            return self._with_loss(args, kwargs, args[-1])
        others = {name: value for name, value in kwargs.items() if name != "target"}
        return self._with_loss(args, others, kwargs["target"])

    def _with_loss(self, args: Any, kwargs: Any, target: Any) -> Any:
        loss_fn = self.autopar_loss_fn
        assert loss_fn is not None
        inputs = args[:-1] if args and args[-1] is target else args
        return call_in(
            self.dtype, self.wrapped, inputs, kwargs, lambda output: loss_fn(output, target)
        )


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _plain(value: Any) -> Any:
    """A batch made in inference mode cannot be captured outside of it, where a trace is."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def export(capture: Capture, args: Any, kwargs: Any) -> Any:
    check_loss_fn(capture.autopar_loss_fn)
    args, kwargs = pytree.tree_map(_plain, (args, kwargs))
    register_dataclasses((args, kwargs))
    refuse_given(capture.wrapped, args, kwargs)
    given = args, kwargs
    on_meta = any(p.is_meta for p in capture.parameters())
    if on_meta:
        args, kwargs = pytree.tree_map(_to_meta, (args, kwargs))
    for name, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, nn.utils.rnn.PackedSequence):
            refuse_packed(f"{type(capture.wrapped).__name__}: input {name!r} is packed")
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            raise TraceError(
                f"input {name!r} requires a gradient; gradients of inputs are not produced. "
                "Detach it, or register it as an nn.Parameter of the model."
            )
    try:
        exported, checks, answers = _captured_with_values(capture, args, kwargs, given)
    except TraceError:
        raise
    except Exception as error:
        refused = explain_call(capture.wrapped, capture.autopar_loss_fn, args, kwargs)
        text = refused or explain_failure(capture.wrapped, error, capture.notes.lines)
        raise TraceError(text) from error
    warn_of(checks, answers)
    warn_of_both(capture.notes.both_sides)
    warn_of_frozen(capture.notes.frozen, exported.constants.values())
    warn_of_known(capture.wrapped, capture.notes.known_values())
    warn_of_left_out(capture.wrapped, capture.notes.left_out)
    return exported


def _captured_with_values(
    capture: Capture, args: Any, kwargs: Any, given: tuple[Any, Any]
) -> tuple[Any, Any, Answers]:
    """What the model does for any values; where it asks for some, for those that are `given`.

    Where neither can be captured, the error is that of the first line that values do not help with.
    """
    try:
        return _captured_as_eager(capture, args, kwargs)
    except Exception as error:
        if not asks_for_values(error):
            raise
        first = error
    lines, eager, counting = capture.notes.lines, EagerFunctions(), False
    while True:
        capture.notes.lines = {}
        sources = Sources(capture.wrapped, *given, whole=bool(eager) or counting)
        known = KnownValues(sources, eager.places if counting else None)
        capture.notes.known = known
        try:
            with eager.called(known):
                captured = _captured_as_eager(capture, args, kwargs)
            break
        except Exception as error:
            asks = asks_for_values(error)
            if asks and eager.add(error):
                continue
            if not counting and place_of(error) not in (NOWHERE, place_of(first)):
                lines, first = capture.notes.lines, error
            if counting or not asks:
                capture.notes.lines, capture.notes.known = lines, None
                if first is error:
                    raise
                raise first from error
            counting = True  # of what masks select
    capture.notes.frozen.told += eager.told
    capture.notes.eager_calls = tuple(eager.calls)
    written = captured[0].graph_signature.buffers_to_mutate.values()
    asked = {f"{PREFIX}{name}" for kind, name in known.asked if kind == "buffer"}
    if asked.intersection(written):
        capture.notes.lines, capture.notes.known = lines, None
        raise first  # the next step would find another value
    return captured


def _captured_as_eager(capture: Capture, args: Any, kwargs: Any) -> tuple[Any, Any, Answers]:
    """What a plain step does; where that cannot be captured, what the model does if compiled."""
    try:
        with telling_eager() as asked:
            return _captured(capture, args, kwargs)
    except Exception as error:
        if not asked or isinstance(error, Unlike):
            raise
        first = error
    capture.notes.lines.clear()
    try:
        captured = _captured(capture, args, kwargs)
    except Exception as error:
        raise first from error
    warn_of_compiled(asked)
    return captured


def _captured(capture: Capture, args: Any, kwargs: Any) -> tuple[Any, Any, Answers]:
    """The exported program, checks that were left out of it, and what the forward was told."""
    lines = capture.notes.lines
    with passing_checks() as answers, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outside = capture.notes.outside = OutsideTensors()
        higher = HigherOrder(capture.wrapped)
        spelled = Spelled(lines, answers.looped, outside, capture.graded)
        capture.notes.packed = spelled.packed
        with (
            spelled,
            higher.called(),
            emptying_caches(capture.wrapped),
            same_containers(capture.wrapped),
            _quietly_failing(),
            grad_modes_in_autocast(),
            quick_module_lists(),
        ):
            exported = torch.export.export(capture, args, kwargs, strict=False)
        know_all_readers(exported.graph_module.graph)
        capture.cut(exported)
        told = say_own(exported, capture.wrapped, outside, PREFIX)
        capture.notes.frozen.told += told
        capture.notes.both_sides = tuple(higher.both_sides)
        checks = {**answers.passed, **dict.fromkeys(drop_assertions(exported.graph_module))}
        stuck = say_picked(exported.graph_module, answers.of_none)
        capture.notes.left_out = ()
        if capture.has_loss and not stuck:
            capture.notes.left_out = leave_out(exported, capture.notes.out_spec)
        refuse_data_dependent(capture.wrapped, exported.graph_module, lines, stuck)
        refuse_vmap(exported, lines)
        refuse_made(exported.graph)
        if capture.dtype is not None:
            refuse_mixed(capture.wrapped, exported.graph_module, capture.dtype)
        capture.settle(exported)
        if changes_in_place(exported.graph_module):
            read_shared_once(exported)
            traces = mark_no_grad(capture.wrapped, exported)
            keep_written_gradients(capture.wrapped, exported)
            exported = exported.run_decompositions({})
            restore_lines(exported.graph_module.graph, traces)
    return exported, checks, answers


@contextmanager
def _quietly_failing() -> Iterator[None]:
    """Of an export that fails, torch prints the graph so far, which would bury the message, and
    logs the trace of an op that fails, though another way to call it may be found.
    """
    printed = io.StringIO()
    graph = None
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        with redirect_stderr(printed):
            yield
    except Exception as error:
        graph = getattr(error, "partial_fx_graph", None)
        raise
    finally:
        logger.disabled = was_disabled
        text = printed.getvalue()
        sys.stderr.write(text if graph is None else text.replace(f"{graph}\n", ""))
