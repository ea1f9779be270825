"""Calls of ops on batches of matrices, and of distances between rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.bruteforce import Sample

aten = torch.ops.aten
_BATCHES = ((4,), (4, 2), ())


def _matrices(*batch: int) -> Tensor:
    """Symmetric, positive definite and well conditioned."""
    x = torch.randn(*batch, 4, 4, dtype=torch.float64)
    return x @ x.mT + 4 * torch.eye(4, dtype=torch.float64)


def _lower(*batch: int) -> Tensor:
    return torch.linalg.cholesky(_matrices(*batch))


def _right(*batch: int) -> Tensor:
    return torch.randn(*batch, 4, 2, dtype=torch.float64)


_ONE: dict[str, Callable[[Tensor], object]] = {
    "cholesky": lambda x: aten.linalg_cholesky_ex.default(x),
    "inverse": lambda x: aten.linalg_inv_ex.default(x),
    "matrix_exp": lambda x: aten.linalg_matrix_exp.default(x),
    "eigh": lambda x: aten._linalg_eigh.default(x),
    "svd": lambda x: aten._linalg_svd.default(x),
    "qr": lambda x: aten.linalg_qr.default(x),
    "lu_factor": lambda x: aten.linalg_lu_factor_ex.default(x),
}
SAMPLES: list[Sample] = []
for _batch in _BATCHES:
    for _name, _function in _ONE.items():
        SAMPLES.append(
            Sample(f"{_name}_{len(_batch)}", _function, lambda b=_batch: (_matrices(*b),))
        )
    SAMPLES += [
        Sample(
            f"solve_{len(_batch)}",
            lambda a, b: aten._linalg_solve_ex.default(a, b),
            lambda b=_batch: (_matrices(*b), _right(*b)),
        ),
        Sample(
            f"solve_triangular_{len(_batch)}",
            lambda a, b: aten.linalg_solve_triangular.default(a, b, upper=False),
            lambda b=_batch: (_lower(*b), _right(*b)),
        ),
        Sample(
            f"cholesky_solve_{len(_batch)}",
            lambda b, factor: aten.cholesky_solve.default(b, factor),
            lambda b=_batch: (_right(*b), _lower(*b)),
        ),
        Sample(
            f"lu_solve_{len(_batch)}",
            lambda lu, pivots, b: aten.linalg_lu_solve.default(lu, pivots, b),
            lambda b=_batch: (*torch.linalg.lu_factor(_matrices(*b)), _right(*b)),
        ),
    ]
SAMPLES += [
    Sample(
        f"solve_vectors_{len(_batch)}",
        lambda a, b: aten._linalg_solve_ex.default(a, b),
        lambda b=_batch: (_matrices(*b), torch.randn(*b, 4, dtype=torch.float64)),
    )
    for _batch in _BATCHES
]
SAMPLES.append(
    Sample(
        "solve_shared",
        lambda a, b: aten.linalg_solve_triangular.default(a, b, upper=False),
        lambda: (_lower(4), _right()),
    )
)


def _rows(batch: Sequence[int] = (), other: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Two lists of points, whose leading dims broadcast."""
    return (
        torch.randn(*batch, 4, 3, dtype=torch.float64),
        torch.randn(*(batch if other is None else other), 8, 3, dtype=torch.float64),
    )


def _tables(p: float, *leading: Sequence[int]) -> tuple[Tensor, ...]:
    x, y = _rows(*leading)
    distances = torch.cdist(x, y, p=p)
    return torch.randn_like(distances), x, y, distances


for _norm in (1.0, 2.0):
    for _leading in (((),), ((4,),), ((4,), ()), ((), (4,)), ((4, 1), (2,)), ((1, 4), (2, 4))):
        _tag = f"{_norm:.0f}_{_leading}"
        SAMPLES += [
            Sample(
                f"cdist_{_tag}",
                lambda x, y, p=_norm: aten._cdist_forward.default(x, y, p, None),
                lambda leading=_leading: _rows(*leading),
            ),
            Sample(
                f"cdist_backward_{_tag}",
                lambda dy, x, y, d, p=_norm: aten._cdist_backward.default(dy, x, y, p, d),
                lambda leading=_leading, p=_norm: _tables(p, *leading),
            ),
        ]

SAMPLES += [
    Sample(f"euclidean_dist_{len(_b)}", aten._euclidean_dist.default, lambda b=_b: _rows(b))
    for _b in ((), (4,))
]

for _dim in (-1, 0):
    _shapes = ((4, 3), (4, 3)) if _dim else ((3, 1, 4), (3, 2, 4))
    SAMPLES.append(
        Sample(
            f"cross_{_dim}",
            lambda x, y, dim=_dim: aten.linalg_cross.default(x, y, dim=dim),
            lambda shapes=_shapes: tuple(torch.randn(s, dtype=torch.float64) for s in shapes),
        )
    )
