"""A generated kernel as a node of the graph: Triton on CUDA, elsewhere the ATen ops it replaces.

The source depends on the operands' strides, which are known when it is first called; it is written,
loaded and kept for each set of strides.
"""

from __future__ import annotations

import importlib.util
import itertools
import operator
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.codegen.fusion.expressions import IDENTITIES
from autopar.codegen.fusion.groups import Group, find_groups, source_of
from autopar.codegen.fusion.rewriter import ANNOTATIONS, Rewriter
from autopar.codegen.fusion.source import Kernel, write_kernel
from autopar.core.graph import value_of
from autopar.core.late_module import late_module
from autopar.kernels.registry import has_triton

__all__ = ["Generated", "generate"]


class Generated:
    """A callable for a group of ops.

    Two are equal if they consist of the same ops on the same space: those of different ranks may
    differ in their numbers.
    """

    def __init__(
        self,
        name: str,
        space: tuple[int, ...],
        members: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        dump: str | None,
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "autopar.codegen.fusion.generated"
        self.space = space
        self.dump = dump
        self.graph = fx.Graph()
        inside: dict[fx.Node, fx.Node] = {}
        self.reads = _operands(members)
        for node in self.reads:
            inside[node] = self.graph.placeholder(node.name)
            inside[node].meta.update(node.meta)
        for node in members:
            for source in node.all_input_nodes:
                _copy_views(self.graph, source, inside)
            inside[node] = self.graph.node_copy(node, inside.__getitem__)
        self.graph.output(tuple(inside[n] for n in outputs))
        self.operands = [inside[n] for n in self.reads]
        self.members = [inside[n] for n in members]
        self.outputs = [inside[n] for n in outputs]
        self.module = late_module(self.graph)
        self.kind = (space, tuple(str(n.target) for n in members))
        self.kernels: dict[Any, Kernel] = {}  # by the operands' strides
        self.functions: dict[Any, Any] = {}  # what Triton makes of them

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Generated) and self.kind == other.kind

    def __hash__(self) -> int:
        return hash(self.kind)

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, *values: Tensor) -> Any:
        if any(v.is_cuda for v in values) and has_triton():
            return self.triton(*values)
        if self.dump:
            self.kernel(values)
        return self.module(*values)

    def kernel(self, values: Sequence[Tensor]) -> Kernel:
        """Source and launch for operands of these strides."""
        key = _strides(values)
        if key not in self.kernels:
            kernel = write_kernel(self.space, self.members, self.operands, self.outputs, values)
            if self.dump:
                _write(_of_this_rank(Path(self.dump)) / self._file(), kernel.source)
            self.kernels[key] = kernel
        return self.kernels[key]

    def triton(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Run the Triton kernel, in the interpreter where `TRITON_INTERPRET=1`."""
        kernel, function = self.kernel(values), self._loaded(values)
        device = next(v.device for v in values if v.dim())
        results = tuple(
            torch.empty(value_of(n).shape, dtype=value_of(n).dtype, device=device)
            for n in self.outputs
        )
        tile = kernel.tile
        guard = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with guard:
            function[(tile.programs,)](
                *values, *results, ROWS=tile.block_rows, COLS=tile.block_columns,
                num_warps=min(16, max(4, tile.block_rows * tile.block_columns // 256)),
            )  # fmt: skip
        return results

    def _loaded(self, values: Sequence[Tensor]) -> Any:
        key = _strides(values)
        if key not in self.functions:
            file = f"{self.__name__}_{len(self.functions)}.py"
            self.functions[key] = _load(self.kernel(values).source, _folder() / file)
        return self.functions[key]

    def _file(self) -> str:
        suffix = f"_{len(self.kernels)}" if self.kernels else ""
        return f"{self.__name__}{suffix}.py"


def _strides(values: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(v.stride() for v in values)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def _folder() -> Path:
    """A folder of this process, gone with it: Triton reads kernels from files."""
    if not _FOLDERS:
        _FOLDERS.append(tempfile.TemporaryDirectory(prefix="autopar-kernels-"))
    folder = Path(_FOLDERS[0].name) / str(len(list(Path(_FOLDERS[0].name).iterdir())))
    folder.mkdir()
    return folder


def _of_this_rank(folder: Path) -> Path:
    """Kernels of ranks may differ in their numbers."""
    several = dist.is_available() and dist.is_initialized()
    return folder / f"rank{dist.get_rank()}" if several else folder


def _write(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


def _load(source: str, path: Path) -> Any:
    _write(path, source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def _operands(members: Sequence[fx.Node]) -> list[fx.Node]:
    """What a group reads, once each."""
    inside = set(members)
    found: dict[fx.Node, None] = {}
    for node in members:
        for source in node.all_input_nodes:
            if source_of(source) not in inside:
                found.setdefault(source)
    return list(found)


def _copy_views(graph: fx.Graph, node: fx.Node, inside: dict[fx.Node, fx.Node]) -> None:
    """Copy the views between a member and what it reads inside the group."""
    if node in inside:
        return
    source = node.args[0]
    assert node.target in IDENTITIES and isinstance(source, fx.Node)
    _copy_views(graph, source, inside)
    inside[node] = graph.node_copy(node, inside.__getitem__)


def _is_read(node: fx.Node, members: dict[fx.Node, None]) -> bool:
    """True if somebody outside the group reads a member, by views or directly."""
    return any(
        user not in members and (user.target not in IDENTITIES or source_of(user) is user
                                 or _is_read(user, members))
        for user in node.users
    )  # fmt: skip


def generate(rewriter: Rewriter, dump: str | None) -> None:
    """Put one call in place of every group of the graph."""
    order, _ = find_groups(rewriter.graph)
    fresh: list[fx.Node] = []
    count = 0
    for item in order:
        if not isinstance(item, Group):
            fresh.append(item)
            continue
        fresh += _emit(rewriter, item, count, dump)
        count += 1
    alive = [n for n in fresh if not n._erased]
    for before, after in itertools.pairwise(alive):
        before.append(after)
    if count:
        rewriter.counts["generated"] = count


def _emit(rewriter: Rewriter, group: Group, index: int, dump: str | None) -> list[fx.Node]:
    """The call of a group's kernel and its results."""
    members = list(group.members)
    outputs = [n for n in members if _is_read(n, group.members)]
    if not outputs:
        return members
    ops = dict.fromkeys(str(n.target).split(".")[1].strip("_") for n in members)
    name = f"fused_{index}_{'_'.join(ops)}"[:60]
    target = Generated(name, group.space, members, outputs, dump)
    last = members[-1]
    with rewriter.graph.inserting_before(members[0]):
        call = rewriter.graph.call_function(target, tuple(target.reads))
        call.meta["val"] = tuple(_dense(value_of(n)) for n in outputs)
        results = []
        for i in range(len(outputs)):
            item = rewriter.graph.call_function(operator.getitem, (call, i))
            item.meta["val"] = call.meta["val"][i]
            results.append(item)
    for node in (call, *results):
        for key in ANNOTATIONS:
            if key in last.meta:
                node.meta[key] = last.meta[key]
    rewriter.calls.append(call)
    for old, new in zip(outputs, results, strict=True):
        rewriter.replaced[new] = old
        old.replace_all_uses_with(new, delete_user_cb=lambda u: u not in group.members)
    for node in reversed(members):
        _drop_views(rewriter, node)
        rewriter.graph.erase_node(node)
    return [call, *results]


def _drop_views(rewriter: Rewriter, node: fx.Node) -> None:
    for user in list(node.users):
        _drop_views(rewriter, user)
        rewriter.graph.erase_node(user)


def _dense(value: Tensor) -> Tensor:
    """A fake value of the same shape, row-major."""
    return value if value.is_contiguous() else value.new_empty(value.shape)
