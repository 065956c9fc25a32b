"""The experiments on the user's own rows in `docs/post_training.md` learn the responses of the rows that the page shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.config.schema.model import DataConfig
from roll.data.examples import Kind, Limits, prepare_examples
from roll.models.load import load_tokenizer
from tests.unit.docs.pages import blocks

PAGE = "docs/post_training.md"


def experiment(name: str) -> dict[str, Any]:
    (text,) = [block.text for block in blocks(PAGE) if block.option("file") == f"my_experiments/{name}.yaml"]
    return yaml.safe_load(text)


@pytest.mark.parametrize(("name", "role", "kind"), [("my_sft", "sft_train", "responses"), ("my_dpo", "actor_train", "pairs")])
def test_the_rows_of_the_page_fit_its_experiment(
    name: str, role: str, kind: Kind, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = experiment(name)
    (row,) = [json.loads(block.text) for block in blocks(PAGE) if block.option("row") == name]
    data_args = DataConfig.model_validate(keys[role]["data_args"])
    assert isinstance(data_args.file_name, str)
    Path(data_args.file_name).write_text(json.dumps(row) + "\n")
    limits = Limits(keys["prompt_length"], keys["response_length"])
    tokenizer = load_tokenizer(str(tiny_model))
    examples = prepare_examples(data_args, tokenizer, limits, kind, cache_folder=tmp_path / "cache")
    assert len(examples) == 1
    example = examples.example(0)
    learnt = [tokenizer.decode(one.token_ids[one.response_mask], skip_special_tokens=True) for one in example.sequences]
    assert learnt == [row[column] for column in ("response", "chosen", "rejected") if column in row]
