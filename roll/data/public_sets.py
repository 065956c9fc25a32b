"""The public data sets of `python -m roll.data.prepare`: their places, and a pure function from their rows to ours.

Columns as the sets' pages on the Hub list them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BOX = "Reason step by step, and put the final answer within \\boxed{}."
"""Instruction that Qwen2.5 was trained with in mathematics. `math_rule` reads the box."""
CALCULATION = re.compile(r"<<[^<>]*>>")
"""GSM8K's calculator annotations: `48/2 = <<48/2=24>>24`."""
NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")
MARK = "####"


class LeftOut(Exception):
    """A row without anything to learn. The text continues "3 rows"."""


class AnotherLayout(Exception):
    """A row without the set's layout. The text gives the fault."""


@dataclass(frozen=True)
class PreparedRow:
    """A line of a prepared file."""

    key: str
    """The question. Rows with the same key are never in two files."""
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class PublicSet:
    """One data set of the Hub."""

    hub_name: str
    """`owner/name` or `owner/name:config`."""
    train: str
    """Training split, of which some rows are held out for validation."""
    test: str
    convert: Callable[[Mapping[str, Any]], PreparedRow]
    """Converts a row. Raises LeftOut or AnotherLayout."""
    holds: str
    """The resulting columns, and their pipelines."""


def gsm8k(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a problem of GSM8K (arXiv 2110.14168) to a prompt with its reference answer and a worked solution.

    `ground_truth` is the number behind `####`, without thousands separators. `response` is the solution without the calculator
    annotations, with the number in a box.

    Raises:
        LeftOut: there is no number behind `####`.
        AnotherLayout: `question` or `answer` is not a text.
    """
    question, answer = _text(row, "question").strip(), _text(row, "answer")
    solution, mark, last = answer.rpartition(MARK)
    number = last.strip().removeprefix("$").replace(",", "")
    if not mark or not NUMBER.fullmatch(number):
        raise LeftOut(f"without a number behind '{MARK}'")
    steps = CALCULATION.sub("", solution).strip()
    return PreparedRow(
        question,
        {
            "prompt": f"{question}\n{BOX}",
            "response": f"{steps}\nThe final answer is \\boxed{{{number}}}.",
            "ground_truth": number,
            "tag": "math_rule",
        },
    )


def preferences(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a pair of UltraFeedback (arXiv 2310.01377): the conversation, both responses, and the difference of their scores.

    `chosen` and `rejected` are whole conversations that differ in the last message, `score_chosen` and `score_rejected` are numbers.

    Raises:
        LeftOut: both responses or both scores are the same, or a response is empty.
        AnotherLayout: the columns are others.
    """
    chosen, rejected = (_messages(row, column) for column in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1] or len(chosen) < 2:
        raise AnotherLayout("'chosen' and 'rejected' are not conversations that differ in their last message alone")
    better, worse = chosen[-1]["content"], rejected[-1]["content"]
    margin = _number(row, "score_chosen") - _number(row, "score_rejected")
    if not better.strip() or not worse.strip():
        raise LeftOut("with an empty response")
    if better == worse:
        raise LeftOut("with the same response twice")
    if margin <= 0:
        raise LeftOut("whose chosen response has no higher score")
    return PreparedRow(repr(chosen[:-1]), {"messages": chosen[:-1], "chosen": better, "rejected": worse, "margin": margin})


def conversation(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a conversation whose last message is the assistant's.

    Raises:
        LeftOut: it ends with another message, holds no question, or a message of the user or the assistant is empty.
        AnotherLayout: `messages` is not a list of messages.
    """
    messages = _messages(row, "messages")
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        raise LeftOut("that do not end with an answer of the assistant")
    if not all(message["content"].strip() for message in messages if message["role"] != "system"):
        raise LeftOut("with an empty message")
    return PreparedRow(repr(messages[:-1]), {"messages": messages})


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise AnotherLayout(_other_column(row, column, "a text"))
    return value


def _number(row: Mapping[str, Any], column: str) -> float:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AnotherLayout(_other_column(row, column, "a number"))
    return float(value)


def _messages(row: Mapping[str, Any], column: str) -> list[dict[str, str]]:
    """Return the messages of a column with role and content only."""
    value = row.get(column)
    if not isinstance(value, list) or not value:
        raise AnotherLayout(_other_column(row, column, "a list of messages"))
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise AnotherLayout(f"'{column}' holds a message without a text as 'role' and 'content'")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _other_column(row: Mapping[str, Any], column: str, kind: str) -> str:
    if row.get(column) is None:
        return f"there is no column '{column}'; the row has: {', '.join(row) or 'nothing'}"
    return f"'{column}' is not {kind}"


SETS: Mapping[str, PublicSet] = {
    "gsm8k": PublicSet(
        "openai/gsm8k:main", "train", "test", gsm8k, "prompt, response, ground_truth, tag: for rlvr, sft, distill and roll.evaluate"
    ),
    "ultrafeedback": PublicSet(
        "HuggingFaceH4/ultrafeedback_binarized",
        "train_prefs",
        "test_prefs",
        preferences,
        "messages, chosen, rejected, margin: for dpo and reward_model",
    ),
    "capybara": PublicSet("trl-lib/Capybara", "train", "test", conversation, "messages: for sft and distill"),
    "ultrachat": PublicSet("HuggingFaceH4/ultrachat_200k", "train_sft", "test_sft", conversation, "messages: for sft and distill"),
}
