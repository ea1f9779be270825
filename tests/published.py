"""Rows that tests of published runs start from."""

from __future__ import annotations

from typing import Any

__all__ = ["LLAMA", "row"]


def row(**changes: Any) -> dict[str, Any]:
    """A row in the schema of published files."""
    made = {
        "id": "a",
        "source": "here",
        "framework": "Megatron-LM (2021)",
        "model": "gpt",
        "shape": {"layers": 24, "hidden": 512, "heads": 8, "vocab": 1024, "ffn": 2048},
        "hardware": {"gpu": "A100-80GB", "gpus_per_node": 8},
        "gpus": 8,
        "parallel": {"dp": 2, "tp": 2, "pp": 2, "pp_schedule": "1F1B"},
        "seq_len": 128,
        "micro_batch": 2,
        "global_batch": 16,
        "precision": "fp16",
        "activation_ckpt": "full",
        "measured": {"step_time_s": 0.1},
        "derived": {},
    }
    return {**made, **changes}


LLAMA = {
    "framework": "torchtitan",
    "model": "llama3-8b",
    "shape": {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 2, "ffn": 1024, "vocab": 1024},
    "parallel": {"fsdp": 8, "tp": 1, "pp": 1, "cp": 1},
    "local_batch": 1,
    "micro_batch": None,
    "global_batch": 8,
    "precision": "bf16",
}
