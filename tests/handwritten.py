"""Small hand-written modules with what real ones have besides transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "Clamped",
    "Dropped",
    "Frozen",
    "Mlp",
    "Recommender",
    "Sequence",
    "SharedWeight",
    "SideOutputs",
    "UNet",
    "Unused",
]


class Mlp(nn.Module):
    """Blocks of two linears with a residual; returns logits, or a loss where there are labels."""

    def __init__(self, width: int = 16, layers: int = 2, classes: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return logits if labels is None else F.cross_entropy(logits, labels)


class UNet(nn.Module):
    """Two levels with skips and batch norm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1 = self._block(3, width)
        self.down2 = self._block(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = self._block(2 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _block(channels: int, out: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        high = self.down1(x)
        low = self.down2(F.max_pool2d(high, 2))
        merged = torch.cat([high, self.up(low)], dim=1)
        return F.mse_loss(self.head(self.up1(merged)), target)


class Sequence(nn.Module):
    """An LSTM over embedded tokens."""

    def __init__(self, vocab: int = 32, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Recommender(nn.Module):
    """Bags of categories and dense features, as in DLRM."""

    def __init__(self, rows: int = 32, width: int = 8) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(3))
        self.dense = nn.Linear(4, width)
        self.top = nn.Linear(4 * width, 1)

    def forward(self, features: Tensor, bags: Tensor, clicked: Tensor) -> Tensor:
        parts = [self.dense(features).relu()]
        parts += [bag(bags[:, i]) for i, bag in enumerate(self.bags)]
        score = self.top(torch.cat(parts, dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(score, clicked)


class _ClampGradient(torch.autograd.Function):
    """Identity whose gradient is tripled and clamped: not what autograd would derive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (3 * grad).clamp(-1e-2, 1e-2) * (x > 0)


class Clamped(nn.Module):
    """A custom autograd function between two linears."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.outer(_ClampGradient.apply(self.inner(x))), labels)


class SharedWeight(nn.Module):
    """One linear applied twice, and a weight tied between embedding and head."""

    def __init__(self, vocab: int = 32, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.inner(self.inner(self.embed(ids)).tanh())
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Unused(nn.Module):
    """A parameter and a layer that no output depends on."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.randn(width))
        self.spare = nn.Linear(width, width)
        self.used = nn.Linear(width, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.spare(x)
        return F.cross_entropy(self.used(x), labels)


class Frozen(nn.Module):
    """A frozen first layer and a frozen bias; its batch norm stays in evaluation mode."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 4)
        self.base.requires_grad_(False)
        self.head.bias.requires_grad_(False)
        self.norm.running_var.fill_(2.0)
        self.norm.eval()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.base(x)).relu()), labels)


class SideOutputs(nn.Module):
    """Loss, logits and an integer output in a dict, without a class of its own."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.head(self.inner(x).relu())
        loss = F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "chosen": logits.argmax(-1), "scale": 2.0}


class Dropped(nn.Module):
    """Dropout on sharded activations, of tokens and of channels."""

    def __init__(self, width: int = 16, p: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Dropout(p)) for _ in range(2)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


def vectors(batch: int = 8, width: int = 16) -> dict[str, Tensor]:
    """Inputs `x` of shape (batch, width) and labels of four classes."""
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(batch, width, generator=generator),
        "labels": torch.arange(batch) % 4,
    }


def tokens(batch: int = 4, length: int = 8, vocab: int = 32) -> dict[str, Tensor]:
    """Token ids and labels of shape (batch, length)."""
    generator = torch.Generator().manual_seed(1)
    draw = torch.randint(0, vocab, (2, batch, length), generator=generator)
    return {"ids": draw[0], "labels": draw[1]}


def images(batch: int = 8) -> dict[str, Tensor]:
    """Images of shape (batch, 3, 8, 8) and a dense target."""
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(batch, 3, 8, 8, generator=generator),
        "target": torch.randn(batch, 2, 8, 8, generator=generator),
    }


def clicks(batch: int = 8) -> dict[str, Tensor]:
    """Dense features, three bags of four categories, and a 0/1 target."""
    generator = torch.Generator().manual_seed(1)
    return {
        "features": torch.randn(batch, 4, generator=generator),
        "bags": torch.randint(0, 32, (batch, 3, 4), generator=generator),
        "clicked": (torch.arange(batch) % 2).float(),
    }
