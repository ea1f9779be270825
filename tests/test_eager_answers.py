"""A model that asks whether it is compiled is traced as the plain model that it is."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._dynamo
import transformers.utils.import_utils as hf
from torch import Tensor, nn
from torch.compiler import is_exporting

import autopar
from autopar.tracer.trace import trace
from tests import handwritten as hw
from tests.test_forward_semantics import verified

ASKING = {
    "compiling": lambda: torch.compiler.is_compiling(),
    "exporting, imported": lambda: is_exporting(),
    "jit": lambda: torch.jit.is_tracing(),
    "dynamo": lambda: torch._dynamo.is_compiling(),
    "utils": lambda: torch._utils.is_compiling(),
    "a library": lambda: hf.is_torchdynamo_compiling() or hf.is_tracing(),
}


class Asking(hw.Mlp):
    """Computes something else where it is compiled; what it does then may not be traceable."""

    def __init__(self, asks: Any, looks: bool = False) -> None:
        super().__init__()
        self.asks, self.looks = asks, looks

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.asks():
            x = x * 2
        elif self.looks and float(x.abs().sum()) < 0:
            x = x * 3
        return super().forward(x, labels)


@pytest.mark.parametrize("how", ASKING)
def test_a_model_is_told_that_it_is_not_compiled(how: str) -> None:
    found = verified(Asking(ASKING[how]), hw.vectors())
    assert found.worst[1] < 1e-9, found.worst


def test_what_only_a_compiled_model_does_is_named() -> None:
    def asks() -> bool:
        return torch.compiler.is_compiling()  # the line that asks

    with pytest.warns(autopar.UncheckedWarning, match="the line that asks") as caught:
        found = verified(Asking(asks, looks=True), hw.vectors())
    assert "if not cannot be traced" in str(caught[0].message)
    assert found.worst[1] > 1e-3  # as the warning says


def test_a_way_that_fails_is_not_logged_where_another_is_found() -> None:
    class Failing(hw.Mlp):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            if not torch.compiler.is_compiling():
                x = x @ x.new_ones(x.shape[-1] + 1, x.shape[-1])
            return super().forward(x, labels)

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    handler = Mock(level=logging.DEBUG)
    logger.addHandler(handler)
    try:
        trace(Failing(), hw.vectors())
    finally:
        logger.removeHandler(handler)
    assert not handler.handle.called and not logger.disabled


def test_a_model_that_is_traceable_in_no_way_is_refused() -> None:
    class Looking(Asking):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            if float(x.abs().sum()) < 0:  # the line that looks
                x = x * 3
            return super().forward(x, labels)

    with pytest.raises(autopar.TraceError, match="the line that looks"):
        verified(Looking(ASKING["compiling"]), hw.vectors())


def test_layers_of_torch_hear_the_truth_and_nothing_stays() -> None:
    code = torch.compiler.is_compiling.__code__
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    found = verified(nn.TransformerEncoder(layer, 1), {"src": torch.randn(4, 3, 16)})
    assert found.worst[1] < 1e-9
    assert torch.compiler.is_compiling.__code__ is code and not torch.compiler.is_compiling()
