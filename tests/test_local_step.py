"""Elementwise optimizers step on shares: the numbers of one device, and DTensors between steps."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime import local_step
from autopar.runtime.local_step import _ELEMENTWISE
from tests import handwritten as hw
from tests.dist import run_ranks

MAKERS: list[Any] = [
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    partial(optim.AdamW, amsgrad=True, maximize=True),
    partial(optim.AdamW, fused=True),
    partial(optim.AdamW, foreach=True),
    partial(optim.AdamW, capturable=False, differentiable=False),
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    partial(optim.RMSprop, momentum=0.9, centered=True),
    optim.Rprop,
    optim.SGD,
    partial(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    partial(autopar.AdamW, max_norm=0.1, maximize=True),
]
CONSTRAINTS: list[dict[str, Any]] = [{"data": 2, "zero": 3}, {"tensor": "1d"}]
ON_HOST = {"data": 2, "zero": 3, "offload": "optimizer"}


class Scaled(hw.Unused):
    """With a parameter of no dimension, whose states have the shape of a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * self.scale


class Odd(optim.AdamW):
    """A user's own: what it does to parameters is not known."""

    def step(self, closure: Any = None) -> Any:
        assert all(isinstance(p, DTensor) for g in self.param_groups for p in g["params"])
        return super().step(closure)


def batch() -> dict[str, torch.Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in hw.vectors().items()}


def same(parallel: Any, single: torch.nn.Module, ours: Any, theirs: Any) -> None:
    for name, expected in single.named_parameters():
        mine = parallel.get_parameter(name)
        torch.testing.assert_close(mine.full_tensor(), expected, rtol=1e-9, atol=1e-12)
        state = theirs.state.get(expected, {})
        assert set(ours.state.get(mine, {})) == set(state), name
        for key, value in state.items():
            got = ours.state[mine][key]
            if not isinstance(value, torch.Tensor):
                assert got == value
                continue
            counter = key in ("step", "eta", "mu", "mu_product")
            assert isinstance(got, DTensor) is not counter, (name, key)
            whole = got.full_tensor() if isinstance(got, DTensor) else got
            torch.testing.assert_close(whole, value, rtol=1e-9, atol=1e-12)


def every_optimizer(rank: int) -> None:
    local_step._BUCKET_BYTES = 256  # so that a group has several
    for constraints in (*CONSTRAINTS, ON_HOST):
        torch.manual_seed(0)
        model = Scaled().double()
        mesh = init_device_mesh("cpu", (2,))
        made = autopar.parallelize(copy.deepcopy(model), mesh, batch(), constraints=constraints)
        start = {k: v.clone() for k, v in model.state_dict().items()}
        for make in MAKERS:
            single = copy.deepcopy(model)
            made.load_state_dict(start)
            theirs, ours = make(single.parameters(), lr=1e-2), make(made.parameters(), lr=1e-2)
            held = [list(group["params"]) for group in ours.param_groups]
            options = [{**g, "params": None} for g in ours.param_groups]
            for _ in range(3):
                for module, optimizer in ((single, theirs), (made, ours)):
                    module(**batch()).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                same(made, single, ours, theirs)
            for group, before in zip(ours.param_groups, held, strict=True):
                assert all(a is b for a, b in zip(group["params"], before, strict=True))
            assert [{**g, "params": None} for g in ours.param_groups] == options


def test_every_elementwise_optimizer_of_torch() -> None:
    used = {make.func if isinstance(make, partial) else make for make in MAKERS}
    assert used == _ELEMENTWISE
    run_ranks(every_optimizer, 2)


def kept_out(rank: int) -> None:
    """Closures, a user's own optimizer, gradients placed otherwise, and a step that fails."""
    torch.manual_seed(0)
    model = Scaled().double()
    single = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,))
    made = autopar.parallelize(model, mesh, batch(), constraints=CONSTRAINTS[0])
    for make in (Odd, optim.AdamW):
        theirs, ours = optim.AdamW(single.parameters()), make(made.parameters())
        for module, optimizer in ((single, theirs), (made, ours)):

            def closure(module: Any = module, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = module(**batch())
                loss.backward()
                return loss

            optimizer.step(closure)
            closure()
            optimizer.step()
        same(made, single, ours, theirs)
    held = set(map(id, made.parameters()))
    last = ours.param_groups[-1]["params"][-1]
    ours.state[last]["exp_avg"] = "not a tensor"
    with pytest.raises(AttributeError, match="lerp_"):
        ours.step()
    ours.state.clear()
    ours.step()
    assert {id(p) for group in ours.param_groups for p in group["params"]} == held


def test_what_is_not_known_to_be_elementwise_gets_dtensors() -> None:
    run_ranks(kept_out, 2)
