"""State dicts of one device, loaded into parallel modules on real gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests import handwritten as hw
from tests import zoo
from tests.dist import run_ranks
from tests.test_gloo import whole

PLANS: list[Any] = [
    {"data": 2, "zero": 3},
    {"data": 2, "tensor": {"mode": "1d", "size": 2}, "zero": 3},
    {"tensor": {"mode": "2d", "size": 4}},
]


def gpt2(seed: int) -> nn.Module:
    """Tied embedding and head, fused QKV weights."""
    torch.manual_seed(seed)
    return zoo.gpt2(layers=1)[0].train()


def loaded(rank: int, world: int, constraints: Any) -> None:
    inputs = zoo.gpt2(layers=1)[1]
    parallel = autopar.parallelize(
        gpt2(0), init_device_mesh("cpu", (world,)), inputs, constraints=constraints
    )
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    other = gpt2(1)
    state = other.state_dict()
    found = parallel.load_state_dict(state)
    assert found.missing_keys == found.unexpected_keys == []
    for name, value in parallel.state_dict().items():
        assert torch.equal(whole(value), state[name]), name
    expected = other(**inputs).loss
    assert float(parallel.train_step(**inputs)) == pytest.approx(float(expected), rel=1e-5)
    optimizer.step()  # it holds the same parameters
    assert not torch.equal(whole(parallel.state_dict()["lm_head.weight"]), state["lm_head.weight"])
    # one name of a tied pair is enough, and what state_dict returns goes in again
    del state["lm_head.weight"]
    parallel.load_state_dict(state)
    parallel.load_state_dict(parallel.state_dict())
    assert torch.equal(
        whole(parallel.state_dict()["lm_head.weight"]), state["transformer.wte.weight"]
    )


@pytest.mark.parametrize("constraints", PLANS)
def test_full_tensors_are_sharded(constraints: Any) -> None:
    world = 2 if constraints == PLANS[0] else 4
    run_ranks(loaded, world, world, constraints)


def refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1,))
    parallel = autopar.parallelize(gpt2(0), mesh, zoo.gpt2(layers=1)[1])
    before = {n: whole(v).clone() for n, v in parallel.state_dict().items()}
    good = gpt2(1).state_dict()
    name = "transformer.h.0.mlp.c_fc.weight"

    def without(*names: str) -> dict[str, Any]:
        return {k: v for k, v in good.items() if k not in names}

    cases = [
        (without(name), [f"lacks 1 name: {name}"]),
        ({**good, "strange": good[name]}, ["does not have 1 name: strange"]),
        ({f"model.{k}": v for k, v in good.items()}, ["model.transformer.wte.weight", "nearest"]),
        ({**good, name: good[name].t()}, [name, "(256, 64)", "(64, 256)"]),
        ({**good, name: good[name].to("meta")}, [name, "on meta"]),
        ({**good, name: 3}, [name, "a int"]),
        ({**good, "lm_head.weight": good["lm_head.weight"] + 1}, ["lm_head.weight", "different"]),
        ({**good, name: parallel.state_dict()[name]}, []),
    ]
    for state, words in cases:
        if not words:
            parallel.load_state_dict(state)
            continue
        with pytest.raises(autopar.CheckpointError) as caught:
            parallel.load_state_dict(state)
        for word in words:
            assert word in str(caught.value)
        for key, value in parallel.state_dict().items():
            assert torch.equal(whole(value), before[key]), key
    found = parallel.load_state_dict({**without(name), "strange": good[name]}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == ([name], ["strange"])
    with pytest.raises(autopar.CheckpointError, match=r"\(256, 64\)"):
        parallel.load_state_dict({name: good[name].t()}, strict=False)
    with pytest.raises(autopar.AutoparError, match="assign"):
        parallel.load_state_dict(good, assign=True)
    with pytest.raises(autopar.AutoparError, match="before the first call"):
        autopar.parallelize(hw.Mlp(), mesh).load_state_dict(hw.Mlp().state_dict())


def test_what_does_not_fit_is_named_and_changes_nothing() -> None:
    run_ranks(refused, 1)


TAKEN = ("plan", "mesh", "names", "device", "coords", "compiled", "parameter", "buffer")


class Collides(nn.Module):
    """Children and buffers with the names of a parallel module's own attributes."""

    def __init__(self) -> None:
        super().__init__()
        for name in TAKEN:
            self.add_module(name, nn.Linear(8, 8))
        self.register_buffer("loss_scaler", torch.linspace(1, 2, 8))
        self.register_buffer("random_state", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        for name in TAKEN:
            x = torch.tanh(self._modules[name](x))  # type: ignore[misc]
        with torch.no_grad():
            self._buffers["random_state"] += x.mean(0)  # type: ignore[operator]
        return (x * self._buffers["loss_scaler"]).square().mean()


def collides(rank: int) -> None:
    torch.manual_seed(0)
    model, x = Collides(), torch.randn(8, 8)
    mesh = init_device_mesh("cpu", (2,))
    parallel = autopar.parallelize(model, mesh, x, constraints=PLANS[0], cache=False)
    loss = parallel.train_step(x)
    expected = model(x)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    state = model.state_dict()
    assert list(parallel.state_dict()) == list(state)
    assert torch.allclose(whole(parallel.state_dict()["random_state"]), state["random_state"])
    gradients = {name: whole(p.grad) for name, p in parallel.named_parameters()}
    for name, p in model.named_parameters():
        assert torch.allclose(gradients[name], p.grad, atol=1e-6), name
    parallel.load_state_dict(model.state_dict())


def test_a_model_may_use_the_names_of_a_parallel_module() -> None:
    run_ranks(collides, 2)
