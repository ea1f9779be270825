"""`Program`: what one rank runs of a step in one piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.codegen.partition import split_phases
from autopar.codegen.traffic import count_collectives
from autopar.core.graph import InputSpec, OutputSpec
from autopar.core.placement import Layout
from autopar.core.plan import CommBytes

__all__ = ["Program", "tangents_of"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one rank runs.

    Attributes:
        joint: forward and backward as one graph, for inspection and for `run_lockstep`.
        inputs: descriptor and local layout of every placeholder of `joint`.
        outputs: descriptor and layout of every output of `joint`.
        num_results: number of user outputs and buffers, which come first among the outputs.
        training: there is a backward.
        passes: names of the passes that were applied.
    """

    joint: fx.GraphModule
    inputs: tuple[tuple[InputSpec, Layout], ...]
    outputs: tuple[tuple[OutputSpec, Layout], ...]
    num_results: int
    training: bool
    passes: tuple[str, ...] = ()

    @property
    def forward(self) -> fx.GraphModule:
        """`(*inputs) -> (*results, *saved)`; inputs are all but the tangents."""
        return self._phases[0]

    @property
    def backward(self) -> fx.GraphModule | None:
        """`(*saved, *tangents) -> gradients`; None for inference."""
        return self._phases[1] if self.training else None

    @cached_property
    def _phases(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut when they are asked for: most programs of a search are only simulated."""
        return split_phases(self.joint.graph, self.num_results, tangents_of(self.inputs))

    def comm_bytes(self) -> tuple[CommBytes, ...]:
        """Bytes of the collectives in the program, per axis and kind.

        Their sum is the plan's; a bucket counts once, where the plan counts each of its members.
        """
        return count_collectives(self.joint.graph)


def tangents_of(inputs: Iterable[tuple[InputSpec, Layout]]) -> set[str]:
    """Placeholders of the gradients that the backward begins with."""
    return {spec.node for spec, _ in inputs if spec.kind == "tangent"}
