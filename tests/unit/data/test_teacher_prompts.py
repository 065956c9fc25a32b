"""The prompts of a self-teacher: the policy's prompts with hints, in the format of the chat template."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from roll.config.schema.model import DataConfig
from roll.config.schema.self_distillation import SelfDistillationConfig
from roll.data.rows import RowFault
from roll.data.teacher_prompts import TeacherPrompts, solution_at, teacher_prompts

ROW = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]}
KEYS = {
    "sees": ["feedback", "solution"],
    "template": "{prompt} ({hints}) {{go}}",
    "feedback_template": "not {feedback}",
    "solution_template": "but {solution}",
}


def writer(tokenizer: PreTrainedTokenizerFast, data_args: dict[str, Any], **keys: Any) -> TeacherPrompts:
    own = SelfDistillationConfig.model_validate({**KEYS, **keys})
    return teacher_prompts(own, DataConfig.model_validate(data_args), tokenizer)


def test_hints_join_the_last_message(tokenizer: PreTrainedTokenizerFast) -> None:
    write = writer(tokenizer, {"file_name": "a", "messages": "messages"})
    text = write.text(ROW, {"solution": "{2}", "feedback": "3"})
    asked = "[user]1+1? (not 3\n\nbut {2}) {go}<|endoftext|>\n"
    assert text == f"[system]Be brief.<|endoftext|>\n{asked}[assistant]"
    [ids] = write.token_ids([(ROW, {"solution": "{2}", "feedback": "3"})])
    assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_only_given_hints_are_written(tokenizer: PreTrainedTokenizerFast) -> None:
    write = writer(tokenizer, {"file_name": "a", "prompt": "question", "template": "raw"})
    assert write.text({"question": "1+1?"}, {"feedback": "3"}) == "1+1? (not 3) {go}"


def test_a_tools_result_gets_a_further_message(tokenizer: PreTrainedTokenizerFast) -> None:
    write = writer(tokenizer, {"file_name": "a", "messages": "messages"})
    row = {"messages": [*ROW["messages"], {"role": "tool", "content": "2"}]}
    assert write.text(row, {"solution": "2"}).endswith(
        "[tool]2<|endoftext|>\n[user] (but 2) {go}<|endoftext|>\n[assistant]"
    )


def test_prompts_without_hint_marks_equal_the_policys(tokenizer: PreTrainedTokenizerFast) -> None:
    data_args = {"file_name": "a", "messages": "messages", "template": "chatml"}
    write = writer(tokenizer, data_args, template="{prompt}{hints}", solution_template="{solution}")
    assert write.text(ROW, {"solution": ""}) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("row", "column", "expected"),
    [
        ({"ground_truth": " 4 "}, "ground_truth", "4"),
        ({"ground_truth": 4.5}, "ground_truth", "4.5"),
        ({"info": {"how": "add"}}, "info.how", "add"),
        ({"info": '{"how": "add"}'}, "info.how", "add"),
        ({"ground_truth": ""}, "ground_truth", None),
        ({"ground_truth": None}, "ground_truth", None),
        ({}, "solution", None),
    ],
)
def test_solution_is_read_as_text(row: dict[str, Any], column: str, expected: str | None) -> None:
    assert solution_at(row, column) == expected


@pytest.mark.parametrize("value", [["4"], {"a": 1}, True])
def test_solution_that_is_no_text_is_refused(value: Any) -> None:
    with pytest.raises(RowFault) as refused:
        solution_at({"ground_truth": value}, "ground_truth")
    assert refused.value.code == "wrong_type"
