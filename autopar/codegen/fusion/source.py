"""Writes the Triton source of a group of ops.

A program computes a tile of rows and columns of the group's space. Every operand is loaded once and
every result stored once, so the traffic is that of the operands and the results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.codegen.fusion.expressions import (
    COMPARISONS,
    CONDITIONS,
    DROPOUT,
    EXPRESSIONS,
    REDUCTIONS,
    ROW_OPS,
    literal,
    power,
    triton_type,
)
from autopar.codegen.fusion.groups import source_of
from autopar.core.graph import value_of
from autopar.core.random import salt_term
from autopar.kernels.indexing import index_map

__all__ = ["Kernel", "Tile", "write_kernel"]

aten = torch.ops.aten
_HEADER = '''"""{title}"""

import triton
import triton.language as tl

from autopar.kernels.jit.common import (
    activate, keep_mask, row_softmax, row_softmax_backward, sigmoid, slope, tanh,
)


@triton.jit
def kernel({arguments}, ROWS: tl.constexpr, COLS: tl.constexpr):
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a group's space `(rows, columns)` is cut into programs."""

    rows: int
    columns: int
    block_rows: int
    block_columns: int

    @property
    def column_tiles(self) -> int:
        return -(-self.columns // self.block_columns)

    @property
    def programs(self) -> int:
        return -(-self.rows // self.block_rows) * self.column_tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Source text of a kernel, and its launch."""

    source: str
    tile: Tile


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _tile(rows: int, columns: int, reduces: bool) -> Tile:
    """Whole rows where they are reduced; else tiles of about a thousand elements."""
    width = _power_of_two(columns)
    if not reduces:
        width = min(width, 1024)
    height = max(1, min(_power_of_two(rows), 1024 // width))
    return Tile(rows=rows, columns=columns, block_rows=height, block_columns=width)


def _merged(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Leading dims as few (size, stride) pairs, outermost first."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims


def _row_offset(sizes: Sequence[int], strides: Sequence[int]) -> str:
    """Offset of a row in a tensor, as an expression of `row`; empty where it is 0."""
    terms, inner = [], 1
    for index, (size, stride) in enumerate(reversed(_merged(sizes, strides))):
        if stride:
            at = "row" if inner == 1 else f"row // {inner}"
            outermost = index == len(_merged(sizes, strides)) - 1
            at = at if outermost else f"{at} % {size}"
            terms.append(f"({at}) * {stride}")
        inner *= size
    return " + ".join(terms)


class _Writer:
    """Lines of one kernel."""

    def __init__(self, space: tuple[int, ...], flat: bool) -> None:
        self.space = (1, math.prod(space)) if flat else (1,) * (2 - len(space)) + space
        self.flat = flat
        self.lines: list[str] = []
        self.names: dict[fx.Node, str] = {}
        self.types: dict[fx.Node, str] = {}

    def load(self, node: fx.Node, argument: str, value: Tensor, strides: Sequence[int]) -> None:
        """Load an operand, of which each element is read where it is first needed."""
        name = f"x{len(self.names)}"
        held = triton_type(value.dtype, held=True)
        assert held is not None
        row, column = "", 0
        if value.numel() > 1:
            row, column = self._offsets(value, strides)
        parts = [argument, *([row] if row else []), *([f"col * {column}"] if column else [])]
        mask = "inside" if row and column else "row_inside" if row else "col_inside"
        masked = f", mask={mask}, other=0" if row or column else ""
        text = f"tl.load({' + '.join(parts)}{masked})"
        text = f"({text} != 0)" if held == "tl.int1" else f"{text}.to({held})"
        self.lines.append(f"{name} = {text}")
        self.names[node], self.types[node] = name, held

    def _offsets(self, value: Tensor, strides: Sequence[int]) -> tuple[str, int]:
        """Offset of a row as an expression, and the stride of a column; empty and 0 for none."""
        if self.flat:
            return "", 1
        steps = [0] * (len(self.space) - value.dim())
        steps += [0 if n == 1 else s for n, s in zip(value.shape, strides, strict=True)]
        return _row_offset(self.space[:-1], steps[:-1]), steps[-1]

    def operand(self, arg: Any, held: str | None) -> str:
        """An operand as an expression of the held type; None leaves it as it is."""
        if not isinstance(arg, fx.Node):
            return literal(arg)
        base = arg if arg in self.names else source_of(arg)
        name = self.names[base]
        if held is None or self.types[base] == held:
            return name
        return f"({name} != 0)" if held == "tl.int1" else f"{name}.to({held})"

    def compute(self, node: fx.Node) -> None:
        """One op of the group."""
        value = value_of(node)
        held = triton_type(value.dtype, held=True)
        assert held is not None
        name = f"v{len(self.names)}"
        self.lines.append(f"{name} = {self._expression(node, held)}  # {_short(node)}")
        narrow = triton_type(value.dtype)
        if node.target is aten._to_copy.default and narrow != held:
            self.lines.append(f"{name} = {name}.to({narrow}).to({held})")
        self.names[node], self.types[node] = name, held

    def _expression(self, node: fx.Node, held: str) -> str:
        target: Any = node.target
        if target in DROPOUT:
            return self._dropout(node, held)
        if target in COMPARISONS:
            dtypes = [value_of(n).dtype for n in node.all_input_nodes]
            wide = dtypes[0]
            for dtype in dtypes[1:]:
                wide = torch.promote_types(wide, dtype)
            if any(isinstance(a, float) for a in node.args) and not wide.is_floating_point:
                wide = torch.float32
            common = triton_type(wide, held=True)
            return EXPRESSIONS[target].format(*(self.operand(a, common) for a in node.args))
        condition = CONDITIONS.get(target)
        inputs = held
        if held == "tl.int1" and target not in (aten.logical_and.default, aten.logical_or.default):
            inputs = ""  # a test of numbers
        args = [
            self.operand(a, "tl.int1" if i == condition else inputs or None)
            for i, a in enumerate(node.args)
            if isinstance(a, (fx.Node, int, float))
        ]
        if target in REDUCTIONS:
            return REDUCTIONS[target].format(*args, size=self.space[-1])
        if target in ROW_OPS:
            return ROW_OPS[target].format(*args)
        spelled = power(node.args[1]) if target is aten.pow.Tensor_Scalar else None
        act = "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
        return EXPRESSIONS[target].format(
            *args, act=act, power=spelled.format(*args) if spelled else ""
        )

    def _dropout(self, node: fx.Node, held: str) -> str:
        x, p, seed, salt, global_shape, offset = node.args
        assert isinstance(seed, fx.Node) and isinstance(p, float) and isinstance(salt, int)
        sizes, strides, base, dims = index_map(
            value_of(node).shape, _ints(global_shape), _ints(offset)
        )
        numbers = ", ".join(
            map(str, (salt_term(salt), int(p * 2**32), f"row * {self.space[-1]} + col", base,
                      *sizes[1:], *strides, dims))
        )  # fmt: skip
        keep = f"keep_mask({self.operand(seed, None)}, {numbers})"
        return f"tl.where({keep}, {self.operand(x, held)} * {1.0 / (1.0 - p)!r}, 0.0)"

    def store(self, node: fx.Node, argument: str) -> None:
        """Write a result, row-major."""
        value = value_of(node)
        whole = value.numel() == math.prod(self.space)
        at = f"row * {self.space[-1]} + col" if whole else "row"
        shape, mask = ("(ROWS, COLS)", "inside") if whole else ("(ROWS, 1)", "row_inside")
        shown = f"tl.broadcast_to({self.names[node]}.to({triton_type(value.dtype)}), {shape})"
        self.lines.append(f"tl.store({argument} + {at}, {shown}, mask={mask})")


def _ints(values: Any) -> list[int]:
    return [int(v) for v in values]


def _short(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


def write_kernel(
    space: tuple[int, ...],
    members: Sequence[fx.Node],
    operands: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    values: Sequence[Tensor],
) -> Kernel:
    """Source of the kernel for operands of these shapes and strides.

    Args:
        space: shape of the group's space.
        members: ops in order.
        operands: nodes that are read.
        outputs: members that are stored.
        values: the operands' tensors.
    """
    reduces = any(n.target in REDUCTIONS or n.target in ROW_OPS for n in members)
    total = math.prod(space)
    flat = not reduces and all(
        v.numel() == 1 or (tuple(v.shape) == space and v.is_contiguous()) for v in values
    ) and all(value_of(n).numel() == total for n in members)  # fmt: skip
    writer = _Writer(space, flat)
    columns = writer.space[-1]
    tile = _tile(total // columns, columns, reduces)
    across = tile.column_tiles
    writer.lines += [
        "pid = tl.program_id(0).to(tl.int64)",
        f"row = (pid // {across}) * ROWS + tl.arange(0, ROWS)[:, None]",
        f"col = (pid % {across}) * COLS + tl.arange(0, COLS)[None, :]",
        f"row_inside = row < {tile.rows}",
        f"col_inside = col < {columns}",
        "inside = row_inside & col_inside",
    ]
    arguments: list[str] = []
    for node, value in zip(operands, values, strict=True):
        arguments.append(f"in{len(arguments)}")
        writer.load(node, arguments[-1], value, value.stride())
    for node in members:
        writer.compute(node)
    for index, node in enumerate(outputs):
        arguments.append(f"out{index}")
        writer.store(node, arguments[-1])
    shapes = ", ".join(str(list(v.shape)) for v in values)
    title = f"{', '.join(map(_short, members))} of {shapes}."
    head = _HEADER.format(title=title, arguments=", ".join(arguments))
    return Kernel(source=head + "".join(f"    {x}\n" for x in writer.lines), tile=tile)
