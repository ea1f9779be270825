"""Small, unmodified models of several families, with inputs: what the tests parallelize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

Builder = Callable[[], tuple[nn.Module, dict[str, Any]]]


def _tokens(batch: int, length: int, vocab: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (batch, length), generator=generator)


def _causal(batch: int = 4, length: int = 16, vocab: int = 128) -> dict[str, Any]:
    ids = _tokens(batch, length, vocab)
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2(dropout: float = 0.0, layers: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.GPT2Config(
        n_layer=layers,
        n_embd=64,
        n_head=8,
        vocab_size=128,
        n_positions=32,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hf.GPT2LMHeadModel(config), _causal()


def llama(dropout: float = 0.0, layers: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=128,
        max_position_embeddings=32,
        attention_dropout=dropout,
    )
    return hf.LlamaForCausalLM(config), _causal()


def bert(layers: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.BertConfig(
        num_hidden_layers=layers,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=8,
        vocab_size=128,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=4,
    )
    ids = _tokens(4, 16, 128)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 2, 3])}
    return hf.BertForSequenceClassification(config), inputs


def vit(dropout: float = 0.0, layers: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=8,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=8,
    )
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, 32, 32, generator=generator)
    return hf.ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.tensor([0, 1, 2, 3]),
    }


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], layer_type="basic", num_labels=8
    )
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 32, 32, generator=generator)
    return hf.ResNetForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.arange(8),
    }


def t5(layers: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.T5Config(
        d_model=64,
        d_kv=8,
        d_ff=128,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=8,
        vocab_size=128,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    ids = _tokens(4, 16, 128)
    return hf.T5ForConditionalGeneration(config), {
        "input_ids": ids,
        "labels": _tokens(4, 16, 128, seed=1),
    }


def mixtral(layers: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.MixtralConfig(
        num_hidden_layers=layers,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=128,
        num_local_experts=4,
        max_position_embeddings=32,
    )
    return hf.MixtralForCausalLM(config), _causal()


MODELS: dict[str, Builder] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "resnet": resnet,
    "t5": t5,
    "mixtral": mixtral,
}
