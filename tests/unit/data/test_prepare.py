"""`python -m roll.data.prepare`, run on small data sets with the layout of the public ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from roll.data.prepare import TEST, TRAIN, VALIDATION, SetRequest, main, write_set
from roll.data.public_rows import AnotherLayout, LeftOut
from roll.data.public_sets import (
    MARKED,
    SETS,
    conversation,
    gsm8k,
    gsm8k_marked,
    gsm8k_pairs,
    instruction_of_ifeval,
    preferences,
    task_of_humaneval,
    task_of_mbpp,
)
from roll.rewards.answers import last_boxed
from roll.rewards.functions.code_sandbox import code_sandbox
from roll.rewards.functions.math_rule import math_rule
from roll.types import Prompt
from tests.unit.data.public_copies import gsm8k_row, pair_row, write_capybara, write_gsm8k, write_ultrafeedback

FILES = (TRAIN, VALIDATION, TEST)
WRITERS = {"gsm8k": write_gsm8k, "ultrafeedback": write_ultrafeedback, "capybara": write_capybara}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def wish(name: str, source: Path, output: Path, validation: int = 4, seed: int = 42) -> SetRequest:
    return SetRequest(name, str(source), output, validation, seed)


def test_a_problem_of_gsm8k_by_hand() -> None:
    answer = "Ann sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72 clips.\n#### 72"
    row = gsm8k({"question": " How many clips did Ann sell?\n", "answer": answer})
    assert row.key == "How many clips did Ann sell?"
    assert row.columns == {
        "prompt": "How many clips did Ann sell?\nReason step by step, and put the final answer within \\boxed{}.",
        "response": "Ann sold 48/2 = 24 clips in May.\nAltogether 48+24 = 72 clips.\nThe final answer is \\boxed{72}.",
        "ground_truth": "72",
        "tag": "math_rule",
    }


def test_marked_answers_stand_after_the_mark() -> None:
    row = gsm8k_marked({"question": "How many?", "answer": "Ann sold 48/2 = <<48/2=24>>24.\n#### 1,024"})
    assert row.columns == {
        "prompt": f"How many?\n{MARKED}",
        "response": "Ann sold 48/2 = 24.\n#### 1024",
        "ground_truth": "1024",
        "tag": "gsm8k",
    }


def test_a_pair_differs_in_its_last_result() -> None:
    answer = "Ann sold 48/2 = <<48/2=24>>24.\nSo 24+1,000 = <<24+1000=1024>>1,024 in all.\n#### 1,024"
    columns = gsm8k_pairs({"question": "How many?", "answer": answer}).columns
    assert columns == gsm8k_pairs({"question": "How many?", "answer": answer}).columns
    assert columns["chosen"] == "Ann sold 48/2 = 24.\nSo 24+1,000 = 1,024 in all.\n#### 1024"
    wrong = columns["rejected"].rpartition("#### ")[2]
    assert columns["rejected"] == f"Ann sold 48/2 = 24.\nSo 24+1,000 = {wrong} in all.\n#### {wrong}"
    assert wrong != "1024" and int(wrong) >= 0
    for other in ("It is 24.\n#### 24", "It is <<20+4=24>>24, or two dozen.\n#### 2"):
        with pytest.raises(LeftOut, match="last calculation"):
            gsm8k_pairs({"question": "How many?", "answer": other})


def test_solutions_of_tasks_pass_their_cases() -> None:
    text = {"text": "Write add.", "code": "def add(a, b):\n    return a + b", "test_setup_code": "import math"}
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == math.floor(0.5)"]
    start = {
        "prompt": 'def add(a, b):\n    """Add."""\n',
        "entry_point": "add",
        "canonical_solution": "    return a + b\n",
    }
    check = {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0\n"}
    for row in (task_of_mbpp(text | {"test_list": tests}), task_of_humaneval(start | check)):
        prompt = Prompt(0, np.array([1]), str(row.columns["prompt"]), "code_sandbox", row.columns)
        right = str(row.columns["response"])
        assert code_sandbox(prompt, right, row.columns).value == 1.0
        assert code_sandbox(prompt, right.replace("a + b", "max(a, b) * 1"), row.columns).value == 0.5


def test_instructions_lose_the_padding_of_their_settings() -> None:
    row = {"prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]}
    assert instruction_of_ifeval(row).columns["kwargs"] == [{}]
    with pytest.raises(AnotherLayout, match="same length"):
        instruction_of_ifeval(row | {"kwargs": []})


@pytest.mark.parametrize(
    ("end", "number"),
    [
        ("18", "18"),
        ("1,080", "1080"),
        ("2,125,000", "2125000"),
        ("-3", "-3"),
        ("$5", "5"),
        ("0.75", "0.75"),
        (".5", ".5"),
    ],
)
def test_gsm8k_reference_is_the_solutions_number(end: str, number: str) -> None:
    columns = gsm8k({"question": "How many?", "answer": f"Count.\n#### {end}"}).columns
    assert columns["ground_truth"] == number == last_boxed(columns["response"])
    prompt = Prompt(0, np.array([1]), str(columns["prompt"]), "math_rule", columns)
    assert math_rule(prompt, str(columns["response"]), columns).value == 1.0
    assert math_rule(prompt, "It is \\boxed{123456}.", columns).value == 0.0


@pytest.mark.parametrize(
    "answer", ["no mark 5", "Count.\n####", "Count.\n#### five", "Count.\n#### 5 apples", "Count.\n#### 1/2"]
)
def test_a_problem_without_a_number_is_left_out(answer: str) -> None:
    with pytest.raises(LeftOut, match="'####'"):
        gsm8k({"question": "How many?", "answer": answer})


def test_a_pair_by_hand() -> None:
    row = preferences(pair_row(1))
    assert row.columns == {
        "messages": [{"role": "user", "content": "Name 1 colours."}],
        "chosen": "Red, and 0 others.",
        "rejected": "No.",
        "margin": 6.0,
    }


def changed(column: str, content: str) -> dict[str, Any]:
    row = pair_row(1)
    return row | {column: [row[column][0], {"role": "assistant", "content": content}]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (pair_row(2), "higher score"),
        (pair_row(1) | {"score_chosen": 1.0}, "higher score"),
        (changed("chosen", "No."), "same response twice"),
        (changed("rejected", " "), "empty response"),
    ],
)
def test_a_pair_that_teaches_nothing_is_left_out(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(LeftOut, match=reason):
        preferences(row)


def test_conversations_end_with_an_answer() -> None:
    question, answer = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}
    system = {"role": "system", "content": ""}
    assert conversation({"messages": [system, question, answer], "num_turns": 1}).columns == {
        "messages": [system, question, answer]
    }
    for messages, reason in (
        ([question], "end with an answer"),
        ([answer], "end with an answer"),
        ([question, answer, question], "end with an answer"),
        ([question, answer | {"content": ""}], "an empty message"),
    ):
        with pytest.raises(LeftOut, match=reason):
            conversation({"messages": messages})


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("gsm8k", {"problem": "x", "answer": "#### 1"}, "column 'question'; the row has: problem, answer"),
        ("gsm8k", {"question": "x", "answer": 5}, "'answer' is not"),
        ("ultrafeedback", pair_row(1) | {"chosen": "text"}, "'chosen' is not"),
        ("ultrafeedback", pair_row(1) | {"chosen": pair_row(3)["chosen"]}, "only in their last"),
        ("ultrafeedback", pair_row(1) | {"score_chosen": None}, "column 'score_chosen'"),
        (
            "capybara",
            {"messages": [{"from": "human", "value": "x"}]},
            "text as 'role' and 'content'",
        ),
    ],
)
def test_another_layout_is_told(name: str, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(AnotherLayout) as raised:
        SETS[name].convert(row)
    assert problem in str(raised.value)


@pytest.mark.parametrize("name", WRITERS)
def test_files_share_no_question_and_lose_none(name: str, tmp_path: Path) -> None:
    source = WRITERS[name](tmp_path / "copy")
    done = write_set(wish(name, source, tmp_path / "out"))
    rows = {file: lines(tmp_path / "out" / file) for file in FILES}
    assert {file: len(found) for file, found in rows.items()} == done.rows
    assert done.rows[VALIDATION] == 4
    asked = [
        json.dumps(row.get("prompt") or (row["messages"] if "chosen" in row else row["messages"][:-1]))
        for file in FILES
        for row in rows[file]
    ]
    assert len(set(asked)) == len(asked)
    read = {
        split: len(datasets.load_dataset("parquet", data_files=str(next(source.rglob(f"{split}-*"))), split="train"))
        for split in done.left_out
    }
    train, test = SETS[name].train, SETS[name].test
    assert done.rows[TRAIN] + done.rows[VALIDATION] + sum(done.left_out[train].values()) == read[train]
    assert done.rows[TEST] + sum(done.left_out[test].values()) == read[test]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "out"], "no partial folder is left"


def test_the_seed_decides_which_rows_are_held_out(tmp_path: Path) -> None:
    source = write_gsm8k(tmp_path / "copy")
    for folder, seed in (("one", 1), ("again", 1), ("two", 2)):
        write_set(wish("gsm8k", source, tmp_path / folder, seed=seed))
    one, again, two = (
        {file: (tmp_path / folder / file).read_bytes() for file in FILES} for folder in ("one", "again", "two")
    )
    assert one == again
    assert one[TEST] == two[TEST] and one[VALIDATION] != two[VALIDATION]


def test_repeated_and_test_rows_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "copy").mkdir()
    questions = {"train": [1, 2, 3, 3, 4, 5, 6], "test": [6, 7, 7]}
    for split, numbers in questions.items():
        rows = [gsm8k_row(number, 1) for number in numbers]
        rows[0] |= {"answer": "none"} if split == "train" else {}
        (tmp_path / "copy" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    assert main(["gsm8k", "--source", str(tmp_path / "copy"), "--output", str(out), "--validation", "2"]) == 0
    *written, again, unmarked, tested = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in written] == [f"{out}/{n}.jsonl" for n in ("train", "validation", "test")]
    assert all(": 2 row(s)" in line for line in written) and "seed 42" in written[1]
    assert "train: 2 row(s)" in again and "train: 1 row(s)" in unmarked and "'####'" in unmarked
    assert "test: 1 row(s)" in tested
    assert [row["ground_truth"] for row in lines(out / TEST)] == ["7", "8"]


@pytest.mark.parametrize(
    ("words", "place", "problem", "remedy"),
    [
        (["gsm8k", "--output", "there"], "--output", "'there' exists", "give a folder"),
        (
            ["gsm8k", "--source", "nowhere/at/all"],
            "nowhere/at/all",
            "no such file or folder",
            "copy of openai/gsm8k:main",
        ),
        (
            ["ultrafeedback", "--source", "copy"],
            "copy",
            "split 'test_prefs'",
            "splits train_prefs and test_prefs",
        ),
        (
            ["capybara", "--source", "copy"],
            "test-00000-of-00001.parquet:1",
            "column 'messages'",
            "copy of trl-lib/Capybara",
        ),
        (
            ["gsm8k", "--source", "copy", "--validation", "40"],
            "copy",
            "40 rows of the split 'train'",
            "smaller",
        ),
        (
            ["gsm8k", "--source", "copy", "--output", "there/file/out"],
            "--output",
            "cannot be created",
            "you can write to",
        ),
    ],
)
def test_unpreparable_source_is_refused_without_output(
    words: list[str],
    place: str,
    problem: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_gsm8k(tmp_path / "copy")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    before = set(tmp_path.rglob("*"))
    assert main(words) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in (place, problem, remedy)), told
    assert set(tmp_path.rglob("*")) - {tmp_path / "data"} == before
