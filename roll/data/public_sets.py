"""The public data sets of `python -m roll.data.prepare`: their Hub names, and pure functions that convert their rows.

The columns are those that the sets' pages on the Hub list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BOX = "Reason step by step, and put the final answer within \\boxed{}."
"""Instruction that Qwen2.5 was trained with for mathematics. `math_rule` reads the answer from the box."""
CALCULATION = re.compile(r"<<[^<>]*>>")
"""GSM8K's calculator annotations: `48/2 = <<48/2=24>>24`."""
NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")
MARK = "####"
"""Mark before the final answer in GSM8K."""


class LeftOut(Exception):
    """A row without anything to learn. The text is the reason, and completes a sentence that begins with "3 rows"."""


class AnotherLayout(Exception):
    """A row that does not have the layout of the set. The text is the fault."""


@dataclass(frozen=True)
class PreparedRow:
    """A line of a prepared file."""

    key: str
    """The question. Of several rows with the same key only one is written."""
    columns: Mapping[str, Any]
    """The row to write."""


@dataclass(frozen=True)
class PublicSet:
    """One data set of the Hub."""

    hub_name: str
    """`owner/name` or `owner/name:config`."""
    train: str
    """Name of the training split. Some of its rows are held out for validation."""
    test: str
    """Name of the test split."""
    convert: Callable[[Mapping[str, Any]], PreparedRow]
    """Converts a row. Raises LeftOut or AnotherLayout."""
    holds: str
    """The resulting columns, and the pipelines that read them."""


def gsm8k(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a problem of GSM8K (arXiv 2110.14168) to a prompt with its reference answer and a worked solution.

    `ground_truth` is the number after `####`, without thousands separators. `response` is the solution without the
    calculator annotations, with the number in a box.

    Raises:
        LeftOut: there is no number after `####`.
        AnotherLayout: `question` or `answer` is not a text.
    """
    question, answer = _text(row, "question").strip(), _text(row, "answer")
    solution, mark, last = answer.rpartition(MARK)
    number = last.strip().removeprefix("$").replace(",", "")
    if not mark or not NUMBER.fullmatch(number):
        raise LeftOut(f"without a number after '{MARK}'")
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
    """Convert a pair of UltraFeedback (arXiv 2310.01377) to the conversation, both responses, and the difference of
    their scores.

    `chosen` and `rejected` must be whole conversations that differ only in the last message; `score_chosen` and
    `score_rejected` must be numbers.

    Raises:
        LeftOut: a response is empty, the responses are the same, or the chosen response does not have the higher score.
        AnotherLayout: the columns are different.
    """
    chosen, rejected = (_messages(row, column) for column in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1] or len(chosen) < 2:
        raise AnotherLayout("'chosen' and 'rejected' are not conversations that differ only in their last message")
    better, worse = chosen[-1]["content"], rejected[-1]["content"]
    margin = _number(row, "score_chosen") - _number(row, "score_rejected")
    if not better.strip() or not worse.strip():
        raise LeftOut("with an empty response")
    if better == worse:
        raise LeftOut("with the same response twice")
    if margin <= 0:
        raise LeftOut("whose chosen response does not have the higher score")
    return PreparedRow(
        repr(chosen[:-1]), {"messages": chosen[:-1], "chosen": better, "rejected": worse, "margin": margin}
    )


def conversation(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a conversation whose last message is the assistant's.

    Raises:
        LeftOut: the conversation ends with another message, has no question, or has an empty message that is not the
            system message.
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
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise AnotherLayout(f"'{column}' holds a message without a text as 'role' and 'content'")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _other_column(row: Mapping[str, Any], column: str, kind: str) -> str:
    if row.get(column) is None:
        return f"there is no column '{column}'; the row has: {', '.join(row) or 'nothing'}"
    return f"'{column}' is not {kind}"


SETS: Mapping[str, PublicSet] = {
    "gsm8k": PublicSet(
        "openai/gsm8k:main",
        "train",
        "test",
        gsm8k,
        "prompt, response, ground_truth, tag: for rlvr, sft, distill and roll.evaluate",
    ),
    "ultrafeedback": PublicSet(
        "HuggingFaceH4/ultrafeedback_binarized",
        "train_prefs",
        "test_prefs",
        preferences,
        "messages, chosen, rejected, margin: for dpo and reward_model",
    ),
    "capybara": PublicSet("trl-lib/Capybara", "train", "test", conversation, "messages: for sft and distill"),
    "ultrachat": PublicSet(
        "HuggingFaceH4/ultrachat_200k", "train_sft", "test_sft", conversation, "messages: for sft and distill"
    ),
}
