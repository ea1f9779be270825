"""Runs Triton kernels in its interpreter where there is no GPU."""

from __future__ import annotations

import os

import torch


def needs_interpreter() -> None:
    """Switch the interpreter on before Triton is first imported, which decides for good.

    Raises:
        RuntimeError: something has imported Triton already, compiled.
    """
    import sys

    if torch.cuda.is_available():
        return
    if os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules:
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set")
    os.environ["TRITON_INTERPRET"] = "1"
