"""Tiny hybrid models with Qwen3.5's architecture (gated delta rule and attention layers) and the tokenizer of
`examples/tiny`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from examples.tiny.make_model import END_ID, PAD_ID, VOCABULARY, build_tokenizer

Kind = Literal["dense", "experts", "seeing"]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    # vLLM's CPU kernel supports 128 and no smaller size.
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "pad_token_id": PAD_ID,
    "eos_token_id": END_ID,
    "bos_token_id": None,
    "dtype": "float32",
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
VISION: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
SEEN: dict[str, Any] = {
    "image_token_id": 300,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
}


def build_hybrid(kind: Kind = "dense") -> PreTrainedModel:
    """Return a model with random fp32 weights, including norms and decays. The weights are the same in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        if kind == "experts":
            model: PreTrainedModel = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SHAPE, **EXPERTS))
        elif kind == "dense":
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, intermediate_size=128))
        else:
            text = SHAPE | {"intermediate_size": 128, "tie_word_embeddings": True}
            model = Qwen3_5ForConditionalGeneration(
                Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=True, **SEEN)
            )
        for name, parameter in model.named_parameters():
            if "norm" in name or "dt_bias" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
            if "A_log" in name:
                parameter.data.uniform_(
                    -4, 0
                )  # transformers' initialisation would make most states decay within one token
    model.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=PAD_ID)
    return model


def write_hybrid(folder: Path, kind: Kind = "dense") -> Path:
    """Write the model and its tokenizer to the folder, and return the folder."""
    build_hybrid(kind).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
