"""Runs the programs of all ranks of a mesh in one process, node by node.

Every rank executes the same node at the same time; a collective sees the values of its whole
group. So a program for 64 ranks is checked against the unsharded module in a unit test, and
deterministically. Only the emitted graphs are needed: no process group.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.codegen.lowering import DENSE
from autopar.core.einsum import contract
from autopar.core.overlapped import (
    GATHER_MATMUL,
    MATMUL_REDUCE_SCATTER,
    multiplied,
    parts_of,
)

__all__ = ["Strided", "mesh_coords", "run_lockstep"]

c10d = torch.ops._c10d_functional


def mesh_coords(mesh_shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Coordinates of all ranks, in rank order (row-major)."""
    return list(itertools.product(*(range(size) for size in mesh_shape)))


def _groups(mesh_shape: Sequence[int], axis: int) -> list[list[int]]:
    """Ranks of each process group of `axis`."""
    coords = mesh_coords(mesh_shape)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coord in enumerate(coords):
        groups.setdefault((*coord[:axis], *coord[axis + 1 :]), []).append(rank)
    return list(groups.values())


def _reduce(values: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack(values)
    if op == "sum":
        return stacked.sum(0).to(values[0].dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def _run_group(target: Any, args: list[tuple[Any, ...]]) -> list[Any]:
    """One collective for the ranks of one group, given the arguments of each."""
    inputs = [a[0] for a in args]
    if target is c10d.all_reduce_.default:
        result = _reduce(inputs, args[0][1])
        return [x.copy_(result) for x in inputs]
    if target is c10d.all_reduce.default:
        result = _reduce(inputs, args[0][1])
        return [result.clone() for _ in inputs]
    if target is c10d.all_gather_into_tensor.default:
        result = torch.cat(inputs)
        return [result.clone() for _ in inputs]
    if target is c10d.reduce_scatter_tensor.default:
        return [c.clone() for c in _reduce(inputs, args[0][1]).chunk(len(inputs))]
    if target is c10d.all_to_all_single.default:
        sent = [x.split(a[2]) for x, a in zip(inputs, args, strict=True)]
        return [torch.cat([parts[me] for parts in sent]) for me in range(len(inputs))]
    if target is GATHER_MATMUL:
        whole = torch.cat(inputs, args[0][3])
        return [multiplied(whole.clone(), a[1], a[2], a[4]) for a in args]
    if target is MATMUL_REDUCE_SCATTER:
        return _scattered_products(args)
    raise AssertionError(f"{target} is not a collective that codegen emits")


def _scattered_products(args: list[tuple[Any, ...]]) -> list[Tensor]:
    products = [contract(equation, a, b) for a, b, equation, *_ in args]
    dim, ranks = args[0][3:5]
    summed = _reduce([parts_of(product, dim, ranks) for product in products], "sum")
    return [part.clone() for part in summed]


def run_lockstep(
    graphs: Sequence[fx.Graph], inputs: Sequence[Sequence[Any]], mesh_shape: Sequence[int]
) -> list[tuple[Any, ...]]:
    """Outputs of every rank's graph, given every rank's inputs in placeholder order."""
    envs: list[dict[fx.Node, Any]] = [{} for _ in graphs]
    feeds = [iter(values) for values in inputs]
    results: list[tuple[Any, ...]] = []
    uses = [{n: len(n.users) for n in g.nodes} for g in graphs]
    for row in zip(*(list(g.nodes) for g in graphs), strict=True):
        first = row[0]
        if any(n.op != first.op or n.target != first.target for n in row[1:] if n.op != "output"):
            if first.op == "call_function":
                raise AssertionError(f"ranks differ at {first.name}: {[n.target for n in row]}")
        if first.op == "placeholder":
            for env, feed, node in zip(envs, feeds, row, strict=True):
                env[node] = next(feed)
        elif first.op == "output":
            results = [
                fx.map_arg(node.args[0], env.__getitem__)
                for env, node in zip(envs, row, strict=True)
            ]
        else:
            _run_row(row, envs, mesh_shape)
        for env, use, node in zip(envs, uses, row, strict=True):
            for source in node.all_input_nodes:
                use[source] -= 1
                if not use[source]:
                    env.pop(source, None)
    return results


def _run_row(
    row: tuple[fx.Node, ...], envs: list[dict[fx.Node, Any]], mesh_shape: Sequence[int]
) -> None:
    def arguments(rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        lookup = envs[rank].__getitem__
        return fx.map_arg(row[rank].args, lookup), fx.map_arg(row[rank].kwargs, lookup)

    target: Any = row[0].target
    sent = row[0].meta.get("collective") or row[0].meta.get("overlapped")
    if sent is not None:
        axis = sent[1]
        for group in _groups(mesh_shape, axis):
            values = _run_group(target, [arguments(rank)[0] for rank in group])
            for rank, value in zip(group, values, strict=True):
                envs[rank][row[rank]] = value
    elif target is c10d.wait_tensor.default:
        for rank, node in enumerate(row):
            envs[rank][node] = arguments(rank)[0][0]
    else:
        for rank, node in enumerate(row):
            args, kwargs = arguments(rank)
            own: Any = node.target  # generated kernels of ranks differ in their numbers
            envs[rank][node] = own(*args, **kwargs)


class Strided(fx.Interpreter):
    """Runs a graph that was traced on other strides than the kernels here return."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            target = torch.ops.aten.reshape.default
        if target in DENSE:
            args, kwargs = pytree.tree_map_only(Tensor, Tensor.contiguous, (args, kwargs))
        return super().call_function(target, args, kwargs)
