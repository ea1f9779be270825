"""Pipelines on real gloo ranks: AdamW steps against one process, tied weights, checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import zoo
from tests.dist import run_ranks

_OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}


def _model() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = zoo.gpt2(layers=2)
    inputs["labels"][0, 3:] = -100
    return model.double().train(), inputs


def _train(rank: int, constraints: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    model, inputs = _model()
    single = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parallel = autopar.parallelize(model, mesh, inputs, constraints=constraints, cache=False)
    ours = torch.optim.AdamW(parallel.parameters(), **_OPTIONS)
    theirs = torch.optim.AdamW(single.parameters(), **_OPTIONS)
    losses: list[tuple[float, float]] = []
    norms: list[tuple[float, float]] = []
    for step in range(3):
        if step == 1:  # by hand what train_step does
            loss = parallel(**inputs).loss
            loss.backward()
        else:
            loss = parallel.train_step(**inputs)
        expected = single(**inputs).loss
        expected.backward()
        norms.append(
            (
                float(parallel.clip_grad_norm_(1.0)),
                float(nn.utils.clip_grad_norm_(single.parameters(), 1.0)),
            )
        )
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
        losses.append((float(loss.detach()), float(expected.detach())))
    named = dict(single.named_parameters())
    errors = {name: _error(p.full_tensor(), named[name]) for name, p in parallel.named_parameters()}
    parallel.eval(), single.eval()
    with torch.no_grad():
        logits = _error(parallel(**inputs).logits, single(**inputs).logits)
    return {"losses": losses, "norms": norms, "errors": errors, "logits": logits}


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _holds(results: list[dict[str, Any]], parameters: int) -> None:
    """Bounds: GPT-2's loss is computed in float32."""
    names: dict[str, float] = {}
    for result in results:
        for ours, theirs in (*result["losses"], *result["norms"]):
            assert abs(ours - theirs) <= 1e-6 * abs(theirs)
        assert result["logits"] <= 1e-5
        names.update(result["errors"])
    assert len(names) == parameters
    assert max(names.values()) <= 1e-5, max(names, key=lambda n: names[n])


def test_pipeline_with_data_parallel_and_tied_weight() -> None:
    constraints = {"pipeline": {"size": 2, "microbatches": 2}, "data": 2, "zero": 1}
    results = run_ranks(_train, 4, constraints, timeout=300)
    _holds(results, len(dict(_model()[0].named_parameters())))
    first, last = results[0]["errors"], results[-1]["errors"]
    assert "transformer.wte.weight" in first
    assert "transformer.wte.weight" not in last
    assert not first.keys() & last.keys()


@pytest.mark.parametrize("schedule", ["zero-bubble", "automatic"])
def test_a_split_backward_with_tensor_parallel(schedule: str) -> None:
    constraints = {
        "pipeline": {"size": 2, "microbatches": 4, "schedule": schedule},
        "tensor": "1d",
    }
    results = run_ranks(_train, 4, constraints, timeout=300)
    _holds(results, len(dict(_model()[0].named_parameters())))


def _run(rank: int, constraints: dict[str, Any], folder: str, resume: bool) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    model, inputs = _model()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parallel = autopar.parallelize(model, mesh, inputs, constraints=constraints, cache=False)
    optimizer = torch.optim.AdamW(parallel.parameters(), **_OPTIONS)
    losses: list[float] = []

    def steps(count: int) -> None:
        for _ in range(count):
            losses.append(float(parallel.train_step(**inputs)))
            optimizer.step()
            optimizer.zero_grad()

    if resume:
        autopar.load_checkpoint(folder, parallel, optimizer)
    else:
        steps(2)
        autopar.save_checkpoint(folder, parallel, optimizer, step=2)
    steps(5)
    return losses


def test_saved_on_a_pipeline_and_taken_up_on_other_plans(tmp_path: Path) -> None:
    saved = {"pipeline": {"size": 2, "microbatches": 2}, "tensor": "1d"}
    unbroken = run_ranks(_run, 4, saved, str(tmp_path), False, timeout=300)[0]
    others: list[tuple[int, dict[str, Any]]] = [
        (2, {"data": 2, "zero": 3}),
        (2, {"pipeline": {"size": 2}}),
        (1, {}),
    ]
    for world, constraints in others:
        for losses in run_ranks(_run, world, constraints, str(tmp_path), True, timeout=300):
            for ours, theirs in zip(losses, unbroken[2:], strict=True):
                assert abs(ours - theirs) <= 1e-6 * abs(theirs)


class _Shared(nn.Module):
    """Blocks that share two weights, and two tables that all of them read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.a, self.b = (nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2))
        self.g, self.h = (nn.Parameter(torch.randn(8) / 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.g.exp(), self.h.exp()
        for i, layer in enumerate(self.layers):
            first, second = (self.a, self.b) if i < 2 else (self.b, self.a)
            x = torch.tanh(layer(x * up + down) @ first @ second)
        return x.square().mean()


def _order(rank: int, constraints: dict[str, Any]) -> dict[str, Any]:
    """Tags of what is sent and received in a step, by what runs in order: group and peer."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    torch.manual_seed(0)
    model, inputs = _Shared().double(), {"x": torch.randn(8, 8, dtype=torch.float64)}
    single = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallel = autopar.parallelize(model, mesh, inputs, constraints=constraints, cache=False)
    found: dict[str, list[Any]] = {"isend": [], "irecv": []}
    for name in found:
        call = getattr(dist, name)

        def watched(*args: Any, name: str = name, call: Any = call, **given: Any) -> Any:
            found[name].append((given["group"].group_name, given["tag"]))
            return call(*args, **given)

        setattr(dist, name, watched)
    parallel.train_step(**inputs)
    single(**inputs).backward()
    named = dict(single.named_parameters())
    worst = {n: _error(p.grad.full_tensor(), named[n].grad) for n, p in parallel.named_parameters()}
    return {**found, "worst": worst}


@pytest.mark.parametrize(
    "pins",
    [{"schedule": "gpipe"}, {"schedule": "interleaved", "chunks": 2}, {"schedule": "zero-bubble"}],
    ids=["gpipe", "interleaved", "zero-bubble"],
)
def test_what_is_sent_first_is_received_first(pins: dict[str, Any]) -> None:
    """NCCL looks at no tag: of a group, the first to be sent is the first to be received.

    A weight of four stages gets the contributions of all.
    """
    found = run_ranks(_order, 2, {"pipeline": {"size": 2, "microbatches": 2, **pins}})
    for source, target in ((0, 1), (1, 0)):
        sent, received = found[source]["isend"], found[target]["irecv"]
        for group in {name for name, _ in sent}:
            tags = [tag for name, tag in sent if name == group]
            assert len(tags) > 1
            assert tags == [tag for name, tag in received if name == group]
    assert max(error for each in found for error in each["worst"].values()) <= 1e-9
