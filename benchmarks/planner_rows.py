"""Models, meshes and batches that the planner is measured with.

Models are built on the meta device, all but the LSTM from transformers configs; nothing is
downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as hf
from torch import nn

__all__ = ["DEEP", "DEFAULT", "DEPTHS", "MESHES", "MODELS", "ROWS", "Row"]

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: a model, a batch and a cluster."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    profile: str
    nodes: int
    devices_per_node: int
    mesh: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


def _tokens(batch: int, length: int) -> Callable[[], Inputs]:
    def make() -> Inputs:
        ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
        return {"input_ids": ids, "labels": ids}

    return make


def _images(batch: int, size: int) -> Callable[[], Inputs]:
    def make() -> Inputs:
        pixels = torch.zeros(batch, 3, size, size, device="meta")
        return {
            "pixel_values": pixels,
            "labels": torch.zeros(batch, dtype=torch.long, device="meta"),
        }

    return make


def _gpt2(layers: int, hidden: int, heads: int, length: int = 1024) -> Callable[[], nn.Module]:
    config = hf.GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, n_positions=length)
    return lambda: hf.GPT2LMHeadModel(config)


def _llama(layers: int, hidden: int, ffn: int, heads: int, kv: int) -> Callable[[], nn.Module]:
    config = hf.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    return lambda: hf.LlamaForCausalLM(config)


def _xlm(layers: int) -> Callable[[], nn.Module]:
    """The parts of a block are in four lists, which a loop of the model takes together."""
    config = hf.XLMConfig(
        n_layers=layers, emb_dim=2048, n_heads=16, vocab_size=32000, max_position_embeddings=1024
    )
    return lambda: hf.XLMWithLMHeadModel(config)


def _vit(layers: int, hidden: int, heads: int) -> Callable[[], nn.Module]:
    config = hf.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=heads,
        image_size=224,
        patch_size=16,
    )
    return lambda: hf.ViTForImageClassification(config)


def _resnet(third: int, second: int = 4) -> Callable[[], nn.Module]:
    config = hf.ResNetConfig(depths=[3, second, third, 3])  # the default is ResNet-50
    return lambda: hf.ResNetForImageClassification(config)


def _swin(third: int, width: int) -> Callable[[], nn.Module]:
    heads = [width // 32 * 2**i for i in range(4)]
    config = hf.SwinConfig(depths=[2, 2, third, 2], embed_dim=width, num_heads=heads)
    return lambda: hf.SwinForImageClassification(config)


class _Recurrent(nn.Module):
    """A language model of four layers of an LSTM."""

    def __init__(self, vocab: int = 32768, width: int = 2048) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.LSTM(width, width, 4, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(self.embed(input_ids))[0])
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def _mixtral() -> nn.Module:
    config = hf.MixtralConfig(max_position_embeddings=8192)  # its defaults are 8x7B
    return hf.MixtralForCausalLM(config)


def _gemma3() -> nn.Module:
    """The language model of Gemma 3 27B: five local layers to each global one."""
    config = hf.Gemma3TextConfig(
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
    )
    return hf.Gemma3ForCausalLM(config)


def _t5() -> nn.Module:
    config = hf.T5Config(
        d_model=1024,
        d_kv=128,
        d_ff=65536,
        num_layers=24,
        num_heads=128,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def _pairs(batch: int, length: int) -> Callable[[], Inputs]:
    """Source and target, each half as long as `length`."""
    return _tokens(batch, length // 2)


_P100_4 = {"profile": "p100", "nodes": 1, "devices_per_node": 4, "mesh": (4,)}
_P100_16 = {"profile": "p100", "nodes": 4, "devices_per_node": 4, "mesh": (4, 4)}
_F16 = torch.float16

# model, its inputs for a batch, and sequences (images) per device
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Callable[[], Inputs]], float]] = {
    "gpt2-1.5b": (_gpt2(48, 1600, 25), lambda b: _tokens(b, 1024), 2),
    "llama3-8b": (_llama(32, 4096, 14336, 32, 8), lambda b: _tokens(b, 4096), 1),
    "llama3-70b": (_llama(80, 8192, 28672, 64, 8), lambda b: _tokens(b, 4096), 0.25),
    "llama3-405b": (_llama(126, 16384, 53248, 128, 8), lambda b: _tokens(b, 4096), 0.0625),
    "mixtral-8x7b": (_mixtral, lambda b: _tokens(b, 4096), 1),
    "vit-22b": (_vit(48, 6144, 48), lambda b: _images(b, 224), 4),
    "t5-11b": (_t5, lambda b: _pairs(b, 4096), 0.5),
    "gpt3-175b": (_gpt2(96, 12288, 96, 2048), lambda b: _tokens(b, 2048), 0.125),
    "gemma3-27b": (_gemma3, lambda b: _tokens(b, 4096), 0.5),
    # the defaults of the rest are the models as released
    "gpt-oss-120b": (
        lambda: hf.GptOssForCausalLM(hf.GptOssConfig()),
        lambda b: _tokens(b, 4096),
        0.5,
    ),
    "deepseek-v3": (
        lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config()),
        lambda b: _tokens(b, 4096),
        0.25,
    ),
    # blocks are equal within stages: few of them, and many
    "resnet-50": (_resnet(6), lambda b: _images(b, 224), 4),
    "resnet-152": (_resnet(36, 8), lambda b: _images(b, 224), 4),
    "swin-t": (_swin(6, 96), lambda b: _images(b, 224), 4),
    "swin-l": (_swin(18, 192), lambda b: _images(b, 224), 4),
    "lstm-4x2048": (_Recurrent, lambda b: _tokens(b, 4096), 8),
}
MESHES: dict[str, tuple[int, ...]] = {
    "8": (8,),
    "32x8": (32, 8),
    "64x8": (64, 8),
    "4x4x4": (4, 4, 4),
    "16x8x8": (16, 8, 8),
}


def _grid() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for name, (build, inputs, share) in MODELS.items():
        for text, mesh in MESHES.items():
            devices = math.prod(mesh)
            rows[f"{name}@{text}"] = Row(
                build=build,
                inputs=inputs(max(int(devices * share), 8)),
                profile="h100-sxm",
                nodes=devices // 8,
                devices_per_node=8,
                mesh=mesh,
            )
    return rows


DEPTHS = (8, 16, 32, 64, 126)
# blocks of a model, of which more or fewer are planned, with the mesh, sequences and their length
DEEP: dict[str, tuple[Callable[[int], Callable[[], nn.Module]], str, tuple[int, int]]] = {
    "llama3-8b": (lambda layers: _llama(layers, 4096, 14336, 32, 8), "32x8", (256, 4096)),
    "llama3-405b": (lambda layers: _llama(layers, 16384, 53248, 128, 8), "64x8", (32, 4096)),
    "xlm": (_xlm, "32x8", (256, 1024)),
}


def _depths() -> dict[str, Row]:
    return {
        f"{name}-{layers}-layers@{text}": Row(
            build=build(layers),
            inputs=_tokens(*batch),
            profile="h100-sxm",
            nodes=math.prod(MESHES[text]) // 8,
            devices_per_node=8,
            mesh=MESHES[text],
        )
        for name, (build, text, batch) in DEEP.items()
        for layers in DEPTHS
    }


ROWS: dict[str, Row] = {
    "gpt-3b-p100x4": Row(
        build=_gpt2(40, 2496, 26), inputs=_tokens(16, 1024), dtype=_F16, **_P100_4
    ),
    "vit-3b-p100x4": Row(
        build=_vit(40, 2496, 26), inputs=_images(16, 224), dtype=_F16, **_P100_4
    ),
    "gpt-12b-p100x16": Row(
        build=_gpt2(40, 4992, 52), inputs=_tokens(16, 1024), dtype=_F16, **_P100_16
    ),
    "vit-12b-p100x16": Row(
        build=_vit(40, 4992, 52), inputs=_images(16, 224), dtype=_F16, **_P100_16
    ),
    **_depths(),
    **_grid(),
}  # fmt: skip
DEFAULT = [
    "gpt-3b-p100x4", "vit-3b-p100x4", "gpt-12b-p100x16", "vit-12b-p100x16",
    "llama3-8b@8", "llama3-8b@32x8", "llama3-8b@16x8x8", "llama3-405b-16-layers@64x8",
    "llama3-405b@64x8",
]  # fmt: skip
