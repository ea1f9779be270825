"""Every way from one layout to another, emitted and run, against cutting the tensor up anew."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.codegen.builder import Builder
from autopar.codegen.redistribute import emit_redistribution
from autopar.core.placement import Layout, Partial, Replicate, Shard, format_layout, is_valid
from autopar.core.redistribute import copied_fractions, path
from autopar.runtime.lockstep import mesh_coords, run_lockstep
from tests.bruteforce import check_output, distribute

_SHAPE = (16, 48)
_PLACEMENTS = (Replicate(), Partial(), Shard(0), Shard(1), Shard(0, 2), Shard(1, 2), Shard(1, 3))


def _copies(graph: fx.Graph) -> list[int]:
    """Elements of each copy that a program makes in memory of its own."""
    found = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.reshape.default):
        held, (source, *_) = node.meta["val"], node.all_input_nodes
        if held.untyped_storage()._cdata != source.meta["val"].untyped_storage()._cdata:
            found.append(node)
    return [node.meta["val"].numel() for node in graph.nodes if node in found]


def _check(
    src: Layout,
    dst: Layout,
    mesh_shape: tuple[int, ...],
    mode: FakeTensorMode,
    shape: tuple[int, ...] = _SHAPE,
) -> None:
    whole = torch.randn(shape, dtype=torch.float64)
    parts = distribute(whole, src, mesh_shape)
    graphs = []
    for coords, part in zip(mesh_coords(mesh_shape), parts, strict=True):
        graph = fx.Graph()
        builder = Builder(
            graph,
            mesh_shape=mesh_shape,
            coords=coords,
            group_names=[f"axis{i}" for i in range(len(mesh_shape))],
            fake_mode=mode,
            device=torch.device("cpu"),
        )
        place = graph.placeholder("x")
        with mode:
            place.meta["val"] = torch.empty(part.shape, dtype=part.dtype)
        graph.output(emit_redistribution(builder, place, src, dst))
        graphs.append(graph)
    counted = [num * whole.numel() for num in copied_fractions(src, dst, shape, mesh_shape)]
    assert counted == _copies(graphs[-1])
    check_output(
        whole, run_lockstep(graphs, [[part] for part in parts], mesh_shape), dst, mesh_shape
    )


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2), (2, 4), (2, 2, 2)], ids=str)
def test_every_way_is_right(mesh_shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mode = FakeTensorMode()
    layouts = [
        layout
        for layout in itertools.product(_PLACEMENTS, repeat=len(mesh_shape))
        if is_valid(layout, _SHAPE, mesh_shape)
    ]
    pairs = list(itertools.product(layouts, repeat=2))
    if len(pairs) > 150:
        pairs = random.Random(0).sample(pairs, 150)
    for src, dst in pairs:
        if path(src, dst, mesh_shape) is None:
            continue
        try:
            _check(src, dst, mesh_shape, mode)
        except Exception as error:
            way = f"{format_layout(src)} -> {format_layout(dst)} over {mesh_shape}"
            raise AssertionError(way) from error


@pytest.mark.parametrize("shape", [(2, 6, 4), (1, 4, 12), (4, 2, 8), (12, 4)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)], ids=str)
def test_copies_of_small_dims_are_counted(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> None:
    """A dim of which each rank has one element is none that others stand behind."""
    mode = FakeTensorMode()
    placements = (*_PLACEMENTS, Shard(2)) if len(shape) == 3 else _PLACEMENTS
    layouts = [
        layout
        for layout in itertools.product(placements, repeat=len(mesh_shape))
        if is_valid(layout, shape, mesh_shape)
    ]
    pairs = list(itertools.product(layouts, repeat=2))
    tried = random.Random(0).sample(pairs, min(len(pairs), 100))
    for src, dst in tried:
        if path(src, dst, mesh_shape) is not None:
            _check(src, dst, mesh_shape, mode, shape)


def test_only_partial_is_out_of_reach() -> None:
    assert path((Replicate(),), (Partial(),), (2,)) is None
    assert path((Shard(0),), (Partial(),), (2,)) is None
    for src, dst in itertools.product(_PLACEMENTS, repeat=2):
        if not dst.is_partial:
            assert path((src,), (dst,), (2,)) is not None
