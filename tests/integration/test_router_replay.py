"""Whole runs of a mixture of experts with and without router replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.engines.interpreted_triton import interpreted_triton
from tests.integration.conftest import World
from tests.integration.test_model_families import TOKENS, write

pytestmark = [pytest.mark.engines, pytest.mark.full]


def experts() -> PreTrainedModel:
    config = AutoConfig.for_model(
        "qwen3_moe",
        **TOKENS,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=16,
        num_experts_per_tok=4,
        mlp_only_layers=[0],
        norm_topk_prob=True,
        initializer_range=0.1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config)


def test_a_run_replays_the_engines_routes(world: World, tmp_path: Path) -> None:
    torch.manual_seed(0)
    write(experts(), world.folder / "experts", pickled=False)
    keys = ["pretrain=experts", "max_steps=2", "save_steps=0", "num_return_sequences_in_group=4"]
    keys += ["lora_target=null", "entropy_loss_coef=0.1", "actor_train.training_args.learning_rate=1e-4"]
    keys += ["actor_train.model_args.dtype=bf16", "actor_infer.model_args.dtype=bf16", "actor_train.world_size=1"]
    found = {}
    with interpreted_triton(tmp_path) as variables:
        for name, replays in (("chosen", "false"), ("replayed", "true")):
            process = world.start(*world.rlvr(name, *keys, f"+router_replay={replays}"), environment=variables)
            outcome = world.wait(process)
            assert outcome.status == 0, outcome.output
            found[name] = world.metrics(name)[1:]
    assert all(step["router/unknown_fraction"] == 0 for step in found["replayed"])
    assert not any("router/unknown_fraction" in step for step in found["chosen"])
    before, after = (sum(step["mismatch/kl"] for step in steps) for steps in found.values())
    assert 0 < after < before
