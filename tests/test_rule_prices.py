"""No way to run an op over ranks is priced at much less than the ops that it is emitted as."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.core.strategy import op_call
from autopar.core.work import op_class
from autopar.cost_model import Cluster
from autopar.cost_model.emitted_ops import node_seconds
from autopar.solver.candidates import Pricer, expand
from tests.bruteforce import Sample, distribute, emit, rows_of
from tests.test_rules import SAMPLES, _captured

MESH = (2,)
UNSEEN = 1.5  # times a price
UNSIZED = ("bincount", "index_mask")  # whose results are as long as the data say
SLACK = 512  # bytes: of scalars that are made on the way


def by_bytes_and_flops() -> Cluster:
    """Devices that take no time to launch, as samples are small."""
    cluster = Cluster.from_profile("h100-sxm", nodes=1, devices_per_node=2, mesh_shape=MESH)
    given = cluster.device
    efficiency = {name: replace(each, ramp_s=0.0) for name, each in given.efficiency.items()}
    device = replace(
        given, kernel_overhead_s=0.0, view_overhead_s=0.0, efficiency=efficiency, curves=()
    )
    return replace(cluster, device=device)


@pytest.mark.parametrize(
    "sample", [s for s in SAMPLES if s.name not in UNSIZED], ids=lambda sample: sample.name
)
def test_as_emitted(sample: Sample) -> None:
    cluster, captured = by_bytes_and_flops(), _captured(sample)
    call, rows = op_call(captured.node, 2), rows_of(captured, 2)
    offered = {(row.variant, row.inputs, row.outputs): row for row in rows}
    slack_s = SLACK / cluster.device.memory_bandwidth
    candidates = expand(call, MESH)
    seconds = Pricer(cluster).compute(call, candidates)
    if op_class(call) == "view":
        assert not seconds.any()  # which views must copy depends on strides, not on ranks
        return
    for chosen, priced_s in zip(candidates, seconds, strict=True):
        sides = [tuple(layout[0] for layout in side) for side in (chosen.inputs, chosen.outputs)]
        row = offered.get((chosen.variants[0], *sides))
        if row is None:
            continue  # `rows_of` leaves out what brute force cannot compare
        for rank in range(2):
            parts = [
                distribute(x, layout, MESH)[rank]
                for x, layout in zip(captured.operands, chosen.inputs, strict=True)
            ]
            graph = emit(captured, (row,), MESH, rank, parts)
            calls = [n for n in graph.nodes if n.op == "call_function"]
            ops = [n for n in calls if getattr(n.target, "namespace", "") != "_c10d_functional"]
            emitted_s = sum(node_seconds(n, cluster.device) for n in ops)
            assert emitted_s <= UNSEEN * priced_s + slack_s, (rank, row)
