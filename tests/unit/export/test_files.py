"""An exported model loads again as the same model, with its tokenizer and generation configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen2Config

from roll.config.schema.model import DataConfig, ModelConfig
from roll.export.convert import response_ends
from roll.export.source import CheckpointSource
from roll.models.export import write_generation_config, write_model
from roll.models.load import load_causal_model, load_tokenizer
from roll.models.weights import WeightView

SAMPLED = {"do_sample": True, "temperature": 0.6, "eos_token_id": [1, 2]}
INCONSISTENT = {"temperature": 0.6, "top_p": 0.9}
"""A generation configuration like those of some published models: transformers reads it, but refuses to write it."""


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("generation", [SAMPLED, INCONSISTENT, None])
def test_exported_model_keeps_tokenizer_and_generation_config(
    tmp_path: Path, tied: bool, generation: dict[str, Any] | None
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    AutoModelForCausalLM.from_config(Qwen2Config(vocab_size=64, tie_word_embeddings=tied, **shape)).save_pretrained(
        base
    )
    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template="{{ 1 }}").save_pretrained(base)
    (base / "generation_config.json").unlink()
    if generation is not None:
        (base / "generation_config.json").write_text(json.dumps(generation))

    model = load_causal_model(str(base), ModelConfig.model_validate({"dtype": "fp32"}), packed=False)
    view = WeightView(model)
    names = [spec.name for spec in view.model_specs()]
    assert ("lm_head.weight" in names) is not tied
    write_model(
        out, iter([view.model_tensors(names[:3]), view.model_tensors(names[3:])]), model, load_tokenizer(str(base))
    )

    token_ids = torch.arange(64)[None]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(token_ids).logits, model(token_ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.chat_template, tokenizer.eos_token) == ("{{ 1 }}", "</s>")
    assert (generation or {}).items() <= json.loads((out / "generation_config.json").read_text()).items()


@pytest.mark.parametrize(
    ("own", "ends", "written"),
    [(None, (), None), (None, (0,), [1, 0]), (1, (0,), [1, 0]), ([1, 0], (0,), [1, 0]), (1, (1,), 1), (1, (), 1)],
)
def test_generation_config_names_every_end(
    own: int | list[int] | None, ends: tuple[int, ...], written: object, tmp_path: Path
) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    config = None if own is None else GenerationConfig(eos_token_id=own)
    write_generation_config(tmp_path, config, tokenizer, ends)
    file = tmp_path / "generation_config.json"
    assert (json.loads(file.read_text())["eos_token_id"] if file.exists() else None) == written
    assert config is None or config.eos_token_id == own, "the model's own stays as it was"


def test_a_tokenizer_without_template_adds_no_end(caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint can be exported although rows of its format could not be prepared with the tokenizer."""
    rows = DataConfig.model_validate({"file_name": "rows.jsonl", "prompt": "prompt"})
    source = CheckpointSource(Path("step_1"), "model", ModelConfig.model_validate({}), 0, "sft", rows)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"</s>": 0}, "</s>")), eos_token="</s>"
    )
    assert response_ends(source, tokenizer) == ()
    assert "no chat template" in caplog.text
