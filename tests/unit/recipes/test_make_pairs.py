"""Pairs are a right and a wrong answer to one prompt, and the summary counts the prompts that have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.recipes.make_pairs import write_pairs
from roll.config.schema.offline import DpoConfig
from tests.unit.config.test_examples import planned


def record(number: int, *said: tuple[str, bool, str]) -> dict[str, Any]:
    """Return a record of samples.jsonl with answers given as (text, has passed, finish reason)."""
    responses = [{"text": text, "passed": passed, "finish_reason": finish} for text, passed, finish in said]
    return {"row": {"prompt": f"Sum {number}"}, "responses": responses}


def written(tmp_path: Path, records: list[dict[str, Any]], most: int = 1) -> tuple[str, list[dict[str, str]]]:
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    said = write_pairs(tmp_path / "samples.jsonl", tmp_path / "out" / "pairs.jsonl", most)
    return said, [json.loads(line) for line in (tmp_path / "out" / "pairs.jsonl").read_text().splitlines()]


def test_pairs_only_finished_answers_of_one_prompt(tmp_path: Path) -> None:
    mixed = record(1, ("3", True, "stop"), ("4", False, "stop"), ("5 5", False, "length"), (" ", False, "stop"))
    right = record(2, ("3", True, "stop"), ("x", False, "length"))
    wrong, cut = record(3, ("4", False, "stop")), record(4, ("4", False, "length"))
    said, rows = written(tmp_path, [mixed, right, wrong, cut])
    assert rows == [{"prompt": "Sum 1", "chosen": "3", "rejected": "4"}]
    assert [int(word) for word in said.split() if word.isdecimal()] == [1, 1, 4, 1, 1, 1]


def test_the_most_frequent_mistake_is_rejected(tmp_path: Path) -> None:
    said = [(text, text == "3", "stop") for text in ("4", "5", "3", "5", "6")]
    _, rows = written(tmp_path, [record(1, *said)])
    assert rows == [{"prompt": "Sum 1", "chosen": "3", "rejected": "5"}]


def test_no_answer_is_in_two_pairs(tmp_path: Path) -> None:
    said = [(f"right {number}", True, "stop") for number in (1, 1, 2)]
    said += [(f"wrong {number}", False, "stop") for number in range(5)]
    _, rows = written(tmp_path, [record(1, *said)], most=3)
    assert len(rows) == len({row["chosen"] for row in rows}) == len({row["rejected"] for row in rows}) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{}\n", "cannot be read as samples"), (json.dumps(record(1, ("3", True, "stop"))), "more --samples")],
)
def test_samples_without_pairs_are_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(text)
    with pytest.raises(ValueError, match=problem):
        write_pairs(tmp_path / "samples.jsonl", tmp_path / "pairs.jsonl", 1)
    assert not (tmp_path / "pairs.jsonl").exists()


def test_dpo_starts_from_the_fine_tuned_model() -> None:
    tuned, preferred = (planned(f"recipes/smollm2_{name}")[0] for name in ("sums_sft", "dpo"))
    assert isinstance(preferred, DpoConfig) and preferred.actor_train.data_args is not None
    assert Path(preferred.pretrain) == Path(tuned.output_dir) / "export"
    columns = preferred.actor_train.data_args
    assert {columns.prompt, columns.chosen, columns.rejected} == {"prompt", "chosen", "rejected"}
