"""Single sites as calls, what these hand to torch's ops, and whether a group can use them."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _symmetric_memory as torch_symmetric

from autopar import _compat
from autopar.codegen.builder import Builder
from autopar.codegen.passes.symmetric import symmetric_memory
from autopar.core import overlapped, symmetric_device
from autopar.core.einsum import contract
from autopar.core.overlapped import GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from autopar.core.symmetric_device import FusedCalls, Probe, reason_against
from autopar.errors import SymmetricMemoryWarning
from autopar.runtime.lockstep import run_lockstep
from tests.dist import run_ranks
from tests.pieces import CALLS, behind_a_reader, calls
from tests.test_decompose import GATHERS, SCATTERS, written

EINSUM = torch.ops.autopar.einsum.default
ALIAS = torch.ops.aten.alias.default
KEYS = {("op", 0, "all_gather"), ("op", 0, "reduce_scatter"), ("op", 0, "all_reduce")}

# --- one site, written by hand, on two ranks


def called(
    write: Callable[[Builder, list[fx.Node]], Any], shapes: list[tuple[int, ...]]
) -> fx.Graph:
    """Both ranks put out the same with calls as without; the first rank's graph with calls."""
    plain = [behind_a_reader(graph) for graph in written(write, shapes)]
    fused = [symmetric_memory(graph, KEYS, 1 << 40) for graph in plain]
    generator = torch.Generator().manual_seed(0)
    feeds = [
        [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        for _ in plain
    ]
    for mine, other in zip(
        *(run_lockstep(graphs, feeds, (2,)) for graphs in (fused, plain)), strict=True
    ):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for node in fused[0].nodes:
        if node.target in CALLS:
            assert node.meta["overlapped"][0] in ("all_gather", "reduce_scatter")
            assert node.meta["scratch"] > 0
    return fused[0]


REFUSED_GATHERS = {
    "weight gradient": "contracted",
    "contracted": "contracted",
    "runs": "in runs",
    "batched": "a batch of matrices",
}


@pytest.mark.parametrize("name", GATHERS)
def test_gather(name: str) -> None:
    """Read by one product, by two and a third reader, and by a product with a bias."""
    local, dim, split, equation, other = GATHERS[name]
    shapes = [local, other]
    swap = name == "weight gradient"

    def multiply(b: Builder, x: fx.Node, w: fx.Node) -> fx.Node:
        return b.call(EINSUM, equation, *((w, x) if swap else (x, w)))

    def one(b: Builder, inputs: list[fx.Node]) -> Any:
        return (multiply(b, b.all_gather(inputs[0], 0, dim, split), inputs[1]),)

    def several(b: Builder, inputs: list[fx.Node]) -> Any:
        whole = b.call(ALIAS, b.all_gather(inputs[0], 0, dim, split))
        bias = b.call(torch.ops.aten.sum.dim_IntList, inputs[1], [0, 1])
        first = b.call(torch.ops.aten.add.Tensor, multiply(b, whole, inputs[1]), bias)
        second = multiply(b, whole, b.call(torch.ops.aten.exp.default, inputs[1]))
        return first, second, b.call(torch.ops.aten.exp.default, whole)

    for write in (one, several) if len(other) == 2 else (one,):
        found = calls(called(write, shapes))
        assert len(found) == (0 if name in REFUSED_GATHERS else 1)
        for node in found:
            assert len(node.args[1]) == (1 if write is one else 2)
            assert node.args[4] is (write is several)  # the gathered tensor is kept


@pytest.mark.parametrize("name", SCATTERS)
def test_reduction(name: str) -> None:
    """Of a product; a sum of products stays, and one that something else reads."""
    a, b, equation, dim, split = SCATTERS[name]

    def reduced(builder: Builder, x: fx.Node) -> fx.Node:
        return builder.reduce_scatter(x, 0, dim, split) if dim is not None else (
            builder.all_reduce(x, 0)
        )  # fmt: skip

    def one(builder: Builder, inputs: list[fx.Node]) -> Any:
        return (reduced(builder, builder.call(EINSUM, equation, *inputs)),)

    def seen(builder: Builder, inputs: list[fx.Node]) -> Any:
        product = builder.call(EINSUM, equation, *inputs)
        return reduced(builder, product), builder.call(torch.ops.aten.exp.default, product)

    def several(builder: Builder, inputs: list[fx.Node]) -> Any:
        x, w = inputs
        more = builder.call(EINSUM, equation, builder.call(torch.ops.aten.exp.default, x), w)
        first = builder.call(EINSUM, equation, x, w)
        return (reduced(builder, builder.call(torch.ops.aten.add.Tensor, first, more)),)

    refused = dim is None or split > 1
    assert len(calls(called(one, [a, b]))) == (not refused)
    assert not calls(called(seen, [a, b]))
    assert not calls(called(several, [a, b]))


# --- torch's ops, by what they compute on any device


def consumed(
    shard: Tensor, consumer: Any, whole: Tensor, group_name: str, needed: bool = True
) -> None:
    """`_pipelined_all_gather_and_consume`, which needs peers' memory, in one piece."""
    assert shard.is_contiguous() and whole.is_contiguous()
    ranks = dist.get_world_size()
    parts = whole.chunk(ranks)
    dist.all_gather(list(parts), shard)
    for rank, part in enumerate(parts):
        consumer(part, rank)


def produced(producer: Any, output: Tensor, group_name: str, out_chunk_dim: int = 0) -> None:
    """`_pipelined_produce_and_all2all`, likewise."""
    assert out_chunk_dim == 0
    parts = output.chunk(dist.get_world_size())
    made = [torch.empty_like(part) for part in parts]
    for rank, part in enumerate(made):
        producer(rank, part)
    dist.all_to_all_single(output, torch.cat(made))


def fallback_calls(shard: Tensor, others: Any, dim: int, name: str, **options: bool) -> Any:
    # what is not wanted is multicast, in multiples of 16 bytes
    assert options.get("return_A", True) or shard.nbytes % 16 == 0
    return torch_symmetric._fused_all_gather_matmul_fallback(shard, others, dim, name, **options)


def real_calls(shard: Tensor, others: Any, dim: int, name: str, **options: bool) -> Any:
    return torch_symmetric._fused_all_gather_matmul_impl(
        torch.ops.aten.mm.out, shard, others, None, [{} for _ in others],
        [b.dtype for b in others], dim, name, options.get("return_A", True),
    )  # fmt: skip


def real_reduction(a: Tensor, b: Tensor, op: str, dim: int, name: str) -> Tensor:
    return torch_symmetric._fused_matmul_reduce_scatter_impl(
        torch.ops.aten.mm.out, a, b, {}, a.dtype, op, dim, name
    )


FORMS = {
    # shape of a rank's part, gathered dim, (equation, shape of the other operand), …
    "matrices": ((6, 4), 0, (("mk,kn->mn", (4, 3)), ("mk,nk->mn", (5, 4)))),
    "one sequence": ((1, 6, 4), 1, (("abk,nk->abn", (3, 4)), ("xyz,zw->xyw", (4, 6)))),
    "sequences": ((3, 4, 5), 1, (("abk,nk->abn", (2, 5)), ("abk,nk->nab", (2, 5)))),
    "heads": ((2, 4, 5), 1, (("abk,khn->ahbn", (5, 2, 3)), ("abk,hkn->abnh", (2, 5, 3)))),
    "columns of two": ((2, 4, 3, 5), 1, (("abhk,hkn->abn", (3, 5, 2)),)),
    "odd": ((3, 5), 0, (("mk,kn->mn", (5, 3)),)),
    "columns first": ((4, 6), 1, (("kb,kn->bn", (4, 3)),)),
}
REDUCED = {
    # shapes of the operands, equation, scattered dim
    "matrices": ((8, 3), (3, 4), "mk,kn->mn", 0),
    "sequences": ((3, 4, 5), (2, 5), "abk,nk->abn", 1),
    "heads": ((2, 3, 4, 5), (3, 5, 6), "ahbk,hkn->abn", 1),
    "transposed": ((3, 4, 5), (2, 5), "abk,nk->bna", 0),
}


def compared(rank: int) -> list[str]:
    """Ops on CUDA's path with torch's fallbacks, and with its algorithm, against ours."""
    library = torch.library.Library("symm_mem", "IMPL")
    fused = FusedCalls(
        gather_matmul=_compat.fused_all_gather_matmul,
        matmul_reduce_scatter=_compat.fused_matmul_reduce_scatter,
    )
    chosen: dict[str, Any] = {}
    library.impl("fused_all_gather_matmul", lambda *a, **k: chosen["gather"](*a, **k), "CPU")
    library.impl("fused_matmul_reduce_scatter", lambda *a: chosen["reduce"](*a), "CPU")
    torch_symmetric._pipelined_all_gather_and_consume = consumed  # type: ignore[assignment]
    torch_symmetric._pipelined_produce_and_all2all = produced
    fallback = torch_symmetric._fused_matmul_reduce_scatter_fallback
    generator = torch.Generator().manual_seed(rank)
    done = []
    group, ranks = dist.group.WORLD.group_name, dist.get_world_size()

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def same(op: Any, *args: Any) -> None:
        overlapped.fused_calls = lambda *_: None  # type: ignore[assignment]
        plain = op(*args)
        for kind in ({"gather": fallback_calls, "reduce": fallback},
                     {"gather": real_calls, "reduce": real_reduction}):  # fmt: skip
            chosen.update(kind)
            overlapped.fused_calls = lambda *_: fused  # type: ignore[assignment]
            found = op(*args)
            for a, b in zip(*((x if isinstance(x, list) else [x]) for x in (found, plain)),
                            strict=True):  # fmt: skip
                assert a.is_contiguous()
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    for name, (local, dim, products) in FORMS.items():
        shard, others = drawn(local), [drawn(shape) for _, shape in products]
        equations = [equation for equation, _ in products]
        for keep in (False, True):
            same(GATHER_MATMUL, shard, others, equations, dim, keep, ranks, group)
        done.append(name)
    for name, (a, b, equation, dim) in REDUCED.items():
        same(MATMUL_REDUCE_SCATTER, drawn(a), drawn(b), equation, dim, ranks, group)
        done.append(name)
    return done


def test_arguments_of_torchs_ops() -> None:
    """Two ranks: its fallbacks and its own algorithm give what gather and product give."""
    assert run_ranks(compared, 2) == [[*FORMS, *REDUCED]] * 2


def test_fakes_are_of_the_real_shapes() -> None:
    with FakeTensorMode():
        for local, dim, products in FORMS.values():
            others = [torch.empty(shape) for _, shape in products]
            equations = [equation for equation, _ in products]
            found = GATHER_MATMUL(torch.empty(local), others, equations, dim, True, 2, "axis0")
            whole = [*local]
            whole[dim] *= 2
            assert list(found[-1].shape) == whole
            for equation, other, made in zip(equations, others, found, strict=False):
                assert made.shape == contract(equation, torch.empty(whole), other).shape
        for a, b, equation, dim in REDUCED.values():
            x, y = torch.empty(a), torch.empty(b)
            made = MATMUL_REDUCE_SCATTER(x, y, equation, dim, 2, "axis0")
            expected = [*contract(equation, x, y).shape]
            expected[dim] //= 2
            assert list(made.shape) == expected


# --- whether a group can


def probed(rank: int) -> list[str]:
    """What two ranks agree on, by what each of them finds."""

    def probe(**given: Any) -> Probe:
        usual = {"own": lambda: "", "peers": lambda devices: "", "meet": lambda: None}
        return Probe(**{"place": lambda: ("here", f"gpu {rank}"), **usual, **given})

    def fails() -> None:
        if rank == 1:
            raise RuntimeError("no handle\nand more")

    def nowhere() -> Any:
        raise OSError("no place")

    asked: list[Any] = []
    cases = [
        probe(),
        probe(place=lambda: (f"machine {rank}", "gpu 0")),
        probe(place=lambda: ("here", "gpu 0")),
        probe(place=lambda: ("here", "gpu 0") if rank else nowhere()),
        probe(own=lambda: "too old" if rank else ""),
        probe(peers=lambda devices: asked.append(devices) or ("no link" if rank else "")),
        probe(meet=fails),
    ]
    group = dist.group.WORLD
    found = [reason_against(group, case) for case in cases]
    assert asked == [("gpu 0", "gpu 1")]
    symmetric_device._probe = lambda group, device: cases[-2]
    cuda = torch.device("cuda", 0)
    for expected in (1, 0):  # told once
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert symmetric_device.fused_calls(group.group_name, cuda) is None
        assert len([w for w in told if w.category is SymmetricMemoryWarning]) == expected
    symmetric_device._calls_of.cache_clear()
    symmetric_device._probe = lambda group, device: cases[0]
    assert symmetric_device.fused_calls(group.group_name, cuda) is not None
    assert symmetric_device.fused_calls(group.group_name, torch.device("cpu")) is None
    return found


def test_ranks_agree_on_what_stands_against_it() -> None:
    expected = [
        "",
        "its ranks are on 2 machines",
        "some of its ranks share a device",
        "OSError: no place",
        "too old",
        "no link",
        "RuntimeError: no handle",
    ]
    assert run_ranks(probed, 2) == [expected] * 2


def met(rank: int) -> list[Any]:
    """Patience of the group's store while ranks meet, and after that has failed, twice."""
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    before, found = store.timeout, []

    def fails(name: str, min_size: int) -> Any:
        found.append(store.timeout.total_seconds())
        raise RuntimeError("no peers")

    def without_multicast(name: str, min_size: int) -> Any:
        return types.SimpleNamespace(multicast_ptr=0)

    torch.cuda.current_device = lambda: 0
    _compat._SymmetricMemory = types.SimpleNamespace(has_multicast_support=lambda *_: True)
    for workspace in (fails, without_multicast):
        torch_symmetric.get_symm_mem_workspace = workspace
        try:
            _compat.meet_in_symmetric_memory(dist.group.WORLD)
        except RuntimeError as error:
            found += [store.timeout == before, str(error).split(";")[0]]
    return found


def test_nobody_waits_for_long_where_ranks_do_not_meet() -> None:
    failed = "multicast failed on devices that have it"
    assert run_ranks(met, 2) == [[60.0, True, "no peers", True, failed]] * 2
