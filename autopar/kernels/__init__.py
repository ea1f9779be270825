"""Fused kernels as ops of the `autopar_kernels` library: Triton on CUDA, ATen on the CPU.

Importing this package registers its ops and never imports Triton; `jit` holds the
kernels, and is loaded when an op first meets a CUDA tensor.
"""

from autopar.kernels import activation, dropout, loss, norm, optimizer, rotary, softmax

__all__ = ["activation", "dropout", "loss", "norm", "optimizer", "rotary", "softmax"]
