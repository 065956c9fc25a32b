"""The tests that docs/coverage.md names exist, and its counts match its lines."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[2]
PAGE = (TESTS.parent / "docs" / "coverage.md").read_text(encoding="utf-8")
LINES = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if re.match(r"\| \d+ \|", line)
]
STATES = ("works", "refused", "differs")


def functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists() -> None:
    named = {cells[4].strip("`") for cells in LINES} - {"–"}
    files = {name.partition("::")[0] for name in named}
    known = {f"{file}::{test}" for file in files if (TESTS / file).is_file() for test in functions_of(TESTS / file)}
    assert named - known == set()


def test_coverage_lines_have_state_and_test() -> None:
    assert [int(cells[0]) for cells in LINES] == list(range(1, len(LINES) + 1))
    assert {cells[2] for cells in LINES} == set(STATES)
    assert [cells for cells in LINES if cells[2] in ("works", "refused") and cells[4] == "–"] == []


def test_the_counts_are_those_of_the_lines() -> None:
    counts = Counter(cells[2] for cells in LINES)
    assert f"It lists {len(LINES)} features, keys and flags" in PAGE
    assert {state: int(number) for state, number in re.findall(r"\*\*(\w+)\*\* \((\d+)\)", PAGE)} == counts
