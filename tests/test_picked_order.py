"""Picked rows in windows, by their order, split by sample, and at the places of another mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import UncheckedWarning
from autopar.runtime.lockstep import Strided
from autopar.tracer.trace import trace
from autopar.verification import whole_inputs

WIDTH = 8
Way = Callable[["Model", Tensor, Tensor, Tensor], Any]


class Model(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.latent = nn.Parameter(torch.randn(1, WIDTH))
        self.way = way

    def forward(self, ids: Tensor, images: Tensor) -> Any:
        real = (images == 0).flatten(2).sum(-1).flatten() != images[0, 0].numel()
        return self.way(self, ids, images.flatten(0, 1), real)


def _windows(m: Model, ids: Tensor, x: Tensor, real: Tensor) -> Tensor:
    found = m.inner(x[real]).unfold(1, 2, 2).unfold(dimension=2, size=4, step=4)
    return found.exp().sum((-1, -2)).square().mean()


def _bucketed(m: Model, ids: Tensor, x: Tensor, real: Tensor) -> Tensor:
    rows = x[real]
    place = torch.bucketize(rows[..., 0], torch.arange(-1.0, 1.0, 0.25), right=True)
    return (m.table(place) * m.inner(rows)).tanh().sum()


def _own_columns(m: Model, ids: Tensor, x: Tensor, real: Tensor) -> Tensor:
    rows = m.inner(x[real])
    order = torch.arange(rows.shape[0])[:, None]
    found = rows[order, torch.arange(2)[None, :]] * m.table(order)
    seen = (rows[..., 0] > 0)[order, torch.arange(4)[None, :]] & (rows[..., 1] > 0)
    return found.square().mean() + rows[..., 0].where(seen, 0.0).sum()


def _latents(m: Model, ids: Tensor, x: Tensor, real: Tensor) -> Tensor:
    rows = m.inner(x[real])
    latents = m.latent.unsqueeze(0).expand(rows.shape[0], 1, WIDTH)
    return torch.concat([rows, latents], -2).tanh().square().mean()


def _parts(m: Model, x: Tensor, real: Tensor, each: Callable[[Tensor], Tensor]) -> Tensor:
    sizes = real.view(4, 2).sum(dim=1).tolist()
    return torch.cat([each(part).reshape(-1, WIDTH) for part in m.inner(x[real]).split(sizes)])


def _split(m: Model, ids: Tensor, x: Tensor, real: Tensor) -> Tensor:
    return _parts(m, x, real, lambda part: part).exp().square().mean()


def _split_for_more(m: Model, ids: Tensor, x: Tensor, real: Tensor) -> Tensor:
    found = _parts(m, x, real, lambda part: m.inner(part).tanh())
    twice = torch.cat([found, m.inner(x[real]).reshape(-1, WIDTH)])
    return twice.square().mean()


def _scattered(m: Model, ids: Tensor, x: Tensor, real: Tensor) -> Tensor:
    rows = _parts(m, x, real, lambda part: part)
    put = m.table(ids).masked_scatter((ids == 3).unsqueeze(-1), rows)
    return put.cumsum(1).tanh().sum()


def _spread(m: Model, ids: Tensor, x: Tensor, real: Tensor) -> Tensor:
    table = m.table(ids)
    mask = (ids == 3).unsqueeze(-1).expand_as(table)
    return table.masked_scatter(mask, m.inner(x[real]).flatten(0, 1)).cumsum(1).tanh().sum()


def _put(m: Model, ids: Tensor, x: Tensor, real: Tensor) -> Tensor:
    table = m.table(ids).clone()
    table[ids == 3] = m.inner(x[real]).flatten(0, 1)
    more = m.inner(x[real]).view(-1, WIDTH).exp()
    table = table.index_put((ids == 3,), more, accumulate=True)
    return table.cumsum(1).tanh().sum()


def _one_at_least(m: Model, ids: Tensor, x: Tensor, real: Tensor) -> Tensor:
    real[0] |= ~torch.any(real)
    return _scattered(m, ids, x, real)


WRITES = (_scattered, _spread, _put, _one_at_least)
WAYS = (_windows, _bucketed, _own_columns, _latents, _split, _split_for_more, *WRITES)


def batch(*tokens: int) -> tuple[Tensor, Tensor]:
    """Two images of four tokens in each sample, five of them real, and as many tokens as asked."""
    torch.manual_seed(0)
    ids = torch.randint(4, 16, (4, 12))
    for row, count in zip(ids, tokens or (8, 4, 0, 8), strict=True):
        row[1 : count + 1] = 3
    images = torch.randn(4, 2, 4, WIDTH, dtype=torch.float64)
    images[1, 0], images[2] = 0, 0
    return ids, images


def model_of(way: Way) -> Model:
    torch.manual_seed(0)
    return Model(way).double()


def errors(way: Way, constraints: Any, inputs: Any) -> Any:
    model = model_of(way)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=constraints, cache=False)
    return autopar.verify(plan, model, inputs)


@pytest.mark.parametrize("constraints", [{"tensor": "1d"}, {"data": 2}], ids=["tensor", "data"])
@pytest.mark.parametrize("way", WAYS)
def test_as_on_one_device(way: Way, constraints: Any) -> None:
    found = errors(way, constraints, batch())
    assert found.worst[1] < 1e-12, found.worst
    assert "inner.weight" in found.gradients


@pytest.mark.parametrize("way", WRITES)
def test_other_images_are_real_in_another_step(way: Way) -> None:
    model, (ids, images) = model_of(way), batch(8, 8, 4, 0)
    traced = trace(model, batch())
    images[3], images[2, 1] = 0, 1.5
    images[1, 0] = 0.5
    found, expected = _step(traced, model, (ids, images)), model(ids, images)
    torch.testing.assert_close(found[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", [(8, 4, 0, 7), (8, 4, 1, 8), (0, 0, 0, 0)])
@pytest.mark.parametrize("way", WRITES)
def test_unequal_numbers_are_an_error(way: Way, tokens: tuple[int, ...]) -> None:
    model = model_of(way)
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        _step(trace(model, batch()), model, batch(*tokens))


def _step(traced: Any, model: Model, inputs: tuple[Tensor, ...]) -> Any:
    whole = whole_inputs(traced, model, inputs, seed=0)
    feed = [whole[n.name] for n in traced.graph.nodes if n.op == "placeholder"]
    return Strided(traced.graph_module).run(*feed)


def test_sizes_of_another_mask_are_refused() -> None:
    def other(m: Model, ids: Tensor, x: Tensor, real: Tensor) -> Tensor:
        sizes = (x[:, 0, 0] > 0).view(4, 2).sum(1).tolist()
        return torch.cat([m.inner(part) for part in x[real].split(sizes)]).mean()

    with pytest.raises(autopar.TraceError):
        trace(model_of(other), batch())


def test_rows_beside_the_loss_are_left_out() -> None:
    def beside(m: Model, ids: Tensor, x: Tensor, real: Tensor) -> dict[str, Tensor]:
        rows = m.inner(x[real])
        return {"loss": rows.square().mean(), "rows": rows}

    with pytest.warns(UncheckedWarning, match=r"output\['rows'\] has as many rows"):
        found = errors(beside, {"data": 2}, batch())
    assert found.worst[1] < 1e-12, found.worst
    with pytest.raises(autopar.TraceError, match="rows are picked"):
        trace(model_of(beside), batch(), training=False)
