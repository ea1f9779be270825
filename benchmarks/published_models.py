"""Transformers of published runs, as plain torch modules built from a shape alone.

Two kinds: GPT (layer norm, learned positions, GELU, biases, dropout, tied head) and Llama (RMS
norm, rotary positions, gated SiLU, grouped key and value heads). Attention is either one call of
scaled_dot_product_attention or, as before fused kernels, two products with a softmax between.
Letters: B batch, S sequence, H hidden, A heads, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Shape", "Transformer"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a transformer.

    Attributes:
        kind: "gpt" or "llama".
        fused_attention: one attention kernel, which keeps no S x S scores.
        masked_softmax: without it, one kernel scales and masks and takes the softmax of scores;
            False for a kernel for each, in float32.
        dropout: of scores and of each sublayer's output; 0 for none.
        joint_gate: Llama's gate and up projection are one product.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    fused_attention: bool
    masked_softmax: bool = True
    dropout: float = 0.0
    joint_gate: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Core(nn.Module):
    """Softmax(q k^T / sqrt(D)) v, for (B, A, S, D)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.shape.fused_attention:
            grouped = self.shape.kv_heads != self.shape.heads
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        each = self.shape.heads // self.shape.kv_heads
        if each > 1:
            k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
        # the scale goes with the product, and the mask with the softmax: neither is a pass
        scores = q @ k.transpose(-1, -2)
        if self.shape.masked_softmax:
            scores = torch.softmax(scores, -1)
        else:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            wide = (scores.float() * 2.0).masked_fill(hidden, -10000.0)
            scores = torch.softmax(wide, -1).to(q.dtype)
        return F.dropout(scores, self.shape.dropout, self.training) @ v


class Attention(nn.Module):
    """Multi-head attention with grouped key and value heads and one product for q, k and v."""

    def __init__(self, shape: Shape, bias: bool) -> None:
        super().__init__()
        self.shape = shape
        wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = nn.Linear(shape.hidden, wide, bias=bias)
        self.proj = nn.Linear(shape.hidden, shape.hidden, bias=bias)
        self.core = Core(shape)

    def forward(self, x_bsh: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, length, hidden = x_bsh.shape
        groups, dim = self.shape.kv_heads, self.shape.head_dim
        rows = self.qkv(x_bsh).view(batch, length, groups, -1, dim)
        each = self.shape.heads // groups
        q, k, v = (part.flatten(2, 3) for part in rows.split((each, 1, 1), 3))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if rotation is not None:
            q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        out = self.core(q, k, v).transpose(1, 2).reshape(batch, length, hidden)
        return self.proj(out)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class GptBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape, bias=True)
        self.up = nn.Linear(shape.hidden, shape.ffn)
        self.down = nn.Linear(shape.ffn, shape.hidden)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        y = self.attention(self.norm1(x), rotation)
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.down(F.gelu(self.up(self.norm2(x))))
        return x + F.dropout(y, self.dropout, self.training)


class LlamaBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape, bias=False)
        wide = shape.ffn * (2 if shape.joint_gate else 1)
        self.gate = None if shape.joint_gate else nn.Linear(shape.hidden, wide, bias=False)
        self.up = nn.Linear(shape.hidden, wide, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        y = self.norm2(x)
        if self.gate is None:
            gate, up = self.up(y).unflatten(-1, (-1, 2)).unbind(-1)
        else:
            gate, up = self.gate(y), self.up(y)
        return x + self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    """Token ids and labels (B, S) to the mean cross entropy."""

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.shape = shape
        gpt = shape.kind == "gpt"
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(length, shape.hidden) if gpt else None
        block = GptBlock if gpt else LlamaBlock
        self.layers = nn.ModuleList(block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden) if gpt else nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if gpt:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        rotation = None
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
            x = F.dropout(x, self.shape.dropout, self.training)
        else:
            rotation = self._rotation(ids, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def _rotation(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        dim = self.shape.head_dim
        frequency = torch.exp(
            torch.arange(0, dim, 2, device=ids.device) * (-math.log(500_000.0) / dim)
        )
        angle = torch.outer(torch.arange(ids.shape[1], device=ids.device), frequency).repeat(1, 2)
        return angle.cos().to(dtype), angle.sin().to(dtype)
