"""Every sharding rule against brute force; see `bruteforce.py`."""

from __future__ import annotations

import importlib.util
import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.core.placement import Partial, Placement, Replicate, Shard
from autopar.core.strategy import AxisStrategy, OpCall, op_call
from autopar.solver.rules import registry
from autopar.solver.rules.labels import replicated
from autopar.solver.rules.registry import registered_ops
from tests import (
    rule_samples,
    rule_samples_index,
    rule_samples_linalg,
    rule_samples_pointwise,
)
from tests.bruteforce import (
    Captured,
    Sample,
    capture,
    check_rows,
    describe,
    missing_rows,
    offered,
    rows_of,
)

aten = torch.ops.aten


def _neural() -> list[Sample]:
    """Samples of layers, losses and attention, kept in a file of their own."""
    if importlib.util.find_spec("tests.rule_samples_nn") is None:
        return []
    module = importlib.import_module("tests.rule_samples_nn")
    return [Sample(*sample) for sample in module.SAMPLES]


SAMPLES: list[Sample] = [
    *rule_samples.VIEWS,
    *rule_samples.REDUCTIONS,
    *rule_samples.PARTS,
    *rule_samples.FACTORIES,
    *rule_samples_index.SAMPLES,
    *rule_samples_linalg.SAMPLES,
    *rule_samples_pointwise.SAMPLES,
    *_neural(),
]

# registered ops without a sample, and why
UNSAMPLED: dict[Any, str] = {
    aten.empty.memory_format: "its values are undefined",
    aten.empty_strided.default: "its values are undefined",
    aten.empty_permuted.default: "its values are undefined",
    aten.empty_like.default: "its values are undefined",
    aten.new_empty.default: "its values are undefined",
    aten.new_empty_strided.default: "its values are undefined",
    aten.exponential.default: "random: no two runs agree",
    torch.ops.autopar.eager_call.default: "calls what a traced model has; it is always whole",
}
PAIRS_PER_SAMPLE = 4


@cache
def _captured(sample: Sample) -> Captured:
    torch.manual_seed(0)
    return capture(sample)


def _check_single(captured: Captured) -> None:
    for axis_size in (2, 4):
        call, mesh_shape = op_call(captured.node, axis_size), (axis_size,)
        rows = rows_of(captured, axis_size)
        for row in rows if axis_size == 2 else rows[1:]:  # replicated is replicated
            if offered(call, (row,), mesh_shape):
                try:
                    check_rows(captured, (row,), mesh_shape)
                except Exception as error:
                    raise AssertionError(describe(captured, (row,), mesh_shape)) from error


def _check_pairs(captured: Captured, limit: int) -> None:
    call, mesh_shape = op_call(captured.node, 2), (2, 2)
    pairs = [
        pair
        for pair in itertools.product(rows_of(captured, 2), repeat=2)
        if offered(call, pair, mesh_shape)
    ]
    for pair in random.Random(str(captured.node.target)).sample(pairs, min(limit, len(pairs))):
        try:
            check_rows(captured, pair, mesh_shape)
        except Exception as error:
            raise AssertionError(describe(captured, pair, mesh_shape)) from error


def _name(sample: Sample) -> str:
    return sample.name


@pytest.mark.parametrize("sample", SAMPLES, ids=_name)
def test_rows_on_one_axis(sample: Sample) -> None:
    _check_single(_captured(sample))


@pytest.mark.parametrize("sample", SAMPLES, ids=_name)
def test_rows_on_slices(sample: Sample) -> None:
    """A local tensor may be a slice of a whole one: some kernels read it as if it were dense."""
    captured = _captured(sample)
    call = op_call(captured.node, 2)
    rows = [row for row in rows_of(captured, 2) if offered(call, (row,), (2,))]
    for row in rows[:1] + rows[-1:]:
        check_rows(captured, (row,), (2,), gaps=True)


@pytest.mark.parametrize("sample", SAMPLES, ids=_name)
def test_pairs_of_rows_on_two_axes(sample: Sample) -> None:
    _check_pairs(_captured(sample), PAIRS_PER_SAMPLE)


def test_a_sum_passes_through_a_contraction_with_a_factor() -> None:
    einsum = torch.ops.autopar.einsum.default
    captured = capture(
        Sample("factor", lambda x, y: einsum("yz,kz->yk", x, y), lambda: (_rand(8, 4), _rand(2, 4)))
    )
    linear = AxisStrategy((Partial(), Replicate()), (Partial(),))
    assert linear not in rows_of(captured, 2)
    op_call(captured.node, 2).nodes[1].meta["factor"] = True  # as `note_factors` does
    assert linear in rows_of(captured, 2)
    _check_single(captured)
    _check_pairs(captured, PAIRS_PER_SAMPLE)


def test_joined_rows_are_split_inside_of_their_runs() -> None:
    """What `mm` and `t` are offered on rows that a view joined from (3, 8)."""
    inner, turned = Shard(0, 3), Shard(1, 3)
    forward = AxisStrategy((inner, Replicate()), (inner,))
    product = capture(Sample("mm", aten.mm.default, lambda: (_rand(24, 4), _rand(4, 2))))
    check_rows(product, (forward,), (4,))
    biased = AxisStrategy((Replicate(), inner, Replicate()), (inner,))
    inputs = (_rand(2), _rand(24, 4), _rand(4, 2))
    check_rows(capture(Sample("addmm", aten.addmm.default, lambda: inputs)), (biased,), (4,))
    backward = AxisStrategy((turned, inner), (Partial(),))
    gradient = capture(Sample("mm", aten.mm.default, lambda: (_rand(2, 24), _rand(24, 4))))
    check_rows(gradient, (backward,), (4,))
    total = capture(Sample("sum", lambda x: aten.sum.dim_IntList(x, [0]), lambda: (_rand(24, 4),)))
    check_rows(total, (AxisStrategy((inner,), (Partial(),)),), (4,))
    transposed = capture(Sample("t", aten.t.default, lambda: (_rand(24, 4),)))
    check_rows(transposed, (AxisStrategy((inner,), (turned,)),), (4,))


def test_every_registered_op_has_a_sample() -> None:
    sampled = {_captured(sample).node.target for sample in SAMPLES}
    lacking = [str(op) for op in registered_ops() if op not in sampled and op not in UNSAMPLED]
    assert not lacking, f"rules without a brute-force sample: {lacking}"


def test_sample_names_are_unique() -> None:
    names = [sample.name for sample in SAMPLES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("op", "inputs", "outputs"),
    [
        (aten.relu.default, Partial(), Partial()),  # not linear
        (aten.cumsum.default, Shard(1), Shard(1)),  # needs the dim whole
        (aten.cumsum.default, Replicate(), Partial()),  # counts twice
        (aten.cumsum.default, Shard(0), Replicate()),  # ranks differ
    ],
)
def test_a_wrong_row_is_found(op: Any, inputs: Placement, outputs: Placement) -> None:
    args = (1,) if op is aten.cumsum.default else ()
    captured = capture(Sample("wrong", lambda x: op(x, *args), lambda: (_rand(4, 4),)))
    with pytest.raises((AssertionError, RuntimeError)):
        check_rows(captured, (AxisStrategy((inputs,), (outputs,)),), (2,))


def test_a_missing_row_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._RULES, aten.neg.default, replicated_only)
    sample = Sample("neg", lambda x: aten.neg.default(x), lambda: (_rand(4, 3),))
    found = [line.split(":")[1].strip() for line in missing_rows(sample)]
    assert found == ["P -> P", "S0 -> S0"]


@pytest.mark.parametrize(
    "name", ["aten.fmax.default", "aten.angle.default", "aten.complex.default", "cross_-1"]
)
def test_what_torch_tags_as_elementwise_and_cross_products_lack_no_row(name: str) -> None:
    (sample,) = (sample for sample in SAMPLES if sample.name == name)
    assert not list(missing_rows(sample))


def replicated_only(call: OpCall) -> list[AxisStrategy]:
    return [replicated(call)]


# --- random shapes ----------------------------------------------------------------------------
_SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 8])
_SHAPES = st.lists(_SIZES, min_size=1, max_size=4).map(tuple)
_few = settings(max_examples=12, deadline=None, derandomize=True)


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _check(function: Any, *inputs: torch.Tensor) -> None:
    captured = capture(Sample("random", function, lambda: inputs))
    _check_single(captured)
    _check_pairs(captured, 2)


@st.composite
def _regroupings(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes with the same number of elements, each a grouping of common factors."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=5))

    def group() -> tuple[int, ...]:
        shape = [1]
        for factor in factors:
            if draw(st.booleans()):
                shape.append(factor)
            else:
                shape[-1] *= factor
        return tuple(shape)

    return group(), group()


@_few
@given(_regroupings())
def test_view_of_any_shape(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    source, result = shapes
    _check(lambda x: aten.view.default(x, list(result)), _rand(*source))


@_few
@given(_SHAPES, st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 3))
def test_broadcast_of_any_shape(shape: tuple[int, ...], ones: list[bool], dropped: int) -> None:
    other = tuple(1 if one else s for s, one in zip(shape, ones, strict=False))[dropped:]
    _check(aten.add.Tensor, _rand(*shape), _rand(*other))
    _check(aten.mul.Tensor, _rand(*other), _rand(*shape))


@_few
@given(st.sampled_from(["ab,bc->ac", "abk,ck->abc", "xab,xbc->xca", "ab,cd->dacb"]), st.data())
def test_einsum_of_any_shape(equation: str, data: Any) -> None:
    sizes = {c: data.draw(_SIZES) for c in sorted(set(equation) - set(",->"))}
    a, b = (_rand(*(sizes[c] for c in term)) for term in equation.split("->")[0].split(","))
    _check(lambda x, y: torch.ops.autopar.einsum.default(equation, x, y), a, b)


@_few
@given(_SHAPES, st.lists(st.booleans(), min_size=4, max_size=4), st.booleans())
def test_sum_of_any_shape(shape: tuple[int, ...], chosen: list[bool], keepdim: bool) -> None:
    dims = [i for i, take in enumerate(chosen[: len(shape)]) if take]
    _check(lambda x: aten.sum.dim_IntList(x, dims, keepdim), _rand(*shape))


@_few
@given(_SHAPES, st.integers(0, 3), st.lists(_SIZES, min_size=1, max_size=3))
def test_cat_of_any_shape(shape: tuple[int, ...], dim: int, sizes: list[int]) -> None:
    dim %= len(shape)
    parts = [_rand(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
    _check(lambda *xs: aten.cat.default(list(xs), dim), *parts)


@_few
@given(
    _SHAPES, st.lists(st.booleans(), min_size=4, max_size=4), _SHAPES.filter(lambda s: len(s) < 3)
)
def test_index_of_any_shape(
    shape: tuple[int, ...], chosen: list[bool], batch: tuple[int, ...]
) -> None:
    places = [i for i, take in enumerate(chosen[: len(shape)]) if take] or [0]
    indices = [torch.randint(0, shape[i], batch) for i in places]

    def function(x: Any, *given_indices: Any) -> Any:
        slots = dict(zip(places, given_indices, strict=True))
        return aten.index.Tensor(x, [slots.get(i) for i in range(places[-1] + 1)])

    _check(function, _rand(*shape), *indices)
