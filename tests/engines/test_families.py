"""Families that change their logits or their attention in vLLM on the CPU: its log-probs are the trainer's, before and
after a sync, in fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from examples.tiny.make_model import END_ID, PAD_ID, VOCABULARY, build_tokenizer
from tests.engines.generating import policy, running
from tests.engines.test_experts import TOLERANCE, largest_difference

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("as_in_workers")]
# vLLM has kernels for heads of at least 32 numbers on the CPU.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": END_ID,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.1, "embedding_multiplier": 3.0},
    "gemma2": {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 6.0,
    },
    "cohere": {"logit_scale": 0.25},
}


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_log_probs_are_the_trainers(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **FAMILIES[kind]))
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter, std=0.5)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    with running("vllm", tmp_path / "model", tmp_path) as engine:
        found = largest_difference(engine)
        before = engine.policy
        engine.push(policy(tmp_path / "model", seed=1))
        after = largest_difference(engine, before)
    print(f"{kind}: {found:.3g} before a sync, {after:.3g} after it")
    assert max(found, after) < TOLERANCE
