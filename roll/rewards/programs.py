"""Extracts the program from a response, and its test cases from a row of the data. Pure functions."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from roll.rewards.sandbox.program import CaseEnd, Job, Outcome

OPENING = re.compile(r"[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?(`{3,}|~{3,})[ \t]*([^`\n]*)")
"""The first line of a fenced block, which may be the first line of a list item: the fence and its info text."""
ONE_LINE = re.compile(r"[ \t]*(`{3,})([\w.+#-]+)[ \t]+([^`\n]+)\1[ \t]*")
"""A whole block on one line: the fence, the language and the code."""
PYTHON = re.compile(r"\{?\s*\.?(?:python|pypy|py)[\d.]*(?![\w+#-])", re.IGNORECASE)
"""The beginning of an info text that names Python: `python`, `py`, `Python3`, `python3.11`, `{.python}`."""
MOST_CLOSINGS = 8
"""Largest number of lines that are tried as the end of one fenced block."""
INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
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
    """For the other kinds: code before the program, the test's code, and the function to pass to `check`, or ''."""
    tolerance: float | None = None
    """Tolerance for the numbers of an output, of the row's column `tolerance`."""


def program_of(text: str, block: Literal["first", "last"] = "first") -> str | None:
    """Return the program in a text, or None if there is none.

    The program is one of the fenced blocks marked as Python, or of all blocks if no block names a language: `first`
    takes the first one with `def `, or else the first one (ROLL's local rule); `last` takes the last one (the rule of
    ROLL's server). If there is no code fence, it is the whole text, provided that it is short. Programs in other
    languages are ignored.
    """
    found = fenced_blocks(text)
    python = [body for info, body in found if PYTHON.match(info)]
    if not python and any(info for info, _ in found):
        return None
    if bodies := python or [body for _, body in found]:
        return bodies[-1] if block == "last" else next((body for body in bodies if "def " in body), bodies[0])
    return text if text and not re.search("```|~~~", text) and len(text) <= SHORT_CHARACTERS else None


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return (info text, body) of each fenced block. The indentation of a body's first line is removed from all of its
    lines.

    A block ends at a line that is a fence or ends in one. If the lines before it are no Python, but those before a
    later such line are, the block ends there: fences within a string end nothing. A block that never ends counts if it
    is Python.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    found, at = [], 0
    while at < len(lines):
        whole, opening = ONE_LINE.fullmatch(lines[at]), OPENING.fullmatch(lines[at])
        if whole:
            found.append((whole[2], f"{whole[3].rstrip()}\n"))
        elif opening:
            body, at = _body(lines, at + 1, opening[1])
            if body is not None:
                found.append((opening[2].strip(), body))
        at += 1
    return found


def _body(lines: list[str], begin: int, fence: str) -> tuple[str | None, int]:
    """Return (body of the block that begins at a line, its last line). The body is None if it never ends."""
    ends = [number for number in range(begin, len(lines)) if _closes(lines[number], fence)][:MOST_CLOSINGS]
    bodies = [_aligned([*lines[begin:end], *_before_fence(lines[end], fence)]) for end in ends]
    for body, end in zip(bodies, ends, strict=True):
        if _is_python(body):
            return body, end
    if ends:
        return bodies[0], ends[0]
    rest = _aligned(lines[begin:])
    return (rest if rest.strip() and _is_python(rest) else None), len(lines)


def _closes(line: str, fence: str) -> bool:
    bare = line.strip()
    if set(bare) == {fence[0]}:
        return len(bare) >= len(fence)
    return bare.endswith(fence) and not bare.startswith(fence)


def _before_fence(line: str, fence: str) -> list[str]:
    code = line.rstrip().rstrip(fence[0])
    return [code] if code.strip() else []


def _aligned(lines: list[str]) -> str:
    first = next((line for line in lines if line.strip()), "")
    width = len(first) - len(first.lstrip())
    return "".join(f"{line[min(width, len(line) - len(line.lstrip())) :]}\n" for line in lines)


def _is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def same_output(output: str, expected: str, tolerance: float | None) -> bool:
    """Return whether a program printed what is expected.

    White space around the whole text and at the ends of lines makes no difference, nor does the kind of line end.

    Args:
        tolerance: None compares lines as text. A number compares words that are numbers by value: they may differ by
            it, absolutely or relative to the expected number. Integers must be equal.
    """
    printed, wanted = _lines(output), _lines(expected)
    if printed == wanted or tolerance is None or len(printed) != len(wanted):
        return printed == wanted
    pairs = [(mine.split(), theirs.split()) for mine, theirs in zip(printed, wanted, strict=True)]
    return all(
        len(mine) == len(theirs) and all(map(_near, mine, theirs, [tolerance] * len(mine))) for mine, theirs in pairs
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().replace("\r\n", "\n").split("\n")]


def _near(mine: str, theirs: str, tolerance: float) -> bool:
    if mine == theirs or not (NUMBER.fullmatch(mine) and NUMBER.fullmatch(theirs)):
        return mine == theirs
    if Decimal(mine) == Decimal(theirs) or (INTEGER.fullmatch(mine) and INTEGER.fullmatch(theirs)):
        return Decimal(mine) == Decimal(theirs)
    return abs(float(mine) - float(theirs)) <= tolerance * max(1.0, abs(float(theirs)))


def passes(cases: Cases, number: int, outcome: Outcome, tolerance: float | None = None) -> bool:
    """Return whether the outcome of a case is right. The row's own tolerance takes precedence over `tolerance`."""
    if outcome.ending is not CaseEnd.OK or not cases.expected:
        return outcome.ending is CaseEnd.OK
    asked = tolerance if cases.tolerance is None else cases.tolerance
    return same_output(outcome.output.decode("utf-8", "replace"), cases.expected[number], asked)


def imported_packages(source: str) -> set[str]:
    """Return the top-level packages that a source imports, except within a `try`, which may handle absence."""
    try:
        waiting: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names: set[str] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).partition(".")[0])
        elif not isinstance(node, ast.Try):
            waiting += ast.iter_child_nodes(node)
    return names


def cases_of(row: Mapping[str, Any]) -> Cases:
    """Return the test cases of a row. Raises ValueError, with the column, if they cannot be read."""
    kind = row.get("case_type")
    if kind not in KINDS:
        raise ValueError(f"the row's 'case_type' is {kind!r}; it must be one of {', '.join(KINDS)}")
    listed = _listed(row.get("test_cases"))
    if kind == "input":
        inputs = tuple(_text(case, "stdin", index).encode() for index, case in enumerate(listed))
        expected = tuple(_text(case, "expected_stdout", index).strip() for index, case in enumerate(listed))
        return _first_cases(Cases(kind, inputs, expected, (), _tolerance(row)))
    if kind != "check_based":
        codes = [
            case if isinstance(case, str) else _text(case, "assert_code", index) for index, case in enumerate(listed)
        ]
        for index, code in enumerate(codes):
            _parsed(code, f"case {index} of the row's 'test_cases'")
        tests = tuple(("", code, "") for code in codes)
        return _first_cases(Cases(kind, (), (), tests))
    function = row.get("test_case_function")
    if isinstance(function, str) and function.strip():
        listed = [{**(listed[0] if listed and isinstance(listed[0], dict) else {}), "assert_code": function}]
    checks = []
    for index, case in enumerate(listed):
        named = case if isinstance(case, dict) else {"assert_code": case}
        entry = str(named.get("entry_point") or row.get("entry_point") or "")
        checks += [
            (str(named.get("import_prefix") or ""), test, entry)
            for test in one_assert_each(_text(named, "assert_code", index))
        ]
    return _first_cases(Cases(kind, (), (), tuple(checks)))


def one_assert_each(check: str) -> list[str]:
    """Return a copy of the code for each `assert` directly in its function `check`, with only that `assert`. Each copy
    is a test case.

    Code with fewer than two of these `assert`s is returned unchanged, as the only case.

    Raises:
        ValueError: the code is not valid Python, or has no function `check`.
    """
    tree = _parsed(check, "the row's check")
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
        {"kind": kind, "code": code, "source": source, "entry": name or entry, "response": program}
        for _, code, name in cases.tests
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


def _parsed(code: str, what: str) -> ast.Module:
    """Return the syntax tree of a test. Raises ValueError if it is not Python: no program could pass such a test."""
    try:
        return ast.parse(code)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"{what} cannot be read: {error}") from error


def _text(case: Any, name: str, index: int) -> str:
    value = case.get(name) if isinstance(case, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"case {index} of the row's 'test_cases' has no text '{name}'")
    return value


def _tolerance(row: Mapping[str, Any]) -> float | None:
    value = row.get("tolerance")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"the row's 'tolerance' is {value!r}; it must be a number that is not negative")
    return float(value)


def _first_cases(cases: Cases) -> Cases:
    if not cases.inputs and not cases.tests:
        raise ValueError("the row has no 'test_cases'")
    return cases
