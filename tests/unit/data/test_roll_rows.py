"""Rows in the format of ROLL v0.2.1: JSON text in columns, domains and tags, and arguments of the chat template."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from roll.config.schema.model import DataConfig
from roll.config.schema.roles import RewardConfig
from roll.data.chat import renderer
from roll.data.examples import LengthLimits, prepare_examples
from roll.data.prompts import PromptSet, prepare_prompts, warn_of_routes
from roll.data.rows import read_row
from roll.errors import DataError

Write = Callable[..., str]
ASK = [{"role": "user", "content": "One?"}]
UNUSED = dict.fromkeys(
    ("source", "difficulty", "prompt", "case_type", "test_case_function", "test_cases", "ground_truth", "tag"), ""
)
"""ROLL's rows have all columns. Those that a task does not use contain empty strings."""
TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.name }}>{% endfor %}{{ 'think:' if enable_thinking else 'short:' }}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{% if "
    "add_generation_prompt "
    "%}[assistant]{% endif %}"
)


def arguments(file_name: str, **others: Any) -> DataConfig:
    return DataConfig.model_validate({"file_name": file_name, "template": "chatml", "messages": "messages", **others})


def domains(*names: str, **tags: tuple[str, ...]) -> dict[str, RewardConfig]:
    return {
        name: RewardConfig.model_validate({"tag_included": tags[name]} if name in tags else {})
        for name in (*names, *tags)
    }


@pytest.fixture
def prepared(write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Callable[..., PromptSet]:
    def prepare(rows: list[dict], rewards: dict[str, RewardConfig], **others: Any) -> PromptSet:
        return prepare_prompts(arguments(write_jsonl(rows), **others), tokenizer, 200, rewards, tmp_path / "cache")

    return prepare


def test_every_kind_of_roll_row_is_read(prepared: Callable[..., PromptSet]) -> None:
    cases = [{"assert_code": "assert f(1) == 2"}]
    check = {"func_name": "verify_paragraph_count", "N": 2, "word": None}
    rows = [
        UNUSED | {"id": "1", "messages": json.dumps(ASK), "ground_truth": "7", "tag": "deepmath_103k"},
        UNUSED
        | {
            "id": "2",
            "messages": json.dumps(ASK),
            "test_cases": json.dumps(cases),
            "case_type": "pytest",
            "tag": "KodCode",
        },
        UNUSED | {"id": "3", "messages": json.dumps(ASK), "ground_truth": json.dumps(check), "tag": "ifeval"},
        UNUSED | {"id": "4", "messages": json.dumps(ASK), "ground_truth": "a text", "tag": "RLVR"},
    ]
    rewards = domains("ifeval", math_rule=("deepmath_103k",), code_sandbox=("KodCode",), llm_judge=("RLVR",))
    prompts = prepared(rows, rewards, id="id")
    read = [prompts.prompt(index, index) for index in range(4)]
    assert [prompt.domain for prompt in read] == ["math_rule", "code_sandbox", "ifeval", "llm_judge"]
    assert {prompt.text for prompt in read} == {"<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"}
    assert [prompt.row["messages"] for prompt in read] == [ASK] * 4
    assert [prompt.row["ground_truth"] for prompt in read] == ["7", "", check, "a text"]
    assert [prompt.row["test_cases"] for prompt in read] == ["", cases, "", ""]
    assert not prompts.unknown_tags and not prompts.unknown_domains


@pytest.mark.parametrize("text", ["{}", "{1, 2}", "{1: 2}", "[1, 2]", "7", '"a"', "true", "{", "{'a': 1}"])
def test_json_like_answer_stays_unchanged(text: str) -> None:
    assert read_row({"ground_truth": text}, arguments("a.jsonl")) == {"ground_truth": text}


def test_invalid_json_text_is_fault_with_row(prepared: Callable[..., PromptSet]) -> None:
    good = {"messages": json.dumps(ASK)}
    rows = [good, {"messages": "[{'role': 'user'}]"}, good | {"test_cases": "[1,"}, good | {"tools": "{"}]
    rows += [good | {"tools": '[{"name": 1}, 2]'}, good | {"chat_template_kwargs": "[1]"}]
    with pytest.raises(DataError) as caught:
        prepared(rows, domains("math_rule"))
    said = [(fault.code, fault.place.rpartition(":")[2]) for fault in caught.value.faults]
    assert said == [
        ("malformed", "2"),
        ("malformed", "3"),
        ("malformed", "4"),
        ("wrong_type", "5"),
        ("wrong_type", "6"),
    ]
    problems = [fault.problem for fault in caught.value.faults]
    for problem, column in zip(problems, ("messages", "test_cases", "tools"), strict=False):
        assert problem.startswith(f"'{column}' ")
    assert problems[3:] == ["'tools' is [{'name': 1}, 2]", "'chat_template_kwargs' is [1]"]


def test_domain_precedes_tag_and_tag_precedes_default(
    prepared: Callable[..., PromptSet], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = [
        ("code_sandbox", "gsm8k"),  # the domain decides, whatever the tag
        ("", "KodCode"),
        (None, "KodCode"),
        ("algebra", "KodCode"),  # not a configured domain: the tag decides
        ("", "aime2024"),
        ("", "aime2024"),
        ("algebra", "minervamath"),
        (None, ""),
    ]
    rows = [{"messages": ASK, "domain": domain, "tag": tag} for domain, tag in labels]
    prompts = prepared(rows, domains(math_rule=("gsm8k",), code_sandbox=("KodCode",)))
    found = [prompts.prompt(index, 0).domain for index in range(len(rows))]
    assert found == ["code_sandbox"] * 4 + ["math_rule"] * 4
    assert prompts.unknown_tags == {"aime2024": 2, "minervamath": 1, "no tag": 1} and prompts.unknown_domains == {
        "algebra": 2
    }
    with caplog.at_level(logging.WARNING):
        warn_of_routes(prompts)
    tags, columns = [record.getMessage().removeprefix(f"{tmp_path}/rows.jsonl: ") for record in caplog.records]
    assert "4 rows (aime2024: 2, minervamath: 1, no tag: 1)" in tags and "math_rule" in tags
    assert "'domain' of 2 rows" in columns and "(algebra: 2)" in columns


def test_unknown_tag_without_math_rule_is_fault(prepared: Callable[..., PromptSet]) -> None:
    with pytest.raises(DataError, match="'aime2024'") as caught:
        prepared([{"messages": ASK, "tag": "aime2024"}, {"messages": ASK, "tag": "code"}], domains("code", "sums"))
    (fault,) = caught.value.faults
    assert fault.code == "unknown_name" and "add a domain `math_rule`" in fault.remedy


def test_untagged_rows_of_one_domain_do_not_warn(
    prepared: Callable[..., PromptSet], caplog: pytest.LogCaptureFixture
) -> None:
    prompts = prepared([{"messages": ASK}, {"messages": ASK, "tag": ""}], domains("sums"))
    warn_of_routes(prompts)
    assert not caplog.records and list(prompts.domain_index) == [0, 0]


def test_tools_and_arguments_reach_the_chat_template(
    prepared: Callable[..., PromptSet], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    tool = {"name": "add", "parameters": {}}
    rows = [
        {"messages": ASK},
        {"messages": ASK, "tools": [tool], "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": ASK, "tools": json.dumps([tool]), "chat_template_kwargs": '{"enable_thinking": true}'},
        {"messages": ASK, "tools": "", "chat_template_kwargs": {"enable_thinking": None}},
    ]
    prompts = prepared(rows, domains("math_rule"), template="native")
    texts = [prompts.prompt(index, 0).text for index in range(4)]
    assert texts == [f"{start}[user]One?[assistant]" for start in ("short:", "<add>think:", "<add>think:", "short:")]


@pytest.mark.parametrize(
    ("template", "column"),
    [("chatml", {"tools": [{"name": "add"}]}), ("raw", {"chat_template_kwargs": {"enable_thinking": True}})],
)
def test_message_key_unread_by_template_is_fault(
    prepared: Callable[..., PromptSet], template: str, column: dict
) -> None:
    with pytest.raises(DataError, match=f"'(tools|enable_thinking)', .* '{template}'") as caught:
        prepared([{"messages": ASK, **column}], domains("math_rule"), template=template)
    assert [fault.code for fault in caught.value.faults] == ["not_supported"]


@pytest.mark.parametrize("value", ["false", "True", " FALSE "])
def test_a_truth_value_as_text_is_a_fault(
    prepared: Callable[..., PromptSet], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    for given in ({"enable_thinking": value}, json.dumps({"enable_thinking": value})):
        with pytest.raises(DataError, match=f"'enable_thinking' .* '{value}'") as caught:
            prepared([{"messages": ASK, "chat_template_kwargs": given}], domains("math_rule"), template="native")
        assert [fault.code for fault in caught.value.faults] == ["wrong_type"]


@pytest.mark.parametrize("key", ["thinking", "enable", "message", "tool", "tokenize", "add_generation_prompt"])
def test_argument_unknown_to_template_is_fault(
    prepared: Callable[..., PromptSet], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    with pytest.raises(DataError, match=f"'{key}'") as caught:
        prepared([{"messages": ASK, "chat_template_kwargs": {key: True}}], domains("math_rule"), template="native")
    assert [fault.code for fault in caught.value.faults] == ["not_supported"]


def test_examples_of_the_offline_pipelines_are_read_alike(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    talk = [*ASK, {"role": "assistant", "content": "Two."}]
    path = write_jsonl([{"messages": json.dumps(talk), "chat_template_kwargs": {"enable_thinking": True}}])
    examples = prepare_examples(
        arguments(path, template="native"),
        tokenizer,
        LengthLimits(200, 200),
        "responses",
        cache_folder=tmp_path / "cache",
    )
    (sequence,) = examples.example(0).sequences
    render = renderer("native", tokenizer)
    assert tokenizer.decode(sequence.token_ids[~sequence.response_mask]) == render(ASK, True, {"enable_thinking": True})
