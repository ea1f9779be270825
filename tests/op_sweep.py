"""Every op of torch's own database of samples: traced steps against eager, all rows of all rules.

    pip install expecttest  # which the database imports
    python -m tests.op_sweep [--samples N] [NAME ...]

An op is called on a parameter's multiple of its first operand, with its other floating operands as
parameters, in float64; its loss weighs every element of every result. Loss and gradients of the
traced step are compared with eager ones, and then each op of the step is cut up over 2, 3 and 5
ranks in each way that its rule offers (`bruteforce.py`). Each op has a process of its own: some
kernels crash on shapes that do not fit. Printed is what differs or is refused, and a line per op;
samples without a gradient, or with a loss that is not finite, are left out.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.core.graph import TracedModel
from autopar.core.strategy import op_call
from autopar.errors import AutoparError
from autopar.runtime.lockstep import Strided
from autopar.solver.rules.registry import find_rule
from autopar.tracer.trace import trace
from autopar.verification import whole_inputs
from tests.bruteforce import Captured, check_rows, describe, offered, rows_of

RTOL, ATOL = 1e-8, 1e-9
RANKS = (2, 3, 5)  # the database's sizes are mostly multiples of 5
SECONDS = 300.0  # for all samples of an op
# their numbers are drawn, by other generators than torch's
RANDOM = ("bernoulli", "cauchy", "dropout", "exponential", "fractional", "geometric", "lowrank")
RANDOM += ("multinomial", "normal", "poisson", "rand", "rrelu", "uniform", "empty")


class Call(nn.Module):
    """One sample of an op, as a model with a loss; `inputs` are its tensors that do not train."""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self.op = op
        leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.given = nn.ParameterList()
        self.inputs: list[Tensor] = []
        self.leaves: list[tuple[str, Any]] = []
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                self.leaves.append(("constant", leaf))
            elif number and leaf.dtype == torch.float64:
                self.leaves.append(("parameter", len(self.given)))
                self.given.append(nn.Parameter(leaf.detach().clone()))
            else:
                kind = "scaled" if leaf.is_floating_point() else "input"
                self.leaves.append((kind, len(self.inputs)))
                self.inputs.append(leaf.detach().clone())

    def forward(self, *inputs: Tensor) -> Tensor:
        made = {
            "constant": lambda value: value,
            "parameter": lambda number: self.given[number] + 0,
            "scaled": lambda number: inputs[number] * self.scale,
            "input": lambda number: inputs[number],
        }
        leaves = [made[kind](value) for kind, value in self.leaves]
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = pytree.tree_leaves(self.op(first, *args, **kwargs))
        return sum((_weighed(r) for r in results if isinstance(r, Tensor)), self.scale * 0)


def _weighed(result: Tensor) -> Tensor:
    if result.is_complex():
        result = torch.view_as_real(result)
    if not result.is_floating_point():
        return result.double().sum()
    weights = torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype)
    return (result * weights.view(result.shape)).sum()


class Recorded(Strided):
    """Runs a graph, and keeps the value of every node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def differences(model: Call) -> Iterator[str]:
    """What the traced step of a model computes otherwise than eager, and rows that are wrong."""
    inputs = tuple(x.clone() for x in model.inputs)
    loss = model(*(x.clone() for x in inputs))
    loss.backward()
    traced = trace(model, inputs)
    whole = whole_inputs(traced, model, inputs, 0)
    run = Recorded(traced.graph_module)
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    results = run.run(*(whole[n.name] for n in placeholders))
    for spec, value in zip(traced.outputs, results, strict=True):
        expected = loss.detach()
        if spec.kind == "gradient":
            gradient = model.get_parameter(spec.target).grad
            expected = torch.zeros_like(value) if gradient is None else gradient
        if not torch.allclose(value, expected, rtol=RTOL, atol=ATOL, equal_nan=True):
            yield f"{spec.kind} {spec.target} differs by {(value - expected).abs().max():.2g}"
    yield from _wrong_rows(traced, run.values)


_checked: set[Any] = set()


def _wrong_rows(traced: TracedModel, values: dict[fx.Node, Any]) -> Iterator[str]:
    for node in traced.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or find_rule(node.target) is None:
            continue
        call = op_call(node, RANKS[0])
        key = (node.target, call.operands, str(fx.map_arg((node.args, node.kwargs), lambda _: 0)))
        value = values[node]
        outputs = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        operands = tuple(values[n] for n in call.nodes)
        if key in _checked or not _comparable(node, (*operands, *outputs)):
            continue
        _checked.add(key)
        captured = Captured(node, operands, outputs)
        for ranks in RANKS:
            for row in rows_of(captured, ranks):
                if not offered(op_call(node, ranks), (row,), (ranks,)):
                    continue
                try:
                    check_rows(captured, (row,), (ranks,))
                except Exception as error:
                    first = str(error).partition("\n")[0]
                    yield f"{describe(captured, (row,), (ranks,))} {type(error).__name__}: {first}"


def _comparable(node: fx.Node, values: Sequence[Any]) -> bool:
    """False where numbers are rounded, not finite, none, or of memory that nobody wrote to."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    wide = (torch.float64, torch.complex128)
    floats = [x for x in tensors if x.is_floating_point() or x.is_complex()]
    exact = all(x.dtype in wide and bool(x.isfinite().all()) for x in floats)
    exact &= all(x.numel() for x in tensors)
    return exact and "empty" not in str(node.target)


def _has_gradient(model: Call) -> bool:
    """False for a sample without a tensor that does not train, or without a finite loss."""
    try:
        loss = model(*(x.clone() for x in model.inputs))
        loss.backward()
    except RuntimeError:  # torch has no derivative for it
        return False
    return bool(model.inputs) and bool(loss.isfinite())


def _sweep(op: Any, most: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    name = f"{op.name} {op.variant_test_name}".strip()
    samples = list(op.sample_inputs("cpu", torch.float64))
    if len(samples) > most:
        samples = [samples[i * len(samples) // most] for i in range(most)]
    exact, left, refused = 0, 0, ""
    for sample in samples:
        model = Call(op, sample).train()
        if not _has_gradient(model):
            left += 1
            continue
        model.zero_grad()
        try:
            found = list(differences(model))
        except AutoparError as error:
            refused = refused or " ".join(str(error).split())
            continue
        except Exception as error:  # whatever it is, the other samples are still to come
            found = [f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"]
        exact += not found
        for text in found:
            print(f"{name}: {text}", flush=True)
    told = f", else refused: {refused[:200]}" if refused else ""
    print(f"# {name}: {exact} of {len(samples) - left} exact, {left} left out{told}", flush=True)


def main(patterns: Sequence[str], most: int) -> None:
    """Sweep the ops whose name contains one of `patterns`; none: all."""
    from torch.testing._internal.common_methods_invocations import op_db

    context = multiprocessing.get_context("fork")
    for op in op_db:
        asked = any(pattern in op.name for pattern in patterns)
        drawn = any(word in op.name for word in RANDOM)
        if torch.float64 not in op.dtypes or drawn or not (asked or not patterns):
            continue
        worker = context.Process(target=_sweep, args=(op, most))
        worker.start()
        worker.join(SECONDS)
        if worker.is_alive():
            worker.kill()
            print(f"# {op.name}: no end within {SECONDS:g} s", flush=True)
        elif worker.exitcode:
            print(f"# {op.name}: ended with {worker.exitcode}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names of ops")
    parser.add_argument("--samples", type=int, default=8, help="of each op, at most")
    options = parser.parse_args()
    main(options.names, options.samples)
