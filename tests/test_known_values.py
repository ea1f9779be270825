"""Sizes that depend on values of small inputs and of buffers: a step for each, equal to eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autopar
from autopar.tracer.trace import trace
from tests.dist import run_ranks

Way = Callable[["Model", Tensor, Tensor], Tensor]


def _by_list(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    x, parts, start = x.flatten(0, 1), [], 0
    for t, h, w in grid.tolist():
        parts.append(x[start : start + t * h * w].reshape(t, h, w, -1).mean((0, 1)).square().sum())
        start += t * h * w
    return torch.stack(parts).sum()


def _by_rows(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """As rotary embeddings of patches and their sequences are made."""
    places = []
    for t, h, w in grid:
        rows = torch.arange(h).unsqueeze(1).expand(-1, w)
        columns = torch.arange(w).unsqueeze(0).expand(h, -1)
        places.append(torch.stack([rows.flatten(), columns.flatten()], -1).repeat(t, 1))
    angles = torch.arange(grid[:, 1:].max()).to(x.dtype)[:, None] / m.inner.out_features
    x = x.flatten(0, 1) * angles[torch.cat(places)].flatten(1).sum(1, keepdim=True).cos()
    ends = F.pad(torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0]).cumsum(0), (1, 0))
    lengths = ends[1:] - ends[:-1]
    return sum(part.mean(0).square().sum() for part in torch.split(x, lengths.tolist()))


def _by_mask(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    ends = F.pad(grid.prod(-1).cumsum(0), (1, 0))
    x = x.flatten(0, 1).unsqueeze(0)
    mask = torch.zeros(1, x.shape[1], x.shape[1], dtype=torch.bool)
    for i in range(1, len(ends)):
        mask[..., ends[i - 1] : ends[i], ends[i - 1] : ends[i]] = True
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).square().sum()


def _picked(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """What could not be picked if the number of rows were unknown."""
    some = torch.arange(8) < m.sizes.sum() - 7
    first = x[0][some].std(0).sum() + x[1].masked_select(some[:, None]).sort().values[0]
    repeated = torch.repeat_interleave(x[:, 0], grid.prod(-1), dim=0).cumsum(0).square().sum()
    return first + repeated + x[0, some.nonzero()[0]].sum()


def _by_buffers(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    height, width = m.sizes.tolist()
    strided = x[:, :: int(m.stride)].square().sum()
    return x.reshape(-1, height, width).amax(1).sum() + strided * float(m.stride)


def _by_item(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """The mask meets a tensor that says its size."""
    places = torch.arange(0, grid.max().item(), device=grid.device)
    return x.reshape(-1, 4).masked_fill(places < 2, 0.0).square().sum()


class Model(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(64, 8), nn.Linear(8, 8)
        self.register_buffer("stride", torch.tensor(2), persistent=False)
        self.register_buffer("sizes", torch.tensor([4, 8]))
        self.way = way

    def forward(self, ids: Tensor, grid: Tensor) -> Tensor:
        return self.way(self, self.inner(self.table(ids)), grid)


IDS = torch.arange(16).reshape(2, 8)
GRID = torch.tensor([[1, 2, 2], [1, 3, 4]])
OTHER = torch.tensor([[2, 2, 2], [1, 2, 4]])
WAYS = (_by_list, _by_rows, _by_mask, _picked, _by_buffers, _by_item)


@pytest.mark.parametrize("way", WAYS)
def test_sizes_are_those_of_the_values(way: Way) -> None:
    torch.manual_seed(0)
    model, inputs = Model(way).double(), (IDS, GRID)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with pytest.warns(autopar.errors.FrozenValueWarning, match="sizes in the forward depend"):
        plan = autopar.plan(model, cluster, inputs, constraints={"tensor": "1d"}, cache=False)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-12, found.worst
    assert set(found.gradients) == {"table.weight", "inner.weight", "inner.bias"}


@pytest.mark.filterwarnings("ignore::autopar.errors.FrozenValueWarning")
def test_sizes_may_be_a_table_for_each_sample() -> None:
    model = Model(lambda m, x, grids: _by_rows(m, x, grids.flatten(0, 1))).double()
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    inputs = (IDS, GRID.unsqueeze(1))
    plan = autopar.plan(model, cluster, inputs, constraints={"tensor": "1d"}, cache=False)
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-12


@pytest.mark.filterwarnings("ignore::autopar.errors.FrozenValueWarning")
@pytest.mark.parametrize("way", [_by_list, _by_item])
def test_inputs_have_values_where_the_model_has_none(way: Way) -> None:
    inputs, sizes = (IDS, GRID), []
    for model in (Model(way), Model(way).to("meta")):
        sizes.append([n.target for n in trace(model, inputs).graph.nodes])
    assert sizes[0] == sizes[1]


def _other_values(rank: int) -> tuple[list[float], int, str]:
    """How far steps for two grids, in turn, are from one device; their number; a changed buffer."""
    torch.manual_seed(0)
    single = Model(lambda m, x, grid: _by_list(m, x, grid) + _by_buffers(m, x, grid)).double()
    parallel = autopar.parallelize(single, init_device_mesh("cpu", (2,)), (IDS, GRID), cache=False)
    apart = []
    for grid in (GRID, OTHER, GRID, OTHER):
        single.zero_grad()
        parallel.zero_grad()
        single(IDS, grid).backward()
        parallel(IDS, grid).backward()
        gradients = {n: p.grad.full_tensor() for n, p in parallel.named_parameters()}
        apart += [float(torch.dist(gradients[n], p.grad)) for n, p in single.named_parameters()]
    parallel.sizes.copy_(torch.tensor([4, 8]))  # as it was
    parallel(IDS, GRID)
    parallel.sizes.copy_(torch.tensor([8, 4]))
    with pytest.raises(autopar.AutoparError) as caught:
        parallel(IDS, GRID)
    return apart, len(parallel._steps), str(caught.value)


def test_other_values_get_a_step_of_their_own() -> None:
    for apart, steps, message in run_ranks(_other_values, 2):
        assert max(apart) < 1e-12
        assert steps == 2
        assert "'sizes', which was [4, 8]" in message and "is [8, 4] now" in message


class Counting(Model):
    """Its buffer has another value in each step."""

    def forward(self, ids: Tensor, grid: Tensor) -> Tensor:
        rows = int(self.stride)
        self.stride.add_(1)
        return self.inner(self.table(ids))[:, :rows].sum()


class Picking(Model):
    """Picks rows by the values of an input."""

    def forward(self, ids: Tensor, grid: Tensor) -> Tensor:
        x = self.inner(self.table(ids))[:, : grid.shape[0]]
        return x[:, grid[:, 0] > 1].cumsum(1).sum()


class Asking(Model):
    """Decides by the values of an input."""

    def forward(self, ids: Tensor, grid: Tensor) -> Tensor:
        x = self.inner(self.table(ids))
        return x.sum() if grid[0, 0] > 5 else x.square().sum()


@pytest.mark.parametrize("kind", [Counting, Picking, Asking])
def test_what_no_value_answers_is_refused(kind: Any) -> None:
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            autopar.TraceError, match=r"The value of a tensor decides|How many rows are picked"
        ):
            autopar.plan(kind(_by_list), cluster, (IDS, GRID), cache=False)


class Flagged(Model):
    """Branches on a tensor that it keeps in a plain attribute."""

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.flags = torch.tensor([True, False, True])

    def forward(self, ids: Tensor, grid: Tensor) -> Tensor:
        x = self.table(ids)
        for flag in self.flags:
            x = self.inner(x) if flag else x.cos()
        return x.square().sum()


def test_a_tensor_in_a_plain_attribute_decides_nothing() -> None:
    """It may be another one in the next step."""
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with pytest.raises(autopar.TraceError, match="The value of a tensor decides"):
        autopar.plan(Flagged(_by_list), cluster, (IDS, GRID), cache=False)


class Literal(Model):
    """Repeats rows by numbers that depend on nothing."""

    def forward(self, ids: Tensor, grid: Tensor) -> Tensor:
        x = self.inner(self.table(ids))
        return x.repeat_interleave(torch.arange(8), dim=1).cumsum(1).square().sum()


def test_numbers_that_depend_on_nothing() -> None:
    torch.manual_seed(0)
    model, inputs = Literal(_by_list).double(), (IDS, GRID)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.errors.FrozenValueWarning)
        plan = autopar.plan(model, cluster, inputs, constraints={"data": 2}, cache=False)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-12 and len(found.gradients) == 3, found.worst


class Padded(Model):
    """Branches on numbers that it computes of a buffer, as convolutions with paddings do."""

    def forward(self, ids: Tensor, grid: Tensor) -> Tensor:
        x = self.inner(self.table(ids))
        count = torch.ceil((x.shape[1] - self.stride) / self.stride + 1).to(torch.int64)
        missing = max(count * self.stride - x.shape[1], 1)
        if x.shape[1] <= missing * 16:
            x = F.pad(x, (0, 0, 0, missing))
        return F.pad(x, (0, 0, missing, 2)).square().cumsum(1).sum()


def test_branches_on_what_is_computed_of_buffers() -> None:
    torch.manual_seed(0)
    model, inputs = Padded(_by_list).double(), (IDS, GRID)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints={"tensor": "1d"}, cache=False)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-12 and len(found.gradients) == 3, found.worst
