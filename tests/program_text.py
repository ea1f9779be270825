"""Random small models as Python text: `write(seed)`; each line is run as it is written.

A forward is a list of statements. A template proposes one from the values that there are; what
raises an error, or makes nothing, too much or numbers that are not finite, is thrown away. So
templates need not know what fits. `PRELUDE` and the lines of a `Program` are its whole source.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.program_statements import JOINED, LOSSES, TEMPLATES, WRITING, attention, linear

PRELUDE = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3 / (1 + x**2)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return ctx.scale * grad * (x**4 + 3 * x**2) / (1 + x**2) ** 2, None


def untied(x):
    return x + 0.01 * torch.arange(x.numel()).view(x.shape)


def places(x, size):
    return (x.detach() * 7).floor().long() % size
""".lstrip()
MOST = 3000  # elements of a value
# how the model calls its blocks
LOOPS = {
    "plain": "x = block(x, mask, ids=ids)",
    "one": "x = block(x, mask, ids=ids)",  # the same block each time
    "unlike": "x = block(x, mask, ids=ids)",  # every second block does more
    "tied": "x = block(x, mask, ids=ids)",  # the head has the weight of the stem
    "recomputed": "x = checkpoint(block, x, mask, ids=ids, use_reentrant=False)",
    "carried": "x = block(x + 0.1 * first, mask, ids=ids)",
    "residual": "x = x + 0.5 * block(x, mask, ids=ids).tanh()",
    "lists": "x = gate(x) * block(x, mask, ids=ids) + 0.1 * scale",  # of three lists
    "added": "x = block(x, mask, ids=ids)\naux = aux + x.square().mean() * 0.1",
    "halves": "x = torch.cat([block(part, mask, ids=ids) for part in (x, x * 0.5)], 1)[:, ::2]",
}
# those that compute between their blocks, of which so many are folded
FOLDED = ("carried", "residual", "lists")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A model's parts: what `__init__` and `forward` do, of a block and of the model around it."""

    block_init: tuple[str, ...]
    block: tuple[str, ...]
    blocks: int
    init: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    kind: str
    loop: str
    sizes: tuple[int, int, int]  # batch, sequence, width

    def source(self) -> str:
        """The text of the model, which `Model` is in."""
        each = "for block in self.blocks:"
        if self.loop == "lists":
            each = "for block, gate, scale in zip(self.blocks, self.gates, self.scales):"
        loop = [f"{each}\n{_indented(LOOPS[self.loop])}"]
        if self.loop in ("carried", "added"):
            loop = ["first, aux = x, 0.0", *loop]
        result = {
            "loss": "return loss",
            "dict": 'return {"loss": loss, "hidden": x}',
            "tuple": "return loss, (x, ids)",
        }[self.kind]
        width = self.sizes[2]
        stem = f"self.stem = nn.Linear({width}, {width})"
        blocks = f"Block(i) for i in range({self.blocks})"
        if self.loop == "one":
            blocks = f"[Block(0)] * {self.blocks}"
        made = f"self.blocks = nn.ModuleList({blocks})"
        if self.loop == "lists":
            gate = f"nn.Sequential(nn.Linear({width}, {width}), nn.Sigmoid())"
            made += f"\nself.gates = nn.ModuleList({gate} for _ in range({self.blocks}))"
            scales = f"torch.randn({width}) for _ in range({self.blocks})"
            made += f"\nself.scales = nn.ParameterList({scales})"
        head = "F.linear(x, self.stem.weight)" if self.loop == "tied" else "x"
        loss = f"loss = {head}.square().mean()" + (" + aux" if self.loop == "added" else "")
        forward = ("x = self.stem(x)", *self.before, *loop, loss, *self.after, result)
        block, block_init = (*self.block, "return x"), self.block_init
        if self.loop == "unlike":  # an attribute tells blocks apart, used or not
            block = ("x = torch.tanh(x) if self.odd else x", *block)
            block_init = ("self.odd = i % 2 == 1", *block_init)
        return "\n\n\n".join(
            (
                PRELUDE.rstrip(),
                _class("Block", "i", block_init, "x, mask, *, ids", block),
                _class("Model", "", (stem, made, *self.init), "x, mask, ids, labels", forward),
            )
        )  # fmt: skip

    def build(self) -> nn.Module:
        """The model, with the same weights each time."""
        torch.manual_seed(1)
        space: dict[str, Any] = {"__name__": "program"}
        exec(compile(self.source(), "<program>", "exec"), space)
        model: nn.Module = space["Model"]()
        return model

    def inputs(self, seed: int = 0) -> dict[str, Tensor]:
        """A batch of the program's sizes."""
        batch, length, width = self.sizes
        drawn = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, width, (batch, length), generator=drawn)
        labels[torch.rand(batch, length, generator=drawn) < 0.2] = -100
        labels[0, 0] = 1
        mask = torch.rand(batch, length, generator=drawn) < 0.7
        mask[:, 0] = True
        return {
            "x": torch.randn(batch, length, width, generator=drawn),
            "mask": mask,
            "ids": torch.randint(0, width, (batch, length), generator=drawn),
            "labels": labels,
        }


def _class(name: str, made_of: str, init: Sequence[str], given: str, body: Sequence[str]) -> str:
    head = f"def __init__(self{made_of and ', ' + made_of}):"
    lines = [head, "    super().__init__()", *(_indented(x) for x in init), ""]
    lines += [f"def forward(self, {given}):", *(_indented(x) for x in body)]
    return "\n".join([f"class {name}(nn.Module):", *(_indented(x) for x in lines)])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else line for line in text.split("\n"))


@dataclass
class Writer:
    """Writes the statements of one forward.

    With values of `part` of the batch, only statements are kept that treat samples alike: what they
    make of the part is that part of what they make of all.
    """

    drawn: random.Random
    values: dict[str, Any]
    part: dict[str, Any] | None = None
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    scratch: nn.Module = field(default_factory=nn.Module)
    number: int = 0

    def __post_init__(self) -> None:
        self.space: dict[str, Any] = {"__name__": "program", "self": self.scratch, "i": 0}
        exec(PRELUDE, self.space)
        self.wanted: list[str] = []
        self.batch = len(self.values["x"])

    # --- what templates call --------------------------------------------------------------------
    def pick(self, allowed: Callable[[Tensor], bool] = lambda _: True) -> str:
        """A floating value, a late one rather than an early one."""
        return self._pick(lambda t: t.is_floating_point() and allowed(t))

    def integers(self) -> str:
        """A value of whole numbers."""
        return self._pick(lambda t: t.dtype == torch.int64)

    def flags(self) -> str:
        """A value of booleans."""
        return self._pick(lambda t: t.dtype == torch.bool)

    def _pick(self, allowed: Callable[[Tensor], bool]) -> str:
        names = [n for n, t in self.values.items() if isinstance(t, Tensor) and allowed(t)]
        if not names:
            raise LookupError
        if self.drawn.random() < 0.6:
            names = names[-3:]
        return self.drawn.choice(names)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def dim(self, name: str) -> int:
        """A dim of a value, from the front or from the end."""
        dims = len(self.shape(name))
        if not dims:
            raise LookupError
        return self.drawn.randrange(-dims, dims)

    def size(self, name: str, dim: int) -> int:
        return self.shape(name)[dim]

    def state(self, text: str) -> str:
        """The attribute that a line of `__init__` makes."""
        name = f"p{len(self.init) + len(self.wanted)}"
        self.wanted.append(f"self.{name} = {text}")
        return f"self.{name}"

    def buffer(self, text: str) -> str:
        """The buffer that a line of `__init__` makes."""
        name = f"b{len(self.init) + len(self.wanted)}"
        self.wanted.append(f'self.register_buffer("{name}", {text})')
        return f"self.{name}"

    def modules(self) -> list[str]:
        """Submodules that there are."""
        return [f"self.{n}" for n, _ in self.scratch.named_children()]

    # --- writing --------------------------------------------------------------------------------
    def write(self, templates: Sequence[Callable[[Any], str]]) -> bool:
        """Try one of the templates; False where it makes nothing that may be kept."""
        self.wanted = []
        every = [v for v in (self.values, self.part) if v is not None]
        before = [{n: t.clone() for n, t in v.items()} for v in every]
        try:
            text = self.drawn.choice(templates)(self)
            name = f"v{self.number}"
            text = text if text.startswith("!") else f"{name} = {text}"
            text = text.removeprefix("!").replace("NEW", name)
            for line in self.wanted:
                exec(line, self.space)
            made = [dict(values) for values in every]
            for values in made:
                exec(text, self.space, values)
            self._check(*made)
        except Exception:  # whatever does not fit is thrown away
            for values, old in zip(every, before, strict=True):
                values.update(old)  # what a line wrote before it failed
            return False
        made = [{n: v for n, v in values.items() if isinstance(v, Tensor)} for values in made]
        self.values, self.part = made[0], made[1] if self.part is not None else None
        self.init += self.wanted
        self.body.append(text)
        self.number += 1
        return True

    def _check(self, values: dict[str, Any], part: dict[str, Any] | None = None) -> None:
        for name, value in (part or {}).items():
            if isinstance(value, Tensor) and name not in ("loss", "labels"):
                whole = values[name]
                if whole.shape != value.shape or not torch.equal(whole, value):
                    assert len(whole) == self.batch
                    assert torch.allclose(whole[: len(value)], value)
        for name, value in values.items():
            if isinstance(value, Tensor):
                assert 0 < value.numel() <= MOST
                if value.is_floating_point():
                    assert name not in ("x", "loss") or value.shape == self.values[name].shape
                    assert bool(value.isfinite().all()) and float(value.detach().abs().max()) < 50

    def statements(self, number: int) -> None:
        """So many statements, in-place ones among them."""
        for _ in range(40 * number):
            if number <= 0:
                break
            number -= self.write(WRITING if self.drawn.random() < 0.15 else TEMPLATES)

    def joined(self, target: str) -> None:
        """Add late values to `target`, whatever their shapes."""
        for _ in range(self.drawn.randint(1, 3)):
            for _ in range(20):
                if self.write([lambda g: _sum(g, target)]):
                    break


def _sum(g: Writer, target: str) -> str:
    """A statement that adds a value to another and leaves it its shape."""
    added = g.drawn.choice(LOSSES if target == "loss" else JOINED)(g, target)
    return f"!{target} = {target} + {added}"


def write(seed: int) -> Program:
    """The program of a seed."""
    for attempt in range(100):
        program = _written(random.Random(1000 * seed + attempt))
        if is_valid(program):
            return program
    raise AssertionError(f"no program of seed {seed} runs")


def is_valid(program: Program) -> bool:
    """False where eager torch refuses the program, or has numbers that are not finite."""
    try:
        model, inputs = program.build(), program.inputs()
        result = model(**copy.deepcopy(inputs))
        loss = result["loss"] if program.kind == "dict" else result
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
    except Exception:
        return False
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return bool(grads) and all(bool(t.isfinite().all()) for t in (loss, *grads))


def _written(drawn: random.Random) -> Program:
    torch.manual_seed(0)
    sizes = (drawn.choice((4, 4, 8, 6, 2, 10)), drawn.choice((4, 8, 6, 7, 1)), 8)
    empty = Program(
        block_init=(),
        block=(),
        blocks=0,
        init=(),
        before=(),
        after=(),
        kind="loss",
        loop="plain",
        sizes=sizes,
    )
    given = empty.inputs()
    given["x"].requires_grad_()
    start = {**given, "x": given["x"] * 1.0}
    half = {n: t[: sizes[0] // 2] for n, t in start.items()} if drawn.random() < 0.7 else None
    if half is not None:
        half["x"] = half["x"].clone()
    names = ("x", "mask", "ids")
    block = Writer(drawn, {n: start[n] for n in names}, half and {n: half[n] for n in names})
    while not block.write((linear, attention)):
        pass
    block.statements(drawn.randint(1, 5))
    block.joined("x")
    before = Writer(drawn, dict(start), half and dict(half))
    before.statements(drawn.randint(0, 3))
    before.joined("x")
    for values in (before.values, before.part or {}):
        values["loss"] = before.values["x"].square().mean()
    done = len(before.body)
    before.statements(drawn.randint(1, 5))
    before.joined("loss")
    blocks, loop = drawn.choice((1, 2, 2, 2, 3, 5)), drawn.choice(tuple(LOOPS))
    return Program(
        block_init=tuple(block.init),
        block=tuple(block.body),
        blocks=6 if blocks > 2 and loop in FOLDED else blocks,
        init=tuple(before.init),
        before=tuple(before.body[:done]),
        after=tuple(before.body[done:]),
        kind=drawn.choice(("loss", "dict", "tuple")),
        loop=loop,
        sizes=sizes,
    )
