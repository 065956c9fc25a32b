"""Limits on the sizes of files and functions, on the names of tests and on what they quote, and `__init__.py` files
without code.
"""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

from benchmarks.house import sentence_places

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    path for folder in ("roll", "examples", "tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")
)
FILE_LINES = 700
FUNCTION_LINES = 60
TEST_NAME_WORDS = 8
"""After `test_`: subject, condition, result."""
QUOTED_SENTENCES = 9
"""Most assertions that may quote a sentence of a message. Lower it when the number falls; never raise it."""
LINE_LENGTH = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["line-length"]


def test_no_file_is_too_long() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {str(path): length for path, length in lengths.items() if length > FILE_LINES}


@cache
def functions() -> list[tuple[str, str, int]]:
    """Return the place, the name and the number of lines of every function."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node.name, node.end_lineno - node.lineno + 1)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]


def test_no_function_is_too_long() -> None:
    assert not [(place, name, lines) for place, name, lines in functions() if lines >= FUNCTION_LINES]


def test_no_test_name_is_too_long() -> None:
    tests = [(place, name) for place, name, _ in functions() if name.startswith("test_")]
    assert not [(place, name) for place, name in tests if len(name.split("_")) - 1 > TEST_NAME_WORDS]


def test_few_assertions_quote_a_sentence() -> None:
    places = sentence_places(ROOT)
    assert len(places) <= QUOTED_SENTENCES, "\n".join(places)


def test_the_guide_gives_the_same_bounds() -> None:
    bounds = (
        f"Files of at most {FILE_LINES} lines, functions of fewer than {FUNCTION_LINES}, lines of at most "
        f"{LINE_LENGTH} characters"
    )
    assert bounds in " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())


def test_package_files_hold_a_docstring_at_most() -> None:
    """`roll/__init__.py`, which also has the version and the exports, is tested in `test_package.py`."""
    for path in (ROOT / "roll").glob("*/**/__init__.py"):
        body = ast.parse(path.read_text()).body
        assert len(body) <= 1, path
        assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body), path
