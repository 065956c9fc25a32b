"""Extracts the program from a response, and its test cases from a row of the data. Pure functions."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll.rewards.sandbox.program import Job

FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py")
SHORT_CHARACTERS = 4000
"""Largest number of characters of a text without a code fence that counts as a program."""
KINDS = ("input", "assert", "pytest", "check_based", "text")


@dataclass(frozen=True)
class Cases:
    """The test cases of a row."""

    kind: str
    """One of KINDS."""
    inputs: tuple[bytes, ...]
    """Standard input of each case, for the kind `input`."""
    expected: tuple[str, ...]
    """Expected output for each input, stripped."""
    tests: tuple[tuple[str, str, str], ...]
    """For the other kinds: code to put before the program, the test's code, and the name of the function to pass to `check`, or ''."""


def program_of(text: str) -> str | None:
    """Return the program in a text, or None if there is none.

    The program is the last fenced block marked as Python, or the last block if no block names a language. If there is no code fence, it is
    the whole text, provided that it is short. Programs in other languages are ignored.
    """
    fences = FENCE.findall(text)
    python = [body for language, body in fences if language.lower() in PYTHON]
    if python:
        return python[-1]
    if any(language for language, _ in fences):
        return None
    if fences:
        return fences[-1][1]
    return text if text and "```" not in text and len(text) <= SHORT_CHARACTERS else None


def cases_of(row: Mapping[str, Any]) -> Cases:
    """Return the test cases of a row.

    Raises:
        ValueError: the cases cannot be read. The message names the column and the fault.
    """
    kind = row.get("case_type")
    if kind not in KINDS:
        raise ValueError(f"the row's 'case_type' is {kind!r}; it must be one of {', '.join(KINDS)}")
    listed = _listed(row.get("test_cases"))
    if kind == "input":
        inputs = tuple(_text(case, "stdin", index).encode() for index, case in enumerate(listed))
        expected = tuple(_text(case, "expected_stdout", index).strip() for index, case in enumerate(listed))
        return _some(Cases(kind, inputs, expected, ()))
    if kind != "check_based":
        tests = tuple(("", case if isinstance(case, str) else _text(case, "assert_code", index), "") for index, case in enumerate(listed))
        return _some(Cases(kind, (), (), tests))
    function = row.get("test_case_function")
    if isinstance(function, str) and function.strip():
        listed = [{**(listed[0] if listed and isinstance(listed[0], dict) else {}), "assert_code": function}]
    checks = []
    for index, case in enumerate(listed):
        named = case if isinstance(case, dict) else {"assert_code": case}
        entry = str(named.get("entry_point") or row.get("entry_point") or "")
        checks += [(str(named.get("import_prefix") or ""), test, entry) for test in one_assert_each(_text(named, "assert_code", index))]
    return _some(Cases(kind, (), (), tuple(checks)))


def one_assert_each(check: str) -> list[str]:
    """Return a copy of the code for each `assert` directly in its function `check`, with only that `assert`. Each copy is a test case.

    Code with fewer than two of these `assert`s is returned unchanged, as the only case.

    Raises:
        ValueError: the code is not valid Python, or has no function `check`.
    """
    try:
        tree = ast.parse(check)
    except SyntaxError as error:
        raise ValueError(f"the row's check cannot be read: {error}") from error
    function = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if function is None:
        raise ValueError("the row's check defines no function 'check'")
    body = function.body
    asserts = [statement for statement in body if isinstance(statement, ast.Assert)]
    if len(asserts) < 2:
        return [check]
    texts = []
    for kept in asserts:
        function.body = [statement for statement in body if statement is kept or not isinstance(statement, ast.Assert)]
        texts.append(ast.unparse(tree))
    return texts


def job_of(cases: Cases, program: str) -> Job:
    """Return the job for the sandbox. For the kind `text`, `program` is the text of the response."""
    if cases.kind == "input":
        return Job(program, "input", cases.inputs)
    kind = {"check_based": "check", "text": "text"}.get(cases.kind, "assert")
    source = f"{cases.tests[0][0]}\n{program}" if cases.tests[0][0] else program
    entry = _last_function(program) if kind == "check" else ""
    tests = tuple(
        {"kind": kind, "code": code, "source": source, "entry": name or entry, "response": program} for _, code, name in cases.tests
    )
    return Job("" if kind == "text" else source, kind, (), tests)


def _last_function(program: str) -> str:
    try:
        functions = [node.name for node in ast.parse(program).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return functions[-1] if functions else ""


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError as error:
            raise ValueError(f"the row's 'test_cases' is not JSON: {error}") from error
    if value is None or isinstance(value, list):
        return value or []
    raise ValueError(f"the row's 'test_cases' is a {type(value).__name__}, not a list")


def _text(case: Any, name: str, index: int) -> str:
    value = case.get(name) if isinstance(case, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"case {index} of the row's 'test_cases' has no text '{name}'")
    return value


def _some(cases: Cases) -> Cases:
    if not cases.inputs and not cases.tests:
        raise ValueError("the row has no 'test_cases'")
    return cases
