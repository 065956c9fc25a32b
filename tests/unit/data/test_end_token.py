"""A custom end-of-sequence token: it is set in the tokenizer of a copy of the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from roll.config.schema.model import DataConfig
from roll.data.examples import LengthLimits, prepare_examples
from roll.models.load import load_tokenizer

Write = Callable[..., str]


def test_end_token_of_copied_model_ends_rows(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """This is the remedy for `--eot_token` of DeepSpeed's examples.

    Generation stops at `eos_token_id` of the generation configuration in the same folder.
    """
    copy = tmp_path / "copy"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|mine|>"]})
    tokenizer.save_pretrained(copy)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    assert settings["eos_token"] != "<|mine|>"
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|mine|>"}))
    rows = write_jsonl([{"q": "One?", "a": "Two."}])
    columns = DataConfig.model_validate({"file_name": rows, "template": "raw", "prompt": "q", "response": "a"})
    examples = prepare_examples(
        columns, load_tokenizer(str(copy)), LengthLimits(100, 100), cache_folder=tmp_path / "cache"
    )
    (sequence,) = examples.example(0).sequences
    assert tokenizer.decode(sequence.token_ids[sequence.response_mask]) == "Two.<|mine|>"
