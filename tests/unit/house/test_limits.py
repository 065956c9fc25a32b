"""No test depends on the speed of the machine: all time limits are in tests/limits.py, and no test reads a clock."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests import limits

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted({*(ROOT / "tests").rglob("*.py")} - {Path(limits.__file__), Path(__file__)})
WAITS = {"communicate", "join", "poll", "stop", "wait", "wait_for", "within", "Rank", "timeout"}
"""Calls that accept seconds as a positional argument.

For `Rank`, only floats are checked, because its other numbers are integers. For `within`, only the first argument is
checked, because another function of this name accepts a number of tokens as its second argument.
"""
RECORDS = {"LoopState"}
"""Calls that accept an elapsed time in seconds, not a limit."""
CLOCK = re.compile(r"\btime\.(monotonic|perf_counter|process_time|time)(_ns)?\(")


def limits_in(source: str) -> Iterator[str]:
    """Yield the line and text of each call with a literal number of seconds to wait."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        named = [
            word.value
            for word in call.keywords
            if name not in RECORDS and re.search("timeout$|seconds$", word.arg or "")
        ]
        unnamed = call.args[: 1 if name == "within" else None] if name in WAITS else []
        kinds = (float,) if name == "Rank" else (int, float)
        for value in (*named, *unnamed):
            if isinstance(value, ast.Constant) and type(value.value) in kinds:
                yield f"{call.lineno}: {ast.unparse(call)}"


def test_no_test_has_a_limit_of_its_own() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in limits_in(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_no_test_reads_a_clock() -> None:
    assert not [str(path.relative_to(ROOT)) for path in FILES if CLOCK.search(path.read_text(encoding="utf-8"))]


def test_the_tests_see_a_limit_and_a_clock() -> None:
    wrong = (
        "run(timeout=5)",
        "ask(method, seconds=1.0)",
        "group.within(1.0).all(method)",
        "process.wait(3)",
        "wait_for(work, 2)",
        'Rank("r", 0, 1, "", 0, "cpu", 9.0)',
    )
    assert [len(list(limits_in(source))) for source in wrong] == [1] * len(wrong)
    right = (
        "run(timeout=limits.CALL)",
        "path.join(folder)",
        'Rank("r", 0, 1, "", 0, "cpu", limits.START)',
        "LoopState(seconds=3.5)",
    )
    assert [list(limits_in(source)) for source in right] == [[]] * len(right)
    assert CLOCK.search("begin = time.monotonic()") and not CLOCK.search("time.sleep(1)")


def test_faulthandler_timeout_exceeds_every_test_limit() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert settings["faulthandler_timeout"] > max(value for value in vars(limits).values() if isinstance(value, float))
