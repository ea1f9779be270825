"""Functions of integers that cannot be traced: called in each step as they are, equal to eager."""

from __future__ import annotations

import itertools
import random
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.core.eager_calls import EAGER_CALL
from autopar.tracer.trace import trace
from tests.dist import run_ranks
from tests.test_forward_semantics import verified

Way = Callable[["Model", Tensor, Tensor], Tensor]


def _places(ids: Tensor, kept: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """As models of images and text place them: a run of equal tokens counts as one."""
    places, counts = torch.zeros_like(ids), []
    for i, row in enumerate(ids):
        some = row[kept[i].bool()].tolist()
        runs = [len(list(run)) for _, run in itertools.groupby(some)]
        along = [torch.full((length,), step * n) for n, length in enumerate(runs)]
        places[i, kept[i].bool()] = torch.cat(along)
        counts.append(len(runs))
    return places, torch.tensor(counts)


class Model(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(64, 8), nn.Linear(8, 8)
        self.register_buffer("one", torch.tensor(1))
        self.step, self.way, self.seen = 1, way, 0

    def places(self, ids: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        return _places(ids, kept, self.step)

    def some(self, ids: Tensor, kept: Tensor) -> Tensor:
        return self.way(self, ids, kept)

    def forward(self, ids: Tensor, kept: Tensor) -> Tensor:
        x = self.inner(self.table(ids))
        if self.way is not _by_method:
            return (x.sum(-1) * self.some(ids, kept)).square().sum()
        places, counts = self.places(ids, kept * torch.ones_like(kept))
        return ((x + self.table(places)).square().sum((1, 2)) / counts).sum()


def _by_method(m: Model, ids: Tensor, kept: Tensor) -> Tensor:
    return m.places(ids, kept)[0]


class Deep(Model):
    def __init__(self) -> None:
        super().__init__(_by_method)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)
        )

    def forward(self, ids: Tensor, kept: Tensor) -> Tensor:
        places, counts = self.places(ids, kept)
        x = self.table(ids) + self.table(places)
        for layer in self.layers:
            x = x + layer(x)
        return (self.inner(x).square().sum((1, 2)) / counts).sum()


IDS = torch.tensor([[1, 5, 5, 5, 2, 3, 3, 0], [5, 5, 7, 8, 9, 9, 9, 9]])
KEPT = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0], [1] * 8])
OTHER = torch.tensor([[1] * 8, [0, 0, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("constraints", [{"data": 2}, {"tensor": "1d"}])
def test_functions_of_integers_run_as_they_are(constraints: Any) -> None:
    torch.manual_seed(0)
    model = Model(_by_method).double()
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.errors.FrozenValueWarning)
        plan = autopar.plan(model, cluster, (IDS, KEPT), constraints=constraints, cache=False)
    found = autopar.verify(plan, model, (IDS, KEPT))
    assert found.worst[1] < 1e-12 and len(found.gradients) == 3, found.worst


def test_microbatches_are_computed_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model, inputs = Deep().double(), (torch.cat([IDS, IDS.flip(1)]), torch.cat([KEPT, OTHER]))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    constraints = {"pipeline": {"size": 2, "microbatches": 2}}
    plan = autopar.plan(model, cluster, inputs, constraints=constraints, cache=False)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-12 and len(found.gradients) == 11, found.worst


def test_a_graph_keeps_its_calls() -> None:
    traced = trace(Model(_by_method), (IDS, KEPT))
    (node,) = (n for n in traced.graph.nodes if n.target is EAGER_CALL)
    assert node.args[1].startswith("Model.places") and len(traced.eager_calls) == 1
    (call,) = traced.eager_calls
    assert torch.equal(call.results([IDS, KEPT])[1], torch.tensor([4, 4]))


def _other_values(rank: int) -> tuple[list[float], int]:
    """How far steps for two masks, in turn, are from one device, and the number of steps."""
    torch.manual_seed(0)
    single = Model(_by_method).double()
    mesh = init_device_mesh("cpu", (2,))
    parallel = autopar.parallelize(single, mesh, (IDS, KEPT), constraints={"data": 2}, cache=False)
    apart = []
    for ids, kept in ((IDS, KEPT), (IDS, OTHER), (IDS.flip(1), KEPT)):
        single.zero_grad()
        parallel.zero_grad()
        loss, other = single(ids, kept), parallel(ids, kept)
        loss.backward()
        other.backward()
        gradients = {n: p.grad.full_tensor() for n, p in parallel.named_parameters()}
        apart += [float(torch.dist(gradients[n], p.grad)) for n, p in single.named_parameters()]
        apart.append(abs(float(loss) - float(other)))
    return apart, len(parallel._steps)


def test_other_values_are_computed_by_the_same_step() -> None:
    for apart, steps in run_ranks(_other_values, 2):
        assert max(apart) < 1e-10 and len(apart) == 12
        assert steps == 1


def _many(x: Tensor) -> int:
    return len(range(x.tolist()[0][0]))


def _as_many(m: Model, ids: Tensor, kept: Tensor) -> Tensor:
    return torch.ones(_many(kept) + 1, 8)


def _other_shape(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    parallel = autopar.parallelize(Model(_as_many), mesh, (IDS, KEPT), cache=False)
    parallel(IDS, KEPT).backward()
    with pytest.raises(autopar.AutoparError) as caught:
        parallel(IDS, OTHER * 0)
    return str(caught.value)


def test_other_shapes_are_an_error() -> None:
    for message in run_ranks(_other_shape, 2):
        assert "Model.some returned [1, 8] of float32" in message and "[2, 8] of float32" in message


def _reads_a_parameter(m: Model, ids: Tensor, kept: Tensor) -> Tensor:
    return m.table.weight.argmax(1)[ids] * _many(kept)


def _reads_a_buffer(m: Model, ids: Tensor, kept: Tensor) -> Tensor:
    return kept.clone() * m.one * _many(ids)


def _draws(m: Model, ids: Tensor, kept: Tensor) -> Tensor:
    return torch.randperm(8) * _many(ids)


def _draws_in_python(m: Model, ids: Tensor, kept: Tensor) -> Tensor:
    return kept * random.randint(0, 9) * _many(ids)


def _counts(m: Model, ids: Tensor, kept: Tensor) -> Tensor:
    m.seen += 1
    return kept * _many(ids)


def _writes(m: Model, ids: Tensor, kept: Tensor) -> Tensor:
    ids[0, 0] = 2
    return kept * _many(ids)


def _gives_a_number(m: Model, ids: Tensor, kept: Tensor) -> Any:
    return _many(ids)


def _gives_its_input(m: Model, ids: Tensor, kept: Tensor) -> Tensor:
    return kept.view(-1).view(2, 8) if _many(ids) else kept


@pytest.mark.parametrize(
    "way",
    [
        _reads_a_parameter,
        _reads_a_buffer,
        _draws,
        _draws_in_python,
        _counts,
        _writes,
        _gives_a_number,
        _gives_its_input,
    ],
)
def test_functions_that_do_more_are_refused(way: Way) -> None:
    model = Model(way)
    with pytest.raises(autopar.TraceError, match="The value of a tensor decides"):
        trace(model, (IDS.clone(), KEPT))
    assert Model.some.__name__ == "some" and not hasattr(Model.some, "__wrapped__")
    assert model.seen == 0


class Graph(nn.Module):
    """Sums over the edges of a graph, of which loops are left out and one is added to each node."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weigh = nn.Linear(16, 4), nn.Linear(2, 1)

    def forward(self, x: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        kept = edges[0] != edges[1]
        loops = torch.arange(x.shape[0], device=x.device).expand(2, -1)
        sources, targets = torch.cat([edges[:, kept], loops], 1)
        weights = torch.cat([self.weigh(features[kept]), x.new_ones(x.shape[0], 1)])
        messages = self.linear(x)[sources] * weights
        return x.new_zeros(x.shape[0], 4).index_add(0, targets, messages).square().mean()


def test_edges_that_are_no_loops() -> None:
    torch.manual_seed(0)
    edges = torch.randint(0, 7, (2, 20))
    edges[0] = edges[1] + 1
    edges[1, :4] = edges[0, :4] = torch.arange(4)
    inputs = {"x": torch.randn(8, 16), "edges": edges, "features": torch.randn(20, 2)}
    with pytest.warns(autopar.FrozenValueWarning, match=r"edges\[:, kept\](.|\n)*of 20, and oth"):
        found = verified(Graph(), inputs)
    assert found.worst[1] < 1e-9, found.worst


def test_a_function_that_another_module_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = types.ModuleType("autopar_tests_other")
    other._places = _places
    monkeypatch.setitem(sys.modules, other.__name__, other)

    class Importing(Model):
        def forward(self, ids: Tensor, kept: Tensor) -> Tensor:
            places, counts = other._places(ids, kept, 1)
            x = self.inner(self.table(ids)) + self.table(places)
            return (x.square().sum((1, 2)) / counts).sum()

    found = verified(Importing(_by_method), {"ids": IDS, "kept": KEPT})
    assert found.worst[1] < 1e-9, found.worst
    assert other._places is _places
