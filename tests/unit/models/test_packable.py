"""Loading refuses models for which packed sequences would silently get wrong log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTJConfig,
    GPTJForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from roll.config.schema.model import ModelConfig
from roll.data.packing import concatenate
from roll.errors import DataError
from roll.models.load import load_causal_model, not_packable
from roll.models.packed import PackedPolicy, longest_packable, packed_inputs

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("config", "kind", "why"),
    [
        (Qwen2Config(**SHAPE), Qwen2ForCausalLM, None),
        (Qwen3Config(**SHAPE, head_dim=8), Qwen3ForCausalLM, None),
        (LlamaConfig(**SHAPE), LlamaForCausalLM, None),
        (MistralConfig(**SHAPE), MistralForCausalLM, None),
        (GraniteConfig(**SHAPE, logits_scaling=1.0), GraniteForCausalLM, None),
        (GraniteConfig(**SHAPE, logits_scaling=8.0), GraniteForCausalLM, None),
        (Gemma2Config(**SHAPE, head_dim=8), Gemma2ForCausalLM, None),
        (
            Gemma3TextConfig(**SHAPE, head_dim=8, final_logit_softcapping=30.0),
            Gemma3ForCausalLM,
            "its final_logit_softcapping of 30 changes logits",
        ),
        (Gemma3TextConfig(**SHAPE, head_dim=8, use_bidirectional_attention=True), Gemma3ForCausalLM, "its tokens see"),
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4), BloomForCausalLM, "it has its own attention"),
        (
            GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=4),
            GPTJForCausalLM,
            "it has its own attention",
        ),
        (PhiConfig(**SHAPE), PhiForCausalLM, "its output matrix has a bias"),
        (CohereConfig(**SHAPE), CohereForCausalLM, None),
        (GptOssConfig(**SHAPE, head_dim=8, num_local_experts=2, num_experts_per_tok=1), GptOssForCausalLM, None),
        (
            Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
            Lfm2ForCausalLM,
            r"it has layers \((conv|linear_attention)\) that treat",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_model_that_packing_would_change_is_refused(
    config: Any, kind: type[PreTrainedModel], why: str | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = kind(config)
    if why is None:
        assert not_packable(model) is None
        return
    model.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=f"'{tmp_path}' cannot be used: {why}"):
        load_causal_model(str(tmp_path), ModelConfig.model_validate({"dtype": "fp32"}))


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "factor": 4.0,
}


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, None),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}, None),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 64),
        (LONGROPE | {"original_max_position_embeddings": 16}, 16),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else None,
)
def test_longest_packable_sequence_follows_rope_type(rope: dict[str, Any], longest: int | None) -> None:
    assert longest_packable(LlamaConfig(**SHAPE, max_position_embeddings=64, rope_parameters=rope)) == longest


def test_too_long_packed_sequence_is_refused(tmp_path: Path) -> None:
    rope = LONGROPE | {"original_max_position_embeddings": 16}
    LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=64, rope_parameters=rope)).save_pretrained(tmp_path)
    policy = PackedPolicy(load_causal_model(str(tmp_path), ModelConfig.model_validate({"dtype": "fp32"})))

    def said(*lengths: int) -> torch.Tensor:
        ids = [np.arange(length, dtype=np.int32) for length in lengths]
        return policy(packed_inputs(concatenate(ids, [part > 0 for part in ids]), "cpu"))[0]

    assert len(said(10, 16)) == 24
    with pytest.raises(ValueError, match="17 tokens exceed 16, "):
        said(10, 17)
