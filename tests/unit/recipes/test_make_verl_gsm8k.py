"""verl's prompts are made from prepared rows, and rows with another prompt are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.recipes.make_verl_gsm8k import ASKED, write_verl
from roll.data.prepare import main as prepare
from tests.unit.data.public_copies import write_gsm8k


def test_prepared_rows_get_the_prompts_of_verl(tmp_path: Path) -> None:
    source = write_gsm8k(tmp_path / "copy")
    assert prepare(["gsm8k", "--source", str(source), "--output", str(tmp_path / "gsm8k"), "--validation", "2"]) == 0
    write_verl(tmp_path / "gsm8k", tmp_path / "verl")
    lines = {name: (tmp_path / name).read_text().splitlines() for name in ("verl/train.jsonl", "verl/test.jsonl")}
    parts = [(tmp_path / "gsm8k" / name).read_text().splitlines() for name in ("train.jsonl", "validation.jsonl")]
    assert len(lines["verl/train.jsonl"]) == sum(map(len, parts)) and lines["verl/test.jsonl"]
    first, given = json.loads(lines["verl/train.jsonl"][0]), json.loads(parts[0][0])
    question = given["prompt"].partition("\nReason")[0]
    assert first == {"prompt": f"{question} {ASKED}", "ground_truth": given["ground_truth"], "tag": "gsm8k"}


def test_another_prompt_is_refused(tmp_path: Path) -> None:
    for name in ("train.jsonl", "validation.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": "1 + 1", "ground_truth": "2"}) + "\n")
    with pytest.raises(ValueError, match="prepare the rows"):
        write_verl(tmp_path, tmp_path / "verl")
