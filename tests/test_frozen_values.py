"""Numbers that a forward changes or draws are constants of the program, and a warning says so."""

from __future__ import annotations

import copy
import random
import re
import warnings
from functools import cached_property, lru_cache, wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.tracer.trace import trace

X = torch.randn(4, 8)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.step, self.kept, self.name = 3, 2.5, "inner"
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        self.last = self.linear(x)
        self.also = self.last + 1
        return self.last * self.step


class Drawing(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.draw()).square().mean()


def texts(model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace(model, (X,), training=True)
    return [str(w.message) for w in caught if w.category is autopar.FrozenValueWarning]


def test_a_number_that_changes_is_named_and_put_back() -> None:
    model = nn.Sequential(Inner(), nn.Linear(8, 8))
    (text,) = texts(model)
    assert "0.step (3 to 4)" in text and "register_buffer" in text
    inner = model[0]
    assert isinstance(inner, Inner)
    assert (inner.step, inner.kept, inner.name) == (3, 2.5, "inner")
    assert inner.last is None and not hasattr(inner, "also")  # no value of the trace stays
    assert texts(model) == [text]


def test_a_failed_trace_leaves_nothing_behind() -> None:
    class Failing(Inner):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            return found if float(found.sum()) > 0 else -found

    model = Failing()
    with pytest.raises(autopar.TraceError):
        trace(model, (X,), training=True)
    assert model.step == 3 and model.last is None


@pytest.mark.parametrize(
    ("draw", "word"),
    [(random.random, "Python's random"), (lambda: float(np.random.rand()), "numpy.random")],
)
def test_random_numbers_of_others_are_named(draw: Any, word: str) -> None:
    (text,) = texts(Drawing(draw))
    assert word in text and "torch.rand" in text


def test_nothing_is_said_of_other_models() -> None:
    assert not texts(Drawing(lambda: 2.0))
    assert not texts(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)))


class Averaging(nn.Module):
    """Takes off a running mean that is kept in an attribute, a list or a buffer."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), kept
        self.mean = torch.ones(8)
        self.seen = [torch.ones(8)]
        self.count = [0]
        self.register_buffer("buffer", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        if self.kept == "attribute":
            self.mean = mean = self.mean * 0.9 + now * 0.1
        elif self.kept == "list":
            self.seen.append(now)
            mean = torch.stack(self.seen).mean(0)
        elif self.kept == "count":
            self.count[0] += 1
            mean = now / self.count[0]
        elif self.kept == "stashed":
            self.mean = mean = now  # what was there is not read
        else:
            self.buffer = mean = self.buffer * 0.9 + now * 0.1
        return (self.linear(x) - mean).square().mean()


@pytest.mark.parametrize(
    ("kept", "name"), [("attribute", "reads mean "), ("list", "reads seen "), ("count", "count[0]")]
)
def test_a_value_kept_between_steps_is_named_and_put_back(kept: str, name: str) -> None:
    model = Averaging(kept)
    (text,) = texts(model)
    assert name in text and "register_buffer" in text
    assert torch.equal(model.mean, torch.ones(8)) and len(model.seen) == 1 and model.count == [0]


@pytest.mark.parametrize("kept", ["stashed", "buffer"])
def test_a_buffer_and_a_value_that_nothing_reads_are_fine(kept: str) -> None:
    assert texts(Averaging(kept)) == []


class Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight = nn.Parameter(self.linear.weight * 0.9)
        return self.linear(x).square().mean()


def test_a_parameter_that_is_replaced_is_refused_and_put_back() -> None:
    model = Replacing()
    weight = model.linear.weight
    with pytest.raises(TraceError, match=r"parameter linear\.weight.*parametrize"):
        trace(model, (X,), training=True)
    assert model.linear.weight is weight


class Late(nn.Module):
    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        if registered:
            self.register_parameter("gain", None)
        else:
            self.gain = None

    def forward(self, x: Tensor) -> Tensor:
        if self.gain is None:
            self.gain = nn.Parameter(torch.ones(8))
        return (self.linear(x) * self.gain).square().mean()


@pytest.mark.parametrize("registered", [True, False])
def test_a_parameter_that_the_forward_makes_is_refused(registered: bool) -> None:
    model = Late(registered)
    for _ in range(2):
        with pytest.raises(TraceError, match=r"makes the parameter gain.*__init__"):
            trace(model, (X,), training=True)
    model(X)
    assert not texts(model)


class Scaling(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)


class Building(nn.Module):
    """Makes a module in the first step, as those that depend on the sizes of inputs."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.made = nn.ModuleDict()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if "one" not in self.made:
            self.made["one"] = {
                "constant": lambda: Scaling(torch.arange(8.0) + 1),
                "of inputs": lambda: Scaling(x.detach().mean(0)),
                "trained": lambda: nn.Linear(8, 8),
                "known": lambda: self.linear,
            }[self.what]()
        made = self.made["one"]
        scale = made.scale if isinstance(made, Scaling) else made.bias
        return (y * scale).square().mean()


@pytest.mark.parametrize("what", ["constant", "of inputs", "known"])
def test_a_module_that_the_forward_makes_is_put_away(what: str) -> None:
    model = Building(what)
    for _ in range(2):
        found = texts(model)
        assert not model.made
        assert len(found) == (what == "of inputs")
        assert not found or "looks at made.one" in found[0]
    assert torch.isfinite(model(X))


def test_a_module_with_parameters_that_the_forward_makes_is_refused() -> None:
    model = Building("trained")
    for _ in range(2):
        with pytest.raises(TraceError, match=r"makes the parameter made\.one\.weight.*__init__"):
            trace(model, (X,), training=True)
    model(X)
    assert not texts(model)


def test_a_parameter_without_a_shape_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU())
    with pytest.raises(TraceError, match=r"parameter 0\.weight has no shape yet.*call the model"):
        trace(model, (X,), training=True)


class Swapping(nn.Module):
    """Buffers that are replaced: a mean, a count, and two that change places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.Module()
        self.norm.register_buffer("mean", torch.zeros(8).double())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("one", torch.zeros(8).double())
        self.register_buffer("two", torch.ones(8).double())
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.norm.mean = self.norm.mean * 0.9 + x.detach().mean(0) * 0.1
        self.one, self.two = self.two, self.one
        return (self.linear(x - self.norm.mean) * self.one / self.count).square().mean()


@pytest.mark.parametrize("constraints", [{"data": 2}, {"tensor": {"mode": "1d", "size": 2}}])
def test_a_buffer_that_is_replaced_is_updated(constraints: Any) -> None:
    torch.manual_seed(0)
    model, given = Swapping().double(), (torch.randn(8, 8).double(),)
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, given, constraints=constraints)
    before = dict(model.named_buffers())
    found = autopar.verify(plan, model, given)
    assert found.worst[1] < 1e-9
    assert set(found.buffers) == {"norm.mean", "count", "one", "two"} == set(before)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("queue", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.queue = torch.cat([self.queue, x.detach()])
        return (self.linear(x) @ self.queue.t()).square().mean()


def test_a_buffer_that_grows_is_named_and_put_back() -> None:
    model = Growing()
    (text,) = texts(model)
    assert "buffer queue (shape (4, 8)" in text and "(8, 8)" in text
    assert model.queue.shape == (4, 8)


class Remembering(nn.Module):
    """Looks at a place that is empty before the first step, and fills it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(8, 8)
        self.cache: Any = None
        self.average: Any = 0.0
        self.states: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {}
        self.other = SimpleNamespace(cache=None, states=[])
        self.register_buffer("table", None)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        getattr(self, self.how)(self.linear(x).detach().mean(0))
        return self.linear(x).square().mean()

    def attribute(self, h: Tensor) -> None:
        if self.cache is None:
            self.cache = h

    def a_tuple(self, h: Tensor) -> None:
        if self.cache is None:
            self.cache = (h, h)

    def missing(self, h: Tensor) -> None:
        if not hasattr(self, "late"):
            self.late = h

    def number(self, h: Tensor) -> None:
        self.average = 0.9 * self.average + h

    def a_list(self, h: Tensor) -> None:
        if len(self.states) > 2:
            h = h + torch.stack(self.states).mean(0)
        self.states.append(h)

    def mapping(self, h: Tensor) -> None:
        if "h" not in self.by_name:
            self.by_name["h"] = h

    def plain_object(self, h: Tensor) -> None:
        if self.other.cache is None:
            self.other.cache = h

    def buffer(self, h: Tensor) -> None:
        if self.table is None:
            self.table = h

    def new_buffer(self, h: Tensor) -> None:
        if not hasattr(self, "later"):
            self.register_buffer("later", h)

    def constant(self, h: Tensor) -> None:
        if self.cache is None:
            self.cache = torch.arange(8).sin() * self.scale

    def written(self, h: Tensor) -> None:
        self.cache, self.states = h, [h]
        self.other.states.append(1)
        self.by_name["h"] = h

    def filled_before(self, h: Tensor) -> None:
        self.states.append(h)
        self.by_name.__setitem__("h", h)
        self.cache = sum(self.states) + self.by_name["h"]

    def set_before(self, h: Tensor) -> None:
        self.cache = None
        self.states.clear()
        self.states.append(h)
        self.attribute(h + sum(self.states))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("attribute", "looks at cache at .*if self.cache is None:.* finds it None"),
        ("a_tuple", "looks at cache .* finds it None"),
        ("missing", "looks at late .* finds it missing"),
        ("number", "looks at average .* finds it 0.0"),
        ("a_list", "looks at states .*if len.* finds it as it is now"),
        ("mapping", "looks at by_name .* finds it as it is now"),
        ("plain_object", "looks at other.cache .* finds it None"),
        ("buffer", "looks at table .* finds it None"),
        ("new_buffer", "looks at later .* finds it missing"),
    ],
)
def test_a_place_that_the_next_step_would_find_filled_is_named(how: str, said: str) -> None:
    model = Remembering(how)
    before = dict(vars(model))
    (text,) = texts(model)
    assert re.search(said, text) and "register_buffer" in text
    assert vars(model) == before and model.other.cache is None and "later" not in model._buffers
    assert not model.states and not model.by_name and texts(model) == [text]


@pytest.mark.parametrize("how", ["constant", "written", "filled_before", "set_before"])
def test_what_the_next_step_finds_alike_or_writes_first_is_fine(how: str) -> None:
    model = Remembering(how)
    assert texts(model) == [] and model.cache is None
    assert "__getattribute__" not in vars(nn.Module)


@lru_cache
def _table(length: int) -> Tensor:
    return torch.arange(length).sin()


def _copying(function: Any) -> Any:
    cached = lru_cache(function)

    @wraps(function)
    def wrapped(*args: Any) -> Any:
        return copy.deepcopy(cached(*args))

    return wrapped


@_copying
def _copied(length: int) -> dict[str, Tensor]:
    table = torch.arange(length).sin()
    return {"one": table, "other": table}


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @lru_cache  # noqa: B019
    def own_table(self, length: int) -> Tensor:
        return torch.arange(length).cos()

    @cached_property
    def scale(self) -> Tensor:
        return self.linear.weight.detach().norm()

    @cached_property
    def constant(self) -> Tensor:
        return torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        copied = _copied(8)
        assert copied["one"] is copied["other"]
        rows = self.linear(x) * _table(8) + self.own_table(8) * copied["one"]
        return (rows * self.constant / self.scale).square().mean()


def test_caches_of_functions_hold_no_tensors_of_a_trace() -> None:
    model = Cached()
    for _ in range(2):
        (text,) = texts(model)
        assert "looks at scale" in text and "finds it missing" in text
    assert type(_table(8)) is Tensor and "scale" not in vars(model)
    assert type(_copied(8)["one"]) is Tensor
    assert torch.isfinite(model(X)) and type(model.own_table(8)) is Tensor


def test_a_write_to_a_tensor_that_is_no_buffer_is_refused() -> None:
    class Writing(Inner):
        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(x.detach().mean(0))
            return super().forward(x)

    model = Writing()
    model.seen = torch.zeros(8)
    with pytest.raises(TraceError, match=r"seen is mutated(.|\n)*register_buffer"):
        trace(model, (X,), training=True)


CALLS = 0
SEEN: dict[str, Tensor] = {}
KEPT: dict[str, Tensor] = {}
ARGS = SimpleNamespace(calls=0, rate=2.0)
LAST: Tensor | None = None


def _called() -> int:
    global CALLS
    CALLS += 1
    return CALLS


def _scoped() -> nn.Module:
    counts, latest = {"calls": 0}, None

    class Scoped(nn.Module):
        calls = 0
        limit = 10
        table: dict[str, Tensor] = {}  # noqa: RUF012
        first = None

        def __init__(self, how: str = "") -> None:
            super().__init__()
            self.how, self.linear = how, nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return (h * getattr(self, self.how)(h.detach())).square().mean()

        def global_number(self, h: Tensor) -> Any:
            return _called()

        def global_object(self, h: Tensor) -> Any:
            ARGS.calls += 1
            return ARGS.calls * ARGS.rate

        def of_class(self, h: Tensor) -> Any:
            type(self).calls += 1
            return self.calls / self.limit

        def mapping_of_class(self, h: Tensor) -> Any:
            if "h" not in self.table:
                self.table["h"] = h
            return self.table["h"]

        def tensor_of_class(self, h: Tensor) -> Any:
            if self.first is None:
                type(self).first = h
            return self.first

        def outer_mapping(self, h: Tensor) -> Any:
            counts["calls"] += 1
            return counts["calls"]

        def outer_tensor(self, h: Tensor) -> Any:
            nonlocal latest
            found, latest = latest, h
            return 1 if found is None else found

        def global_mapping(self, h: Tensor) -> Any:
            found = SEEN.get("h", h)
            SEEN["h"] = h
            return found

        def global_tensor(self, h: Tensor) -> Any:
            global LAST
            LAST = h
            return 1

        def only_filled(self, h: Tensor) -> Any:
            KEPT["h"] = h
            return self.limit

    return Scoped()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("global_number", r"changes global tests\.test_frozen_values\.CALLS \(0 to 1\)"),
        ("global_object", r"changes global tests\.test_frozen_values\.ARGS\.calls \(0 to 1\)"),
        ("of_class", r"changes .*Scoped\.calls \(0 to 1\)"),
        ("mapping_of_class", r"looks at .*Scoped\.table at .*not in self\.table.* as it is now"),
        ("tensor_of_class", r"looks at .*Scoped\.first at .*if self\.first is.* finds it None"),
        ("outer_mapping", r"outer_mapping\)\.counts\['calls'\] \(0 to 1\)"),
        ("outer_tensor", r"looks at .*outer_tensor\)\.latest at .* finds it None"),
        ("global_mapping", r"looks at global .*\.SEEN at .*found = SEEN\.get.* as it is now"),
    ],
)
def test_values_outside_of_modules_are_named_and_put_back(how: str, said: str) -> None:
    model: Any = _scoped()
    model.how = how
    (text,) = texts(model)
    assert re.search(said, text), text
    assert CALLS == ARGS.calls == 0 and SEEN == {} and model.calls == 0 and texts(model) == [text]


@pytest.mark.parametrize("how", ["global_tensor", "only_filled"])
def test_values_that_are_only_left_behind_are_fine(how: str) -> None:
    model: Any = _scoped()
    model.how = how
    assert texts(model) == [] and KEPT == {} and LAST is None


class Caching(nn.Module):
    """Computes a table in the first call and reads it in later ones, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.zeros(8))
        self.filled, self.calls = 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        if not self.filled:
            self.table[:] = torch.arange(8.0)
            self.filled = 8
        return (self.linear(x) * self.table).square().mean()


def test_verify_leaves_attributes_as_they_were() -> None:
    model = Caching()
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, (X,), constraints={"data": 2}, cache=False)
    for _ in range(2):
        assert autopar.verify(plan, model, (X,)).worst[1] < 1e-5
        assert model.filled == 0 and model.calls == [0] and not model.table.any()


class Frozen(dict[str, int]):
    """A mapping that refuses writes, as configurations of models do."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("frozen")

    __setitem__ = __delitem__ = update = clear = pop = setdefault = _refuse


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(8, 8), Frozen(scale=2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.config["scale"]).square().mean()


def test_a_mapping_that_refuses_writes_is_left_alone() -> None:
    model = Configured()
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, (X,), constraints={"data": 2}, cache=False)
    assert autopar.verify(plan, model, (X,)).worst[1] < 1e-5


class Handing(nn.Module):
    """Its part leaves a tensor in a list that both hold, as the heads of a deep supervision do."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Inner()
        self.kept: list[Any] = [torch.zeros(1)]
        self.by_name = {"lists": (self.kept,)}
        self.part.linear.kept = self.kept

    def forward(self, x: Tensor) -> Tensor:
        linear = self.part.linear
        linear.kept[0] = linear(x)
        return (self.kept[0] * self.by_name["lists"][0][0].cos()).sum()


def test_what_modules_share_stays_shared() -> None:
    torch.manual_seed(0)
    model = Handing().double()
    kept, first = model.kept, model.kept[0]
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    plan = autopar.plan(model, cluster, X.double(), constraints={"data": 2}, cache=False)
    assert model.kept is kept and model.part.linear.kept is kept and kept[0] is first
    assert model.by_name["lists"][0] is kept
    assert autopar.verify(plan, model, X.double()).worst[1] < 1e-9
