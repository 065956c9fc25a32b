"""The column of the reference answers is a key, which may reach into a column."""

from __future__ import annotations

import csv
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from roll.config.schema.model import DataConfig
from roll.config.schema.roles import RewardConfig
from roll.data.prompts import PromptSet, prepare_prompts
from roll.data.rows import RowFault, example_conversation, read_row, reference_at
from roll.errors import DataError
from tests.faults import coded

ASK = [{"role": "user", "content": "One?"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": ASK,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"index": 0, "split": "train", "answer": "... #### 72"},
}
DOMAINS = {"maths": RewardConfig.model_validate({"reward": "math_rule", "tag_included": ("openai/gsm8k",)})}


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Callable[..., PromptSet]:
    def prepare(path: Path, **columns: Any) -> PromptSet:
        data_args = DataConfig.model_validate({"file_name": str(path), "template": "chatml", **columns})
        return prepare_prompts(data_args, tokenizer, 100, DOMAINS, tmp_path / "cache")

    return prepare


def test_verl_s_parquet_needs_only_keys(prepared: Callable[..., PromptSet], tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL, VERL]), path := tmp_path / "train.parquet")
    prompt = prepared(path, messages="prompt", ground_truth="reward_model.ground_truth", tag="data_source").prompt(1, 0)
    assert prompt.row == {**VERL, "ground_truth": "72"} and prompt.domain == "maths"
    assert prompt.text == "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("columns", "prompt"), [({"messages": "prompt"}, ASK), ({"prompt": "prompt"}, "One?")])
def test_trl_s_rows_need_only_keys(
    prepared: Callable[..., PromptSet], tmp_path: Path, columns: dict, prompt: Any
) -> None:
    (path := tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt, "solution": "$72$"}))
    assert prepared(path, ground_truth="solution", **columns).prompt(0, 0).row["ground_truth"] == "$72$"


def test_a_reference_of_csv_is_named_too(prepared: Callable[..., PromptSet], tmp_path: Path) -> None:
    with (path := tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["q", "solution", "more"], ["One?", "007", '{"a": {"b": "0.10"}}']])
    assert prepared(path, prompt="q", ground_truth="solution").prompt(0, 0).row["ground_truth"] == "007"
    assert prepared(path, prompt="q", ground_truth="more.a.b").prompt(0, 0).row["ground_truth"] == "0.10"


@pytest.mark.parametrize(
    ("row", "path", "found"),
    [
        ({"a": {"b": 0}}, "a.b", 0),
        ({"a.b": "whole", "a": {"b": "inner"}}, "a.b", "whole"),
        ({"a": '{"b": {"c": "x"}}'}, "a.b.c", "x"),
        ({"answer": "x"}, "answer", "x"),
        ({"a": ""}, "a", ""),
    ],
)
def test_reference_path_names_column_or_nested_value(row: dict, path: str, found: Any) -> None:
    assert reference_at(row, path) == found


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (
            "reward_model.ground_truht",
            "'ground_truht' is missing (did you mean 'ground_truth'?); 'reward_model' has: style, ground_truth",
        ),
        (
            "reward_modle.ground_truth",
            "'reward_modle' is missing (did you mean 'reward_model'?); the row has: data_source, prompt, ability",
        ),
        ("reward_model.ground_truth.x", "'x' is missing; 'reward_model.ground_truth' is '72'"),
        ("ability.x", "'x' is missing; 'ability' is 'math'"),
    ],
)
def test_unknown_reference_path_suggests_near_names(path: str, problem: str) -> None:
    with pytest.raises(RowFault) as caught:
        reference_at(VERL, path)
    assert caught.value.code == "missing"
    assert f"data_args.ground_truth is '{path}'" in caught.value.problem and problem in caught.value.problem
    assert "data_args.ground_truth" in caught.value.remedy


def test_row_without_configured_reference_is_fault(prepared: Callable[..., PromptSet], tmp_path: Path) -> None:
    rows = [{"q": "One?", "solution": "1"}, {"q": "One?", "solution": None}, {"q": "One?"}]
    (path := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError) as caught:
        prepared(path, prompt="q", ground_truth="solution")
    assert coded(caught.value.faults) == [("missing", f"{path}:2"), ("missing", f"{path}:3")]


@pytest.mark.parametrize(
    ("named", "rows", "code"),
    [
        ("ground_truth", [{"q": "One?", "ground_truth": 3, "answer": "7"}, {"q": "One?", "answer": "7"}], "missing"),
        ("solution", [{"q": "One?", "solution": "3"}, {"q": "One?", "solution": "", "answer": "7"}], "empty"),
    ],
)
def test_no_other_column_replaces_the_named_one(
    prepared: Callable[..., PromptSet], tmp_path: Path, named: str, rows: list[dict], code: str
) -> None:
    (path := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(prepared(path, prompt="q")) == 2  # without the key, rewards read `answer` of the second row
    with pytest.raises(DataError) as caught:
        prepared(path, prompt="q", ground_truth=named)
    assert coded(caught.value.faults) == [(code, f"{path}:2")]


def test_reference_stays_named_in_records() -> None:
    named = DataConfig.model_validate({"file_name": "a", "prompt": "q", "ground_truth": "ground_truth"})
    again = DataConfig.model_validate_json(named.model_dump_json())
    for one in (named.model_copy(update={"id": "n"}), again, pickle.loads(pickle.dumps(named))):
        with pytest.raises(RowFault):
            read_row({"q": "One?", "answer": "7"}, one)
    unnamed = DataConfig.model_validate({"file_name": "a", "prompt": "q"})
    unnamed = DataConfig.model_validate_json(unnamed.model_dump_json())
    assert read_row({"q": "One?", "answer": "7"}, unnamed) == {"q": "One?", "answer": "7"}


def test_missing_column_lists_only_those_of_the_file(prepared: Callable[..., PromptSet], tmp_path: Path) -> None:
    (path := tmp_path / "rows.jsonl").write_text(json.dumps(VERL))
    with pytest.raises(DataError) as caught:
        prepared(path, prompt="question", ground_truth="reward_model.ground_truth", tag="data_source")
    assert caught.value.faults[0].problem.endswith(f"the row has: {', '.join(VERL)}")


def test_untagged_row_names_a_column_of_tags(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (path := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [VERL, {"prompt": ASK}])))
    data_args = DataConfig.model_validate({"file_name": str(path), "template": "chatml", "messages": "prompt"})
    domains = DOMAINS | {"words": RewardConfig.model_validate({"reward": "exact_match"})}
    with pytest.raises(DataError) as caught:
        prepare_prompts(data_args, tokenizer, 100, domains, tmp_path / "cache")
    named, bare = caught.value.faults
    assert named.remedy.startswith("set data_args.tag: data_source,") and "'openai/gsm8k'" in named.remedy
    assert "data_args.tag" not in bare.remedy


def test_another_reference_column_is_another_table(prepared: Callable[..., PromptSet], tmp_path: Path) -> None:
    (path := tmp_path / "rows.jsonl").write_text(json.dumps({"q": "One?", "a": "1", "b": "2"}))
    found = [prepared(path, prompt="q", ground_truth=name).prompt(0, 0).row["ground_truth"] for name in ("a", "b")]
    assert found == ["1", "2"]


def test_configured_reference_replaces_column_of_same_name() -> None:
    data_args = DataConfig.model_validate({"file_name": "a", "prompt": "q", "ground_truth": "solution"})
    assert read_row({"ground_truth": "x", "solution": '{"func_name": "f"}'}, data_args)["ground_truth"] == {
        "func_name": "f"
    }


def test_prompt_of_messages_is_pointed_to_messages_key(prepared: Callable[..., PromptSet], tmp_path: Path) -> None:
    (path := tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": ASK, "solution": "1"}))
    with pytest.raises(DataError) as caught:
        prepared(path, prompt="prompt", ground_truth="solution")
    (fault,) = caught.value.faults
    assert fault.code == "wrong_type" and "data_args.messages=prompt" in fault.remedy


def test_prompt_and_response_reach_into_column() -> None:
    row = {"extra_info": {"question": "One?", "answer": "1"}}
    columns = {"file_name": "a", "prompt": "extra_info.question", "response": "extra_info.answer"}
    conversation = example_conversation(row, DataConfig.model_validate(columns))
    assert [message["content"] for message in conversation] == ["One?", "1"]


def test_missing_inner_column_suggests_near_name() -> None:
    columns = {"file_name": "a", "prompt": "extra_info.quetsion", "response": "extra_info.answer"}
    with pytest.raises(RowFault) as caught:
        example_conversation({"extra_info": {"question": "One?"}}, DataConfig.model_validate(columns))
    assert caught.value.code == "missing"
    assert "did you mean 'question'" in caught.value.problem
