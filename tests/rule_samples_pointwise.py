"""Calls of every elementwise op with a rule, made from its schema.

Numbers lie in (0.1, 0.9), inside the domain of nearly all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.core.host import FROM_HOST, TO_HOST
from autopar.core.host_link import HOST
from autopar.core.ops import NARROW
from autopar.solver.rules.registry import find_rule, registered_ops
from tests.bruteforce import Sample
from tests.rule_samples import bools, case, ints, rand

aten = torch.ops.aten
_SHAPE, _NARROW = (4, 6), (4, 1)
_BITS = ("bitwise", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__")
_SCALARS = {"Scalar": 0.5, "number": 0.5, "float": 0.5, "bool": False, "int": 1, "str": "floor"}

seed = ints(1 << 30)
SPECIAL = [
    case("imag", lambda x: aten.imag.default(x), lambda: torch.randn(4, 6, dtype=torch.complex128)),
    case(
        "_conj", lambda x: aten._conj.default(x), lambda: torch.randn(4, 6, dtype=torch.complex128)
    ),
    case(
        "bucketize",
        lambda x, edges: aten.bucketize.Tensor(x, edges),
        rand(4, 6),
        lambda: torch.linspace(-1, 1, 5, dtype=torch.float64),
    ),
    case(
        "isin",
        lambda x, elements: aten.isin.Tensor_Tensor(x, elements),
        ints(9, 4, 6),
        ints(9, 2, 2),
    ),
    case(
        "searchsorted",
        lambda edges, x: aten.searchsorted.Tensor(edges, x, right=True),
        lambda: torch.linspace(-1, 1, 6, dtype=torch.float64),
        rand(4, 6),
    ),
    case(
        "searchsorted_rows",
        lambda edges, x: aten.searchsorted.Tensor(edges, x),
        lambda: torch.linspace(-1, 1, 5, dtype=torch.float64).repeat(4, 1),
        rand(4, 6),
    ),
    case("clamp", lambda x: aten.clamp.default(x, -0.5, 0.5), rand(4, 6)),
    case("mul_number", lambda x: aten.mul.Tensor(x, 2.0), rand(4, 6)),
    case("add_number", lambda x: aten.add.Tensor(x, 2.0), rand(4, 6)),
    case("add_alpha", lambda x, y: aten.add.Tensor(x, y, alpha=3), rand(4, 8), rand(8)),
    case("add_outer", lambda x, y: aten.add.Tensor(x, y), rand(4, 1), rand(8)),
    case("add_to_loss", lambda x, y: aten.add.Tensor(x, y, alpha=3), rand(), rand(1)),
    case("sub_from_loss", lambda x, y: aten.sub.Tensor(x, y), rand(), rand()),
    case("add_number_to_loss", lambda x: aten.add.Tensor(x, 2.0, alpha=3), rand()),
    case("sub_loss_from_number", lambda x: aten.rsub.Scalar(x, 2.0, 3), rand()),
    case("sub_ones", lambda x, y: aten.sub.Tensor(x, y), rand(1, 8), rand(4, 1, 8)),
    case("masked_zero", lambda x, m: aten.masked_fill.Scalar(x, m, 0), rand(4, 6), bools(4, 6)),
    case("masked_inf", lambda x, m: aten.masked_fill.Scalar(x, m, -1e9), rand(4, 6), bools(6)),
    case("where_wide", lambda m, x, y: aten.where.self(m, x, y), bools(4, 1), rand(8), rand(4, 8)),
    case("where_or_zero", lambda m, x: aten.where.ScalarOther(m, x, 0), bools(4, 6), rand(4, 6)),
    case("zero_or_where", lambda m, x: aten.where.ScalarSelf(m, 0, x), bools(4, 6), rand(6)),
    case("cast", lambda x: aten._to_copy.default(x, dtype=torch.float64), ints(9, 4, 6)),
    # to its own dtype: to a smaller one, the parts of a sum are rounded apart
    case("narrow_dtype", lambda x: NARROW(x, torch.float64), rand(4, 6)),
    case("cast_bool", lambda x: aten._to_copy.default(x, dtype=torch.bool), ints(2, 4, 6)),
    case("to_host", lambda x: TO_HOST(x), rand(4, 8)),
    case("from_host", lambda x: FROM_HOST(x, device=HOST), rand(4, 8)),
    case(
        "dropout",
        lambda x, s: torch.ops.autopar.dropout.default(x, 0.3, s, 1, [4, 8], [0, 0]),
        rand(4, 8),
        seed,
    ),
    case(
        "uniform",
        lambda s: torch.ops.autopar.uniform.default(s, 1, [4, 8], [4, 8], [0, 0], torch.float64),
        seed,
    ),
]


def _unit(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def _tensor(op: Any, name: str, position: int, narrow: bool) -> Callable[[], Tensor]:
    shape = _NARROW if narrow and position else _SHAPE
    if name in ("condition", "mask"):
        return bools(*shape)
    if op is aten.masked_fill.Tensor and name == "value":
        return _unit()
    return ints(4, *shape) if any(bits in str(op) for bits in _BITS) else _unit(*shape)


def _from_schema(op: Any, narrow: bool) -> Sample:
    """A call with all required arguments; `narrow` makes the later tensors broadcast."""
    makers: list[Callable[[], Tensor]] = []
    plan: list[tuple[str, bool, Any]] = []  # name, keyword only, value or tensor number
    for arg in op._schema.arguments:
        kind = str(arg.type).replace("Optional[", "").rstrip("]")
        if "Tensor" in kind and (not arg.has_default_value() or arg.name in ("min", "max")):
            makers.append(_tensor(op, arg.name, len(makers), narrow))
            plan.append((arg.name, arg.kwarg_only, None))
        elif not arg.has_default_value():
            value = 2 if any(bits in str(op) for bits in _BITS) else _SCALARS[kind]
            plan.append((arg.name, arg.kwarg_only, value))

    def function(*tensors: Any) -> Any:
        left = iter(tensors)
        args, kwargs = [], {}
        for name, by_name, value in plan:
            given = next(left) if value is None else value
            if by_name:
                kwargs[name] = given
            else:
                args.append(given)
        return op(*args, **kwargs)

    return case(f"{op}{'.narrow' if narrow else ''}", function, *makers)


_MODULES = ("rules.derivatives", "rules.pointwise")


def _pointwise_ops() -> list[Any]:
    by_hand = (
        aten.imag.default,
        aten.clamp.default,
        aten._to_copy.default,
        aten.exponential.default,
        aten._conj.default,
        aten.bucketize.Tensor,
        aten.searchsorted.Tensor,
    )
    return [
        op
        for op in registered_ops()
        if getattr(find_rule(op), "__module__", "").endswith(_MODULES)
        and op.namespace == "aten"
        and op not in by_hand
    ]


_BROADCASTS = (
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.where.self,
    aten.copy.default,
)

_BY_TAG = (  # of the ops that have the rule of their tag
    aten.angle.default,
    aten.fmax.default,
    aten.igamma.default,
    aten.special_ndtri.default,
    aten.frexp.Tensor,
    aten.xlogy.Scalar_Self,
)

SAMPLES: list[Sample] = [
    *SPECIAL,
    *(_from_schema(op, False) for op in _BY_TAG),
    *(_from_schema(op, False) for op in _pointwise_ops()),
    *(_from_schema(op, True) for op in _BROADCASTS),
]
