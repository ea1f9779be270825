"""What a forward computes and drops is left out of the program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar


class Model(nn.Module):
    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)
        self.beside = beside

    def forward(self, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out = self.inner(x)
        F.cross_entropy(out, y)
        return (out, y) if self.beside else out


@pytest.mark.parametrize("beside", [False, True])
def test_a_dropped_loss_of_what_is_returned(beside: bool) -> None:
    model = Model(beside).double()
    inputs = (torch.randn(8, 16, dtype=torch.float64), torch.randint(0, 4, (8,)))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints={"data": 2}, cache=False)
    assert not any("nll" in op.name or "entropy" in op.name for op in plan.predicted.timeline.ops)
    found = autopar.verify(plan, model, inputs)
    assert found.worst[1] < 1e-12, found.worst


class Told(nn.Module):
    """Beside its loss it returns numbers that need the whole batch, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.outer(self.inner(x).relu())
        loss = F.cross_entropy(logits, y)
        share = logits.softmax(-1).mean(0)
        perplexity = torch.exp(-(share * share.log()).sum())
        ratio = -10 * torch.log10(loss.detach())
        return {"loss": loss, "ratio": ratio, "perplexity": perplexity, "logits": logits}


@pytest.mark.parametrize(
    "constraints",
    [{"pipeline": {"size": size, "microbatches": 2}} for size in (1, 2)],
    ids=["turns", "pipeline"],
)
def test_microbatches_drop_what_only_other_results_read(constraints: dict[str, Any]) -> None:
    model = Told().double()
    inputs = (torch.randn(8, 16, dtype=torch.float64), torch.randint(0, 4, (8,)))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=constraints, cache=False)
    assert plan.pipeline is not None
    assert not any("log10" in name for name in plan.pipeline.time)
    found = autopar.verify(plan, model, inputs)
    assert set(found.outputs) == {"0"} and len(found.gradients) == 4
    assert found.worst[1] < 1e-12, found.worst
