"""The benchmarks' models load like any other, and their prompts have the requested length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.models import PAD_ID, SHAPES, build_config, build_model, build_tokenizer, write
from roll.config.schema.model import DataConfig
from roll.config.schema.roles import RewardConfig
from roll.data.prompts import prepare_prompts
from roll.models.load import load_tokenizer

BILLIONS = {"0.5b": 0.494, "1.5b": 1.544, "7b": 7.616}
"""Billions of parameters of the Qwen2.5 models, from their model cards."""


@pytest.mark.parametrize("shape", BILLIONS)
def test_shapes_have_the_parameters_of_qwen(shape: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build_config(shape))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(BILLIONS[shape], abs=0.001)


def test_cut_mixture_of_experts_differs_in_layers_only() -> None:
    config = build_config("30b-a3b-4")
    config.num_hidden_layers = 48
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 30_532_122_624  # from its model card


def test_pipeline_reads_written_model_and_prompts(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, "tiny", prompts=5, prompt_tokens=128)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        expected = 0.02 if parameter.ndim == 2 else 0.0
        assert float(parameter.detach().float().std()) == pytest.approx(expected, rel=0.1), name
    made, tokens = build_model("tiny", seed=0), torch.arange(60, 90)[None]
    torch.testing.assert_close(made(tokens).logits, model(tokens).logits)
    prompts = prepare_prompts(
        DataConfig.model_validate({"file_name": str(folder / "prompts.jsonl"), "template": "raw", "prompt": "prompt"}),
        load_tokenizer(str(folder)),
        128,
        {"benchmark": RewardConfig.model_validate({"reward": "exact_match"})},
    )
    assert [len(prompts.prompt(index, index).token_ids) for index in range(len(prompts))] == [128] * 5
    assert AutoConfig.from_pretrained(folder).pad_token_id == PAD_ID


def test_every_id_of_the_vocabulary_is_a_token() -> None:
    vocabulary = SHAPES["tiny"]["vocab_size"]
    tokenizer = build_tokenizer(vocabulary)
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocabulary))
    assert len(tokenizer.decode(list(range(1000, 1010)))) == 40
