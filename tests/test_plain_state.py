"""State dicts of one device, loaded into parallel modules on real gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
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
