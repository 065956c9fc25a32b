"""The config.json of a small model, of which the plan counts parameters and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 5000,
}


def write_shape(folder: Path, **changed: Any) -> Path:
    """Write a config.json with the given keys changed, and return its path."""
    file = folder / "config.json"
    file.write_text(json.dumps(SHAPE | changed))
    return file
