"""An offloaded step in buckets: what goes down and up beside what, and what a user sees of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import autopar
from autopar.core.host_link import HOST, HostLink
from autopar.runtime import local_step, offload
from tests import handwritten as hw
from tests.dist import run_ranks
from tests.test_gloo import whole

PINS = {"data": 2, "zero": 3, "offload": "optimizer"}


def batch() -> dict[str, torch.Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in hw.vectors().items()}


def both(make: Callable[[], nn.Module] = hw.Unused) -> tuple[nn.Module, Any]:
    """A model, and the same offloaded over two ranks, after one backward each."""
    torch.manual_seed(0)
    model = make().double()
    mesh = init_device_mesh("cpu", (2,))
    module = autopar.parallelize(copy.deepcopy(model), mesh, batch(), constraints=PINS)
    for each in (model, module):
        each(**batch()).backward()
    return model, module


def same(model: nn.Module, module: Any) -> None:
    for name, expected in model.named_parameters():
        mine = whole(module.get_parameter(name).detach())
        torch.testing.assert_close(mine, expected.detach(), rtol=1e-9, atol=1e-12)


class Recorder(HostLink):
    """A link that notes what goes over it."""

    def __init__(self, events: list[tuple[str, int]]) -> None:
        super().__init__(HOST)
        self.events, self.downs, self.ups = events, 0, 0

    def begin(self) -> None:
        self.events.append(("begin", 0))

    def down(self, tensors: Any) -> Any:
        self.events.append(("down", self.downs))
        self.downs += 1
        return super().down(tensors)

    def up(self, pairs: Any) -> None:
        self.events.append(("up", self.ups))
        self.ups += 1
        super().up(pairs)

    def end(self) -> None:
        self.events.append(("end", 0))


def in_order(rank: int) -> None:
    """While a bucket is updated, the next is on its way down and the one before on its way up."""
    local_step._BUCKET_BYTES = 1  # a bucket for each parameter
    model, module = both(hw.Mlp)
    events: list[tuple[str, int]] = []
    link = Recorder(events)
    for part in (local_step, offload):
        part.link_for = lambda parameter: link  # type: ignore[attr-defined]
    init_group: Callable[..., Any] = torch.optim.Adam._init_group
    updates = iter(range(100))

    def noted(self: Any, group: Any, *lists: Any) -> Any:
        found = init_group(self, group, *lists)
        if lists[0]:  # the group behind the last bucket has no parameters
            assert not any(isinstance(t, DTensor) for kind in lists for t in kind)
            events.append(("update", next(updates)))
        return found

    torch.optim.Adam._init_group = noted  # type: ignore[method-assign]
    ours = AdamW(module.parameters(), lr=1e-2)
    ours.step()
    torch.optim.Adam._init_group = init_group  # type: ignore[method-assign]
    count = sum(p.grad is not None for p in module.parameters())
    assert count > 3
    expected: list[tuple[str, int]] = [("begin", 0), ("down", 0)]
    for number in range(count):
        if number:
            expected.append(("up", number - 1))
        if number + 1 < count:
            expected.append(("down", number + 1))
        expected.append(("update", number))
    assert events == [*expected, ("up", count - 1), ("end", 0)]
    AdamW(model.parameters(), lr=1e-2).step()
    same(model, module)


def test_copies_go_both_ways_beside_the_update() -> None:
    run_ranks(in_order, 2)


def hooked(rank: int) -> None:
    """Hooks run once, see the module's parameters, and what they change counts."""
    local_step._BUCKET_BYTES = 256
    model, module = both()
    theirs, ours = AdamW(model.parameters(), lr=1e-2), AdamW(module.parameters(), lr=1e-2)
    held = list(module.parameters())
    seen: list[Any] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        seen.append([p for group in optimizer.param_groups for p in group["params"]])

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        seen.append([p for group in optimizer.param_groups for p in group["params"]])
        assert {id(p) for p in optimizer.state} <= {id(p) for p in seen[-1]}
        with torch.no_grad():
            for p in seen[-1]:
                p.add_(1.0)

    for optimizer in (theirs, ours):
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        seen.clear()
        for _ in range(2):
            optimizer.step()
            schedule.step()
        assert len(seen) == 4
    assert all(a is b for found in seen for a, b in zip(found, held, strict=True))
    assert len(ours._optimizer_step_pre_hooks) == 1  # nothing is left behind
    same(model, module)


def test_hooks_run_once_on_the_modules_parameters() -> None:
    run_ranks(hooked, 2)


def with_options(rank: int) -> None:
    """Learning rates as tensors, loss scales given to a fused step, states put on the device."""
    local_step._BUCKET_BYTES = 256
    for make in (
        partial(AdamW, lr=torch.tensor(1e-2, dtype=torch.float64)),
        partial(AdamW, lr=1e-2, fused=True),
        partial(torch.optim.Adagrad, lr=1e-2),
    ):
        model, module = both()
        theirs, ours = make(model.parameters()), make(module.parameters())
        for found_inf in (0.0, 1.0, 0.0):
            for optimizer in (theirs, ours):
                if make.keywords.get("fused"):
                    optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
                    optimizer.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]
                optimizer.step()
            # torch's fused step divides the gradients that it is given: ours were copies
            for name, p in model.named_parameters():
                mine = module.get_parameter(name).grad
                if p.grad is not None and make.keywords.get("fused"):
                    p.grad.copy_(whole(mine))
            same(model, module)
        state = ours.state_dict()
        ours.load_state_dict(state)
        theirs.load_state_dict(theirs.state_dict())
        for optimizer in (theirs, ours):
            optimizer.step()
        same(model, module)
        steps = {float(s["step"]) for s in ours.state.values()}
        assert steps == {float(s["step"]) for s in theirs.state.values()}


def test_options_of_a_step() -> None:
    run_ranks(with_options, 2)
