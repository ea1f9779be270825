"""Every fused kernel beside eager, Inductor and ATen's own fused op, in bfloat16.

    python -m benchmarks.kernels [--only NAME ...] [--json FILE]

Shapes are those of GPT-2 1.5B (8 sequences of 1,024 tokens) and of Llama-8B (one of 8,192). Seconds
are medians of Triton's `do_bench`, which flushes the cache between runs. Bytes are those of the
operands and results, once each, so that GB/s counts no traffic that a fused kernel can avoid; the
share is of a device-to-device copy of 1 GiB, measured first, read and write counted. Eager is the
op's own chain of ATen calls, Inductor is `torch.compile` of it.

Without a CUDA device it lists the rows, says that they are open, and exits with 0.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from autopar import kernels as _kernels  # noqa: F401  (registers the ops)
from autopar.kernels.registry import KERNELS
from benchmarks.provenance import provenance

RESULTS = Path(__file__).parent / "results"
COPY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a model's kernels work on."""

    name: str
    batch: int
    length: int
    hidden: int
    wide: int
    heads: int
    vocab: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length


GPT2 = Sizes(name="gpt2-1.5b", batch=8, length=1024, hidden=1600, wide=6400, heads=25, vocab=50257)
LLAMA = Sizes(
    name="llama-8b", batch=1, length=8192, hidden=4096, wide=14336, heads=32, vocab=128256
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kernel at one model's shapes: makes its arguments, and knows ATen's fused op."""

    kernel: str
    sizes: Sizes
    arguments: Callable[[Sizes, str], tuple[Any, ...]]
    aten: Callable[..., Any] | None = None


def _normal(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _random(s: Sizes, device: str, width: int) -> tuple[Any, ...]:
    return (0.1, torch.tensor(1, device=device), 3, [s.tokens, width], [0, 0])


def _x(s: Sizes, device: str, width: int | None = None) -> Tensor:
    return _normal(device, s.tokens, width or s.hidden)


def _stat(s: Sizes, device: str) -> Tensor:
    return torch.rand(s.tokens, 1, device=device) + 0.5


def _targets(s: Sizes, device: str) -> Tensor:
    return torch.randint(0, s.vocab, (s.tokens,), device=device)


def _heads(s: Sizes, device: str) -> tuple[Any, ...]:
    width = s.hidden // s.heads
    x = _normal(device, s.batch, s.length, s.heads, width).transpose(1, 2)
    tables = [_normal(device, 1, 1, s.length, width) for _ in range(2)]
    return (x, *tables, False)


def _scores(s: Sizes, device: str) -> Tensor:
    return _normal(device, 1, s.heads, 1024, 1024)


def _adamw(s: Sizes, device: str) -> tuple[Any, ...]:
    count = 12 * s.hidden * s.hidden
    p, g, m = (torch.randn(count, device=device) for _ in range(3))
    one, zero = torch.ones((), device=device), torch.zeros((), device=device)
    return (p, g, m, m.abs(), one, 1e-3 * one, one, zero, 0.9, 0.95, 1e-8, 0.1)


def _aten_adamw(p, g, m, v, step, lr, factor, found, beta1, beta2, eps, decay):  # type: ignore[no-untyped-def]
    torch._fused_adamw_([p], [g], [m], [v], [], [step], lr=lr, beta1=beta1, beta2=beta2,
                        weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
                        grad_scale=factor, found_inf=found)  # fmt: skip


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
    return torch.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)


def _layer_norm_backward(grad, x, mean, rstd, weight, through):  # type: ignore[no-untyped-def]
    width = [x.shape[-1]]
    found = torch.ops.aten.native_layer_norm_backward(
        grad, x, width, mean, rstd, weight, weight, [True, True, True]
    )
    return found[0] + through, found[1], found[2]


_EPS = 1e-5
MAKE: dict[str, tuple[Callable[[Sizes, str], tuple[Any, ...]], Callable[..., Any] | None]] = {
    "layer_norm": (lambda s, d: (_x(s, d), *_x(s, d)[:2], _EPS), _layer_norm),
    "add_layer_norm": (
        lambda s, d: (_x(s, d), _x(s, d), *_x(s, d)[:2], _EPS),
        lambda x, r, w, b, eps: _layer_norm(x + r, w, b, eps),
    ),
    "layer_norm_backward": (
        lambda s, d: (_x(s, d), _x(s, d), _stat(s, d), _stat(s, d), _x(s, d)[0], _x(s, d)),
        _layer_norm_backward,
    ),
    "rms_norm": (
        lambda s, d: (_x(s, d), _x(s, d)[0], _EPS),
        lambda x, w, eps: F.rms_norm(x, [x.shape[-1]], w, eps),
    ),
    "add_rms_norm": (
        lambda s, d: (_x(s, d), _x(s, d), _x(s, d)[0], _EPS),
        lambda x, r, w, eps: F.rms_norm(x + r, [x.shape[-1]], w, eps),
    ),
    "rms_norm_backward": (
        lambda s, d: (_x(s, d), _x(s, d), _stat(s, d), _x(s, d)[0], _x(s, d)), None,
    ),
    "gated": (lambda s, d: (_x(s, d, s.wide), _x(s, d, s.wide), "silu"), None),
    "gated_backward": (lambda s, d: (*(_x(s, d, s.wide) for _ in range(3)), "silu"), None),
    "bias_act": (
        lambda s, d: (_x(s, d, s.wide), _x(s, d, s.wide)[0], "gelu_tanh", *_random(s, d, s.wide)),
        None,
    ),
    "bias_act_backward": (
        lambda s, d: (_x(s, d, s.wide), _x(s, d, s.wide), _x(s, d, s.wide)[0], "gelu_tanh",
                      *_random(s, d, s.wide)),
        None,
    ),
    "dropout": (
        lambda s, d: (_x(s, d), *_random(s, d, s.hidden)),
        lambda x, p, *_: torch.native_dropout(x, p, True),
    ),
    "dropout_add": (
        lambda s, d: (_x(s, d), _x(s, d)[0], _x(s, d), *_random(s, d, s.hidden)), None,
    ),
    "rotary": (_heads, None),
    "masked_softmax": (
        lambda s, d: (_scores(s, d), torch.ones(1024, 1024, dtype=torch.bool, device=d).tril(),
                      0.125),
        lambda x, mask, scale: torch.softmax(x.mul(scale).masked_fill(~mask, -torch.inf), -1),
    ),
    "softmax_backward": (
        lambda s, d: (_scores(s, d), torch.softmax(_scores(s, d), -1), 0.125),
        lambda g, p, scale: torch._softmax_backward_data(g, p, -1, p.dtype) * scale,
    ),
    "nll_stats": (lambda s, d: (_x(s, d, s.vocab // 2), _targets(s, d), 0, -100), None),
    "token_nll": (
        lambda s, d: (_x(s, d, s.vocab), _targets(s, d), -100),
        lambda z, t, ignore: F.cross_entropy(z, t, ignore_index=ignore, reduction="none"),
    ),
    "nll_backward": (
        lambda s, d: (_stat(s, d)[:, 0], _x(s, d, s.vocab), _targets(s, d),
                      _stat(s, d)[:, 0] + 12.0, 0, -100),
        None,
    ),
    "linear_nll": (
        lambda s, d: (_x(s, d), _normal(d, s.vocab, s.hidden), _targets(s, d), -100), None,
    ),
    "linear_nll_backward": (
        lambda s, d: (_stat(s, d)[:, 0], _x(s, d), _normal(d, s.vocab, s.hidden), _targets(s, d),
                      _stat(s, d)[:, 0] + 12.0, -100),
        None,
    ),
    "adamw_": (_adamw, _aten_adamw),
}  # fmt: skip


def rows(only: list[str]) -> list[Row]:
    """All kernels at all shapes; every registered kernel is among them."""
    missing = KERNELS.keys() ^ MAKE.keys()
    if missing:
        raise SystemExit(f"no row for {sorted(missing)}")
    return [
        Row(kernel=name, sizes=sizes, arguments=make, aten=aten)
        for name, (make, aten) in MAKE.items()
        for sizes in (GPT2, LLAMA)
        if not only or name in only
    ]


def traffic(args: tuple[Any, ...], results: Any) -> int:
    """Bytes of operands and results; operands that are updated count twice."""
    found = results if isinstance(results, tuple) else (results,)
    tensors = [x for x in (*args, *found) if isinstance(x, Tensor)]
    updated = args[0:1] + args[2:4] if results is None else ()
    return sum(x.numel() * x.element_size() for x in (*tensors, *updated))


def measure(row: Row, copy_gbps: float) -> dict[str, Any]:
    """Milliseconds of each contender, and the kernel's share of the copy bandwidth."""
    from triton.testing import do_bench

    kernel = KERNELS[row.kernel]
    args = row.arguments(row.sizes, "cuda")
    ways: dict[str, Callable[..., Any] | None] = {
        "autopar": kernel.triton,
        "eager": kernel.aten,
        "inductor": torch.compile(kernel.aten, dynamic=False),
        "aten": row.aten,
    }
    num_bytes = traffic(args, kernel.triton(*args))
    found: dict[str, Any] = {"kernel": row.kernel, "shapes": row.sizes.name, "bytes": num_bytes}
    for name, way in ways.items():
        if way is None:
            found[name] = None
            continue
        middle, low, high = do_bench(lambda way=way: way(*args), quantiles=[0.5, 0.2, 0.8])
        found[name] = {"median_ms": middle, "p20_ms": low, "p80_ms": high}
    gbps = num_bytes / found["autopar"]["median_ms"] / 1e6
    found |= {"gbps": gbps, "share_of_copy": gbps / copy_gbps}
    found["over_inductor"] = found["inductor"]["median_ms"] / found["autopar"]["median_ms"]
    return found


def copy_bandwidth() -> float:
    """GB/s of a copy within the device, bytes read and written."""
    from triton.testing import do_bench

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * COPY_BYTES / milliseconds / 1e6


def show(found: list[dict[str, Any]], copy_gbps: float, device: str) -> None:
    """Print a table."""
    table = Table(
        "kernel", "shapes", "ms", "GB/s", "share", "eager", "inductor", "aten", "× inductor",
        title=f"{device}, bfloat16; a copy runs at {copy_gbps:.0f} GB/s",
    )  # fmt: skip
    for row in found:
        others = [row[k] and f"{row[k]['median_ms']:.3f}" for k in ("eager", "inductor", "aten")]
        table.add_row(
            row["kernel"], row["shapes"], f"{row['autopar']['median_ms']:.3f}",
            f"{row['gbps']:.0f}", f"{row['share_of_copy']:.2f}",
            *(x or "" for x in others), f"{row['over_inductor']:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)


def main() -> None:
    """Print the table; write benchmarks/results/kernels_DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], choices=sorted(KERNELS))
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/kernels_DEVICE.json")
    options = parser.parse_args()
    todo = rows(options.only)
    if not torch.cuda.is_available():
        for row in todo:
            print(f"{row.kernel} at {row.sizes.name}: open")
        print(f"no CUDA device here, so these {len(todo)} rows are open")
        return
    import triton

    device = torch.cuda.get_device_name()
    copy_gbps = copy_bandwidth()
    found = []
    for row in todo:
        found.append(measure(row, copy_gbps))
        torch.cuda.empty_cache()
    show(found, copy_gbps, device)
    RESULTS.mkdir(exist_ok=True)
    out = options.json or RESULTS / f"kernels_{device.split()[-1].lower()}.json"
    head = {
        **provenance(), "device": device, "triton": triton.__version__, "copy_gbps": copy_gbps,
    }  # fmt: skip
    out.write_text(json.dumps({**head, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
