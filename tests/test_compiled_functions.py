"""Functions and modules inside of a model that are compiled, or kept from it, run as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests import handwritten as hw
from tests.test_forward_semantics import verified


def _bounded(x: Tensor) -> Tensor:
    return torch.tanh(x / 2.0) * 2.0


def _scripted() -> Callable[[Tensor], Tensor]:
    made: Callable[[Tensor], Tensor] = torch.jit.script(_bounded)
    x = torch.randn(4, requires_grad=True)
    for _ in range(3):  # until it is optimized
        made(x).sum().backward()
    return made


FUNCTIONS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "compiled": lambda: torch.compile(_bounded, fullgraph=True),
    "compiled in the forward": lambda: lambda x: torch.compile(_bounded)(x),
    "a region": lambda: torch.compiler.nested_compile_region(_bounded),
    "disabled": lambda: torch.compiler.disable(_bounded),
    "disabled alone": lambda: torch.compiler.disable(_bounded, recursive=False),
    "scripted": _scripted,
    "traced": lambda: torch.jit.trace(_bounded, (torch.randn(4),)),
}


class Calling(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.second(self.function(self.first(x)))).square().mean()


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functions(kind: str) -> None:
    result = verified(Calling(FUNCTIONS[kind]()), {"x": hw.vectors()["x"]})
    assert result.worst[1] < 1e-9, result.worst
    assert len(result.gradients) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_function_of_unknown_source_is_refused() -> None:
    function: Any = torch.jit.script(_bounded)
    del function._torchdynamo_inline
    with pytest.raises(autopar.TraceError, match="_bounded is TorchScript"):
        verified(Calling(function), {"x": hw.vectors()["x"]})


def test_compiled_modules() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = torch.compile(hw.Mlp())
            self.compiled = hw.Mlp()
            self.compiled.compile()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            first: Tensor = self.wrapped(x, labels)
            second: Tensor = self.compiled(x, labels)
            return first + second

    result = verified(Stack(), hw.vectors())
    assert result.worst[1] < 1e-9, result.worst
