"""Fake values that are made again without running the call are those that it yields."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.codegen import fakes
from autopar.codegen.fakes import fake_call

aten = torch.ops.aten


class Calls:
    """Calls on placeholders with fake values."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()

    def value(self, *size: int, **options: Any) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(*size, **options)
        return node

    def shown(self, node: fx.Node, *args: int) -> fx.Node:
        """A view of a node: a slice along the first axis."""
        found = self.graph.call_function(aten.slice.Tensor, (node, 0, *args))
        with self.mode:
            found.meta["val"] = aten.slice.Tensor(node.meta["val"], 0, *args)
        return found

    def columns(self, rows: int, columns: int) -> fx.Node:
        """A tensor whose rows are not contiguous."""
        node = self.value(columns, rows)
        found = self.graph.call_function(aten.t.default, (node,))
        with self.mode:
            found.meta["val"] = aten.t.default(node.meta["val"])
        return found


def view_and_copy(x: Tensor) -> tuple[Tensor, Tensor]:
    return aten.alias.default(x), aten.clone.default(x)


def two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    return aten.alias.default(x), aten.alias.default(x)


def two_of_one(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = aten.clone.default(x)
    return whole, aten.view.default(whole, [24])


def described(result: Any, operands: list[Tensor]) -> object:
    if not isinstance(result, Tensor):
        shared = {r.untyped_storage()._cdata for r in result}
        return type(result), len(shared), [described(r, operands) for r in result]
    storage = result.untyped_storage()
    shows = [n for n, x in enumerate(operands) if x.untyped_storage()._cdata == storage._cdata]
    return (
        tuple(result.shape), result.stride(), result.dtype, result.device,
        int(result.storage_offset()), storage.nbytes(), shows,
    )  # fmt: skip


CALLS: dict[str, tuple[Any, Any]] = {
    "product": (aten.mm.default, lambda c: (c.value(4, 6), c.value(6, 2))),
    "view": (aten.view.default, lambda c: (c.value(4, 6), [2, 12])),
    "reshape": (aten.reshape.default, lambda c: (c.value(4, 6), [24])),
    "reshape of columns": (aten.reshape.default, lambda c: (c.columns(4, 6), [-1])),
    "reshape within columns": (aten.reshape.default, lambda c: (c.columns(4, 6), [2, 3, 4, 1])),
    "reshape of rows": (aten.reshape.default, lambda c: (c.shown(c.value(8, 3), 2, 8), [2, 9])),
    "reshape of one": (aten.reshape.default, lambda c: (c.columns(1, 6), [6, 1, 1])),
    "reshape of nothing": (aten.reshape.default, lambda c: (c.columns(0, 6), [2, 0])),
    "slice": (aten.slice.Tensor, lambda c: (c.value(8, 3), 0, 2, 5)),
    "slice of a slice": (aten.slice.Tensor, lambda c: (c.shown(c.value(8, 3), 2, 8), 0, 1, 3)),
    "transposed": (aten.permute.default, lambda c: (c.value(2, 3, 4), [2, 0, 1])),
    "strided": (aten.as_strided.default, lambda c: (c.value(8, 3), [2, 3], [6, 1], 6)),
    "expanded": (aten.expand.default, lambda c: (c.value(1, 3), [5, 3])),
    "nothing": (aten.mm.default, lambda c: (c.value(0, 6), c.value(6, 2))),
    "integer added": (aten.add.Tensor, lambda c: (c.value(3, dtype=torch.int64), 1)),
    "float added": (aten.add.Tensor, lambda c: (c.value(3, dtype=torch.int64), 1.0)),
    "bool added": (aten.add.Tensor, lambda c: (c.value(3, dtype=torch.int64), True)),
    "cast": (aten._to_copy.default, lambda c: (c.value(3, dtype=torch.int64),)),
    "in place": (aten.add_.Tensor, lambda c: (c.value(3), 1)),
    "several": (aten.split.Tensor, lambda c: (c.value(6, 2), 2)),
    "statistics": (
        aten.native_layer_norm.default,
        lambda c: (c.value(4, 6), [6], None, None, 1e-5),
    ),
    "extremes": (aten.max.dim, lambda c: (c.value(4, 6), 1)),
    "view and copy": (view_and_copy, lambda c: (c.shown(c.value(8, 3), 2, 6),)),
    "two views": (two_views, lambda c: (c.value(8, 3),)),
    "two of one": (two_of_one, lambda c: (c.value(8, 3),)),
    "complex": (aten.view_as_real.default, lambda c: (c.value(3, dtype=torch.complex64),)),
    "conjugate": (aten._conj.default, lambda c: (c.value(3, dtype=torch.complex64),)),
}


@pytest.mark.parametrize("name", CALLS)
def test_made_again_is_what_the_call_yields(name: str) -> None:
    fakes._known.clear()
    for _ in range(3):  # the first one runs, others may not
        calls = Calls()
        target, make = CALLS[name]
        args = make(calls)
        options = {"dtype": torch.float16} if name == "cast" else {}
        operands = [a.meta["val"] for a in args if isinstance(a, fx.Node)]
        made = fake_call(calls.mode, target, args, options)
        given = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        with calls.mode:
            ran = target(*given, **options)
        assert described(made, operands) == described(ran, operands)
        assert all(made.fake_mode is calls.mode for made in pytree.tree_leaves(made))


def test_a_place_in_a_storage_is_no_place_in_a_view_of_it() -> None:
    fakes._known.clear()
    calls = Calls()
    whole = calls.value(8, 3)
    for begin in (0, 2):  # views of the same size
        view = calls.shown(whole, begin, begin + 6)
        made = fake_call(calls.mode, aten.as_strided.default, (view, [6, 3], [3, 1], 0), {})
        assert made.storage_offset() == 0


def test_pieces_are_made_of_one_another_wherever_they_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fakes._known.clear()
    calls = Calls()
    whole = calls.shown(calls.value(12, 3), 2, 12)
    run = fakes._called
    ran: list[Any] = []
    monkeypatch.setattr(fakes, "_called", lambda *a: ran.append(a[1]) or run(*a))
    for begin in (4, 0, 6, 4):
        args = (whole, 0, begin, begin + 3)
        piece = calls.graph.call_function(aten.slice.Tensor, args)
        piece.meta["val"] = fake_call(calls.mode, aten.slice.Tensor, args, {})
        flat = fake_call(calls.mode, aten.reshape.default, (piece, [9]), {})
        for made in (piece.meta["val"], flat):
            assert made.storage_offset() == 3 * (2 + begin) and made.numel() == 9
            assert made.untyped_storage()._cdata == whole.meta["val"].untyped_storage()._cdata
    assert ran == [aten.slice.Tensor, aten.reshape.default]


def test_results_follow_the_default_dtype() -> None:
    calls = Calls()
    args = (calls.value(3, dtype=torch.int64), 2)
    assert fake_call(calls.mode, aten.div.Tensor, args, {}).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert fake_call(calls.mode, aten.div.Tensor, args, {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def second(one: Tensor, other: Tensor) -> Tensor:
    return aten.alias.default(other)


def test_views_of_one_of_several_that_share_a_storage() -> None:
    """The same metadata, in one storage and in two."""
    fakes._known.clear()
    calls = Calls()
    base, other = calls.value(8, 3), calls.value(8, 3)
    for pair in ((calls.shown(base, 0, 8), base), (other, base)):
        made = fake_call(calls.mode, second, pair, {})
        assert made.untyped_storage()._cdata == base.meta["val"].untyped_storage()._cdata


def test_results_of_a_call_made_twice_are_apart() -> None:
    calls = Calls()
    args = (calls.value(4, 6), calls.value(6, 2))
    one, other = (fake_call(calls.mode, aten.mm.default, args, {}) for _ in range(2))
    assert one.untyped_storage()._cdata != other.untyped_storage()._cdata
