"""Classes of ops: what is measured is what is priced, and variants go by their class elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.core.strategy import OpCall, TensorSpec
from autopar.core.work import VARIANTS, family, global_flops, op_class
from autopar.cost_model import (
    Curve,
    byte_probes,
    compute_seconds_array,
    load_profile,
    probes,
    profile_names,
)
from autopar.cost_model.compute import OP_CLASSES, PLAINER
from benchmarks.op_shapes import random_probes

aten = torch.ops.aten
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


class _Calls(TorchDispatchMode):
    """Keeps each op that is called, as the cost model sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[OpCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        self.found.append(_call(func, args, kwargs or {}, out))
        return out


def _call(func: Any, args: Any, kwargs: Any, out: Any) -> OpCall:
    graph, specs, nodes = fx.Graph(), [], []

    def node(value: torch.Tensor) -> fx.Node:
        specs.append(TensorSpec(tuple(value.shape), value.dtype))
        nodes.append(graph.placeholder(f"x{len(nodes)}"))
        return nodes[-1]

    args, kwargs = pytree.tree_map_only(torch.Tensor, node, (args, kwargs))
    outputs = [
        TensorSpec(tuple(x.shape), x.dtype)
        for x in pytree.tree_leaves(out)
        if isinstance(x, torch.Tensor)
    ]
    return OpCall(
        target=func, args=tuple(args), kwargs=kwargs, operands=tuple(specs),
        outputs=tuple(outputs), axis_size=1, nodes=tuple(nodes),
    )  # fmt: skip


def _recorded(function: Any, *args: Any, **kwargs: Any) -> OpCall:
    with _Calls() as calls:
        function(*args, **kwargs)
    return calls.found[0]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One set of operands for each probe: nothing is timed here."""
    monkeypatch.setattr(byte_probes, "_COLD_BYTES", 0)


_SETS = {
    "measured": lambda: probes.probes("cpu", "float32", largest=2),
    "plain": lambda: probes.probes("cpu", "bfloat16", plain=True, largest=1),
    "held out": lambda: probes.held_out_probes("cpu", "float32"),
    "random": lambda: random_probes("cpu", "float32", seed=1),
}


@pytest.mark.parametrize("name", _SETS)
def test_probes_are_priced_as_what_they_measure(name: str, small: None) -> None:
    classes = set()
    for probe in _SETS[name]():
        with _Calls() as calls:
            probe.run()
        call = next(c for c in calls.found if op_class(c) != "view")
        if probe.op_class == "update":  # which no op of a program is
            assert call.target is aten._fused_adamw_.default
        elif probe.op_class != "transpose":  # the layout of its operand makes that, not the op
            assert op_class(call) == probe.op_class, probe.label
        if probe.unit == "flops":
            assert global_flops(call) == probe.work * probe.steps, probe.label
        classes.add(probe.op_class)
    if name in ("measured", "random"):
        # others go by a class that is measured
        no_ops = {"update"} if name == "random" else set()
        assert set(OP_CLASSES) - classes == {"view", "host"} | no_ops


def test_random_shapes_follow_from_the_seed_and_are_not_those_of_the_profile(small: None) -> None:
    found = [[p.label for p in random_probes("cpu", "float32", seed=s)] for s in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert len(set(found[0])) == len(found[0])
    known = {p.label for p in probes.probes("cpu", "float32")}
    assert not known & {*found[0], *found[2]}
    assert not known & {p.label for p in probes.held_out_probes("cpu", "float32")}


def test_weight_gradient_alone_is_half_a_backward_and_goes_by_the_forward() -> None:
    x, w = torch.ones(2, 3, 16, 16), torch.ones(8, 3, 4, 4)
    tail = ([4, 4], [0, 0], [1, 1], False, [0, 0], 1)
    y = aten.convolution.default(x, w, None, *tail)
    backward = aten.convolution_backward.default
    forward = _recorded(aten.convolution.default, x, w, None, *tail)
    both = _recorded(backward, y, x, w, None, *tail, [True, True, False])
    weight = _recorded(backward, y, x, w, None, *tail, [False, True, True])
    flops = 2.0 * 2 * 8 * 4 * 4 * 3 * 4 * 4
    assert [global_flops(c) for c in (forward, both, weight)] == [flops, 2 * flops, flops]
    assert [op_class(c) for c in (forward, both, weight)] == [
        "conv_image",
        "conv_backward_image",
        "conv_image",
    ]


@pytest.mark.parametrize(
    ("function", "args", "wanted"),
    [
        (aten.sum.dim_IntList, (torch.ones(2, 3, 4), [-1]), "reduction"),
        (aten.sum.dim_IntList, (torch.ones(2, 3, 4), [0, 2]), "reduction"),
        (aten.sum.dim_IntList, (torch.ones(2, 3, 4), [0, 1]), "reduction_leading"),
        (aten.amax.default, (torch.ones(2, 3, 4), [1]), "reduction_leading"),
        (aten.sum.default, (torch.ones(2, 3, 4),), "reduction"),
        (aten.masked_fill.Scalar, (torch.ones(2, 2), torch.ones(2, 2).bool(), 0.0), "select"),
        (aten.bmm.default, (torch.ones(2, 3, 4), torch.ones(2, 4, 5)), "matmul_batched"),
        (aten.mm.default, (torch.ones(3, 4), torch.ones(4, 5)), "matmul"),
        (
            torch.ops.autopar.einsum.default,
            ("abk,akn->abn", torch.ones(1, 3, 4), torch.ones(1, 4, 5)),
            "matmul",  # a batch of one is one product
        ),
        (aten._log_softmax_backward_data.default,
         (*[torch.ones(2, 3)] * 2, 1, torch.float32), "softmax_backward"),
    ],
)  # fmt: skip
def test_classes_of_single_ops(function: Any, args: tuple[Any, ...], wanted: str) -> None:
    assert op_class(_recorded(function, *args)) == wanted


def _seconds(device: Any, op_class: str, work: float) -> float:
    flops = op_class.startswith(("matmul", "attention", "conv"))
    counts = np.array(work if flops else 0.0), np.array(1.0 if flops else work)
    return float(compute_seconds_array(device, op_class, "float32", *counts))


@pytest.mark.parametrize("name", [*profile_names(), *sorted(RESULTS.glob("profile_cpu_*.toml"))])
def test_variants_cost_what_their_class_does_where_it_alone_is_known(name: str | Path) -> None:
    device = load_profile(name).device
    measured = {curve.op_class for curve in device.curves}
    for variant, known in VARIANTS.items():
        if variant not in measured:
            for work in (1e3, 1e6, 1e9):
                assert _seconds(device, variant, work) == _seconds(device, known, work)


def test_variant_with_a_curve_goes_by_it() -> None:
    device = load_profile("cpu-gloo").device
    curves = tuple(
        Curve(op_class=c, dtype="float32", unit="bytes", work=(1e3, 1e6), seconds=(a, 1e3 * a))
        for c, a in (("memory", 1e-6), ("softmax", 3e-6), ("softmax_backward", 2e-6))
    )
    device = type(device)(**{f: getattr(device, f) for f in device.__slots__} | {"curves": curves})
    assert _seconds(device, "softmax_backward", 1e6) == pytest.approx(2e-3)
    assert _seconds(device, "softmax", 1e6) == pytest.approx(3e-3)
    assert _seconds(device, "loss_backward", 1e6) == pytest.approx(3e-3)  # loss, then softmax


def test_every_variant_has_its_family() -> None:
    assert set(VARIANTS) <= set(PLAINER)
    assert all(family(v) == known and family(known) == known for v, known in VARIANTS.items())
    assert family("matmul") == "matmul"
