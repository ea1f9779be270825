"""Short-time Fourier transforms, expressed in ops that split by batch.

ATen's own read the frames as a strided view, which no rule can split, and read values of the window
to refuse one that leaves gaps; here such a window divides by zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["istft", "stft"]

aten = torch.ops.aten


def _centred(window: Tensor | None, n_fft: int, length: int, like: Tensor) -> Tensor | None:
    """A window in the middle of a frame; None for one that changes nothing."""
    if window is None:
        if length == n_fft:
            return None
        window = like.new_ones(length, dtype=like.dtype.to_real())
    left = (n_fft - length) // 2
    return window if length == n_fft else F.pad(window, (left, n_fft - length - left))


def stft(
    rng: Any,
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Tensor:
    """`aten.stft` of x (…, L), padded before: (…, F, frames), or with (real, imaginary) behind."""
    if align_to_window is not None:
        return aten.stft.default(
            x, n_fft, hop_length, win_length, window, normalized, onesided, return_complex,
            align_to_window,
        )  # fmt: skip
    frames = x.unfold(-1, n_fft, hop_length or n_fft // 4)
    window = _centred(window, n_fft, win_length or n_fft, x)
    if window is not None:
        frames = frames * window
    half = not frames.is_complex() if onesided is None else onesided
    transform = torch.fft.rfft if half else torch.fft.fft
    found = transform(frames, norm="ortho" if normalized else "backward").transpose(-1, -2)
    return found if return_complex else torch.view_as_real(found)


def istft(
    rng: Any,
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """`aten.istft` of x (…, F, frames): frames added up, over the squares of their windows."""
    hop, norm = hop_length or n_fft // 4, "ortho" if normalized else "backward"
    spectra = x.transpose(-1, -2)
    half = x.shape[-2] != n_fft if onesided is None else onesided
    if half:
        frames = torch.fft.irfft(spectra, n=n_fft, norm=norm)
    else:
        frames = torch.fft.ifft(spectra, norm=norm)
        frames = frames if return_complex else frames.real
    window = _centred(window, n_fft, win_length or n_fft, x)
    if window is None:
        window = x.new_ones(n_fft, dtype=x.dtype.to_real())
    count = x.shape[-1]
    total = n_fft + hop * (count - 1)
    signal = _added_up(frames * window, total, hop)
    weight = _added_up((window * window).expand(count, n_fft), total, hop)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else total - start
    found = signal[..., start:end] / weight[..., start:end]
    return F.pad(found, (0, end - total)) if end > total else found


def _added_up(frames: Tensor, total: int, hop: int) -> Tensor:
    """Overlapping frames (…, frames, n) as one signal (…, total)."""
    shape = [*frames.shape[:-2], total]
    return aten.unfold_backward.default(frames, shape, len(shape) - 1, frames.shape[-1], hop)
