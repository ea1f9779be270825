"""Short-time Fourier transforms: those of torch, split by batch over ranks and microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.tracer.spectrograms import istft, stft

_PLANS = {"data": {"data": 2}, "turns": {"pipeline": {"size": 1, "microbatches": 2}}}
_WAYS: list[dict[str, Any]] = [
    {},
    {"hop_length": 3},
    {"window": torch.hann_window(8, dtype=torch.float64) + 0.1},
    {"win_length": 6},
    {"win_length": 5, "window": torch.rand(5, dtype=torch.float64) + 0.5, "hop_length": 2},
    {"normalized": True},
    {"onesided": False},
]


@pytest.mark.filterwarnings("ignore:The length of signal is shorter")
@pytest.mark.parametrize("way", _WAYS, ids=lambda way: "-".join(way) or "plain")
def test_transforms_are_those_of_torch(way: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 29, dtype=torch.float64)
    for signal in (x, x[0]):
        spectrum = torch.stft(signal, 8, center=False, return_complex=True, **way)
        torch.testing.assert_close(stft(None, signal, 8, return_complex=True, **way), spectrum)
        spectrum = torch.stft(signal, 8, return_complex=True, **way)
        # behind the last frame are zeros; narrow windows leave gaps there
        for length in (None, 20) if "win_length" in way else (None, 20, 40):
            expected = torch.istft(spectrum, 8, length=length, **way)
            torch.testing.assert_close(istft(None, spectrum, 8, length=length, **way), expected)
    with_parts = torch.view_as_real(torch.stft(x, 8, center=False, return_complex=True))
    torch.testing.assert_close(stft(None, x, 8, return_complex=False), with_parts)


class Enhance(nn.Module):
    """A mask on a spectrogram, and the distance of magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Linear(9, 9)
        self.window = nn.Buffer(torch.hann_window(16))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        spectrum = torch.stft(x, 16, 8, window=self.window, return_complex=True)
        masked = spectrum * self.mask(spectrum.abs().mT).sigmoid().mT
        found = torch.istft(masked, 16, 8, window=self.window, length=x.shape[-1])
        wanted = torch.stft(target, 16, 4, return_complex=True).abs()
        made = torch.stft(found, 16, 4, return_complex=True).abs()
        return (found - target).square().mean() + (made - wanted).abs().mean()


@pytest.mark.parametrize("plan", _PLANS)
def test_a_spectrogram_is_split_by_batch(plan: str) -> None:
    torch.manual_seed(0)
    model = Enhance().double()
    inputs = tuple(torch.randn(4, 64, dtype=torch.float64) for _ in range(2))
    cluster = autopar.Cluster.from_profile("cpu-gloo", devices_per_node=2)
    made = autopar.plan(model, cluster, inputs, constraints=_PLANS[plan], cache=False)
    found = autopar.verify(made, model, inputs)
    assert found.worst[1] < 1e-11, found.worst
