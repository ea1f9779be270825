"""How much is live beside a block of a folded program that stands for several."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.codegen.passes.lifetimes import Lifetimes

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
MB = 1 << 20


class Program:
    """Writes a program whose values have a megabyte each, or as many as are asked for."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.given = self.graph.placeholder("given")
        self.given.meta["val"] = self._value(1)

    def _value(self, size: int) -> torch.Tensor:
        with self.mode:
            return torch.empty(size * MB, dtype=torch.uint8)

    def op(self, phase: str, *sources: fx.Node, times: int = 1, size: int = 1) -> fx.Node:
        target: Any = aten.add.Tensor if len(sources) > 1 else aten.relu.default
        node = self.graph.call_function(target, sources)
        node.meta.update(val=self._value(size), phase=phase, times=times)
        return node

    def cast(self, phase: str) -> fx.Node:
        """A cast of what is given, as in front of a gather of another block."""
        node = self.graph.call_function(aten._to_copy.default, (self.given,))
        node.meta.update(val=self._value(1), phase=phase, times=1)
        return node

    def gather(self, phase: str, times: int) -> fx.Node:
        """A gather and the wait for it."""
        start = self.op(phase, self.given, times=times)
        start.meta["collective"] = ("all_gather", 0, MB, times)
        wait = self.graph.call_function(c10d.wait_tensor.default, (start,))
        wait.meta.update(val=start.meta["val"].view(-1), phase=phase, times=times)
        return wait

    def live(self, *nodes: fx.Node) -> list[float]:
        """Megabytes while each of these runs."""
        lifetimes = Lifetimes(self.graph)
        return [float(lifetimes.live[lifetimes.position[n]]) / MB for n in nodes]


def test_what_blocks_save_is_there_as_often_as_there_are_blocks_behind_them() -> None:
    program = Program()
    first = program.op("forward", program.given)
    saved = program.op("forward", first, times=9)
    hidden = program.op("forward", saved, times=9)
    loss = program.op("forward", hidden)
    start = program.op("backward", loss)
    back = program.op("backward", start, saved, times=9)
    end = program.op("backward", back)
    program.graph.output(end)
    # of nine blocks that save, five are there on average while they run
    assert program.live(first, saved, hidden) == [1, 1 + 5, 5 + 1]
    assert program.live(loss, start) == [9 + 2, 9 + 2]
    assert program.live(back, end) == [5 + 2, 2]


def test_gradients_of_blocks_are_kept() -> None:
    program = Program()
    start = program.op("backward", program.given)
    gradient = program.op("backward", start, times=4)
    hidden = program.op("backward", gradient, times=4)
    end = program.op("backward", hidden)
    program.graph.output((gradient, end))
    assert program.live(start, gradient, hidden, end) == [1, 1 + 2, 2 + 1, 4 + 2]


def test_beside_a_neighbour_most_of_the_blocks_are_not_all_there() -> None:
    """A gather of a block that stands for many begins early by what most of these find."""
    program = Program()
    saved = program.op("forward", program.given, times=9)
    loss = program.op("forward", saved)
    alone = program.op("backward", loss)
    gathered = program.gather("backward", times=9)
    back = program.op("backward", alone, saved, times=9)
    again = program.op("backward", back, gathered, times=9)
    program.graph.output(again)
    lifetimes = Lifetimes(program.graph)
    here = lifetimes.position[alone]
    assert lifetimes.live[here] == (9 + 2) * MB
    assert lifetimes.beside(gathered)[here] == (5 + 2) * MB
    assert lifetimes.beside(loss)[here] == (9 + 2) * MB
    start = gathered.all_input_nodes[0]
    assert lifetimes.earliest(start, here, MB, 9 * MB) == here
    assert lifetimes.earliest(start, here, MB, 7 * MB) == here + 1


def test_what_is_gathered_before_a_block_counts_among_its_own_ops() -> None:
    """There it is beside another of the blocks, if not beside the neighbour that runs once."""
    program = Program()
    before = program.op("forward", program.given)
    gathered = program.gather("forward", times=3)
    also = program.op("forward", before)
    first = program.op("forward", also, times=3)
    second = program.op("forward", first, gathered, times=3)
    after = program.op("forward", second)
    program.graph.output(after)
    assert program.live(before, also, first, second) == [1, 2, 1 + 2, 1 + 2]
    assert program.live(after) == [2]


def test_casts_of_what_another_block_reads_may_stand_among_the_ops_of_a_block() -> None:
    """They begin early with the gather behind them: all of the block's ops are still one run."""
    program = Program()
    first = program.op("forward", program.given, times=9)
    cast = program.cast("forward")
    second = program.op("forward", first, times=9)
    loss = program.op("forward", second, cast)
    start = program.op("backward", loss)
    back = program.op("backward", start, first, times=9)
    program.graph.output(program.op("backward", back))
    assert program.live(first, cast, second) == [5, 5 + 1, 5 + 1 + 1]
    assert program.live(loss, start) == [9 + 1 + 1 + 1, 9 + 2]


def test_a_whole_program_counts_each_storage_once() -> None:
    program = Program()
    saved = program.op("forward", program.given)
    back = program.op("backward", saved, saved)
    program.graph.output(back)
    assert program.live(saved, back) == [1, 2]
