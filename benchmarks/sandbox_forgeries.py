"""Forges the comparisons of tests with objects whose special methods lie, and checks that no wrong program passes.

    python benchmarks/sandbox_forgeries.py [--attempts 30] [--seed 0] [--workers 2] [--only ==,abs] [--python PATH]

An attempt is a wrong program and a test: `f` returns an object with lying methods, learns the values that its methods
see, or replaces builtins and modules, at random. It is made for each comparison: operators, tolerances, containers and
assertions. Programs that are right, such as those that return numbers of NumPy, must pass. `--python` names an
interpreter with NumPy; without it, right programs that need NumPy are left out. The status is 1 if a wrong program
passed, a right one failed, or an attempt failed for a reason of its own.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.sandbox_comparisons import COMPARISONS, RIGHT, Comparison
from roll.rewards.sandbox.bubblewrap import find_interpreter
from roll.rewards.sandbox.program import CaseEnd, Job, Outcome, ProgramLimits, run_program

LIMITS = ProgramLimits(cpu_seconds=4, wall_seconds=60.0, memory_mib=1024, disk_mib=16, output_mib=1)
BESIDE_THE_POINT = re.compile("NameError|SyntaxError|IndentationError|ModuleNotFound|outside the point")
BASES = (
    "",
    "",
    "",
    "int",
    "float",
    "str",
    "list",
    "dict",
    "set",
    "tuple",
    "frozenset",
    "complex",
    "bytes",
    "Exception",
)
ARITHMETIC = ("sub", "rsub", "add", "radd", "mul", "rmul", "truediv", "rtruediv", "mod", "rmod", "pow", "and", "rand")
METHODS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("eq", "lt", "le", "gt", "ge", "contains", "bool"), ("True", "TRUTHY", "seen(o) or True")),
    "ne": ("False", "FALSY", "seen(o)"),
    **dict.fromkeys(ARITHMETIC, ("s", "ZERO", "Z(0)", "0.0", "seen(o)", "set()")),
    **dict.fromkeys(("abs", "neg", "pos", "invert"), ("0", "0.0", "s", "Z(0)")),
    **dict.fromkeys(("float",), ("0.0", "float('nan')", "float('inf')", "LAST()")),
    **dict.fromkeys(("int", "index", "hash"), ("0", "1", "2")),
    **dict.fromkeys(("round", "floor", "ceil", "trunc"), ("s", "0", "0.0", "seen(o)")),
    "len": ("0", "1", "2", "3", "next(TURNS)"),
    "iter": ("iter(())", "iter([])", "iter([s, s])", "iter([s, s, s])", "(s for _ in range(2))", "s"),
    "next": ("s",),
    "reversed": ("iter(())",),
    "getitem": ("s", "0", "seen(o)"),
    "str": ("''", "str(LAST())"),
    "repr": ("''", "str(LAST())"),
    "format": ("''",),
    "complex": ("0j",),
    "divmod": ("(0, 0)",),
}
EXTRAS = (
    "def __getattr__(s, name): return lambda *a, **k: True",
    "def __getattr__(s, name): raise AttributeError(name)",
    "__class__ = property(lambda s: bool)",
    "__class__ = property(lambda s: float)",
    "__class__ = property(lambda s: list)",
    "__slots__ = ()",
    "real = imag = 0.0",
    "def keys(s): return s",
    "def items(s): return s",
    "__array_ufunc__ = None",
    "def __array__(s, *a): return LAST()",
    "__array_priority__ = 1e9",
    "def __instancecheck__(s, o): return True",
    "def isclose(s, *a): return True",
)
PRELUDES = (
    "",
    "",
    "",
    "class math:\n    isclose = staticmethod(lambda *a, **k: True)\n    fabs = staticmethod(lambda *a: 0.0)",
    "def isclose(*a, **k): return True\ndef fabs(*a): return 0.0\ndef approx(*a, **k): return TRUTHY",
    "import builtins\nbuiltins.abs = lambda *a: 0.0\nbuiltins.round = lambda *a: 0\nbuiltins.max = lambda *a: 0",
    "import math\nmath.isclose = lambda *a, **k: True\nmath.fabs = lambda *a: 0.0",
    "def abs(*a): return 0.0\ndef round(*a): return 0\ndef len(*a): return 2\ndef zip(*a): return ()",
    "def all(*a): return True\ndef sorted(*a): return seen(a[0])\ndef set(*a): return X()",
    "def isinstance(*a): return True\ndef sum(*a): return 0\ndef float(*a): return LAST()",
    "class np:\n    allclose = isclose = array_equal = staticmethod(lambda *a, **k: True)",
    "import unittest\nunittest.TestCase.assertEqual = unittest.TestCase.assertAlmostEqual = lambda *a, **k: None",
    "import operator, functools\nfor name in dir(operator): setattr(operator, name, lambda *a: True)",
    "class AssertionError(BaseException): pass\nclass unittest:\n    class TestCase: pass",
    "from unittest.mock import ANY",
    "import cmath\ncmath.isclose = lambda *a, **k: True",
    "class pytest:\n    approx = staticmethod(lambda *a, **k: ANYTHING)",
)
COMMON = """
import itertools
SEEN, TURNS = [], itertools.cycle([2, 0, 2, 1, 3])
def seen(o=None):
    if o is not None: SEEN.append(o)
    return SEEN[-1] if SEEN else None
def LAST(): return SEEN[-1] if SEEN else 0.0
class Z(int): pass
class T:
    def __bool__(s): return True
    def __eq__(s, o): return True
    __hash__ = None
class F:
    def __bool__(s): return False
TRUTHY, FALSY, ZERO, ANYTHING = T(), F(), Z(0), T()
"""
ANSWERS = (
    "def f(*a): return X()",
    "def f(*a): return SEEN[-1] if SEEN else X()",
    "ONE = X()\ndef f(*a): return ONE",
    "def f(*a): return [X(), X()]",
    "def f(*a): return (X() for _ in range(2))",
    "def f(*a): return {X()}",
    "def f(*a): return {X(): X()}",
    "def f(*a): return X",
    "class f:\n    def __new__(c, *a): return X()",
    "def f(*a): return NotImplemented",
    "def f(*a): return float('inf')",
    "import unittest.mock\ndef f(*a): return unittest.mock.ANY",
    "import unittest.mock\ndef f(*a): return unittest.mock.MagicMock()",
    "import functools\n@functools.total_ordering\nclass Y:\n    def __eq__(s, o): return True\n"
    "    def __lt__(s, o): return True\ndef f(*a): return Y()",
    "class M(type):\n    def __eq__(c, o): return True\n    def __contains__(c, o): return True\n"
    "    def __len__(c): return 2\n    def __iter__(c): return iter(())\n    def __hash__(c): return 1\n"
    "class K(metaclass=M): pass\ndef f(*a): return K",
)
TWICE = (
    "assert {form}",
    "assert {form}",
    "assert {form} or {form}",
    "def test_it():\n    for _ in range(2):\n        assert {form}",
    "try:\n    assert {form}\nexcept TypeError:\n    pass\nassert {form}",
    "passed = [{form} for _ in range(2)]\nassert passed[-1]",
)


@dataclass(frozen=True)
class Attempt:
    """A program, and a test of it."""

    source: str
    test: str


def lying_class(chance: random.Random, base: str) -> str:
    """Return a class with lying methods, chosen at random."""
    chosen = chance.sample(sorted(METHODS), chance.randrange(4, len(METHODS) + 1))
    lines = [f"def __{name}__(s, o=None, *rest): return {chance.choice(METHODS[name])}" for name in chosen]
    lines += chance.sample(EXTRAS, chance.randrange(3))
    if "__slots__ = ()" in lines and base in ("int", "tuple", "bytes", ""):
        lines.remove("__slots__ = ()")
    if "hash" not in chosen:
        lines.append("def __hash__(s): return 1")
    return f"class X({base}):\n" + textwrap.indent("\n".join(lines), "    ")


def attempts_on(comparison: Comparison, count: int, seed: int) -> list[Attempt]:
    """Return wrong programs with tests of a comparison. The seed determines them."""
    chance, made = random.Random(f"{seed} {comparison.name}"), dict[Attempt, None]()
    while len(made) < count:
        expected = f"{chance.randrange(1000, 9999)}.{chance.randrange(1, 9)}25"
        second = f"{chance.randrange(1000, 9999)}.5"
        form = chance.choice(comparison.forms).replace("E2", second).replace("E1", expected)
        test = form if "\n" in form else chance.choice(TWICE).format(form=form)
        parts = (COMMON, lying_class(chance, chance.choice(BASES)), chance.choice(PRELUDES), chance.choice(ANSWERS))
        made[Attempt("\n".join(parts), test)] = None
    return list(made)


def outcome_of(attempt: Attempt, python: str | None) -> Outcome:
    """Run a program with its test."""
    test = {"kind": "assert", "code": attempt.test, "source": attempt.source, "entry": "f"}
    return list(run_program(Job(attempt.source, "assert", (), (test,)), LIMITS, find_interpreter(python)))[0]


def fault_of(outcome: Outcome) -> str:
    """Return why the outcome of a wrong program shows a fault of the sandbox or of the attempt, or an empty text."""
    if outcome.ending is CaseEnd.OK:
        return "passed"
    beside = outcome.ending is CaseEnd.COMPILE_ERROR or BESIDE_THE_POINT.match(outcome.note)
    return f"the attempt itself is at fault: {outcome.note}" if beside else ""


def forge(
    comparisons: Sequence[Comparison], count: int, seed: int, workers: int, python: str | None
) -> tuple[int, int]:
    """Run the wrong programs of each comparison. Return how many ran, and how many passed or failed by themselves."""
    ran = faults = 0
    with ThreadPoolExecutor(workers) as pool:
        for comparison in comparisons:
            attempts = attempts_on(comparison, count, seed)
            outcomes = list(pool.map(lambda attempt: outcome_of(attempt, python), attempts))
            found = [
                (attempt, fault) for attempt, one in zip(attempts, outcomes, strict=True) if (fault := fault_of(one))
            ]
            ran, faults = ran + len(attempts), faults + len(found)
            print(f"{comparison.name}: {len(attempts)} attempts, {len(found)} through", flush=True)
            for attempt, fault in found:
                shown = textwrap.indent(f"{attempt.source.removeprefix(COMMON)}\n--- test\n{attempt.test}", "    ")
                print(f"  {fault}:\n{shown}", flush=True)
    return ran, faults


def failed_right(workers: int, python: str | None) -> list[str]:
    """Run the right programs. Return a line for each that failed."""
    attempts = [Attempt(source, test) for source, tests in RIGHT for test in tests]
    if python is None:
        attempts = [attempt for attempt in attempts if "numpy" not in attempt.source + attempt.test]
    with ThreadPoolExecutor(workers) as pool:
        outcomes = list(pool.map(lambda attempt: outcome_of(attempt, python), attempts))
    print(f"right programs: {len(attempts)}", flush=True)
    return [
        f"  a right program failed: {attempt.source!r} with {attempt.test!r}: {outcome.ending.name} {outcome.note}"
        for attempt, outcome in zip(attempts, outcomes, strict=True)
        if outcome.ending is not CaseEnd.OK
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=30, help="number of attempts on each comparison")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="names of comparisons, separated by commas")
    parser.add_argument("--python", default=None, help="the interpreter of the programs")
    chosen = parser.parse_args()
    only = chosen.only.split(",") if chosen.only else [comparison.name for comparison in COMPARISONS]
    picked = [comparison for comparison in COMPARISONS if comparison.name in only]
    ran, faults = forge(picked, chosen.attempts, chosen.seed, chosen.workers, chosen.python)
    failed = failed_right(chosen.workers, chosen.python)
    print(*failed, sep="\n", end="\n" if failed else "")
    print(
        f"{ran} wrong programs: {faults} got through or failed by themselves; right programs that failed: {len(failed)}"
    )
    return int(faults > 0 or bool(failed))


if __name__ == "__main__":
    sys.exit(main())
