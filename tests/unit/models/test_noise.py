"""Dropout and the other noise of models in training: off, unless the model's own is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from roll.config.schema.model import ModelConfig
from roll.models.attention import packed_attention
from roll.models.layers import disable_noise
from roll.models.load import load_policy
from roll.models.packed import PackedPolicy, packed_inputs
from tests.unit.models.test_policy import sequences

WIDE: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED: dict[str, Any] = WIDE | {"intermediate_size": 48, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = GATED | {"num_local_experts": 4, "num_experts_per_tok": 2}


def opt() -> PreTrainedModel:
    noise: dict[str, Any] = {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5}
    return OPTForCausalLM(OPTConfig(**WIDE, **noise, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64))


def gpt2() -> PreTrainedModel:
    noise: dict[str, Any] = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=64, **noise))


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**GATED, attention_dropout=0.5))


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**EXPERTS, router_jitter_noise=0.5))


def phimoe() -> PreTrainedModel:
    return PhimoeForCausalLM(PhimoeConfig(**EXPERTS, input_jitter_noise=0.5, lm_head_bias=False))


MODELS = [opt, gpt2, qwen2, mixtral, phimoe]


def policy(model: PreTrainedModel, folder: Path, **keys: object) -> PackedPolicy:
    torch.manual_seed(0)
    model.save_pretrained(folder)
    return load_policy(str(folder), ModelConfig.model_validate({"dtype": "fp32"} | keys), seed=0)


def log_probs(policy: PackedPolicy) -> Tensor:
    return policy(packed_inputs(sequences([9, 3, 20]), "cpu", 1.0))[0].detach()


@pytest.mark.parametrize("make", MODELS)
def test_a_model_in_training_adds_no_noise(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    quiet = policy(make(), tmp_path)
    expected = log_probs(quiet.eval())
    quiet.train()
    disable_noise(quiet.causal)
    for _ in range(3):
        assert torch.equal(log_probs(quiet), expected)


@pytest.mark.parametrize("make", MODELS)
def test_the_noise_of_a_model_on_request(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    noisy = policy(make(), tmp_path, dropout=True)
    expected = log_probs(noisy.eval())
    noisy.train()
    first, second = log_probs(noisy), log_probs(noisy)
    assert not torch.allclose(first, expected) and not torch.allclose(first, second)


def test_an_adapter_keeps_its_own_dropout(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"lora_target": "all-linear", "lora_dropout": 0.5}
    adapted = policy(qwen2(), tmp_path, **keys)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.train()
    disable_noise(adapted.causal)
    assert not torch.allclose(log_probs(adapted), log_probs(adapted))


def test_packed_attention_drops_weights_and_keeps_their_mean() -> None:
    """Each output is a sum of weights that is 1 without dropout; `spread` is the exact deviation for equal weights."""
    torch.manual_seed(0)
    heads, tokens, drop = 512, 16, 0.25
    flat = torch.zeros(1, heads, tokens, 1)
    kept: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, tokens], dtype=torch.int32), "max_length_q": tokens}
    out, _ = packed_attention(torch.nn.Identity(), flat, flat, flat + 1, None, **kept, dropout=drop)
    of_last = out[0, -1, :, 0]
    spread = (drop / (1 - drop) / tokens) ** 0.5
    assert abs(of_last.mean() - 1) < 4 * spread / heads**0.5 and abs(of_last.std() / spread - 1) < 0.15
