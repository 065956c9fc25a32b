"""The public data sets of `python -m roll.data.prepare`: their Hub names, and pure functions that convert their rows.

The columns are those that the sets' pages on the Hub list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from zlib import crc32

from roll.data.public_rows import BOX, AnotherLayout, LeftOut, PreparedRow, messages_at, number_at, text_at

CALCULATION = re.compile(r"<<[^<>]*>>")
"""GSM8K's calculator annotations: `48/2 = <<48/2=24>>24`."""
RESULT = re.compile(r"<<[^<>]*>>(-?[\d,]*\.?\d+)")
"""A calculation of GSM8K, with its result behind it."""
OFF_BY = (1, -1, 2, -2, 10, -10, 100, -100)
"""Differences between a right result and a wrong one."""
NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")
MARK = "####"
"""Mark before the final answer in GSM8K."""
MARKED = f'Reason step by step, and write the final answer after "{MARK}".'
PROGRAM = "Answer with one fenced block of Python."


@dataclass(frozen=True)
class PublicSet:
    """One data set of the Hub."""

    hub_name: str
    """`owner/name` or `owner/name:config`."""
    train: str
    """Name of the training split, some of whose rows are held out for validation. Empty if the set only measures."""
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
    question, steps, number = _problem(row)
    response = f"{steps}\nThe final answer is \\boxed{{{number}}}."
    columns = {"prompt": f"{question}\n{BOX}", "response": response, "ground_truth": number, "tag": "math_rule"}
    return PreparedRow(question, columns)


def gsm8k_marked(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a problem of GSM8K as `gsm8k` does, with the final answer after `####` as in the set itself.

    Raises:
        LeftOut: there is no number after `####`.
        AnotherLayout: `question` or `answer` is not a text.
    """
    question, steps, number = _problem(row)
    columns = {"prompt": f"{question}\n{MARKED}", "response": f"{steps}\n{MARK} {number}", "ground_truth": number}
    return PreparedRow(question, columns | {"tag": "gsm8k"})


def gsm8k_pairs(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a problem of GSM8K to a pair: its solution with the final answer after `####`, and the same solution with
    another result of the last calculation, and so with a wrong answer. The same row always gives the same pair.

    Raises:
        LeftOut: there is no number after `####`, or it is not the result of the last calculation.
        AnotherLayout: `question` or `answer` is not a text.
    """
    question, steps, number = _problem(row)
    solution = text_at(row, "answer").rpartition(MARK)[0]
    last = next(iter(reversed(list(RESULT.finditer(solution)))), None)
    if last is None or last[1].replace(",", "") != number:
        raise LeftOut("whose answer is not the result of the last calculation")
    choices = [str(wrong) for by in OFF_BY if (wrong := Decimal(number) + by) >= 0]
    wrong = choices[crc32(question.encode()) % len(choices)]
    mistaken = CALCULATION.sub("", f"{solution[: last.start(1)]}{wrong}{solution[last.end(1) :]}").strip()
    columns = {"prompt": f"{question}\n{MARKED}", "chosen": f"{steps}\n{MARK} {number}"}
    return PreparedRow(question, columns | {"rejected": f"{mistaken}\n{MARK} {wrong}"})


def _problem(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the question of GSM8K, the solution's steps without annotations, and its number. Raises LeftOut."""
    question, answer = text_at(row, "question").strip(), text_at(row, "answer")
    solution, mark, last = answer.rpartition(MARK)
    number = last.strip().removeprefix("$").replace(",", "")
    if not mark or not NUMBER.fullmatch(number):
        raise LeftOut(f"without a number after '{MARK}'")
    return question, CALCULATION.sub("", solution).strip(), number


def preferences(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a pair of UltraFeedback (arXiv 2310.01377) to the conversation, both responses, and the difference of
    their scores.

    `chosen` and `rejected` must be whole conversations that differ only in the last message; `score_chosen` and
    `score_rejected` must be numbers.

    Raises:
        LeftOut: a response is empty, the responses are the same, or the chosen response does not have the higher score.
        AnotherLayout: the columns are different.
    """
    chosen, rejected = (messages_at(row, column) for column in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1] or len(chosen) < 2:
        raise AnotherLayout("'chosen' and 'rejected' are not conversations that differ only in their last message")
    better, worse = chosen[-1]["content"], rejected[-1]["content"]
    margin = number_at(row, "score_chosen") - number_at(row, "score_rejected")
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
    messages = messages_at(row, "messages")
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        raise LeftOut("that do not end with an answer of the assistant")
    if not all(message["content"].strip() for message in messages if message["role"] != "system"):
        raise LeftOut("with an empty message")
    return PreparedRow(repr(messages[:-1]), {"messages": messages})


def task_of_mbpp(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a task of MBPP (arXiv 2108.07732), whose prompt shows its tests. Each test is one case.

    Raises:
        LeftOut: the task has no text or no test.
        AnotherLayout: the columns are different.
    """
    task, setup, tests = text_at(row, "text").strip(), text_at(row, "test_setup_code").strip(), row.get("test_list")
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise AnotherLayout("'test_list' is not a list of texts")
    if not task or not tests:
        raise LeftOut("without a task or a test")
    cases = [{"assert_code": f"{setup}\n{test}".strip()} for test in tests]
    asked = "\n".join([task, "Your code must pass these tests:", "", "```python", *tests, "```", "", PROGRAM])
    columns = {"prompt": asked, "response": f"```python\n{text_at(row, 'code').strip()}\n```", "case_type": "assert"}
    return PreparedRow(task, columns | {"test_cases": json.dumps(cases), "tag": "code_sandbox"})


def task_of_humaneval(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a task of HumanEval (arXiv 2107.03374): the beginning of a function, which the response completes.

    Raises:
        AnotherLayout: the columns are different.
    """
    beginning, name, test = text_at(row, "prompt"), text_at(row, "entry_point"), text_at(row, "test")
    asked = (
        f"Complete the function `{name}`, and repeat what is given.\n\n```python\n{beginning.strip()}\n```\n\n{PROGRAM}"
    )
    solution = f"```python\n{beginning}{text_at(row, 'canonical_solution')}```"
    columns = {"prompt": asked, "response": solution, "case_type": "check_based"}
    cases = [{"assert_code": test, "entry_point": name}]
    return PreparedRow(beginning, columns | {"test_cases": json.dumps(cases), "tag": "code_sandbox"})


def instruction_of_ifeval(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a request of IFEval (arXiv 2311.07911), with the instructions to check.

    Raises:
        AnotherLayout: the columns are different.
    """
    names, settings = row.get("instruction_id_list"), row.get("kwargs")
    if not isinstance(names, list) or not isinstance(settings, list) or len(names) != len(settings):
        raise AnotherLayout("'instruction_id_list' and 'kwargs' are not lists of the same length")
    given = [{key: value for key, value in (each or {}).items() if value is not None} for each in settings]
    columns = {"prompt": text_at(row, "prompt"), "instruction_id_list": names, "kwargs": given, "tag": "ifeval"}
    return PreparedRow(columns["prompt"], columns)


SETS: Mapping[str, PublicSet] = {
    "gsm8k": PublicSet(
        "openai/gsm8k:main",
        "train",
        "test",
        gsm8k,
        "prompt, response, ground_truth, tag: for rlvr, sft, distill and roll.evaluate",
    ),
    "gsm8k_marked": PublicSet(
        "openai/gsm8k:main", "train", "test", gsm8k_marked, "the same as gsm8k, with the final answer after ####"
    ),
    "gsm8k_pairs": PublicSet(
        "openai/gsm8k:main",
        "train",
        "test",
        gsm8k_pairs,
        "prompt, chosen, rejected (a solution with a wrong result): for dpo and reward_model",
    ),
    "mbpp": PublicSet(
        "google-research-datasets/mbpp",
        "train",
        "test",
        task_of_mbpp,
        "prompt, response, case_type, test_cases, tag: for rlvr, sft and roll.evaluate",
    ),
    "humaneval": PublicSet(
        "openai/openai_humaneval", "", "test", task_of_humaneval, "the same as mbpp: for roll.evaluate"
    ),
    "ifeval": PublicSet(
        "google/IFEval",
        "",
        "train",
        instruction_of_ifeval,
        "prompt, instruction_id_list, kwargs, tag: for roll.evaluate",
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
