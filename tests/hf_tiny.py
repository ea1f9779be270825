"""Tiny models of any transformers class, and inputs for them, without knowing the class.

A configuration is made small by the names of its fields: widths, depths, heads, vocabularies.
Several sizes are tried until one builds and runs.
"""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.hf_inputs import IMAGE, LABELS, VOCAB, inputs_for

MAX_PARAMETERS = 20_000_000
_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
)


class NotBuiltError(Exception):
    """No tiny configuration of the class builds and runs eagerly."""


def classes(more: bool = False) -> dict[str, str]:
    """Model type by class name, for every class of the lists that the page is of; or of others."""
    if more:
        listed, every = classes(), _listed([n for n in dir(modeling_auto) if _is_list(n)])
        return {name: kind for name, kind in every.items() if name not in listed}
    return _listed(_MAPPINGS)


def _is_list(name: str) -> bool:
    return name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")


def _listed(mappings: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for mapping in mappings:
        for model_type, names in getattr(modeling_auto, mapping).items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, model_type)
    return found


# --- configurations ---------------------------------------------------------------------------
_SIZES: dict[str, Any] = {
    **dict.fromkeys(
        "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size hidden_dim "
        "word_embed_proj_dim projection_dim adapter_hidden_size cross_attention_hidden_size "
        "qk_dim state_rnn_width lru_width attention_hidden_size d_embed dim_model "
        "mamba_d_inner d_latents".split(),
        64,
    ),
    **dict.fromkeys(
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
        "num_encoder_layers num_decoder_layers num_blocks n_encoder_layers".split(),
        1,
    ),
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "linear_num_value_heads linear_num_key_heads mamba_n_heads num_cross_attention_heads "
        "num_self_attention_heads attn_heads".split(),
        4,
    ),
    **dict.fromkeys("num_key_value_heads num_kv_heads swa_num_key_value_heads".split(), 2),
    **dict.fromkeys(
        "intermediate_size ffn_dim d_ff d_inner n_inner ffn_hidden_size encoder_ffn_dim "
        "decoder_ffn_dim dim_ff hidden_dims d_ffn moe_intermediate_size "
        "shared_expert_intermediate_size mlp_hidden_size intermediate_size_mlp "
        "dense_intermediate_size expert_ffn_hidden_size encoder_intermediate_size "
        "block_ff_dim moe_shared_expert_intermediate_size".split(),
        128,
    ),
    **dict.fromkeys(
        "head_dim d_kv d_head qk_nope_head_dim v_head_dim attention_head_dim "
        "attention_key_dim global_head_dim attention_head_size swa_head_dim "
        "linear_key_head_dim linear_value_head_dim mamba_headdim kv_channels".split(),
        16,
    ),
    **dict.fromkeys("qk_rope_head_dim rotary_dim index_head_dim".split(), 8),
    **dict.fromkeys("q_lora_rank kv_lora_rank o_lora_rank".split(), 32),
    **dict.fromkeys(
        "vocab_size entity_vocab_size vocab_size_per_layer_input "
        "pronunciation_vocab_size shape_vocab_size".split(),
        VOCAB,
    ),
    **dict.fromkeys("max_position_embeddings n_positions n_ctx max_seq_len".split(), 64),
    **dict.fromkeys(
        "num_local_experts num_experts n_routed_experts moe_num_experts num_experts_total".split(),
        4,
    ),
    **dict.fromkeys(
        "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts".split(), 2
    ),
    **dict.fromkeys("n_group topk_group".split(), 1),
    "image_size": IMAGE,
    "input_size": IMAGE,
    "num_labels": LABELS,
    "patch_size": 4,
    "window_size": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    "sep_token_id": 2,
    "num_virtual_tokens": 4,
    "is_decoder": None,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "num_frames": 4,
    "context_length": 32,
    "prediction_length": 8,
    "coordinate_size": 8,
    "shape_size": 16,
    "pronunciation_embed_dim": 16,
    "shape_embed_dim": 16,
    "axial_pos_embds": False,
    "num_latents": 16,
    "zero_expert_num": 2,
    "encoder_hash_byte_group_vocab": VOCAB,
    "default_language": "en_XX",
}
_LISTS: dict[str, Any] = {
    "attention_types": [[["global"], 1]],
    "attn_layer_indices": [0],
    "first_k_dense_replace": 0,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "index_topk": 8,
    "num_groups": 4,
    "width_coefficient": 0.25,
    "depth_coefficient": 0.2,
}
# what fits together where the sizes above do not, level 3
_FITTING: dict[str, Any] = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "adapter_in_dim": 64,
    "adapter_input_size": 64,
    "adapter_out_dim": 64,
    "attention_hidden_size": 128,
    "blank_token_id": 0,
    "token_budget": 16,
    "compress_ratio": 4,
    "num_self_attention_heads": 1,
    "num_cross_attention_heads": 1,
    "num_key_value_heads": 4,
    "is_decoder": True,
}
_GENTLE = (
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_blocks "
    "num_encoder_layers num_decoder_layers vocab_size num_labels image_size pad_token_id "
    "bos_token_id eos_token_id decoder_start_token_id max_position_embeddings"
).split()
_FILLED = ("vocab_size", "default_language", "num_key_value_heads", "head_dim", "rope_theta")
_LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")


def _fields(config: Any) -> dict[str, Any]:
    aliases = getattr(type(config), "attribute_map", {})
    return {**{name: getattr(config, name, None) for name in aliases}, **vars(config)}


def _small_list(name: str, value: list[Any]) -> list[Any] | None:
    """A list over the stages of a network, as long as before."""
    if not value or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return None
    count = len(value)
    if name == "depth":  # one class takes the rates of a stage from as many as it has layers
        return list(range(1, count + 1))
    if name in ("depths", "layers", "encoder_depths", "stage_num_blocks"):
        return [1] * count
    if "head" in name:
        return [min(v, 2) for v in value]
    if "stem" in name:
        return None
    if any(word in name for word in ("hidden_size", "embed_dim")) and max(value) > 32:
        return [16 * 2**i for i in range(count)]
    return None


def _kept_layers(config: Any) -> tuple[int, dict[str, list[Any]]]:
    """Layers to keep, so that each kind that a list per layer names occurs."""
    lists = {n: vars(config).get(n) for n in _LAYER_LISTS}
    lists = {n: list(v) for n, v in lists.items() if isinstance(v, (list, tuple)) and v}
    if not lists:
        return 1, {}
    kinds = list(zip(*lists.values(), strict=False))
    keep = sorted({kinds.index(kind) for kind in dict.fromkeys(kinds)})[:4]
    return len(keep), {n: [v[i] for i in keep] for n, v in lists.items()}


def _is_named(config: Any, name: str, value: Any) -> bool:
    attribute = getattr(type(config), name, None)
    fixed = isinstance(attribute, property) and attribute.fset is None
    return not name.startswith("_") and not fixed


def _by_name(config: Any, level: int) -> dict[str, Any]:
    """Sizes of the fields whose names are known."""
    chosen: dict[str, Any] = {}
    for name, value in _fields(config).items():
        if getattr(type(config), "attribute_map", {}).get(name) == "num_stages":
            continue
        if not _is_named(config, name, value):
            continue
        given = value is not None or name.endswith("token_id") or (level > 1 and name in _FILLED)
        if isinstance(value, float) and "drop" in name:
            chosen[name] = 0.0
        elif isinstance(value, (list, tuple)) and level != 1:
            if (small := _small_list(name, list(value))) is not None:
                chosen[name] = small
        elif name in _SIZES and given:
            if (level != 1 or name in _GENTLE) and not isinstance(value, (list, tuple, dict)):
                chosen[name] = _SIZES[name]
    return chosen


def _overrides(config: Any, level: int) -> dict[str, Any]:
    fields, chosen = _fields(config), _by_name(config, level)
    layers, layer_lists = _kept_layers(config)
    if level > 1:
        layers = layers if layer_lists else 2
        chosen["use_cache"] = False
        rope = fields.get("rope_parameters")
        if isinstance(rope, dict) and rope.get("rope_theta", 0) is None:
            chosen["rope_parameters"] = {**rope, "rope_theta": 10000.0}
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"):
        if name in chosen:
            chosen[name] = layers
    chosen.update(layer_lists)
    if "qk_rope_head_dim" in chosen and "head_dim" in chosen:
        chosen["head_dim"] = chosen["qk_rope_head_dim"]
    if "kv_lora_rank" in chosen and "num_key_value_heads" in chosen:
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    if level != 1 and {"depths", "embed_dim"} <= set(fields):
        chosen["embed_dim"] = 16  # of the first of several stages
    if level != 1 and {"depths", "window_size"} <= set(fields):
        chosen.update(image_size=2 * IMAGE, window_size=2)  # the last stage has one window
    if level != 1:
        chosen.update({k: v for k, v in _LISTS.items() if k in fields})
    if level == 3:
        chosen.update(_fitted(config, fields, layers))
        chosen.pop("patch_size", None)
    if level != 3:
        chosen.pop("is_decoder", None)
    chosen["num_labels"] = LABELS
    return chosen


def _fitted(config: Any, fields: dict[str, Any], layers: int) -> dict[str, Any]:
    """Sizes that depend on one another."""
    made = {name: value for name, value in _FITTING.items() if name in fields}
    if "image_size" in fields:
        made["image_size"] = 4 * IMAGE
    if {"expand", "num_heads", "head_dim"} <= set(fields):
        made |= {"num_heads": 64 * fields["expand"] // 16, "head_dim": 16}
    if "layer_types" in fields and not fields["layer_types"]:
        made["layer_types"] = ["full_attention"] * layers
    depth = fields.get("num_hidden_layers")
    for name, value in fields.items():
        if name not in _LAYER_LISTS and isinstance(value, list) and len(value) == depth:
            made[name] = value[:layers]
    return made


def _children(config: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(config).items() if isinstance(v, hf.PreTrainedConfig)}


def _shrunk(config: Any, level: int) -> Any:
    """The configuration made anew with small sizes, its parts too."""
    aliases = getattr(type(config), "attribute_map", {})
    chosen = _overrides(config, level)
    chosen = {k: v for k, v in chosen.items() if k not in aliases or aliases[k] not in chosen}
    children = {name: _shrunk(child, level) for name, child in _children(config).items()}
    try:
        return type(config)(**chosen, **children)
    except Exception:
        accepted = set(inspect.signature(type(config).__init__).parameters)
        made = type(config)(**{k: v for k, v in chosen.items() if k in accepted})
        for name, value in {**chosen, **children}.items():
            setattr(made, name, value)
        return made


def tiny_config(model_type: str, level: int) -> Any:
    """A small configuration of a model type.

    Level 0 shrinks all, 1 depth and vocabulary only; 2 is 0 with two layers, without a cache and
    with what is left open filled in; 3 is 2 with sizes that are made to fit one another.
    """
    kind: Any = CONFIG_MAPPING[model_type]
    if model_type == "encoder-decoder":
        parts = [_shrunk(hf.BertConfig(), level) for _ in range(2)]
        made = kind.from_encoder_decoder_configs(*parts)
        made.decoder_start_token_id, made.pad_token_id = 1, 0
        return made
    made = _shrunk(kind(), level)
    if made.is_encoder_decoder and getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = 1
    return made


# --- models -----------------------------------------------------------------------------------
def _attempt(
    name: str, kind: Any, level: int, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Any]]:
    config = tiny_config(classes().get(name) or classes(more=True)[name], level)
    if "QuestionAnswering" in name:
        config.num_labels = 2  # a start and an end
    parts = [config, *_children(config).values()]
    expected = getattr(kind, "config_class", None)
    if expected is not None and not isinstance(config, expected):
        config = next((part for part in parts if isinstance(part, expected)), config)
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    if count > MAX_PARAMETERS:
        raise NotBuiltError(f"{count / 1e6:.0f} million parameters at its smallest")
    torch.manual_seed(0)
    model = kind(config).to(dtype).train()
    inputs = {
        k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in inputs_for(name, model, config, every=level == 3).items()
    }
    with torch.no_grad():
        loss = getattr(model(**inputs), "loss", None)
    if loss is not None and not bool(loss.isfinite().all()):
        raise NotBuiltError("its loss is not a number, run eagerly")
    return model, inputs


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model of the class and a batch for it, in float64 where it runs in float64.

    Raises:
        NotBuiltError: with the reason of the last attempt.
    """
    logging.disable(logging.WARNING)
    kind = getattr(hf, name, None)
    if kind is None:
        raise NotBuiltError("transformers does not export the class")
    reasons: list[str] = []
    for dtype in (torch.float64, torch.float32):
        for level in (0, 2, 3, 1):
            try:
                with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
                    warnings.simplefilter("ignore")
                    with redirect_stdout(io.StringIO()):
                        return _attempt(name, kind, level, dtype)
            except Exception as error:
                text = (str(error).strip().splitlines() or [""])[0][:160]
                reasons.append(
                    text if isinstance(error, NotBuiltError) else f"{type(error).__name__}: {text}"
                )
    raise NotBuiltError(reasons[0])
