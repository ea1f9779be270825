"""A batch with labels for any transformers class, by its name and what its forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

BATCH, LENGTH, VOCAB, LABELS, IMAGE = 4, 16, 128, 4, 32


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _ids(vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, max(vocab, 4), (BATCH, LENGTH), generator=generator)
    ids[:, -1] = 2
    return ids


def _images(config: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    vision = getattr(config, "vision_config", config)
    channels = getattr(vision, "num_channels", None) or 3
    size = getattr(vision, "image_size", None) or 64
    height, width = (size, size) if isinstance(size, int) else size
    frames = getattr(config, "num_frames", None)
    shape = (BATCH, *([frames] if isinstance(frames, int) else []), channels, height, width)
    return torch.randn(shape, generator=generator)


def _labels(name: str, ids: torch.Tensor, vocab: int, names: Iterable[str]) -> torch.Tensor:
    """Labels of a text model, by the kind that its name tells."""
    if "TokenClassification" in name:
        return ids % LABELS
    if "Classification" in name or "MultipleChoice" in name or "NextSentence" in name:
        return torch.arange(BATCH) % (LABELS if "Classification" in name else 2)
    if "MaskedLM" in name:
        return ids.where(ids % 3 == 0, -100)
    return _ids(vocab, 1) if "decoder_input_ids" in names else ids.clone()


def _beside(name: str, config: Any, accepted: Iterable[str]) -> dict[str, Any]:
    """Labels that have names of their own, and what some models want beside the text or image."""
    made: dict[str, Any] = {}
    if "QuestionAnswering" in name:
        made |= {"start_positions": torch.arange(BATCH), "end_positions": torch.arange(BATCH) + 3}
    if "PreTraining" in name:
        made |= {"next_sentence_label": torch.arange(BATCH) % 2}
        made |= {"sentence_order_label": torch.arange(BATCH) % 2}
    if any(word in name for word in ("ImageText", "ZeroShot", "Retrieval")):
        made["pixel_values"] = _images(config)
    vision = getattr(config, "vision_config", config)
    size, patch = getattr(vision, "image_size", 0), getattr(vision, "patch_size", 0)
    if "MaskedImage" in name and isinstance(size, int) and isinstance(patch, int):
        made["bool_masked_pos"] = torch.arange((size // patch) ** 2).expand(BATCH, -1) % 3 == 0
    made["return_loss"] = True
    return {k: v for k, v in made.items() if k in accepted}


def _series(config: Any, accepted: Iterable[str]) -> dict[str, Any]:
    """A batch for a model of time series."""
    generator = torch.Generator().manual_seed(0)
    channels = getattr(config, "num_input_channels", 1)
    past = torch.randn(BATCH, config.context_length, channels, generator=generator)
    future = torch.randn(BATCH, config.prediction_length, channels, generator=generator)
    made = {"past_values": past, "future_values": future, "target_values": torch.arange(BATCH) % 2}
    return {k: v for k, v in made.items() if k in accepted}


_SOUNDS = ("input_values", "input_features")


def _sound(config: Any, key: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", None) or 80
    shape = (BATCH, 1600) if key == "input_values" else (BATCH, 64, bins)
    return torch.randn(shape, generator=generator)


def _patches(config: Any) -> dict[str, torch.Tensor]:
    """Images as rows of patches, 4 by 4 of each."""
    vision = getattr(config, "vision_config", config)
    width = vision.num_channels * vision.patch_size**2
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(BATCH, 16, width, generator=generator),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.int64),
        "spatial_shapes": torch.full((BATCH, 2), 4),
    }


def _of_codebooks(made: dict[str, Any], books: int) -> None:
    """Token ids of several codebooks, one below another, and labels in columns."""
    ids = made["input_ids"]
    made["input_ids"] = ids.repeat_interleave(books, 0)
    made["labels"] = ids.unsqueeze(-1).repeat(1, 1, books)


def inputs_for(name: str, model: nn.Module, config: Any, *, every: bool = False) -> dict[str, Any]:
    """A batch with labels; with `every`, images and sounds too where text alone would be taken."""
    accepted = inspect.signature(model.forward).parameters
    made: dict[str, Any] = {}
    if "past_values" in accepted and hasattr(config, "context_length"):
        return _series(config, accepted)
    sound = next((n for n in _SOUNDS if n in accepted), None)
    if "input_ids" not in accepted and {"pixel_values", "inputs"} & set(accepted):
        made[next(n for n in accepted if n in ("pixel_values", "inputs"))] = _images(config)
        labels = torch.arange(BATCH) % LABELS
        if "SemanticSegmentation" in name:
            labels = (made["pixel_values"][:, 0] > 0).to(torch.int64)
    elif "input_ids" not in accepted and sound is not None:
        made[sound] = _sound(config, sound)
        labels = torch.arange(BATCH) % LABELS
        if "CTC" in name:
            labels = _ids(getattr(config, "vocab_size", VOCAB), 1)[:, :2]
    else:
        vocab = getattr(_text(config), "vocab_size", None) or VOCAB
        ids = _ids(vocab, 0)
        if "MultipleChoice" in name:
            ids = torch.stack([ids, ids.flip(0)], 1)
        made["input_ids" if "input_ids" in accepted else next(iter(accepted))] = ids
        if "attention_mask" in accepted:
            made["attention_mask"] = torch.ones_like(ids)
        labels = _labels(name, ids, vocab, accepted)
    made = {**_beside(name, config, accepted), **made}
    if "spatial_shapes" in accepted:
        made |= {k: v for k, v in _patches(config).items() if k in accepted}
    if every and "pixel_values" in accepted and not {"pixel_values", "inputs"} & set(made):
        made["pixel_values"] = _images(config)
    if every and sound is not None and sound not in made:
        made[sound] = _sound(config, sound)
    if "labels" in accepted:
        made["labels"] = labels
    books = getattr(config, "num_codebooks", None)
    tables = (m for n, m in model.named_modules() if n.endswith("embed_tokens"))
    several = any(isinstance(m, nn.ModuleList) for m in tables)  # one of each codebook
    if name.endswith("ForCausalLM") and several and isinstance(books, int):
        _of_codebooks(made, books)
    return made
