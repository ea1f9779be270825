"""Compiles for a device that is not there what a call would launch.

    python -m tests.triton_compile

Every kernel is called with the arguments of `CALLS`; launches are taken up by Triton's compiler,
which writes machine code for compute capability 9.0 (H100, H200). Prints one line a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from autopar.kernels.activation import ACTIVATIONS
from autopar.kernels.registry import KERNELS

TARGET = GPUTarget("cuda", 90, 32)
_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}


def compiled(function: JITFunction[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What a launch would compile; operands are taken as aligned to 16 bytes."""
    num_warps = options.pop("num_warps", 4)
    names = function.arg_names
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {(names.index(k),): v for k, v in options.items()}
    attributes: dict[Any, Any] = {}
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            signature[names[index]] = _TYPES[value.dtype]
            attributes[index,] = [["tt.divisibility", 16]]
        else:
            signature[names[index]] = "i32" if -(2**31) <= value < 2**31 else "i64"
    for name in options:
        signature[name] = "constexpr"
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=TARGET, options={"num_warps": num_warps})


class Recorder:
    """Compiles instead of launching, while it is entered."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Any]] = []

    def __enter__(self) -> Recorder:
        self.before = JITFunction.run

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self.found.append((function.__name__, compiled(function, args, options)))

        JITFunction.run = run
        return self

    def __exit__(self, *_: object) -> None:
        JITFunction.run = self.before


def calls(dtype: torch.dtype) -> list[tuple[str, tuple[Any, ...]]]:
    """Arguments of every op, at sizes of models; nothing is read or written."""
    x = torch.empty(64, 1600, dtype=dtype)
    row, stat = x[0], torch.empty(64, 1)
    random = (0.1, torch.tensor(1), 3, [128, 1600], [64, 0])
    strided = (0.1, torch.tensor(1), 3, [64, 3200], [0, 1600])
    heads = torch.empty(2, 8, 64, 128, dtype=dtype)
    mask = torch.ones(2, 1, 64, 128, dtype=torch.bool)
    target, grad = torch.zeros(64, dtype=torch.int64), torch.empty(64)
    weight = torch.empty(1000, 1600, dtype=dtype)
    moment, scalar = torch.empty(5000), torch.tensor(1.0)
    return [
        ("layer_norm", (x, row, row, 1e-5)),
        ("add_layer_norm", (x, x, row, row, 1e-5)),
        ("layer_norm_backward", (x, x, stat, stat, row, x)),
        ("rms_norm", (x, row, 1e-5)),
        ("add_rms_norm", (x, x, row, 1e-5)),
        ("rms_norm_backward", (x, x, stat, row, x)),
        *((name, (*args, act))
          for act in ACTIVATIONS
          for name, args in (("gated", (x, x)), ("gated_backward", (x, x, x)))),
        ("bias_act", (x, row, "gelu", *random)),
        ("bias_act_backward", (x, x, row, "gelu_tanh", *strided)),
        ("dropout", (x, *random)),
        ("dropout_add", (x, row, x, *strided)),
        ("rotary", (heads, heads[:1, :1], heads[:1, :1], False)),
        ("rotary", (heads, heads[:1, :1], heads[:1, :1], True)),
        ("masked_softmax", (heads, mask, 0.125)),
        ("softmax_backward", (heads, heads, 0.125)),
        ("nll_stats", (x, target, 0, -100)),
        ("token_nll", (x, target, -100)),
        ("nll_backward", (grad, x, target, grad, 0, -100)),
        ("linear_nll", (x, weight, target, -100)),
        ("linear_nll_backward", (grad, x, weight, target, grad, -100)),
        ("adamw_", (moment, moment.to(dtype), moment, moment, scalar, scalar, scalar, scalar,
                    0.9, 0.95, 1e-8, 0.1)),
    ]  # fmt: skip


def generated() -> list[tuple[Any, list[torch.Tensor]]]:
    """Kernels written for real programs, with operands."""
    from autopar.codegen.fusion.generated import Generated
    from tests.fusion_programs import MODELS, program_of

    found = {}
    for model in MODELS:
        for fusion in (True, {"only": "generated"}):
            for node in program_of(model, fusion).joint.graph.nodes:
                if isinstance(node.target, Generated):
                    operands = [n.meta["val"] for n in node.args]
                    values = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype)
                              for v in operands]  # fmt: skip
                    source = node.target.kernel(values).source
                    found[source.partition("tl.program_id")[2]] = node.target, values
    return list(found.values())


def main() -> None:
    """Compile every kernel in bfloat16 and float64, and what is generated for small models."""
    for target, values in generated():
        with Recorder() as recorder:
            target.triton(*values)
        size = len(recorder.found[0][1].asm["cubin"])
        print(f"generated: {target.__name__}, {size} bytes of machine code")
    for dtype in (torch.bfloat16, torch.float64):
        listed = calls(dtype)
        missing = KERNELS.keys() - {name for name, _ in listed}
        if missing:
            raise SystemExit(f"no call for {sorted(missing)}")
        for name, args in listed:
            with Recorder() as recorder:
                KERNELS[name].triton(*args)
            for kernel, code in recorder.found:
                size = len(code.asm["cubin"])
                print(f"{name}: {kernel} in {dtype}, {size} bytes of machine code")


if __name__ == "__main__":
    main()
