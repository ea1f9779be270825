"""Parts of a joined gather are copied out of it by one kernel, where they fit in memory at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.codegen.emit import emit
from autopar.codegen.passes import phase_of
from autopar.codegen.passes.bucket import bucket
from autopar.codegen.passes.lifetimes import Lifetimes
from autopar.codegen.passes.sends import is_wait
from autopar.core.constraints import Constraints
from autopar.core.graph import TracedModel
from autopar.core.plan import Plan
from autopar.core.split_copy import SPLIT_COPY
from autopar.cost_model import Cluster
from autopar.solver.solve import solve
from autopar.tracer.trace import trace
from autopar.verification import verify

SLICE = torch.ops.aten.slice.Tensor


class Blocks(nn.Module):
    """Two linears a block, with biases."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("strided", [False, True])
def test_parts_are_the_columns(strided: bool) -> None:
    x = torch.arange(24.0).view(4, 6)
    x = x.t().contiguous().t() if strided else x
    parts = SPLIT_COPY(x, [1, 3, 2])
    for part, columns in zip(parts, x.split([1, 3, 2], dim=1), strict=True):
        assert part.is_contiguous() and torch.equal(part, columns)
        assert part.untyped_storage()._cdata != x.untyped_storage()._cdata


def zero_3() -> tuple[nn.Module, dict[str, Tensor], TracedModel, Plan]:
    torch.manual_seed(0)
    model, inputs = Blocks().double().train(), {"x": torch.randn(8, 16).double()}
    traced = trace(model, inputs)
    pins = Constraints.parse({"data": 4, "zero": 3})
    plan = solve(traced, Cluster.from_profile("h100-sxm", devices_per_node=4), constraints=pins)
    return model, inputs, traced, plan


def joined(graph: fx.Graph, budget: int) -> fx.Graph:
    """All gathers of a phase in one bucket."""
    return bucket(graph, {(0, "all_gather"): 1 << 30}, phase_of, budget)


def is_gather(node: fx.Node) -> bool:
    return "all_gather" in str(node.target)


def taken_out(graph: fx.Graph) -> tuple[int, int]:
    """Joint copies, and slices, of what joined gathers bring."""
    waits = {n for n in graph.nodes if is_wait(n) and is_gather(n.all_input_nodes[0])}
    readers = [u for wait in waits for u in wait.users]
    return sum(u.target is SPLIT_COPY for u in readers), sum(u.target is SLICE for u in readers)


def test_a_bucket_is_taken_apart_by_one_kernel_if_that_fits() -> None:
    _, _, traced, plan = zero_3()
    graph = emit(traced, plan, [0], passes=()).joint.graph
    free = joined(graph, 1 << 40)
    copies, slices = taken_out(free)
    assert copies == 2 and slices == 0  # in the forward and in the backward
    most = Lifetimes(free).peak_bytes
    tight = joined(graph, int(0.998 * most))  # a thousandth more is let pass
    assert Lifetimes(tight).peak_bytes < most
    assert taken_out(tight)[0] < 2


def test_values_are_those_of_one_device() -> None:
    model, inputs, traced, plan = zero_3()
    program = emit(traced, plan, [0]).joint.graph
    assert any(node.target is SPLIT_COPY for node in program.nodes)
    assert verify(plan, model, inputs).worst[1] <= 1e-12
