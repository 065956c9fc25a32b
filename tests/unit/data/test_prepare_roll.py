"""`python -m roll.data.prepare roll`: the files of ROLL's examples, made from small copies of the public sets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.schema.model import DataConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.data.prepare import main
from roll.data.prompts import prepare_prompts
from roll.data.public_rows import AnotherLayout, LeftOut
from roll.data.roll_files import ROLL_FILES, RollFile
from roll.data.rows import read_row
from roll.pipeline import main as pipeline
from roll.rewards.functions.code_sandbox import code_sandbox
from roll.rewards.functions.crossthinkqa import crossthinkqa
from roll.rewards.functions.ifeval import ifeval
from roll.rewards.functions.math_rule import math_rule
from roll.types import Prompt, RewardResult
from tests.unit.data.public_copies import (
    crossthink_row,
    deepmath_row,
    ifeval_row,
    kodcode_row,
    math500_row,
    subjects_row,
    write_roll_copies,
)

MAKERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "math_rule": deepmath_row,
    "code_sandbox": kodcode_row,
    "llm_judge": subjects_row,
    "crossthinkqa": crossthink_row,
    "ifeval": ifeval_row,
    "math_benchmarks": math500_row,
}
COLUMNS = ["id", "source", "difficulty", "prompt", "messages", "ground_truth"]
COLUMNS += ["case_type", "test_case_function", "test_cases", "tag"]
"""Columns of ROLL's rows, in order; its held-out rows have `domain` after `id`."""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_roll_copies(tmp_path / "copies")
    return tmp_path


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def converted(domain: str, **changed: Any) -> dict[str, Any]:
    return dict(ROLL_FILES[domain].convert(MAKERS[domain](3) | changed).columns)


def example() -> RlvrConfig:
    found: list[Any] = []
    words = ["--config-name", "rlvr_lora_zero3", "dry_run=true"]
    compose(words, lambda composed, presets: found.append(checked_config(composed, presets)))
    return found[0]


def columns_of(config: RlvrConfig) -> tuple[DataConfig, DataConfig]:
    """Return where the rows of the example are, for training and for validation."""
    training, held_out = config.actor_train.data_args, config.validation and config.validation.data_args
    assert training is not None and held_out is not None
    return training, held_out


def test_a_prepared_row_of_mathematics_by_hand() -> None:
    row = converted("math_rule")
    box = "Reason step by step, and put the final answer within \\boxed{}."
    assert json.loads(row.pop("messages")) == [
        {"role": "system", "content": box},
        {"role": "user", "content": "Compute $3+1$."},
    ]
    unused = dict.fromkeys(("case_type", "test_case_function", "test_cases"), "")
    said = {"prompt": "Compute $3+1$.", "ground_truth": "4", "difficulty": "4.5"}
    assert row == unused | said | {"source": "deepmath_103k", "tag": "deepmath_103k"}


def scored(domain: str, reward: Callable[..., RewardResult], response: str, **arguments: Any) -> float:
    row = read_row(converted(domain), columns_of(example())[0])
    return reward(Prompt(0, np.array([1]), "", domain, row), response, row, **arguments).value


def test_a_right_answer_scores_above_a_wrong_one() -> None:
    program = "```python\ndef add_3(value):\n    return value + {}\n```".format
    cases: list[tuple[str, Callable[..., RewardResult], str, str, dict[str, Any]]] = [
        ("math_rule", math_rule, "\\boxed{4}", "\\boxed{5}", {}),
        ("math_benchmarks", math_rule, "\\boxed{3/7}", "\\boxed{3}", {}),
        ("code_sandbox", code_sandbox, program(3), program(4), {"sandbox": "none"}),
        ("crossthinkqa", crossthinkqa, "\\boxed{A}", "\\boxed{B}", {"reward_type": "loose"}),
        ("ifeval", ifeval, "a\n***\nb\n***\nc\n***\nd", "a", {}),
    ]
    for domain, reward, right, wrong, arguments in cases:
        values = [scored(domain, reward, response, **arguments) for response in (right, wrong)]
        assert values[0] == 1 and values[1] <= 0, (domain, values)


@pytest.mark.parametrize(
    ("domain", "changed", "reason"),
    [
        ("math_rule", {"final_answer": " "}, "reference answer"),
        ("math_rule", {"question": ""}, "empty message"),
        ("llm_judge", {"label": ""}, "reference answer"),
        ("llm_judge", {"query": [{"role": "system", "content": "Solve it."}]}, "without a question at the end"),
        ("crossthinkqa", {"reward_model": {"ground_truth": "A cat", "style": "rule"}}, "letter of a choice"),
        ("crossthinkqa", {"reward_model": {"ground_truth": "12", "style": "rule"}}, "letter of a choice"),
        ("code_sandbox", {"test_info": []}, "functions to define"),
        ("code_sandbox", {"test": "from solution import add_3"}, "test function"),
        ("code_sandbox", {"test": "def test_it():"}, "no Python"),
        ("code_sandbox", {"solution": "import numpy as np\ndef add_3(value):\n    return value"}, "import a package"),
    ],
)
def test_a_useless_public_row_is_left_out(domain: str, changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(LeftOut, match=reason):
        converted(domain, **changed)


@pytest.mark.parametrize(
    ("truth", "letter"), [("C", "C"), ("(C)", "C"), ("C. a cat", "C"), ("C) 7", "C"), ("C:\nno", "C")]
)
def test_letter_of_a_choice_becomes_the_reference(truth: str, letter: str) -> None:
    row = converted("crossthinkqa", reward_model={"ground_truth": truth, "style": "rule"})
    assert row["ground_truth"] == letter


@pytest.mark.parametrize(
    ("domain", "changed", "problem"),
    [
        ("math_rule", {"final_answer": None}, "column 'final_answer'; the row has: question"),
        ("math_benchmarks", {"answer": 3}, "'answer' is not a text"),
        ("code_sandbox", {"test_info": [{"name": "f"}]}, "without a text as 'function_declaration'"),
        ("llm_judge", {"query": "Who?"}, "'query' is not a list"),
        ("crossthinkqa", {"reward_model": "A"}, "'reward_model' is not an object"),
        ("ifeval", {"ground_truth": "3 paragraphs"}, "'func_name'"),
    ],
)
def test_another_layout_of_roll_set_is_told(domain: str, changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(AnotherLayout) as raised:
        converted(domain, **changed)
    assert problem in str(raised.value)


def test_example_plans_and_reads_every_prepared_row(
    there: Path, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["roll", "--source", "copies"]) == 0
    assert [line.partition(": 6 row(s)")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"data/{file.name}" for file in ROLL_FILES.values()
    ]
    for domain, file in ROLL_FILES.items():
        row = lines(there / "data" / file.name)[2]
        assert [column for column in row if column != "domain"] == COLUMNS
        assert row["id"] == "3" and ("domain" in row) == (domain == "math_benchmarks")
    config = example()
    prompts = prepare_prompts(columns_of(config)[0], tokenizer, 2048, config.domains, there / "cache")
    assert [len(list(prompts.rows(domain))) for domain in config.domains] == [6] * 5
    assert not (prompts.unknown_tags or prompts.unknown_domains or prompts.too_long or prompts.remarks)
    assert pipeline(["--config-name", "rlvr_lora_zero3", "dry_run=true"]) == 0
    printed = capsys.readouterr()
    warned = [line for line in (printed.out + printed.err).splitlines() if "warning" in line.lower()]
    assert all("GPU" in line for line in warned), warned


def test_one_domain_reads_a_folder_or_file(there: Path) -> None:
    copies = {
        "crossthinkqa": "copies/Nemotron-CrossThink",
        "math_rule": "copies/DeepMath-103K/data/train-00000-of-00001.parquet",
    }
    for domain, copy in copies.items():
        assert main([f"roll:{domain}", "--source", copy, "--output", "out"]) == 0
    assert sorted(path.name for path in (there / "out").iterdir()) == sorted(ROLL_FILES[name].name for name in copies)


def test_rows_are_drawn_by_seed_and_counted(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = there / "copy.jsonl"
    rows = [deepmath_row(number) for number in (1, 1, 2, 3, 4, 5)] + [deepmath_row(6) | {"final_answer": ""}]
    copy.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for folder, seed in (("one", "1"), ("again", "1"), ("two", "2")):
        words = ["roll:math_rule", "--source", str(copy), "--output", folder, "--rows", "3", "--seed", seed]
        assert main(words) == 0
    file = ROLL_FILES["math_rule"].name
    one, again, two = (lines(there / folder / file) for folder in ("one", "again", "two"))
    assert one == again != two and len(one) == 3
    assert [row["id"] for row in one] == sorted(row["id"] for row in one)
    written, *left_out = capsys.readouterr().out.splitlines()[-3:]
    assert f"two/{file}: 3 row(s)" in written and "3 drawn from 5 with seed 2" in written
    assert all(f"{copy}: 1 row(s)" in line for line in left_out)


def test_rows_that_the_reward_refuses_are_left_out(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = there / "copy.jsonl"
    copy.write_text("".join(json.dumps(deepmath_row(1) | {"final_answer": said}) + "\n" for said in ("1", "A^\\top")))
    copy.write_text(copy.read_text() + json.dumps(deepmath_row(2) | {"final_answer": "2^{\\aleph_0}"}) + "\n")
    assert main(["roll:math_rule", "--source", str(copy), "--output", "out"]) == 0
    assert [row["ground_truth"] for row in lines(there / "out" / ROLL_FILES["math_rule"].name)] == ["1"]
    assert f"{copy}: 1 row(s) that math_rule" in capsys.readouterr().out


def faults_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


def test_unpreparable_roll_sets_are_refused_at_once(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("MATH-500/test.jsonl", "RLVR-IFeval/data/train-00000-of-00001.parquet"):
        (there / "copies" / name).rename(there / Path(name).name)
    told = faults_of(["roll", "--source", "copies"], capsys)
    assert all(part in told for part in ("copies/MATH-500", "copies/RLVR-IFeval", "copy of allenai/RLVR-IFeval"))
    assert "DeepMath" not in told
    bad = there / "bad.jsonl"
    bad.write_text(json.dumps(ifeval_row(1)) + "\n" + json.dumps(ifeval_row(2) | {"ground_truth": "{}"}) + "\n")
    told = faults_of(["roll:ifeval", "--source", str(bad)], capsys)
    assert f"{bad}:2" in told and "'func_name'" in told and "copy of allenai/RLVR-IFeval" in told
    bad.write_text(json.dumps(deepmath_row(1) | {"final_answer": ""}) + "\n")
    assert "1 without" in faults_of(["roll:math_rule", "--source", str(bad)], capsys)
    assert list((there / "data").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["roll", "--validation", "3"], "--validation"),
        (["gsm8k", "--rows", "3"], "--rows"),
        (["roll:ifeval", "--output", "there"], "exists already"),
    ],
)
def test_idle_options_and_existing_files_are_refused(
    words: list[str], told: str, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (there / "there").mkdir()
    (there / "there" / ROLL_FILES["ifeval"].name).touch()
    assert told in faults_of([*words, "--source", "copies"], capsys)


def test_files_are_those_of_the_example() -> None:
    named = [name for columns in columns_of(example()) for name in columns.file_name]
    assert sorted(named) == sorted(f"data/{file.name}" for file in ROLL_FILES.values())


def test_path_within_a_set_names_its_copy() -> None:
    file = RollFile("a.jsonl", "owner/name:Data/b.jsonl", "train", ROLL_FILES["ifeval"].convert, "")
    assert (file.copy_name, file.inside) == ("name", "Data/b.jsonl")
    assert (ROLL_FILES["ifeval"].copy_name, ROLL_FILES["ifeval"].inside) == ("RLVR-IFeval", "")
