"""All-reduces in place: where they may, and that nothing reads what they overwrite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.codegen.builder import Builder
from autopar.codegen.passes import run_last_passes
from autopar.codegen.passes.in_place import mark_in_place
from autopar.codegen.passes.lifetimes import Lifetimes
from autopar.runtime.lockstep import run_lockstep

aten = torch.ops.aten
IN_PLACE = torch.ops._c10d_functional.all_reduce_.default


def program(case: str) -> fx.Graph:
    """A sum over two ranks of a copy of x, and what else reads that copy."""
    graph = fx.Graph()
    with FakeTensorMode() as mode:
        builder = Builder(
            graph,
            mesh_shape=(2,),
            coords=(0,),
            group_names=("axis0",),
            fake_mode=mode,
            device=torch.device("cpu"),
        )
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(4, 6, dtype=torch.float64)
    builder.phase = "forward"
    made = builder.call(aten.cat.default, [x])
    read = {
        "alone": lambda: made,
        "of a view": lambda: builder.call(aten.reshape.default, made, [24]),
        "of the caller": lambda: x,
        "read before": lambda: made,
        "read behind": lambda: made,
        "a view read behind": lambda: builder.call(aten.reshape.default, made, [24]),
        "of another phase": lambda: made,
        "a reshape read behind": lambda: made,
        "not fresh": lambda: builder.call(aten.relu.default, x),
        "chained": lambda: builder.all_reduce(made, 0),
        "maybe permuted": lambda: builder.call(aten.mul.Tensor, x, 3.0),
    }[case]()
    results = []
    if case == "read before":
        results.append(builder.call(aten.sin.default, made))
    if case == "of another phase":
        builder.phase = "backward"
    results.append(builder.all_reduce(read, 0))
    if case == "a reshape read behind":  # that copies, by its fake strides
        moved = builder.call(aten.reshape.default, made, [24])
        moved.meta["val"] = moved.meta["val"].clone()
        results.append(builder.call(aten.sin.default, moved))
    if case in ("read behind", "a view read behind"):
        results.append(builder.call(aten.sin.default, made))
    graph.output(tuple(results))
    return graph


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("alone", 1),
        ("of a view", 1),
        ("of the caller", 0),
        ("read before", 1),
        ("read behind", 0),
        ("a view read behind", 0),
        ("of another phase", 0),
        ("a reshape read behind", 0),
        ("not fresh", 0),
        ("chained", 2),
        ("maybe permuted", 0),  # as strided as what the caller gives
    ],
)
def test_only_what_nobody_reads_any_more_is_overwritten(case: str, count: int) -> None:
    plain, changed = program(case), program(case)
    run_last_passes(changed, None)
    assert sum(node.target is IN_PLACE for node in changed.nodes) == count
    given = [torch.rand(4, 6, dtype=torch.float64) for _ in range(2)]

    def run(graph: fx.Graph) -> tuple[list[Tensor], list[Tensor]]:
        fed = [x.clone() for x in given]
        rows = run_lockstep([graph, graph], [[x] for x in fed], (2,))
        return [value for row in rows for value in row], fed

    (expected, _), (found, fed) = run(plain), run(changed)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(fed, given, strict=True):
        assert torch.equal(a, b)  # the caller's values are as they were
    if count:
        assert Lifetimes(changed).peak_bytes < Lifetimes(plain).peak_bytes
    else:
        assert Lifetimes(changed).peak_bytes == Lifetimes(plain).peak_bytes


def test_a_budget_counts_no_copy_where_there_will_be_none() -> None:
    graph = program("alone")
    functional = Lifetimes(graph).peak_bytes
    mark_in_place(graph, lambda node: node.meta.get("phase"))
    marked = Lifetimes(graph).peak_bytes
    run_last_passes(graph, None)
    assert marked == Lifetimes(graph).peak_bytes < functional


def test_the_pass_can_be_left_out() -> None:
    graph = program("alone")
    run_last_passes(graph, ["bucket", "late"])
    assert not any(node.target is IN_PLACE for node in graph.nodes)


def test_a_part_that_runs_later_may_stand_before() -> None:
    """Where a backward is cut in two, what stands in front of an all-reduce may run behind it."""
    graph = program("read before")
    (reader,) = (node for node in graph.nodes if node.target is aten.sin.default)
    run_last_passes(graph, None, lambda node: node is reader)
    assert not any(node.target is IN_PLACE for node in graph.nodes)


@pytest.mark.parametrize(
    ("equation", "count"), [("ab,bc->ac", 1), ("ab,cb->ca", 1), ("abk,bkc->acb", 0)]
)
def test_a_permuted_product_is_copied(equation: str, count: int) -> None:
    """NCCL takes contiguous tensors, which such a product is not, whatever its fake value says."""
    graph = fx.Graph()
    sizes = {"a": 2, "b": 3, "c": 4, "k": 5}
    terms = equation.partition("->")[0].split(",")
    with FakeTensorMode() as mode:
        builder = Builder(
            graph,
            mesh_shape=(2,),
            coords=(0,),
            group_names=("axis0",),
            fake_mode=mode,
            device=torch.device("cpu"),
        )
        given = [graph.placeholder(f"x{i}") for i in range(2)]
        for node, term in zip(given, terms, strict=True):
            node.meta["val"] = torch.empty([sizes[c] for c in term])
    builder.phase = "forward"
    product = builder.call(torch.ops.autopar.einsum.default, equation, *given)
    graph.output(builder.all_reduce(product, 0))
    run_last_passes(graph, None)
    assert sum(node.target is IN_PLACE for node in graph.nodes) == count
    real = [torch.empty([sizes[c] for c in term]) for term in terms]
    assert torch.ops.autopar.einsum(equation, *real).is_contiguous() == bool(count)
