"""Models that cannot be traced: the error names the line. And some that look so and can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests import handwritten as hw
from tests.dist import RankError, try_ranks


def cluster(devices: int = 4) -> Any:
    return autopar.Cluster.from_profile("cpu-gloo", devices_per_node=devices)


class Branching(nn.Module):
    """Its control flow depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if x.sum() > 0:  # the line that the error must name
            x = x + 1
        return nn.functional.cross_entropy(self.linear(x), labels)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


def test_data_dependent_control_flow_names_the_line() -> None:
    with pytest.raises(autopar.TraceError) as caught:
        autopar.plan(Branching(), cluster(), hw.vectors())
    line = line_of("the line that the error must " + "name")
    assert f"test_trace_errors.py:{line}" in str(caught.value)


class Lengths(nn.Module):
    """Asks whether all rows have one length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        lengths = mask.sum(1).tolist()
        if len(set(lengths)) > 1:  # numbers of a tensor in a set
            x = x * mask
        return self.linear(x).square().mean()


def test_a_set_of_numbers_of_a_tensor_is_data_dependence() -> None:
    inputs = (torch.randn(4, 16), torch.ones(4, 16, dtype=torch.bool))
    with pytest.raises(autopar.TraceError, match=r"The value of a tensor decides") as caught:
        autopar.plan(Lengths(), cluster(), inputs)
    line = line_of("numbers of a tensor " + "in a set")
    assert f"test_trace_errors.py:{line}" in str(caught.value)


class Started(nn.Module):
    """Asks a buffer for its value, which is known, and an activation, which is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.register_buffer("started", torch.tensor(True))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if not self.started:  # a value that is known
            x = x + 1
        if x.sum() > 0:  # a value that nobody knows
            x = x * 2
        return nn.functional.cross_entropy(self.linear(x), labels)


def test_a_line_that_a_known_value_answers_is_not_the_one_named() -> None:
    with pytest.raises(autopar.TraceError, match=r"The value of a tensor decides") as caught:
        autopar.plan(Started(), cluster(), hw.vectors())
    line = line_of("a value that " + "nobody knows")
    assert f"test_trace_errors.py:{line}" in str(caught.value)


class PerSample(nn.Module):
    """A gradient of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))  # of one row
        return slope(self.linear(x)).mean()


def test_a_derivative_of_each_element_is_refused_as_what_maps_over_them() -> None:
    with pytest.raises(autopar.TraceError, match=r"torch.vmap hides the dim") as caught:
        autopar.plan(PerSample(), cluster(), (torch.randn(8, 16),))
    line = line_of("slope(self." + "linear(x))")
    assert f"test_trace_errors.py:{line}" in str(caught.value)


class Listing(nn.Module):
    """Makes a tensor from a list by a constructor of old: on meta its numbers are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scale = self.linear.weight.new([0.5, 2.0])
        return nn.functional.cross_entropy(self.linear(x) * scale.sum(), labels)


def list_on_meta(rank: int) -> None:
    with torch.device("meta"):
        model = Listing()
    mesh = init_device_mesh("cpu", (2,))
    inputs = hw.vectors()
    autopar.parallelize(model, mesh, inputs, cache=False)(**inputs)


def test_numbers_that_are_lost_on_meta_are_not_made_up() -> None:
    for error in try_ranks(list_on_meta, 2):
        assert isinstance(error, RankError)
        assert "test_trace_errors.py:" in str(error)
        assert "numbers on the meta device" in str(error)


class Choosing(nn.Module):
    """Export captures this, with a size that is known only at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x[labels > 0]  # rows chosen by data
        return self.linear(x).cumsum(0).mean()


def test_data_dependent_shape_names_the_line() -> None:
    with pytest.raises(autopar.TraceError, match="depends on values") as caught:
        autopar.plan(Choosing(), cluster(), hw.vectors())
    line = line_of("rows chosen " + "by data")
    assert f"test_trace_errors.py:{line}" in str(caught.value)


class Looking(nn.Module):
    """Takes a number out of a tensor and does nothing with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.linear(x), labels)
        self.seen = 2 * x.mean().item()
        return loss


def test_a_number_that_nothing_depends_on_is_no_data_dependence() -> None:
    autopar.plan(Looking(), cluster(), hw.vectors())


class Marking(nn.Module):
    """Writes one learned vector to places that data chooses: all shapes are known."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.mark = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x.clone()
        x[labels > 0] = self.mark
        return nn.functional.cross_entropy(self.linear(x), labels)


def test_a_masked_assignment_is_no_data_dependence() -> None:
    model, inputs = Marking(), hw.vectors()
    plan = autopar.plan(model, cluster(), inputs, constraints={"data": 4})
    name, error = autopar.verify(plan, model, inputs).worst
    assert error < 1e-5, name


class Checked(nn.Module):
    """Checks values, as models that merge images into text and distributions do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        torch._check_tensor_all(labels >= 0, lambda: "labels are negative")
        found = torch.distributions.Categorical(logits=self.linear(x))
        return -found.log_prob(labels).mean()


def test_a_check_of_values_is_no_data_dependence(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile, as in another test, switches these checks off for good
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    model, inputs = Checked(), hw.vectors()
    plan = autopar.plan(model, cluster(), inputs, constraints={"data": 4}, cache=False)
    assert autopar.verify(plan, model, inputs).worst[1] < 1e-5
    with pytest.raises(ValueError):  # asked for again behind the trace
        torch.distributions.Normal(torch.tensor(0.0), torch.tensor(-1.0))


def test_dtypes_that_do_not_fit_name_the_line() -> None:
    batch = hw.vectors()
    with pytest.raises(autopar.TraceError, match=r"handwritten\.py:\d+ in forward.*\n.*dtype"):
        autopar.plan(hw.Clamped(), cluster(2), {**batch, "x": batch["x"].double()})


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return while_loop(lambda h: h.sum() > 1, lambda h: (h / 2,), (h,))[0].mean()


def test_control_flow_of_torch_is_refused_with_what_to_do() -> None:
    with pytest.raises(autopar.TraceError, match=r"in forward: .*while_loop(.|\n)*fixed number"):
        autopar.plan(Halving(), autopar.Cluster.from_profile("cpu-gloo"), (torch.randn(4, 8),))
