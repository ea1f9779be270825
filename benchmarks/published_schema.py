"""Rows as they are published, brought to one spelling before anything reads them.

Frameworks name the same size differently (`layers`, `num_layers`, `n_layers`). A name that is not
known is left as it is; a value of the wrong kind becomes nothing, and `published_rows` says what is
missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.published_hardware import RowError

__all__ = ["count", "flag", "normal"]

_ROW = {
    "gpus": ("num_gpus", "n_gpus", "world_size", "num_devices"),
    "seq_len": ("seq_length", "sequence_length", "seq", "sequence_len"),
    "micro_batch": ("micro_batch_size", "microbatch", "microbatch_size", "mbs"),
    "local_batch": ("local_batch_size", "batch_per_rank", "lbs"),
    "global_batch": ("global_batch_size", "gbs", "train_batch_size"),
    "microbatches": ("num_microbatches", "grad_accum", "gradient_accumulation_steps"),
    "activation_ckpt": ("recompute", "recomputation", "activation_checkpointing", "ac"),
    "precision": ("dtype",),
    "torch_compile": ("compile", "compiled"),
    "shape": ("model_shape", "model_config"),
    "parallel": ("parallelism",),
}
_SHAPE = {
    "layers": ("num_layers", "n_layers", "n_layer", "num_hidden_layers"),
    "hidden": ("hidden_size", "d_model", "dim", "n_embd"),
    "heads": ("num_heads", "n_heads", "n_head", "num_attention_heads"),
    "kv_heads": ("num_kv_heads", "n_kv_heads", "num_query_groups", "num_key_value_heads"),
    "ffn": ("ffn_hidden", "ffn_hidden_size", "intermediate_size", "d_ff", "ffn_dim"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "experts": ("num_experts", "n_experts", "num_local_experts"),
    "head_dim": ("kv_channels",),
}
_SIZES = ("", "_size", "_degree")
_PARALLEL = {
    "tp": ("tensor", "tensor_parallel", "tensor_model_parallel"),
    "pp": ("pipeline", "pipeline_parallel", "pipeline_model_parallel"),
    "cp": ("context", "context_parallel"),
    "dp": ("data", "data_parallel"),
    "fsdp": ("dp_shard", "data_parallel_shard", "fully_sharded"),
    "replicas": ("dp_replicate", "data_parallel_replicate", "hsdp"),
    "ep": ("expert", "experts", "expert_parallel", "expert_model_parallel"),
    "zero": ("zero_stage",),
    "sequence_parallel": ("sp",),
    "distributed_optimizer": ("use_distributed_optimizer",),
}
_HARDWARE = {
    "gpu": ("name", "device", "gpu_type", "accelerator"),
    "gpus_per_node": ("devices_per_node", "num_gpus_per_node"),
}
_MEASURED = {
    "step_time_s": ("iteration_time_s", "seconds_per_step", "step_s"),
    "step_time_ms": ("iteration_time_ms",),
    "tokens_per_s_per_gpu": ("tokens_per_sec_per_gpu", "tokens_per_second_per_gpu", "tps_per_gpu"),
    "tokens_per_s": ("tokens_per_sec", "tokens_per_second"),
}


def normal(row: Any) -> dict[str, Any]:
    """A row with the names of this benchmark; parts that are absent are empty.

    Args:
        row: as it stands in the file.
    """
    if not isinstance(row, Mapping):
        return {key: {} for key in ("shape", "hardware", "parallel", "measured", "derived")}
    made = _named(row, _ROW)
    hardware = made.get("hardware")
    if isinstance(hardware, str):
        made["hardware"] = {"gpu": hardware}
    parts = {"shape": _SHAPE, "hardware": _HARDWARE, "measured": _MEASURED, "derived": _MEASURED}
    for key, names in parts.items():
        made[key] = _named(made.get(key), names)
    sized = {
        key: tuple(n + size for n in (key, *others) for size in _SIZES if n + size != key)
        for key, others in _PARALLEL.items()
    }
    parallel = made["parallel"] = _named(made.get("parallel"), sized)
    if parallel.get("fsdp") is True:  # a way and not a number of ranks
        parallel["fsdp"] = None
        parallel.setdefault("zero", 3)
    return made


def _named(given: Any, names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """`given` with its own names in place of others, in any case; the first that has a value."""
    if not isinstance(given, Mapping):
        return {}
    made = {str(key): value for key, value in given.items()}
    for key, others in names.items():
        spelled = {name.lower(): name for name in made}
        for other in (key, *others):
            there = spelled.get(other)
            if there is not None and made.get(key) is None and made[there] is not None:
                made[key] = made.pop(there)
    return made


def count(value: Any, name: str, default: int = 0) -> int:
    """A whole number above 0, or `default` where nothing is said.

    Raises:
        RowError: anything else.
    """
    if value is None or value == "" or value is False:
        return default
    try:
        number = math.nan if value is True else float(value)
    except (TypeError, ValueError):
        raise RowError(f"{name} is no number: {value!r}") from None
    if number == 0 and default:
        return default
    if not math.isfinite(number) or number <= 0 or number != int(number):
        raise RowError(f"{name} is no whole number above 0: {value!r}")
    return int(number)


def flag(value: Any) -> bool:
    """Yes or no, from a bool, a number or a word."""
    if isinstance(value, str):
        return value.strip().lower() not in ("", "0", "false", "no", "none", "off", "n/a")
    return bool(value)
