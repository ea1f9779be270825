"""Calls of the ops that take index tensors, and of the contractions."""

from __future__ import annotations

from typing import Any

import torch

from tests.bruteforce import Sample
from tests.rule_samples import bools, case, ints, perm, rand

aten = torch.ops.aten


def _reduce(kind: str, include: bool = True) -> Any:
    return lambda x, i, s: aten.scatter_reduce.two(x, 1, i, s, kind, include_self=include)


GATHERS = [
    case("gather", lambda x, i: aten.gather.default(x, 1, i), rand(4, 6), ints(6, 4, 8)),
    case("gather_short", lambda x, i: aten.gather.default(x, 1, i), rand(8, 6), ints(6, 4, 6)),
    case("gather_3d", lambda x, i: aten.gather.default(x, -1, i), rand(4, 2, 8), ints(8, 4, 2, 1)),
    case(
        "take_along", lambda x, i: aten.take_along_dim.default(x, i, 1), rand(4, 6), ints(6, 4, 4)
    ),
    case(
        "take_along_wide",
        lambda x, i: aten.take_along_dim.default(x, i, 1),
        rand(4, 6),
        ints(6, 1, 4),
    ),
    case(
        "take_along_flat", lambda x, i: aten.take_along_dim.default(x, i), rand(4, 6), ints(24, 8)
    ),
    case("take", lambda x, i: aten.take.default(x, i), rand(4, 6), ints(24, 8, 2)),
    case(
        "inverse_permutation",
        torch.ops.autopar.inverse_permutation.default,
        lambda: torch.randperm(8),
    ),
    case(
        "scatter",
        lambda x, i, s: aten.scatter.src(x, 1, i, s),
        rand(4, 8),
        lambda: torch.rand(4, 8).argsort(1),
        rand(4, 8),
    ),
    case("scatter_value", lambda x, i: aten.scatter.value(x, 1, i, 2.0), rand(4, 8), ints(8, 4, 2)),
    case("scatter_short", lambda x, i: aten.scatter.value(x, 1, i, 2.0), rand(8, 8), ints(8, 4, 2)),
    case(
        "scatter_add",
        lambda x, i, s: aten.scatter_add.default(x, 1, i, s),
        rand(4, 8),
        ints(8, 4, 6),
        rand(4, 6),
    ),
    case(
        "scatter_add_long",
        lambda x, i, s: aten.scatter_add.default(x, 0, i, s),
        rand(8, 4),
        ints(8, 4, 4),
        rand(6, 4),
    ),
    case("scatter_sum", _reduce("sum"), rand(4, 8), ints(8, 4, 6), rand(4, 6)),
    case("scatter_mean", _reduce("mean"), rand(4, 8), ints(8, 4, 6), rand(4, 6)),
    case("scatter_amax", _reduce("amax", False), rand(4, 8), ints(8, 4, 6), rand(4, 6)),
    case("scatter_sum_over", _reduce("sum", False), rand(4, 8), ints(8, 4, 6), rand(4, 6)),
    case("index_select", lambda x, i: aten.index_select.default(x, 1, i), rand(4, 6), ints(6, 8)),
    case("index_select_one", lambda x, i: aten.index_select.default(x, 1, i), rand(4, 6), ints(6)),
    case(
        "index_add",
        lambda x, i, s: aten.index_add.default(x, 1, i, s),
        rand(4, 6),
        ints(6, 8),
        rand(4, 8),
    ),
    case(
        "index_add_alpha",
        lambda x, i, s: aten.index_add.default(x, 0, i, s, alpha=3),
        rand(6, 4),
        ints(6, 8),
        rand(8, 4),
    ),
    case(
        "index_fill", lambda x, i: aten.index_fill.int_Scalar(x, 1, i, 2.0), rand(4, 6), ints(6, 2)
    ),
    case(
        "index_fill_tensor",
        lambda x, i, v: aten.index_fill.int_Tensor(x, 1, i, v),
        rand(4, 6),
        ints(6, 2),
        rand(),
    ),
    case(
        "index_copy",
        lambda x, i, s: aten.index_copy.default(x, 1, i, s),
        rand(4, 6),
        perm(6),
        rand(4, 6),
    ),
    case(
        "index_reduce",
        lambda x, i, s: aten.index_reduce.default(x, 1, i, s, "prod"),
        rand(4, 6),
        ints(6, 2),
        rand(4, 2),
    ),
]

ADVANCED = [
    case("index_rows", lambda x, i: aten.index.Tensor(x, [i]), rand(6, 8), ints(6, 4, 2)),
    case("index_middle", lambda x, i: aten.index.Tensor(x, [None, i]), rand(4, 6, 8), ints(6, 4)),
    case(
        "index_pair",
        lambda x, i, j: aten.index.Tensor(x, [i, j]),
        rand(6, 5, 4),
        ints(6, 4),
        ints(5, 4),
    ),
    case(
        "index_apart",
        lambda x, i, j: aten.index.Tensor(x, [i, None, j]),
        rand(6, 8, 5),
        ints(6, 4),
        ints(5, 4),
    ),
    case(
        "index_wide",
        lambda x, i, j: aten.index.Tensor(x, [i, j]),
        rand(6, 5, 4),
        ints(6, 4, 1),
        ints(5, 8),
    ),
    case(
        "index_late",
        lambda x, i, j: aten.index.Tensor(x, [None, i, j]),
        rand(8, 6, 5),
        ints(6, 4, 2),
        ints(5, 2),
    ),
    case("index_scalar", lambda x, i: aten.index.Tensor(x, [None, i]), rand(4, 6, 8), ints(6)),
    case(
        "index_mask",
        lambda x, m: aten.index.Tensor(x, [m]),
        rand(8, 4),
        lambda: torch.arange(8) < 4,
    ),
    case(
        "unsafe_index", lambda x, i: aten._unsafe_index.Tensor(x, [None, i]), rand(4, 6), ints(6, 8)
    ),
    case(
        "index_put",
        lambda x, i, v: aten.index_put.default(x, [i], v),
        rand(6, 8),
        perm(6),
        rand(6, 8),
    ),
    case(
        "index_put_wide",
        lambda x, i, v: aten.index_put.default(x, [None, i], v),
        rand(4, 6, 8),
        perm(4),
        rand(8),
    ),
    case(
        "index_put_scalar",
        lambda x, i, v: aten.index_put.default(x, [i], v),
        rand(6, 8),
        ints(6, 4),
        rand(),
    ),
    case(
        "index_put_add",
        lambda x, i, v: aten.index_put.default(x, [i], v, True),
        rand(6, 8),
        ints(6, 4, 2),
        rand(4, 2, 8),
    ),
    case(
        "index_put_add_wide",
        lambda x, i, v: aten.index_put.default(x, [i], v, True),
        rand(6, 8),
        ints(6, 4),
        rand(1, 8),
    ),
    case(
        "index_put_add_one",
        lambda x, i, v: aten.index_put.default(x, [i], v, True),
        rand(6, 8),
        ints(6, 4),
        rand(),
    ),
    case(
        "index_put_apart",
        lambda x, i, j, v: aten.index_put.default(x, [i, None, j], v, True),
        rand(6, 8, 5),
        ints(6, 4),
        ints(5, 1),
        rand(4, 8),
    ),
    case(
        "index_put_mask",
        lambda x, m, v: aten.index_put.default(x, [m], v),
        rand(8, 4),
        bools(8, 4),
        rand(),
    ),
    case(
        "unsafe_index_put",
        lambda x, i, v: aten._unsafe_index_put.default(x, [i], v, True),
        rand(6, 8),
        ints(6, 4),
        rand(4, 8),
    ),
]

CONTRACTIONS = [
    case(
        "einsum_linear",
        lambda a, b: torch.ops.autopar.einsum.default("bsk,nk->bsn", a, b),
        rand(4, 2, 8),
        rand(4, 8),
    ),
    case(
        "einsum_scores",
        lambda a, b: torch.ops.autopar.einsum.default("bhqd,bhkd->bhqk", a, b),
        rand(2, 4, 3, 4),
        rand(2, 4, 4, 4),
    ),
    case("mm", lambda a, b: aten.mm.default(a, b), rand(4, 6), rand(6, 8)),
    case("bmm", lambda a, b: aten.bmm.default(a, b), rand(4, 2, 8), rand(4, 8, 3)),
    case("mv", lambda a, b: aten.mv.default(a, b), rand(4, 8), rand(8)),
    case("dot", lambda a, b: aten.dot.default(a, b), rand(8), rand(8)),
    case("addmm", lambda c, a, b: aten.addmm.default(c, a, b), rand(8), rand(4, 6), rand(6, 8)),
    case(
        "addmm_wide",
        lambda c, a, b: aten.addmm.default(c, a, b, beta=2),
        rand(4, 1),
        rand(4, 6),
        rand(6, 8),
    ),
    case(
        "baddbmm",
        lambda c, a, b: aten.baddbmm.default(c, a, b),
        rand(4, 1, 8),
        rand(4, 2, 6),
        rand(4, 6, 8),
    ),
]

SAMPLES: list[Sample] = [*GATHERS, *ADVANCED, *CONTRACTIONS]
