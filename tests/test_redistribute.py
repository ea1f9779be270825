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
from autopar.core.redistribute import path
from autopar.runtime.lockstep import mesh_coords, run_lockstep
from tests.bruteforce import check_output, distribute

_SHAPE = (16, 48)
_PLACEMENTS = (Replicate(), Partial(), Shard(0), Shard(1), Shard(0, 2), Shard(1, 2), Shard(1, 3))


def _check(src: Layout, dst: Layout, mesh_shape: tuple[int, ...], mode: FakeTensorMode) -> None:
    whole = torch.randn(_SHAPE, dtype=torch.float64)
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


def test_only_partial_is_out_of_reach() -> None:
    assert path((Replicate(),), (Partial(),), (2,)) is None
    assert path((Shard(0),), (Partial(),), (2,)) is None
    for src, dst in itertools.product(_PLACEMENTS, repeat=2):
        if not dst.is_partial:
            assert path((src,), (dst,), (2,)) is not None
