"""Training rows of the tiny judge and of the tiny reward model."""

import json
import random
from pathlib import Path

import pytest

from examples.tiny.make_judgements import EACH, TEMPLATE, judgements, pairs, write_judgements, wrong_response
from examples.tiny.make_problems import draw_problems, write_problems


@pytest.fixture(scope="module")
def problems() -> list[dict[str, str]]:
    train, _ = draw_problems(seed=0)
    return train[:500]


@pytest.mark.parametrize("answer", ["0", "1", "9", "10", "11", "36"])
def test_a_wrong_response_is_never_the_right_answer(answer: str) -> None:
    draw = random.Random(0)
    assert answer not in {wrong_response(answer, draw) for _ in range(1000)}


def test_generated_judgement_accepts_only_the_right_answer(problems: list[dict[str, str]]) -> None:
    rows = judgements(problems, seed=0)
    assert len(rows) == EACH * len(problems)
    for row in rows:
        reference, response = row["prompt"].removesuffix("?").split("=", 1)
        assert row["prompt"] == TEMPLATE.format(reference=reference, response=response)
        assert row["response"] == ("yes" if response == reference else "no")
    assert sum(row["response"] == "yes" for row in rows) == len(rows) / 2


def test_generated_pairs_contain_right_answer_and_near_miss(problems: list[dict[str, str]]) -> None:
    rows = pairs(problems, seed=0)
    assert [row["response"] for row in rows] == [problem["ground_truth"] for problem in problems for _ in range(EACH)]
    distances = [
        abs(int(row["rejected"]) - int(row["response"]))
        for row in rows
        if row["rejected"].isdecimal() and row["rejected"].isascii()
    ]
    assert 0 not in distances
    assert sum(distance <= 2 for distance in distances) > len(rows) / 4
    assert len(set(distances)) > 10


def test_the_files_hold_the_rows_and_the_question(tmp_path: Path) -> None:
    write_problems(tmp_path / "problems", seed=0)
    train, _ = draw_problems(seed=0)
    for _ in range(2):
        write_judgements(tmp_path / "problems" / "train.jsonl", tmp_path / "judgements", seed=0)
    for name, rows in (("judgements", judgements(train, 0)), ("pairs", pairs(train, 0))):
        assert [
            json.loads(line) for line in (tmp_path / "judgements" / f"{name}.jsonl").read_text().splitlines()
        ] == rows
    assert (tmp_path / "judgements" / "prompt.txt").read_text() == f"{TEMPLATE}\n"
