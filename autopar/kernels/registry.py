"""`define`: registers a fused op with its fake, its ATen form and its Triton kernel.

An op runs as ATen where there is no kernel for its device, where Triton is not installed, and
where the kernel does not take the operands (a row that does not fit into registers).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["KERNELS", "LIBRARY_NAME", "MAX_ROW_BYTES", "Kernel", "define", "has_triton", "wide"]

LIBRARY_NAME = "autopar_kernels"
MAX_ROW_BYTES = 1 << 18  # of a row in float32 that one program keeps in registers

_lib = torch.library.Library(LIBRARY_NAME, "DEF")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One fused op.

    Attributes:
        name: in the `autopar_kernels` library.
        aten: its form in ATen ops.
        module: submodule of `autopar.kernels.jit` with a function of the same name.
        takes: whether the Triton kernel takes these operands.
    """

    name: str
    aten: Callable[..., Any]
    module: str
    takes: Callable[..., bool]

    def triton(self, *args: Any) -> Any:
        """Run the Triton kernel, in the interpreter where `TRITON_INTERPRET=1`."""
        jit = importlib.import_module(f"autopar.kernels.jit.{self.module}")
        return getattr(jit, self.name)(*args)


KERNELS: dict[str, Kernel] = {}


@cache
def has_triton() -> bool:
    """True where Triton is installed; does not import it."""
    return importlib.util.find_spec("triton") is not None


def define(
    schema: str, *, module: str, fake: Callable[..., Any], takes: Callable[..., bool] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated ATen form as an op of the library.

    Args:
        schema: in torch's syntax, without the library's name.
        module: submodule of `autopar.kernels.jit` with a function of the same name and arguments.
        fake: yields empty outputs, for tracing.
        takes: says of the op's arguments whether the kernel takes them; default: always.

    Raises:
        ValueError: there is an op of this name.
    """
    name = schema.partition("(")[0]

    def register(aten: Callable[..., Any]) -> Callable[..., Any]:
        if name in KERNELS:
            raise ValueError(f"{LIBRARY_NAME}::{name} is already defined")
        kernel = Kernel(name=name, aten=aten, module=module, takes=takes or (lambda *_: True))

        def on_cuda(*args: Any) -> Any:
            first = next(x for x in args if isinstance(x, Tensor))
            if not has_triton() or not first.numel() or not kernel.takes(*args):
                return aten(*args)
            with torch.cuda.device(first.device):
                return kernel.triton(*args)

        _lib.define(schema)
        _lib.impl(name, aten, "CPU")
        _lib.impl(name, on_cuda, "CUDA")
        torch.library.register_fake(f"{LIBRARY_NAME}::{name}", fake, lib=_lib)
        KERNELS[name] = kernel
        return aten

    return register


def wide(x: Tensor) -> Tensor:
    """`x` in at least float32, in which kernels compute."""
    return x.to(wide_dtype(x))


def wide_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, float32 for all other floating dtypes."""
    return torch.promote_types(x.dtype, torch.float32)


def row_fits(x: Tensor) -> bool:
    """True if a row of `x` fits into the registers of one program."""
    return bool(x.shape[-1] * max(4, x.element_size()) <= MAX_ROW_BYTES)
