"""The tiny arithmetic problems: their answers, their sets and their files."""

import json
from pathlib import Path

import pytest

from examples.tiny.make_problems import HELDOUT, TRAIN, draw_problems, problem, write_problems


@pytest.mark.parametrize(
    ("digits", "prompt", "answer", "wrong"),
    [("7492", "7+4+9+2=", "22", "25"), ("0000", "0+0+0+0=", "0", "1"), ("9999", "9+9+9+9=", "36", "37")],
)
def test_a_problem_and_its_answers(digits: str, prompt: str, answer: str, wrong: str) -> None:
    row = {"prompt": prompt, "response": answer, "rejected": wrong, "ground_truth": answer, "tag": "arithmetic"}
    assert problem(digits) == row


@pytest.mark.parametrize("seed", [0, 1])
def test_no_problem_occurs_twice_or_in_both_sets(seed: int) -> None:
    train, heldout = draw_problems(seed)
    assert (len(train), len(heldout)) == (TRAIN, HELDOUT)
    assert len({row["prompt"] for row in train + heldout}) == TRAIN + HELDOUT


def test_the_seed_decides_the_problems() -> None:
    assert draw_problems(0) == draw_problems(0)
    assert draw_problems(0) != draw_problems(1)


def test_problem_files_hold_rows_and_replace_folder(tmp_path: Path) -> None:
    folder = tmp_path / "problems"
    write_problems(folder, seed=0)
    write_problems(folder, seed=1)
    train, heldout = draw_problems(1)
    for name, rows in (("train", train), ("heldout", heldout)):
        assert [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] == rows
    assert [entry.name for entry in tmp_path.iterdir()] == ["problems"]
