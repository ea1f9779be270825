"""What the multiprocessors of a device cost: matmuls that fill them unevenly, and collectives."""

from __future__ import annotations

from autopar.cost_model.profile import DeviceProfile

__all__ = ["beside_s", "wave_factor"]

# multiprocessors that a collective of NCCL takes beside FSDP's compute: 24 in the trace of
# https://forums.developer.nvidia.com/t/337991
_SENDING = 24


def beside_s(device: DeviceProfile, compute_s: float, comm_s: float) -> float:
    """Seconds until both are done, of parts that start together.

    Args:
        device: one without a number of multiprocessors loses nothing.
        compute_s, comm_s: of each alone.
    """
    all_of_them = device.multiprocessors
    taken = min(0.5, _SENDING / all_of_them) if all_of_them else 0.0
    # at the lower rate until the communication ends, at the full rate after it
    return max(comm_s, compute_s + taken * min(comm_s, compute_s / (1 - taken)))


# tiles of a kernel library, with the rate of each over that of the largest: how often a loaded
# element is used, tm tn / (tm + tn), where 64 uses keep the matrix units busy
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))


def wave_factor(device: DeviceProfile, gemm: tuple[int, int, int, int]) -> float:
    """How much longer a matmul takes because its tiles do not fill the last wave.

    A device with m multiprocessors computes m tiles at a time, so T tiles take ceil(T / m) / (T /
    m) of their share of its rate; the library takes the tile size for which that is least. (NVIDIA,
    Matrix Multiplication Background, "Wave Quantization".)

    Args:
        device: a device of which the number of multiprocessors is known, or the factor is 1.
        gemm: (batch, M, N, K).
    """
    if not device.multiprocessors:
        return 1.0
    batch, m, n, _ = gemm
    factors = []
    for tile_m, tile_n in _TILES:
        tiles = batch * -(-m // tile_m) * -(-n // tile_n)
        waves = -(-tiles // device.multiprocessors)
        computed = waves * device.multiprocessors * tile_m * tile_n
        rate = min(1.0, tile_m * tile_n / (tile_m + tile_n) / 64)
        factors.append(computed / (batch * m * n) / rate)
    return min(factors)
