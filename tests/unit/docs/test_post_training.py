"""The experiments on the user's own rows in `docs/post_training.md` learn the responses of the rows that the page
shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.config.schema.model import DataConfig
from roll.config.schema.roles import RewardConfig
from roll.data.examples import Kind, LengthLimits, prepare_examples
from roll.data.prompts import prepare_prompts
from roll.models.load import load_tokenizer
from roll.rewards.answers import ground_truth
from tests.unit.docs.pages import blocks

PAGE = "docs/post_training.md"


def experiment(name: str) -> dict[str, Any]:
    (text,) = [block.text for block in blocks(PAGE) if block.option("file") == f"my_experiments/{name}.yaml"]
    return yaml.safe_load(text)


@pytest.mark.parametrize(
    ("name", "role", "kind"), [("my_sft", "sft_train", "responses"), ("my_dpo", "actor_train", "pairs")]
)
def test_the_rows_of_the_page_fit_its_experiment(
    name: str, role: str, kind: Kind, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = experiment(name)
    (row,) = [json.loads(block.text) for block in blocks(PAGE) if block.option("row") == name]
    data_args = DataConfig.model_validate(keys[role]["data_args"])
    assert isinstance(data_args.file_name, str)
    Path(data_args.file_name).write_text(json.dumps(row) + "\n")
    limits = LengthLimits(keys["prompt_length"], keys["response_length"])
    tokenizer = load_tokenizer(str(tiny_model))
    examples = prepare_examples(data_args, tokenizer, limits, kind, cache_folder=tmp_path / "cache")
    assert len(examples) == 1
    example = examples.example(0)
    learnt = [tokenizer.decode(one.token_ids[one.response_mask], skip_special_tokens=True) for one in example.sequences]
    assert learnt == [row[column] for column in ("response", "chosen", "rejected") if column in row]


@pytest.mark.parametrize("role", ["actor_train", "validation"])
def test_the_prompt_of_the_page_fits_its_experiment(
    role: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = experiment("my_rlvr_cpu")
    (row,) = [json.loads(block.text) for block in blocks(PAGE) if block.option("row") == "my_rlvr_cpu"]
    data_args = DataConfig.model_validate(keys[role]["data_args"])
    assert isinstance(data_args.file_name, str)
    Path(data_args.file_name).write_text(json.dumps(row) + "\n")
    sections = {name: RewardConfig.model_validate(block) for name, block in keys["rewards"].items()}
    prompts = prepare_prompts(
        data_args, load_tokenizer(str(tiny_model)), keys["prompt_length"], sections, cache_folder=tmp_path / "cache"
    )
    assert len(prompts) == 1
    prompt = prompts.prompt(0, 0)
    assert (prompt.text, prompt.domain, ground_truth(prompt.row)) == (row["prompt"], "exact_match", row["ground_truth"])
