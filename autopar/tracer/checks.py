"""Checks of values that only raise: a forward is traced as if they passed.

    if labels.max() >= size:
        raise ValueError(...)

asks for a number that a trace does not have. One answer leads to nothing but an error, so every
step that yields a loss took the other one. With that answer the graph is exact, and a warning says
that the check is left out. An answer is given only where the source shows all of this: the value
alone decides an `if` or an `assert`, and no caller catches what is raised.
"""

from __future__ import annotations

import ast
import builtins
import dis
import operator
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar._compat import asks_emptiness, upper_bound
from autopar.errors import UncheckedWarning
from autopar.tracer.diagnose import MODES, is_outside, user_line
from autopar.tracer.emptiness import some_are_picked
from autopar.tracer.finiteness import all_are_finite
from autopar.tracer.picked import picking_mask, same_rows
from autopar.tracer.sources import described, function_at, nodes_of

__all__ = ["Answers", "drop_assertions", "passing_checks", "warn_of"]

_CAPTURE = str(Path(__file__).with_name("capture.py"))  # it calls the model
_BETWEEN = ("CACHE", "COPY", "EXTENDED_ARG", "NOP", "TO_BOOL")
_ASSERTIONS = (
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg,
)
_warned: set[str] = set()


@dataclass
class Answers:
    """What a forward was told of values: lines of checks that passed, of those that asked whether
    rows are picked or values finite, and of loops over places where rows are picked."""

    passed: dict[str, None] = field(default_factory=dict)
    some: dict[str, None] = field(default_factory=dict)
    finite: dict[str, None] = field(default_factory=dict)
    looped: dict[str, None] = field(default_factory=dict)

    @property
    def of_none(self) -> bool:
        """True if what is made of no rows is asked for only where there are some."""
        return bool(self.some or self.looped)

    def to(self, frame: FrameType | None) -> bool | None:
        """What is answered to the code of a frame, if it may be."""
        found = None if frame is None else passing(frame)
        if frame is None or found is not None:
            self.passed.update({described(frame): None} if frame else {})
            return found
        for lines, answer in ((self.some, goes_on), (self.finite, finds_finite)):
            found = answer(frame)
            if found is not None:
                lines[described(frame)] = None
                return found
        return None


@contextmanager
def passing_checks() -> Iterator[Answers]:
    """While a model is exported, checks of unknown values pass, and masks pick rows."""
    answers = Answers()
    of_number = torch.SymBool.__bool__

    def tensor_bool(value: Tensor) -> bool:
        # asked for its number, a fake tensor would leave an assertion about it in the graph
        unknown = isinstance(value, FakeTensor) and value.constant is None
        found = answers.to(_asking(sys._getframe(1))) if unknown else None
        return torch._C.TensorBase.__bool__(value) if found is None else found

    def number_bool(value: torch.SymBool) -> bool:
        try:
            return of_number(value)
        except GuardOnDataDependentSymNode:
            found = _not_empty(value)
            found = answers.to(_asking(sys._getframe(1))) if found is None else found
            if found is None:
                raise
            return found

    torch.Tensor.__bool__ = tensor_bool  # type: ignore[assignment, method-assign]
    torch.SymBool.__bool__ = number_bool  # type: ignore[method-assign]
    try:
        yield answers
    finally:
        del torch.Tensor.__bool__
        torch.SymBool.__bool__ = of_number  # type: ignore[method-assign]


def _not_empty(asked: torch.SymBool) -> bool | None:
    """torch asks of what it is given whether it is empty, and does by another way what it does for
    the others: a graph for any number of rows is one for none. A model's own code is not believed.
    """
    frame = _asking(sys._getframe(2))
    inside = frame is not None and not is_outside(frame.f_code.co_filename)
    return asks_emptiness(asked) if inside else None


def drop_assertions(gm: fx.GraphModule) -> Iterator[str]:
    """Take out what `torch._check` left in an exported graph; yields the lines. What torch notes
    of dtypes goes too: it is of the trace, and rewrites need not keep to it.
    """
    parts = [part for part in gm.modules() if isinstance(part, fx.GraphModule)]
    for graph in (part.graph for part in parts):
        for node in reversed(graph.nodes):
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                graph.erase_node(node)
            elif node.target in _ASSERTIONS:
                if not _holds_anyway(node.args[0]):
                    yield _source(node)
                graph.erase_node(node)


_DRAWN = (torch.ops.aten.rand.default, torch.ops.aten.rand_like.default)


def _holds_anyway(condition: Any) -> bool:
    """True for what torch notes of how many elements something picks of a tensor: bounds, and that
    equal masks pick equally many; and for the bounds of a random number (`sure_draws`)."""
    compared = (operator.eq, operator.le, operator.ge)
    if not isinstance(condition, fx.Node) or condition.target not in compared:
        return False
    given: Any = condition.args
    size, bound = given
    if isinstance(bound, fx.Node):
        return same_rows(condition.graph, size, bound)
    if not isinstance(size, fx.Node):
        return False
    if size.target is torch.ops.aten.item.default:
        return size.all_input_nodes[0].target in _DRAWN
    if size.target is not torch.ops.aten.sym_size.int:
        return False
    (picked,) = size.all_input_nodes
    mask = picking_mask(size)
    sources = [x.meta.get("val") for x in (picked.all_input_nodes if mask is None else [mask])]
    counts = [_most(x.numel()) for x in sources if isinstance(x, Tensor)]
    if condition.target is operator.eq or not counts or not isinstance(bound, int):
        return False
    return bound >= max(counts) if condition.target is operator.le else bound <= 0


def _most(count: Any) -> float:
    """The largest that a number can be."""
    return count if isinstance(count, int) else float(upper_bound(count))


def _source(node: fx.Node) -> str:
    """The line of an assertion, or else that of what it is about."""
    while (line := user_line(node)).startswith("(no line") and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return line


_LEFT_OUT = (
    "looks at values, which a trace does not have, and only raises: the parallel program leaves "
    "this check out. Where values may be wrong, check the batch before the step."
)
_ZERO_GRADIENTS = (
    "Parameters that are used for picked rows alone then have a gradient of zeros where one device "
    "has None, so weight decay and momentum move them."
)
_SOME_ARE = (
    "asks whether a mask picks anything, which a trace does not know: the parallel program goes on "
    "as where it does. Where nothing is picked, sums and means of picked rows are 0 and nothing is "
    "written; what else this branch computes should not depend on it. " + _ZERO_GRADIENTS
)
_ALL_PLACES = (
    "loops over the places where a mask picks anything, which a trace does not know: the parallel "
    "program runs the loop for all places. Where nothing is picked, sums and means of picked rows "
    "are 0 and nothing is written; what else the loop computes should not depend on it. "
    + _ZERO_GRADIENTS
)

_ALL_FINITE = (
    "asks whether values are finite, which a trace does not know: the parallel program goes on as "
    "where all are. Values that are not are not clamped: they go on to the loss."
)


def warn_of(passed: Iterable[str], answers: Answers) -> None:
    """One warning for each line whose check, other side or number of passes is left out."""
    texts = {
        _LEFT_OUT: passed,
        _SOME_ARE: answers.some,
        _ALL_PLACES: answers.looped,
        _ALL_FINITE: answers.finite,
    }
    for where, text in ((w, text) for text, lines in texts.items() for w in lines):
        if where not in _warned:
            _warned.add(where)
            warnings.warn(f"{where}\n  {text}", UncheckedWarning, stacklevel=2)


def _asking(frame: FrameType | None) -> FrameType | None:
    """The frame whose own code asks, behind those that pass the question on."""
    while frame is not None and (
        frame.f_code.co_filename == __file__ or frame.f_code.co_name in ("__bool__", *MODES)
    ):
        frame = frame.f_back
    return frame


def passing(frame: FrameType) -> bool | None:
    """The answer with which what a frame asks does not raise; None where it is not that simple."""
    found = [
        node
        for node in nodes_of(frame.f_code.co_filename)
        if isinstance(node, (ast.If, ast.Assert)) and _spans([node.test], frame.f_lineno)
    ]
    if len(found) != 1:
        return None
    (check,) = found
    error, wanted = _raised(check)
    if error is None:
        return None
    by = ("bool", "all", "any")  # the last two ask for each of several, with one answer
    leaf = next((x for x in _leaves(check.test, wanted) if _is_asked(frame, x[0], by)), None)
    if leaf is None or _is_caught(frame, _named(error, frame)):
        return None
    return leaf[1]


def goes_on(frame: FrameType) -> bool | None:
    """The answer to a frame that asks whether rows are picked; None to other questions."""
    asked = _asked_branch(frame)
    if asked is None:
        return None
    check, leaf, wanted = asked
    if isinstance(check.test, ast.BoolOp) or _counts_numbers(frame, leaf):
        return None
    return some_are_picked(check, leaf, wanted, function_at(frame))


def finds_finite(frame: FrameType) -> bool | None:
    """The answer to a frame that asks whether values are finite; None to other questions."""
    asked = _asked_branch(frame)
    return None if asked is None else all_are_finite(*asked)


def _asked_branch(frame: FrameType) -> tuple[ast.If, ast.expr, bool] | None:
    """The `if` that a frame is at, the part of its test whose truth is asked for, and the truth of
    that part which leads into the body."""
    nodes = nodes_of(frame.f_code.co_filename)
    found = [n for n in nodes if isinstance(n, ast.If) and _spans([n.test], frame.f_lineno)]
    if len(found) != 1:
        return None
    leaves = _leaves(found[0].test, True)
    return next(((found[0], *leaf) for leaf in leaves if _is_asked(frame, leaf[0])), None)


def _counts_numbers(frame: FrameType, leaf: ast.expr) -> bool:
    """True for `places.sum() > 0` of numbers that do not say which rows are picked."""
    names = (n.id for n in ast.walk(leaf) if isinstance(n, ast.Name))
    values = [frame.f_locals.get(name) for name in names]
    sums = any(isinstance(n, ast.Attribute) and n.attr == "sum" for n in ast.walk(leaf))
    plain = isinstance(leaf, ast.Compare) and not any(
        isinstance(n, ast.Compare) and n is not leaf for n in ast.walk(leaf)
    )
    numbers = (isinstance(v, Tensor) and v.dtype is not torch.bool for v in values)
    return sums and plain and any(numbers)


def _raised(check: ast.If | ast.Assert) -> tuple[ast.expr | None, bool]:
    """What the one side raises, and the truth of the test that leads to the other."""
    if isinstance(check, ast.Assert):
        return ast.Name("AssertionError"), True
    sides = [_only_raises(check.body), _only_raises(check.orelse)]
    if (sides[0] is None) == (sides[1] is None):
        return None, False
    return sides[0] or sides[1], sides[0] is None


def _only_raises(body: list[ast.stmt]) -> ast.expr | None:
    """What a block of statements raises, if it does so whatever happens in it."""
    *before, last = body or [ast.Pass()]
    plain = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Import, ast.ImportFrom)
    if isinstance(last, ast.Raise) and all(isinstance(s, plain) for s in before):
        return last.exc
    return None


def _leaves(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Parts of a test whose truth is asked for, each with that which makes the whole `wanted`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand, not wanted)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _leaves(value, wanted)
    else:
        yield test, wanted


def _is_asked(frame: FrameType, leaf: ast.expr, by: Sequence[str] = ("bool",)) -> bool:
    """True if the instruction that runs asks for the truth of this very expression.

    Args:
        frame: that runs.
        leaf: the expression.
        by: functions that may ask for it.
    """
    place, code = frame.f_lasti // 2, frame.f_code
    positions, names = list(code.co_positions()), [dis.opname[op] for op in code.co_code[::2]]
    asks = names[place]
    own = (leaf.lineno, leaf.end_lineno, leaf.col_offset, leaf.end_col_offset)
    if asks.startswith("CALL"):
        explicit = isinstance(leaf, ast.Call) and isinstance(leaf.func, ast.Name)
        return positions[place] == own and explicit and leaf.func.id in by  # type: ignore
    if asks == "COMPARE_OP":
        return positions[place] == own
    if "JUMP" not in asks and asks != "TO_BOOL":
        return False
    before = place - 1
    while before > 0 and names[before] in _BETWEEN:
        before -= 1
    return positions[before] == own


# --- what is raised goes all the way up ---------------------------------------------------------
def _is_caught(frame: FrameType | None, error: type | None) -> bool:
    """True if a frame of the model, from this one up, may catch the error and go on."""
    first = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _CAPTURE:
            break
        if frame is first or is_outside(name):
            if any(_catches(node, frame, error) for node in nodes_of(name)):
                return True
        frame = frame.f_back
    return False


def _catches(node: ast.AST, frame: FrameType, error: type | None) -> bool:
    if isinstance(node, (ast.With, ast.AsyncWith)) and _spans(node.body, frame.f_lineno):
        return any("suppress" in ast.unparse(item.context_expr) for item in node.items)
    if not isinstance(node, (ast.Try, ast.TryStar)) or not _spans(node.body, frame.f_lineno):
        return False
    return any(
        not isinstance(handler.body[-1], ast.Raise) and _may_match(handler.type, frame, error)
        for handler in node.handlers
    )


def _may_match(expected: ast.expr | None, frame: FrameType, error: type | None) -> bool:
    kinds = expected.elts if isinstance(expected, ast.Tuple) else [expected]
    for kind in kinds:
        known = None if kind is None else _named(kind, frame)
        if known is None or error is None or issubclass(error, known):
            return True
    return False


def _named(expression: ast.expr, frame: FrameType) -> type | None:
    """The class of errors that an expression names or makes."""
    if isinstance(expression, ast.Call):
        expression = expression.func
    path = ast.unparse(expression).split(".")
    scope = {**vars(builtins), **frame.f_globals, **frame.f_locals}
    found = scope.get(path[0])
    for name in path[1:]:
        found = getattr(found, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _spans(body: list[Any], line: int) -> bool:
    return body[0].lineno <= line <= body[-1].end_lineno
