"""Small models from transformers configs, unmodified, whose steps take 0.05 to 1 s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

__all__ = ["MODELS", "build"]

_VOCAB = 1024


def _tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, _VOCAB, (batch, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _images(batch: int, side: int, labels: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, side, side, generator=generator)
    return {"pixel_values": images, "labels": torch.arange(batch) % labels}


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = hf.GPT2Config(
        n_layer=3, n_embd=256, n_head=8, vocab_size=_VOCAB, n_positions=128, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config), _tokens(8, 128)


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = hf.LlamaConfig(
        num_hidden_layers=4, hidden_size=256, intermediate_size=768, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=_VOCAB, max_position_embeddings=128,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config), _tokens(8, 128)


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = hf.BertConfig(
        num_hidden_layers=3, hidden_size=256, intermediate_size=1024, num_attention_heads=8,
        vocab_size=_VOCAB, max_position_embeddings=128, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.BertForMaskedLM(config), _tokens(8, 128)


def vit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = hf.ViTConfig(
        num_hidden_layers=4, hidden_size=256, intermediate_size=1024, num_attention_heads=8,
        image_size=64, patch_size=8, num_labels=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.ViTForImageClassification(config), _images(16, 64, 16)


def resnet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = hf.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128], depths=[2, 2], layer_type="basic", num_labels=16
    )
    return hf.ResNetForImageClassification(config), _images(16, 96, 16)


def t5() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = hf.T5Config(
        d_model=256, d_kv=32, d_ff=768, num_layers=2, num_decoder_layers=2, num_heads=8,
        vocab_size=_VOCAB, dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config), _tokens(8, 128)


def wide() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Llama with two wide layers and few tokens: weights outweigh activations."""
    config = hf.LlamaConfig(
        num_hidden_layers=2, hidden_size=768, intermediate_size=2304, num_attention_heads=12,
        num_key_value_heads=12, vocab_size=_VOCAB, max_position_embeddings=64,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config), _tokens(4, 64)


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "resnet": resnet,
    "t5": t5,
    "wide": wide,
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """A model with weights of a seed, in training mode, and its global batch."""
    torch.manual_seed(seed)
    model, inputs = MODELS[name]()
    return model.train(), inputs
