"""The data files of ROLL's RLVR examples, made from the public data sets that ROLL made them from. Pure functions.

Every row has the columns of ROLL v0.2.1, of which those that its domain does not need are empty. The columns that are
read are those that the sets' pages on the Hub list.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.data.public_rows import BOX, AnotherLayout, LeftOut, PreparedRow, messages_at, number_at, objects_at, text_at

DEFINES = "Answer with one fenced block of Python. It must define:"
UNUSED = {"case_type": "", "test_case_function": "", "test_cases": ""}
LETTER = re.compile(r"\(?([A-Z])(?:[.:)]+(?:\s.+)?)?", re.DOTALL)
"""The letter of a choice, alone or followed by the choice: `C`, `(C)`, `C. a text`; not the article of `A text`."""
AT_HAND = frozenset({*sys.stdlib_module_names, "solution", "pytest"})
"""Packages that tests and programs may import in the sandbox. `solution` is the program."""


@dataclass(frozen=True)
class RollFile:
    """One file that ROLL's examples read."""

    name: str
    """Name of the file."""
    hub_name: str
    """The public set: `owner/name`, or `owner/name:path` for one of its files."""
    split: str
    """Split of the set that is read."""
    convert: Callable[[Mapping[str, Any]], PreparedRow]
    """Converts a row. Raises LeftOut or AnotherLayout."""
    reward: str
    """The built-in reward of the rows, which must be able to use every one; "" for a judge."""

    @property
    def copy_name(self) -> str:
        """Return the name of the set's folder in a folder of copies: the last part of its Hub name."""
        return self.hub_name.partition(":")[0].rpartition("/")[2]

    @property
    def inside(self) -> str:
        """Return the path of the file within the set, or "" if the split decides which files are read."""
        return self.hub_name.partition(":")[2]


def mathematics(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a problem of DeepMath-103K (arXiv 2504.11456), with its difficulty.

    Raises:
        LeftOut: the problem or its answer is empty.
        AnotherLayout: the columns are different.
    """
    problem, answer = text_at(row, "question").strip(), text_at(row, "final_answer").strip()
    return _problem(problem, answer, "deepmath_103k", str(number_at(row, "difficulty")))


def benchmark(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a problem of MATH-500 (arXiv 2305.20050). Raises LeftOut or AnotherLayout, see `mathematics`."""
    done = _problem(text_at(row, "problem").strip(), text_at(row, "answer").strip(), "MATH-500", "0")
    return PreparedRow(done.key, {"domain": "math_rule", **done.columns})


def program(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a programming task of KodCode (arXiv 2503.02951). Its tests are one case, so all of them must pass.

    Raises:
        LeftOut: the task is empty, names no function to define, has no test function, or its tests or its solution are
            no Python, or import more than Python's standard library, which is all that the sandbox has by default.
        AnotherLayout: the columns are different.
    """
    task, solution, test = text_at(row, "question").strip(), text_at(row, "solution"), text_at(row, "test").strip()
    declared = [one["function_declaration"].strip() for one in objects_at(row, "test_info", ("function_declaration",))]
    if not task or not all(declared) or not declared:
        raise LeftOut("without a task, or without the functions to define")
    tree, solved = _python(test), _python(solution)
    if not any(isinstance(node, ast.FunctionDef) and node.name.startswith("test") for node in ast.walk(tree)):
        raise LeftOut("without a test function")
    if (_imported(tree) | _imported(solved)) - AT_HAND:
        raise LeftOut("whose tests or solution import a package outside of Python's standard library")
    asked = "\n".join([task, "", DEFINES, "", "```python", *declared, "```"])
    columns = {"case_type": "pytest", "test_cases": json.dumps([{"assert_code": test}])}
    return _row("KodCode", [{"role": "user", "content": asked}], json.dumps([solution]), **columns)


def judged(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a question of Multi-subject-RLVR (arXiv 2503.23829), whose answer a judge compares with the reference.

    Raises:
        LeftOut: the question or the reference is empty.
        AnotherLayout: the columns are different.
    """
    return _row("RLVR", messages_at(row, "query"), text_at(row, "label").strip())


def choice(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a question of Nemotron-CrossThink (arXiv 2504.13941) with several choices.

    Raises:
        LeftOut: the answer is not the letter of a choice, or the question is empty.
        AnotherLayout: the columns are different.
    """
    reward = row.get("reward_model")
    if not isinstance(reward, Mapping):
        raise AnotherLayout("'reward_model' is not an object with the reference answer")
    letter = LETTER.fullmatch(text_at(reward, "ground_truth").strip())
    if letter is None:
        raise LeftOut("whose answer is not the letter of a choice")
    return _row("crossthinkqa", messages_at(row, "prompt"), letter[1])


def instruction(row: Mapping[str, Any]) -> PreparedRow:
    """Convert a request of RLVR-IFeval (arXiv 2411.15124), whose reference is the JSON text of the check to run.

    Raises:
        LeftOut: the request is empty.
        AnotherLayout: the columns are different, or the reference names no check.
    """
    truth = text_at(row, "ground_truth")
    try:
        check = json.loads(truth)
    except ValueError:
        check = None
    if not isinstance(check, dict) or not isinstance(check.get("func_name"), str):
        raise AnotherLayout("'ground_truth' is not the JSON text of an object with 'func_name', the name of a check")
    return _row("ifeval", messages_at(row, "messages"), truth)


def _problem(problem: str, answer: str, tag: str, difficulty: str) -> PreparedRow:
    messages = [{"role": "system", "content": BOX}, {"role": "user", "content": problem}]
    return _row(tag, messages, answer, difficulty)


def _row(
    tag: str, messages: Sequence[Mapping[str, str]], truth: str, difficulty: str = "0", **columns: str
) -> PreparedRow:
    """Return a row in ROLL's format, in which messages are JSON text."""
    if messages[-1]["role"] != "user" or not all(one["content"].strip() for one in messages if one["role"] != "system"):
        raise LeftOut("without a question at the end, or with an empty message")
    if not truth:
        raise LeftOut("without a reference answer")
    written = json.dumps(messages, ensure_ascii=False)
    asked = messages[-1]["content"]
    kept = {"source": tag, "difficulty": difficulty, "prompt": asked, "messages": written, "ground_truth": truth}
    return PreparedRow(written, {**kept, **UNUSED, **columns, "tag": tag})


def _python(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise LeftOut("whose tests or solution are no Python") from None


def _imported(tree: ast.Module) -> set[str]:
    """Return the names of the top-level packages that a program imports anywhere."""
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names}


ROLL_FILES: Mapping[str, RollFile] = {
    "math_rule": RollFile("math_deepmath_deal.jsonl", "zwhe99/DeepMath-103K", "train", mathematics, "math_rule"),
    "code_sandbox": RollFile(
        "code_KodCode_data.jsonl", "KodCode/KodCode-Light-RL-10K", "train", program, "code_sandbox"
    ),
    "llm_judge": RollFile(
        "llm_judge_Multi-subject-RLVR_deal_new.jsonl", "virtuoussy/Multi-subject-RLVR", "train", judged, ""
    ),
    "crossthinkqa": RollFile(
        "general_CrossThink-QA_deal.jsonl",
        "nvidia/Nemotron-CrossThink:Data/Nemotron-CrossThink-QA.jsonl",
        "train",
        choice,
        "crossthinkqa",
    ),
    "ifeval": RollFile("general_ifeval_train_deal.jsonl", "allenai/RLVR-IFeval", "train", instruction, "ifeval"),
    "math_benchmarks": RollFile("math_benchmarks.jsonl", "HuggingFaceH4/MATH-500", "test", benchmark, "math_rule"),
}
"""The files by the domain of their rows; `math_benchmarks` are held-out rows of `math_rule`."""
