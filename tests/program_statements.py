"""The statements that random programs are made of (`program_text.py`).

A template gets the `Writer` and returns an expression, or after "!" a statement, in which NEW is
the name of a new value. Ties are avoided where an order matters, and kinks are not at 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Template = Callable[[Any], str]

UNARY = (
    "torch.tanh({})", "torch.sigmoid({})", "F.gelu({})", "F.silu({})", "F.softplus({})",
    "torch.exp(-{}.square())", "torch.sin({})", "torch.cos({})", "{} * 0.5 + 0.1", "{}.square()",
    "torch.rsqrt({}.square() + 1)", "torch.log1p({}.square())", "-{}", "F.relu({} - 0.0123)",
    "{}.clamp(-0.7, 0.6)", "{}.clamp(min=-0.31)", "F.elu({})", "F.dropout({}, 0.0)", "{}.detach()",
    "Cubed.apply({}, 0.5)", "{}.clone()", "{}.contiguous()", "F.hardswish({} - 0.017)",
)  # fmt: skip
BINARY = (
    "{} + {}", "{} - {}", "{} * {}", "{} / (1 + {}.square())", "torch.maximum({}, {} + 0.0131)",
    "torch.minimum({}, {} + 0.0137)", "torch.lerp({}, {}, 0.3)", "torch.where({} > 0.0171, {}, 0.2)",
)  # fmt: skip


def unary(g: Any) -> str:
    return g.drawn.choice(UNARY).format(g.pick())


def binary(g: Any) -> str:
    return g.drawn.choice(BINARY).format(g.pick(), g.pick())


def where(g: Any) -> str:
    return f"torch.where({g.flags()}, {g.pick()}, {g.pick()})"


def masked(g: Any) -> str:
    flags = g.flags()
    extra = len(g.shape(v := g.pick())) - len(g.shape(flags))
    return f"{v}.masked_fill({flags}{'[..., None]' * max(extra, 0)}, {g.drawn.choice((0.0, -0.5))})"


def view(g: Any) -> str:
    v = g.pick()
    s, d = g.shape(v), g.dim(v)
    n = s[d]
    half = g.drawn.choice([k for k in range(1, n + 1) if n % k == 0])
    k = g.drawn.randrange(-n, n)
    a = g.drawn.randrange(-n, n)
    width = g.drawn.randint(1, n)
    perm = list(range(len(s)))
    g.drawn.shuffle(perm)
    colons = ":, " * (d % len(s))
    two = g.drawn.sample(range(len(s)), 2) if len(s) > 1 else (0, 0)
    joined = "(" + ", ".join(map(str, (*s[: two[0]], -1))) + ")"
    return str(g.drawn.choice((
        f"{v}.transpose({two[0]}, {two[1]})", f"{v}.permute({perm})", f"{v}.unflatten({d}, ({half}, -1))",
        f"{v}.flatten({min(two)}, {max(two)})", f"{v}.reshape{joined}", f"{v}.unsqueeze({d})",
        f"{v}.squeeze({d})", f"{v}.chunk(2, {d})[{g.drawn.choice((0, -1))}]",
        f"{v}.split({width}, {d})[{g.drawn.choice((0, -1))}]", f"{v}.unbind({d})[{k}]",
        f"{v}.select({d}, {k})", f"{v}.narrow({d}, {abs(k) % n}, 1)", f"{v}[{colons}{k}]",
        f"{v}[{colons}{a}:]", f"{v}[{colons}:{a}]", f"{v}[{colons}{k % n}::{g.drawn.randint(1, 3)}]",
        f"{v}[{colons}None]", f"{v}[..., {g.drawn.randrange(-s[-1], s[-1])}]",
        f"{v}.expand({g.drawn.choice((2, 3))}, {', '.join(['-1'] * len(s))})",
        f"{v}.repeat({', '.join(str(g.drawn.choice((1, 1, 2))) for _ in s)})",
        f"{v}.repeat_interleave({g.drawn.choice((2, 3))}, {d})", f"{v}.roll({k}, {d})",
        f"torch.roll({v}, ({k}, 1), ({two[0]}, {two[1]}))", f"{v}.flip({d})",
        f"F.pad({v}, ({g.drawn.randint(-1, 2)}, {g.drawn.randint(0, 2)}))",
        f"F.pad({v}, (0, 0, {g.drawn.randint(0, 2)}, {g.drawn.randint(-1, 1)}), value=0.3)",
        f"{v}.unfold({d}, {width}, {g.drawn.randint(1, 3)})", f"{v}.movedim({two[0]}, {two[1]})",
        f"{v}.tril()", f"{v}.triu(1)", f"{v}.diagonal(dim1={two[0]}, dim2={two[1]})",
        f"{v}.T if {v}.dim() == 2 else {v}.mT", f"{v}.swapaxes(0, {d})", f"{v}.view({s})",
        f"torch.tensor_split({v}, 3, {d})[0]", f"{v}.unflatten({d}, ({half}, -1)).flatten({d % len(s)}, {d % len(s) + 1})",
    )))  # fmt: skip


def combined(g: Any) -> str:
    a, b = g.pick(), g.pick()
    d = g.dim(a)
    return str(g.drawn.choice((
        f"torch.cat([{a}, {b}], {d})", f"torch.stack([{a}, {b}], {d})", f"torch.cat([{a}, {a}.flip({d})], {d})",
        f"torch.cat([{a}, {b}, {a} * 2], {d})", f"torch.stack([{a}, {a} + 1]).sum(0)",
        f"torch.cat([{a}.narrow({d}, 1, {g.size(a, d)} - 1), {a}.narrow({d}, 0, 1)], {d})",
    )))  # fmt: skip


def product(g: Any) -> str:
    a, b = g.pick(lambda t: t.dim() > 0), g.pick(lambda t: t.dim() > 0)
    letters: list[str] = []
    sizes: dict[str, int] = {}
    for name in (a, b):
        here = ""
        for size in g.shape(name):
            same = [x for x, n in sizes.items() if n == size and x not in here]
            letter = (
                g.drawn.choice(same)
                if same and g.drawn.random() < 0.7
                else "abcdefghijk"[len(sizes)]
            )
            sizes[letter] = size
            here += letter
        letters.append(here)
    out = [x for x in sizes if g.drawn.random() < 0.6]
    g.drawn.shuffle(out)
    scale = g.drawn.choice(("", " * 0.2"))
    return str(g.drawn.choice((
        f"torch.einsum('{letters[0]},{letters[1]}->{''.join(out)}', {a}, {b}){scale}",
        f"torch.einsum('{letters[0]},{letters[1]}->{''.join(out)}', {a}, {b}){scale}",
        f"{a} @ {b}.mT", f"{a}.mT @ {b}", f"{a} @ {b}", f"torch.bmm({a}, {b}.mT)",
        f"torch.tensordot({a}, {b}, 1)", f"torch.outer({a}.flatten()[:5], {b}.flatten()[:6])",
    )))  # fmt: skip


def linear(g: Any) -> str:
    v = g.pick(lambda t: t.dim() > 1)
    n, out = g.size(v, -1), g.drawn.choice((4, 6, 8, 12, 16))
    s = g.shape(v)
    w = f"nn.Parameter(torch.randn({out}, {n}) * 0.3)"
    return str(g.drawn.choice((
        lambda: f"{g.state(f'nn.Linear({n}, {out})')}({v})",
        lambda: f"{g.state(f'nn.Linear({n}, {out}, bias=False)')}({v})",
        lambda: f"F.linear({v}, {g.state(w)})",
        lambda: f"{v} @ {g.state(w)}.T",
        lambda: f"{g.state(f'nn.Sequential(nn.Linear({n}, {out}), nn.GELU(), nn.Linear({out}, {n}))')}({v})",
        lambda: f"checkpoint({g.state(f'nn.Sequential(nn.Linear({n}, {out}), nn.Tanh())')}, {v}, use_reentrant=False)",
        lambda: f"{v} * {g.state(f'nn.Parameter(torch.randn({n}))')}",
        lambda: f"{v} + {g.state(f'nn.Parameter(torch.randn({s[-2:]}))')}",
        lambda: f"{g.state(f'nn.Conv1d({n}, {out}, 3, padding=1)')}({v}.transpose(-1, -2)).transpose(-1, -2)",
        lambda: f"{g.state(f'nn.Conv1d({n}, {n}, 3, padding=2, groups={n})')}({v}.transpose(1, 2))[..., :-2].transpose(1, 2)",
        lambda: f"{g.state(f'nn.Conv2d({s[-3] if len(s) > 2 else 1}, {out}, 3, padding=1)')}({v})",
        lambda: f"{g.state(f'nn.ConvTranspose1d({s[-2]}, {out}, 2, stride=2)')}({v})",
    ))())  # fmt: skip


def norm(g: Any) -> str:
    v = g.pick(lambda t: t.dim() > 1)
    s, d = g.shape(v), g.dim(v)
    n = s[-1]
    return str(g.drawn.choice((
        lambda: f"{g.state(f'nn.LayerNorm({n})')}({v})",
        lambda: f"F.layer_norm({v}, {s[1:]})",
        lambda: f"{g.state(f'nn.RMSNorm({n})')}({v})",
        lambda: f"{g.state(f'nn.GroupNorm(2, {s[1]})')}({v})",
        lambda: f"{g.state(f'nn.BatchNorm1d({s[1]})')}({v})",
        lambda: f"{g.state(f'nn.BatchNorm1d({n})')}({v}.flatten(0, -2)).view({s})",
        lambda: f"F.normalize({v}, dim={d})",
        lambda: f"F.softmax({v}, {d})", lambda: f"F.log_softmax({v}, {d})",
        lambda: f"({v} - {v}.mean({d}, keepdim=True)) / ({v}.std({d}, keepdim=True) + 0.3)",
        lambda: f"{v} * torch.rsqrt({v}.square().mean({d}, True) + 0.1)",
    ))())  # fmt: skip


def lookup(g: Any) -> str:
    ids = g.integers()
    n = int(g.values[ids].max()) + 1
    if int(g.values[ids].min()) < 0 or n > 40:
        raise LookupError
    n = max(n, 8)
    v = g.pick()
    d = g.dim(v)
    size = g.size(v, d)
    return str(g.drawn.choice((
        lambda: f"{g.state(f'nn.Embedding({n}, {g.drawn.choice((4, 8))})')}({ids})",
        lambda: f"{g.state(f'nn.Embedding({n}, 8, padding_idx=1)')}({ids})",
        lambda: f"F.one_hot({ids}, {n}).to({v}.dtype)",
        lambda: f"{v}[{ids} % {g.size(v, 0)}]",
        lambda: f"{v}.index_select({d}, {ids}.flatten() % {size})",
        lambda: f"{v}[..., torch.arange({g.size(v, -1)} - 1, -1, -1)]",
        lambda: f"{v}[torch.arange({g.size(v, 0)}), {ids}.flatten()[0] % {g.shape(v)[1]}]",
        lambda: f"torch.gather({v}, {d}, places({v}, {size}))",
        lambda: f"{v}.take_along_dim(places({v}, {size}), {d})",
        lambda: f"torch.zeros_like({v}).scatter_add({d}, places({v}, {size}), {v})",
        lambda: f"{v}.scatter({d}, torch.argsort(untied({v}), {d}), {g.pick()})",
        lambda: f"torch.zeros_like({v}).index_add({d}, torch.arange({size}) % 2, {v})",
        lambda: f"{v}.index_copy({d}, torch.tensor([0]), {v}.narrow({d}, -1, 1))",
        lambda: f"{v}.index_fill({d}, torch.tensor([{size - 1}]), 0.5)",
    ))())  # fmt: skip


def reduction(g: Any) -> str:
    v = g.pick()
    s, d = g.shape(v), g.dim(v)
    keep = g.drawn.choice(("", ", keepdim=True"))
    dims = tuple(sorted(g.drawn.sample(range(len(s)), g.drawn.randint(1, len(s)))))
    return str(g.drawn.choice((
        f"{v}.sum({d}{keep})", f"{v}.mean({dims}{keep})", f"{v}.mean({d}{keep})", f"{v}.sum({dims}{keep}) * 0.1",
        f"{v}.var({d}{keep})", f"{v}.var({dims}, correction=0{keep})", f"({v}.var({dims}{keep}) + 0.1).sqrt()",
        f"{v}.logsumexp({d}{keep})", f"{v}.logsumexp({dims}{keep})", f"(1 + {v}.square()).log().mean({d}{keep})",
        f"untied({v}).amax({dims}{keep}) * 0.1", f"untied({v}).min({d}{keep}).values * 0.1", f"{v}.mean()",
        f"{v}.norm(dim={d}{keep})", f"torch.linalg.vector_norm({v} + 0.01, dim={dims}{keep})",
        f"{v}.cumsum({d}) * 0.3", f"torch.logcumsumexp({v}, {d})", f"{v}.clamp(0.5, 1.1).prod({d}{keep})",
        f"(0.9 + 0.1 * {v}.tanh()).cumprod({d})", f"untied({v}).sort({d}).values * 0.1",
        f"untied({v}).sort({d}, descending=True).values * 0.1", f"untied({v}).topk(1, {d}).values * 0.1",
        f"untied({v}).topk({s[d]}, {d}).values.mean({d}) * 0.1", f"untied({v}).median({d}).values * 0.1",
        f"untied({v}).cummax({d}).values * 0.1", f"F.avg_pool1d({v}, 2)", f"F.max_pool1d(untied({v}), 2) * 0.1",
        f"F.adaptive_avg_pool1d({v}, 2)", f"F.interpolate({v}, scale_factor=2)", f"{v}.diff(dim={d})",
    )))  # fmt: skip


def whole(g: Any) -> str:
    v = g.pick()
    d = g.dim(v)
    n = g.size(v, d)
    return str(g.drawn.choice((
        f"untied({v}).argmax({d})", f"untied({v}).argsort({d})", f"places({v}, {g.drawn.choice((3, 8))})",
        f"untied({v}).topk(1, {d}).indices", f"({v} > 0.0173).long().cumsum({d})", f"torch.arange({n})",
        f"({v} > 0.0173).sum({d})", f"torch.arange({n}) % 3", f"({v} > 0.0173).long()",
    )))  # fmt: skip


def whole_of(g: Any) -> str:
    v, d = (n := g.integers()), g.dim(n)
    return str(g.drawn.choice((
        f"{v} * 2 + 1", f"{v} % 5", f"{v}.flip({d})", f"{v}.cumsum({d}) % 7", f"{v} // 2",
        f"{v}.clamp(1, 4)", f"{v}.roll(1, {d})", f"{v} + {g.integers()}", f"{v}.unsqueeze(-1)",
        f"{v}.transpose(0, -1)", f"{v}[..., :1]", f"{v}.amax({d})", f"{v}.expand(2, *{v}.shape)",
        f"torch.bitwise_xor({v}, 3)", f"torch.where({v} > 2, {v}, 0)",
    )))  # fmt: skip


def flags(g: Any) -> str:
    v = g.pick()
    d = g.dim(v)
    return str(g.drawn.choice((
        f"{v} > 0.0179", f"{g.integers()} > 1", f"{g.integers()} == {g.integers()}", f"~{g.flags()}",
        f"{g.flags()} & ({v} < 0.3019)", f"{g.flags()}.any({d})", f"({v} > -0.7).all({d})",
        f"{g.integers()} % 2 == 0", f"torch.ones({g.size(v, d)}, {g.size(v, d)}).tril().bool()",
        f"(torch.arange({g.size(v, d)})[:, None] - torch.arange({g.size(v, d)})).abs() < 2",
    )))  # fmt: skip


def attention(g: Any) -> str:
    v = g.pick(lambda t: t.dim() == 3 and t.shape[-1] % 4 == 0)
    _, s, n = g.shape(v)
    heads = g.drawn.choice((2, 4))
    kv = g.drawn.choice((heads, 2, 1))
    head = n // heads
    qkv = g.state(f"nn.Linear({n}, {n + 2 * kv * head})")
    out = g.state(f"nn.Linear({n}, {n})")
    bias = f"(torch.arange({s}) - torch.arange({s})[:, None]) * 0.1"
    kind = g.drawn.choice((
        "causal", "flags", "bias", "window", "padding", "hand", "hand", "learned"))  # fmt: skip
    lines = [
        f"q, k, v = {qkv}({v}).split(({n}, {kv * head}, {kv * head}), -1)",
        f"q, k, v = (t.unflatten(-1, (-1, {head})).transpose(1, 2) for t in (q, k, v))",
    ]
    gqa = ", enable_gqa=True" if kv != heads and g.drawn.random() < 0.5 else ""
    if kv != heads and not gqa:
        lines.append(f"k, v = (t.repeat_interleave({heads // kv}, 1) for t in (k, v))")
    if kind == "hand" and not gqa:
        lines += [
            f"w = q @ k.mT / {head} ** 0.5",
            f"w = w.masked_fill(~torch.ones({s}, {s}, dtype=torch.bool).tril(), float('-inf'))"
            if g.drawn.random() < 0.5 else f"w = w + {bias}",
            "a = w.softmax(-1) @ v",
        ]  # fmt: skip
    else:
        given = {
            "causal": "is_causal=True", "flags": f"attn_mask=torch.ones({s}, {s}, dtype=torch.bool).tril()",
            "bias": f"attn_mask={bias}", "window": f"attn_mask=({bias}).abs() < 0.25",
            "padding": "attn_mask=mask[:, None, None, :]", "hand": "",
            "learned": "",
        }[kind]  # fmt: skip
        if kind == "learned":
            given = f"attn_mask={g.state(f'nn.Parameter(torch.randn({heads}, {s}, {s}))')}"
        lines.append(f"a = F.scaled_dot_product_attention(q, k, v, {given}{gqa})")
    lines.append(f"NEW = {out}(a.transpose(1, 2).flatten(2))")
    return "!" + "\n".join(lines)


def looped(g: Any) -> str:
    v = g.pick(lambda t: t.dim() > 1 and t.shape[1] < 9)
    s = g.shape(v)
    w = g.state(f"nn.Parameter(torch.randn({s[-1]}, {s[-1]}) * 0.3)") if len(s) > 2 else None
    step = f"torch.tanh({v}[:, t] @ {w} + h)" if w else f"torch.tanh({v}[:, t] + 0.5 * h)"
    end = g.drawn.choice(
        ("NEW = torch.stack(hs, 1)", "NEW = h", "NEW = torch.cat(hs, -1)", "NEW = sum(hs)")
    )
    return f"!h, hs = torch.zeros_like({v}[:, 0]), []\nfor t in range({s[1]}):\n    h = {step}\n    hs.append(h)\n{end}"


def shared(g: Any) -> str:
    return f"{g.drawn.choice(g.modules())}({g.pick()})"


def unwatched(g: Any) -> str:
    v = g.pick()
    return f"!with torch.no_grad():\n    NEW = {v}.mean({g.dim(v)}, keepdim=True) * 2"


def cast(g: Any) -> str:
    v = g.pick()
    if g.drawn.random() < 0.7:
        raise LookupError
    return f"{v}.float().tanh().to(torch.float64)"


def write_in_place(g: Any) -> str:
    v = g.pick(lambda t: t.dim() > 0)
    d, s = g.dim(v), g.shape(v)
    n = s[d]
    k = g.drawn.randrange(-n, n)
    colons = ":, " * (d % len(s))
    w = g.pick()
    part = g.drawn.choice((
        f"{v}", f"{v}.select({d}, {k})", f"{v}[{colons}{k % n}:]", f"{v}.narrow({d}, 0, {max(1, n // 2)})",
        f"{v}[{colons}::2]", f"{v}.transpose(0, -1)", f"{v}.flatten(0)[1:3]", f"{v}.view(-1)[::2]",
        f"{v}.transpose(0, {d})[0]", f"{v}.chunk(2, {d})[0]", f"{v}.unflatten({d}, (2, -1)).select({d % len(s)}, 1)",
    ))  # fmt: skip
    done = g.drawn.choice((
        f"{part}.add_(0.5)", f"{part}.mul_(0.7)", f"{part}.add_({w})", f"{part}.mul_({w})", f"{part}.copy_({w})",
        f"{part}.copy_({w}.mean())", f"{part}.sub_({w}.mean(), alpha=0.5)", f"{part}.zero_()", f"{part}.fill_(0.3)",
        f"{part}.masked_fill_({g.flags()}, 0.25)", f"{part}.tanh_()", f"{part}.sigmoid_()", f"{part}.clamp_(-0.9, 0.9)",
        f"{part}.index_fill_(0, torch.tensor([0]), 0.2)", f"{part}.index_add_(0, torch.tensor([0]), {part}[:1] * 0.5)",
        f"{part}.addcmul_({w}, {w}, value=0.1)", f"{part}.lerp_({w}, 0.4)", f"{part}.div_(1.7)",
        f"{part}.index_put_((torch.tensor([0]),), {w}.mean(), accumulate=True)", f"{part}.neg_()",
    ))  # fmt: skip
    assigned = g.drawn.choice((
        f"{v}[{colons}{k}] = {w}", f"{v}[{colons}{k}] = 0.3", f"{v}[{colons}{k % n}:] += {w}.mean()", f"{v} += 0.1",
        f"{v}[{colons}::2] *= 0.5", f"{v}[{g.flags()}] = 0.4", f"{v}[torch.arange({s[0]}) % 2 == 0] += 0.1",
        f"{v}[..., :1] = {w}[..., -1:]", f"{v}[{v} > 0.513] = 0.5", f"{v} *= {w}",
    ))  # fmt: skip
    text = g.drawn.choice((done, assigned))
    if g.drawn.random() < 0.7:
        return (
            f"!NEW = {v}.clone()\n" + text.replace(v, "NEW")
            if v != w
            else f"!NEW = {v} * 1.0\n{text}"
        )
    return f"!{text}"


def write_buffer(g: Any) -> str:
    v = g.pick(lambda t: t.dim() > 0)
    d, n = g.dim(v), g.shape(v)[-1]
    dims = tuple(range(len(g.shape(v)) - 1))
    return str(g.drawn.choice((
        lambda: f"!{(b := g.buffer(f'torch.zeros({n})'))}.mul_(0.9).add_({v}.detach().mean({dims}), alpha=0.1)\nNEW = {v} - {b}",
        lambda: f"!{(b := g.buffer('torch.zeros((), dtype=torch.long)'))} += 1\nNEW = {v} * {b}",
        lambda: f"!with torch.no_grad():\n    {g.buffer(f'torch.zeros({n})')}.copy_({v}.amax({dims}))",
        lambda: f"!{(b := g.buffer(f'torch.ones(4, {n})'))}[1:3] = {v}.detach().mean({dims})\nNEW = {v} @ {b}.T",
        lambda: f"!{(b := g.buffer(f'torch.ones({n})'))}.lerp_({v}.detach().var({dims}), 0.1)\nNEW = {v} / ({b} + 0.5).sqrt()",
        lambda: f"!{(b := g.buffer(f'torch.ones({n})'))} = {b} * 0.9 + {v}.detach().sum({dims}) * 0.01\nNEW = {v} * {b}",
        lambda: f"!NEW = {v} * {(b := g.buffer(f'torch.ones({n})'))}\n{b}.add_(0.1)",
        lambda: f"!{(b := g.buffer('torch.zeros(8, dtype=torch.long)'))}.scatter_add_(0, ids.flatten() % 8, torch.ones_like(ids).flatten())\nNEW = {b}.double() * 0.01",
        lambda: f"!{(b := g.buffer(f'torch.zeros({g.shape(v)})'))}.copy_({v}.detach())\nNEW = {b}.roll(1, {d})",
        lambda: f"!{(b := g.buffer(f'torch.zeros(3, {n})'))}.copy_(torch.cat([{b}[1:], {v}.detach().mean({dims})[None]]))\nNEW = {b}.mean(0) + {v}",
    ))())  # fmt: skip


# what may be added to the hidden values
JOINED: tuple[Callable[[Any, str], str], ...] = (
    lambda g, x: g.pick(lambda t: t.shape == g.values[x].shape),
    lambda g, x: g.pick(lambda t: t.shape == g.values[x].shape),
    lambda g, x: f"{g.pick(lambda t: t.dim() == 2)}.mean(-1)[:, None, None]",
    lambda g, x: f"{g.pick()}.mean()",
    lambda g, x: f"{g.pick(lambda t: t.dim() > 1)}.flatten(1).mean(1)[:, None, None]",
    lambda g, x: f"{g.pick()}[..., :1, :1].tanh()",
    lambda g, x: f"{g.pick(lambda t: t.dim() > 2)}.sum(0)",
    lambda g, x: f"{g.state('nn.Linear(8, 8)')}({g.pick()})",
    lambda g, x: f"{g.pick(lambda t: t.dim() > 2)}.flatten(2).mean(-1, True)",
    lambda g, x: f"{g.pick(lambda t: t.dim() == 4)}.sum(1)",
)  # fmt: skip
# what may be added to the loss
LOSSES: tuple[Callable[[Any, str], str], ...] = (
    lambda g, x: f"{g.pick()}.mean()",
    lambda g, x: f"{g.pick()}.square().sum() * 0.01",
    lambda g, x: f"{g.pick()}.tanh().mean(0).square().sum()",
    lambda g, x: f"F.cross_entropy({g.pick()}.flatten(0, -2), labels.flatten())",
    lambda g, x: f"F.cross_entropy({g.pick()}.mT, labels, reduction='sum') * 0.05",
    lambda g, x: f"F.cross_entropy({(v := g.pick(lambda t: t.dim() > 1))}.flatten(0, -2), labels.flatten(), "
    f"label_smoothing=0.1, weight=torch.linspace(0.5, 1.5, {g.shape(v)[-1]}))",
    lambda g, x: f"(F.cross_entropy({g.pick()}.mT, labels, reduction='none') * mask).sum() / mask.sum()",
    lambda g, x: f"F.nll_loss(F.log_softmax({g.pick()}.flatten(0, -2), -1), ids.flatten(), ignore_index=1)",
    lambda g, x: f"F.mse_loss({g.pick()}, {g.pick()})",
    lambda g, x: f"F.smooth_l1_loss({g.pick()}, {g.pick()}, reduction='sum') * 0.01",
    lambda g, x: f"F.binary_cross_entropy_with_logits({g.pick()}[..., 0], mask.to(torch.float64))",
    lambda g, x: f"({g.pick(lambda t: t.shape[:2] == mask_shape(g) and t.dim() > 2)}.flatten(2).mean(2) * mask).sum() / mask.sum()",
    lambda g, x: f"({g.pick()}[..., 0] * ({g.integers()} > 0)).mean()",
    lambda g, x: f"{g.pick()}[mask].mean()",
    lambda g, x: f"{g.pick()}[mask].square().sum() * 0.1",
    lambda g, x: f"F.kl_div(F.log_softmax({(v := g.pick())}, -1), F.softmax({v}.detach() * 0.5, -1), reduction='batchmean')",
    lambda g, x: "sum(p.square().sum() for p in self.parameters()) * 0.001",
    lambda g, x: f"F.cross_entropy({g.pick()}[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
    lambda g, x: f"{g.pick()}.var() * 0.1",
    lambda g, x: f"F.cosine_similarity({g.pick()}, {g.pick()}, dim=-1).mean()",
)  # fmt: skip


def mask_shape(g: Any) -> tuple[int, ...]:
    """Batch and sequence."""
    return tuple(g.shape("mask"))


TEMPLATES: tuple[Template, ...] = (
    *(unary,) * 3, *(binary,) * 4, where, masked, *(view,) * 8, *(combined,) * 2, *(product,) * 3,
    *(linear,) * 5, *(norm,) * 2, *(lookup,) * 3, *(reduction,) * 4, whole, whole_of, *(flags,) * 2,
    *(attention,) * 2, looped, shared, unwatched, cast,
)  # fmt: skip
WRITING: tuple[Template, ...] = (write_in_place, write_in_place, write_buffer)
