"""The code sandbox: rewards for programs, and attacks on the sandbox."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import psutil
import pytest

from roll.rewards.functions.code_sandbox import code_sandbox
from roll.rewards.programs import cases_of, one_assert_each, program_of, same_output
from roll.rewards.sandbox import bubblewrap, program
from roll.rewards.sandbox.bubblewrap import START, SandboxUnavailable, find_interpreter
from roll.rewards.sandbox.inside import link
from roll.types import Prompt, RewardOutcome, RewardResult
from tests.limits import CPU_EXPIRY, RUN, until
from tests.unit.rewards import escapes

PROMPT = Prompt(0, np.zeros(1, dtype=np.int32), "", "code", {})
ROOT = Path(__file__).parents[3]
PACKAGES = Path(bubblewrap.bwrap_path()).parents[2]
QUICK = (
    *(
        "read_secret",
        "symlink_to_secret",
        "write_standard_library",
        "proc_environment",
        "connect_to_host",
        "fork_bomb",
        "clone3",
    ),
    *(
        "thread_bomb",
        "trace_first",
        "kill_all",
        "new_user_namespace",
        "old_abi",
        "memory",
        "memory_file",
        "fill_disk",
        "environment",
    ),
    *(
        "descriptors",
        "search_memory",
        "floods_output",
        "sleeps",
        "exits",
        "ends_process_where_errors_are_caught",
        "liar",
        "liar_near",
    ),
    *(
        "raises_stop_iteration",
        "lying_int",
        "shadowed_builtins",
        "patched_assertion",
        "own_pytest_file",
        "writes_everywhere",
    ),
    *(
        "difference_of_itself",
        "learns_from_comparison",
        "contains_all",
        "counting_int",
        "equal_object_of_own_class",
        "own_isclose",
    ),
    *("builds_a_liar_there", "reads_frames_there", "search_test_file", "response_is_code"),
    *(
        "counting_list",
        "learns_where_a_search_ends",
        "end_of_iteration_with_another_name",
        "end_of_iteration_written_to_the_test",
    ),
    *(
        "reads_the_tests_of_the_supervisor",
        "writes_to_the_pipes_of_others",
        "asynchronous_contexts",
        "flush_all_disks",
        "watches",
    ),
)
QUICK_AS_OTHER = (
    "read_secret",
    "connect_to_host",
    "fork_bomb",
    "thread_bomb",
    "kill_all",
    "memory",
    "old_abi",
    "liar",
    "writes_everywhere",
)


def score(response: str, row: Mapping[str, Any], **arguments: Any) -> RewardResult:
    return code_sandbox(PROMPT, response, row, **arguments)


def fenced(source: str) -> str:
    return f"<think>```python\nraise ValueError\n```</think>So:\n```python\n{source}\n```\nDone."


def asserts(*tests: str, kind: str = "assert") -> dict[str, Any]:
    return {"case_type": kind, "test_cases": json.dumps([{"assert_code": test} for test in tests])}


LOOSE = "x = 1\n"
NESTED = 'text = """\n```\ninner\n```\n"""\nprint(text)\n'


@pytest.mark.parametrize(
    ("response", "first", "last"),
    [
        ("```python\na\n```\n```py\nb\n```", "a\n", "b\n"),
        ("```python\na\n```\n```py\ndef b(): pass\n```\n```python\nc\n```", "def b(): pass\n", "c\n"),
        ("```python\na\n```\n```json\n{}\n```", "a\n", "a\n"),
        ("```\na\n```\ntext\n```\nb\n```", "a\n", "b\n"),
        ("```cpp\nint main() {}\n```", None, None),
        ("print(1)", "print(1)", "print(1)"),
        ("x" * 5000, None, None),
        ("```python\nnever closed", None, None),
        ("", None, None),
        *(
            (text, LOOSE, LOOSE)
            for text in (
                "```python\nx = 1",
                "```python\nx = 1```",
                "```python\r\nx = 1\r\n```\t\r\n",
                "```\nx = 1\n```",
            )
        ),
        *(
            (f"```{name}\nx = 1\n```", LOOSE, LOOSE)
            for name in ("Python", "PY", "python3.11", "{.python}", "python title='a.py'", " pypy3")
        ),
        *((f"{mark}python\nx = 1\n{mark}", LOOSE, LOOSE) for mark in ("````", "~~~", "~~~~~")),
        ("1. So:\n   ```python\n   x = 1\n   ```", LOOSE, LOOSE),
        ("1. ```python\n   x = 1\n   ```", LOOSE, LOOSE),
        ("\t```python\n\tif x:\n\t\ty\n\t```", "if x:\n\ty\n", "if x:\n\ty\n"),
        ("```python x = 1```", LOOSE, LOOSE),
        (f"```python\n{NESTED}```\nDone", NESTED, NESTED),
        (f"````python\n{NESTED}````", NESTED, NESTED),
        ("```pycon\n>>> x\n```", None, None),
    ],
)
def test_one_fenced_block_is_the_program(response: str, first: str | None, last: str | None) -> None:
    assert (program_of(response), program_of(response, "last")) == (first, last)


@pytest.mark.parametrize(
    ("printed", "expected", "tolerance", "same"),
    [
        ("1 \n2\t\n", "1\n2", None, True),
        ("1\n2\n", "1 \r\n2\r\n", None, True),
        ("1\n\n2", "1\n2", None, False),
        ("1  2", "1 2", None, False),
        ("0.5", "0.50", None, False),
        ("0.5", "0.50", 0, True),
        ("0.333333", "0.3333333", 1e-5, True),
        ("0.333333", "0.3333333", 1e-9, False),
        ("1000000.4 x", "1000000 x", 1e-6, True),
        ("1000001", "1000000", 1e-5, False),
        ("nan", "0.5", 1e9, False),
        ("1 2", "1\n2", 1, False),
        ("1e5", "100000", 0, True),
        ("\u0663", "3", 1, False),
    ],
)
def test_outputs_are_compared_by_lines_or_numbers(
    printed: str, expected: str, tolerance: float | None, same: bool
) -> None:
    assert same_output(printed, expected, tolerance) is same


def test_tolerance_of_the_row_takes_precedence() -> None:
    row = {"case_type": "input", "test_cases": [{"stdin": "", "expected_stdout": "0.3333333"}]}
    source = fenced("print(0.333)")
    assert score(source, row).value == 0
    assert score(source, row, tolerance=0.01).value == 1
    assert score(source, {**row, "tolerance": 1e-9}, tolerance=0.01).value == 0
    with pytest.raises(ValueError, match="'tolerance' is -1"):
        cases_of({**row, "tolerance": -1})


@pytest.mark.parametrize(
    "end",
    ["exit()", "quit()", "exit(0)", "import sys; sys.exit()", "raise SystemExit", "copyright; credits; license; help"],
)
def test_a_script_ends_as_in_python(end: str) -> None:
    row = {"case_type": "input", "test_cases": [{"stdin": "", "expected_stdout": "3 1"}]}
    assert score(fenced(f"import sys\nprint(3, len(sys.argv))\n{end}"), row).value == 1


def test_pays_all_only_for_all_cases() -> None:
    tests = asserts("assert f(1) == 2", "assert f(1) == 3")
    half = score(fenced("def f(x): return x + 1"), tests, pays="all")
    assert (half.value, half.parts["passed"]) == (0.0, 0.5)
    assert score(fenced("def f(x): return x + 1"), asserts("assert f(1) == 2"), pays="all").value == 1.0


@pytest.mark.parametrize(
    ("source", "test", "outcome"),
    [
        ("import numpy as np\ndef f(): return 1", "assert f() == 1", RewardOutcome.UNAVAILABLE),
        ("def f():\n    from scipy.special import comb\n    return 1", "assert f() == 1", RewardOutcome.UNAVAILABLE),
        ("def f(): return 1", "import pandas\nassert f() == 1", RewardOutcome.UNAVAILABLE),
        ("import made_up_module\ndef f(): return 1", "assert f() == 1", RewardOutcome.SCORED),
        ("import numpy\ndef f(:", "assert f() == 1", RewardOutcome.SCORED),
        ("def f(): raise ImportError(\"No module named 'numpy'\")", "assert f() == 1", RewardOutcome.SCORED),
        (
            "try:\n    import numpy\nexcept ImportError:\n    pass\ndef f(): return 2",
            "assert f() == 1",
            RewardOutcome.SCORED,
        ),
        ("if 0: import numpy\ndef f(): return 2", "assert f() == 1", RewardOutcome.SCORED),
    ],
)
def test_a_missing_known_package_gives_no_verdict(source: str, test: str, outcome: RewardOutcome) -> None:
    result = score(fenced(source), asserts(test))
    assert (result.value, result.outcome) == (0.0, outcome)
    assert ("reward_args.python" in result.note) == (outcome is RewardOutcome.UNAVAILABLE)


def test_scripts_are_compared_by_what_they_write() -> None:
    cases = [
        {"stdin": "2\n", "expected_stdout": "4\n"},
        {"stdin": "3", "expected_stdout": " 6"},
        {"stdin": "4", "expected_stdout": "9"},
    ]
    result = score(fenced("print(int(input()) * 2)"), {"case_type": "input", "test_cases": json.dumps(cases)})
    assert (result.value, result.outcome) == (pytest.approx(2 / 3), RewardOutcome.SCORED)
    assert result.parts["passed"] == pytest.approx(2 / 3) and "case 3 of 3: wrong output" in result.note
    crashed = score(fenced("print(4)\nraise KeyError('x')"), {"case_type": "input", "test_cases": cases})
    assert crashed.value == 0 and "KeyError" in crashed.note


@pytest.mark.parametrize(
    ("source", "tests", "share"),
    [
        ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(1) == 3"], 0.5),
        ("def sort(items): items.sort()", ["x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]"], 1),
        ("from typing import List\ndef g(x: List[int]) -> Dict: return Counter(x)", ["assert g([1, 1]) == {1: 2}"], 1),
        (
            "def apply(f, items): return [f(item) for item in items]",
            ["assert apply(lambda x: x + 1, [1, 2]) == [2, 3]"],
            1,
        ),
        ("def count(n):\n    yield from range(n)", ["assert list(count(3)) == [0, 1, 2]"], 1),
        (
            "class Low(ValueError): pass\nclass Account:\n    def __init__(self, n): self.n = n\n"
            "    def take(self, k):\n        if k > self.n: raise Low('too low')\n        self.n -= k",
            [
                "a = Account(5)\na.take(2)\nassert a.n == 3 and isinstance(a, Account)",
                "import pytest\ndef test_low():\n    with pytest.raises(Low, match='too'):\n        Account(1).take(2)",
                "try:\n    Account(1).take(2)\nexcept ValueError as error:\n    assert str(error) == 'too "
                "low'\nelse:\n    assert False",
            ],
            1,
        ),
        (
            "def f(x): return x / 3",
            ["import pytest\nassert f(1) == pytest.approx(0.333333, abs=1e-5)", "assert abs(f(1) - 0.3333) < 1e-3"],
            1,
        ),
        (
            "def size(node): return 0 if node is None else node.value + size(node.next)",
            [
                "class Node:\n    def __init__(self, v, n=None): self.value, self.next = v, n\nassert size(Node(1, "
                "Node(2))) == 3"
            ],
            1,
        ),
        (
            "from collections import namedtuple\nPair = namedtuple('Pair', 'a b')\ndef f(): return Pair(1, 2)",
            [
                "assert f() == (1, 2) and f().b == 2 and len(f()) == 2",
                "from solution import f as g\nassert tuple(g()) == (1, 2)",
            ],
            1,
        ),
        (
            "async def f(x): return x",
            ["import asyncio\nassert asyncio.run(f(3)) == 3", "async def test_f():\n    assert await f(3) == 3"],
            1,
        ),
        ("x = 5\nif __name__ == '__main__':\n    raise ValueError", ["assert x == 5"], 1),
        (
            "def f(x): return -x",
            [
                "import pytest\n@pytest.mark.parametrize('x, y', [(1, -1), (2, -2)])\ndef test_f(x, y): assert f(x) == "
                "y",
                "import pytest\n@pytest.mark.parametrize('x, y', [(1, -1), (2, 2)])\ndef test_f(x, y): assert f(x) == "
                "y",
                "import pytest\n@pytest.fixture\ndef one(): return 1\nclass TestF:\n    def test_f(self, one): assert "
                "f(one) == -1",
                "import unittest\nclass T(unittest.TestCase):\n    def test_f(self): self.assertEqual(f(1), 1)",
            ],
            0.5,
        ),
    ],
)
def test_tests_see_the_programs_objects(source: str, tests: list[str], share: float) -> None:
    assert score(fenced(source), asserts(*tests, kind="pytest")).value == share


VECTOR = """
class V:
    def __init__(self, x): self.x = x
    def __add__(self, other): return V(self.x + other.x)
    def __eq__(self, other): return self.x == other.x
    def __lt__(self, other): return self.x < other.x
    def __len__(self): return self.x
    def __str__(self): return f"V{self.x}"
    def __iter__(self): return iter(range(1, self.x + 1))
"""


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        (
            "def f(x): return 3.0000000001",
            [
                "assert abs(f(2) - 3) < 1e-6",
                "import pytest\nassert f(2) == pytest.approx(3)",
                "import math\nassert math.fabs(f(2) - 3) < 1e-6 and math.isclose(3, f(2), rel_tol=1e-6)",
                "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertAlmostEqual(f(2), 3)",
                "assert round(f(2), 2) - 3 == 0 and not round(f(2)) - 3",
            ],
        ),
        ("def f(x): return [1.5, 2.5]", ["assert max(abs(a - b) for a, b in zip(f(2), [1.5, 2.5])) < 1e-6"]),
        ("def f(x): return {1, 2}", ["assert f(2) - {1, 2} == set() and 1 in f(2)"]),
        (
            VECTOR,
            [
                "assert V(1) + V(2) == V(3) != V(1)",
                "assert len(V(3)) == 3 and str(V(1)) == 'V1' and 4 in V(4)",
                "assert V(1) < V(2)",
            ],
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(x): return P(x)",
            ["assert f(2) == P(2)", "assert f(2) in [P(2)]"],
        ),
        ("class P:\n    pass", ["p = P()\nassert p == p and p != P() and p in [p]"]),
        (
            "from enum import *\nclass C(Enum): R = 1\nclass I(IntEnum): A = 3",
            ["assert C.R is C.R and C.R.value == 1", "assert I.A + 1 == 4 and I.A in (3, 4)"],
        ),
        (
            "class S(list):\n    def push(self, x): self.append(x)",
            ["s = S()\ns.push(3)\nassert s == [3] and 3 in s and s[0] == 3\ns.push(4)\nassert s == [3, 4]"],
        ),
        (
            "class S(str): pass\nclass D(dict): pass",
            ["assert 'bc' in S('abcd')", "d = D()\nd['a'] = 1\nassert 'a' in d and d == {'a': 1}"],
        ),
        (
            "class Node:\n    def __init__(self, v, n=None): self.v, self.n = v, n\n"
            "def reverse(h):\n    p = None\n    while h: h.n, p, h = p, h, h.n\n    return p",
            ["h = reverse(Node(1, Node(2)))\nassert h.v == 2 and h.n.v == 1 and h.n.n is None"],
        ),
        ("def gcd(a, b): return a if b == 0 else gcd(b, a % b)", ["assert gcd(4, 6) == 2"]),
    ],
)
def test_the_honest_twin_of_a_forgery_passes(source: str, tests: list[str]) -> None:
    assert score(fenced(source), asserts(*tests)).value == 1.0


def test_check_is_split_into_its_asserts() -> None:
    check = "def check(candidate):\n    limit = 2\n    assert candidate(1) == limit\n    assert candidate(2) == 4\n"
    assert [text.count("assert") for text in one_assert_each(check)] == [1, 1]
    for row in (
        {"test_cases": [{"assert_code": check, "entry_point": "f"}]},
        {"test_cases": [], "test_case_function": check, "entry_point": "f"},
        {"test_cases": "", "test_case_function": check},
    ):
        assert score(fenced("def f(x): return x + 1"), {"case_type": "check_based", **row}).value == 0.5


def test_check_uses_library_names_from_python() -> None:
    check = "def check(candidate):\n    assert Counter(candidate(2)) == Counter([2, 2])\n"
    row = {"case_type": "check_based", "test_cases": [{"assert_code": check, "entry_point": "f"}]}
    assert score(fenced("def f(x): return [x, x]\ndef Counter(x): return 0"), row).value == 1.0
    assert score(fenced("def f(x): return 1\ndef Counter(x): return 0"), row).value == 0.0


def test_a_texts_response_is_a_value() -> None:
    row = asserts("assert {response}.startswith('Dear')", "assert 'kind' in '{response}'", kind="text")
    assert score("<think>no</think>Dear ''' friend", row).value == 0.5


RIGHT = "def mean(n):\n    if n < 1:\n        return 0.0\n    return sum(range(n + 1)) / n"
WRONG = [
    RIGHT.replace("n + 1", "n"),
    RIGHT.replace("/ n", "// n"),
    RIGHT.replace("n < 1", "n > 1"),
    "def mean(n): return n",
    "def mean(n): return None",
    "def mean(n): return float('nan')",
    "def mean(n):\n    import sys\n    sys.exit(0)",
    "def mean(n): yield 2.5",
    "mean = 2.5",
]
MAIN = "if __name__ == '__main__':\n    print(mean(int(input())))"
MEANS = {4: 2.5, 1: 1.0, 0: 0.0}
CHECK = "def check(candidate):\n" + "".join(
    f"    assert abs(candidate({n}) - {mean}) < 1e-6\n" for n, mean in MEANS.items()
)
KINDS = {
    "input": {"test_cases": [{"stdin": str(n), "expected_stdout": str(mean)} for n, mean in MEANS.items()]},
    "assert": {"test_cases": ["\n".join(f"assert mean({n}) == {mean}" for n, mean in MEANS.items())]},
    "pytest": {
        "test_cases": [
            f"import pytest\ndef test_mean():\n    assert list(map(mean, {[*MEANS]})) == "
            f"pytest.approx({[*MEANS.values()]})"
        ]
    },
    "check_based": {"test_cases": [{"assert_code": CHECK, "entry_point": "mean"}]},
}


@pytest.mark.parametrize("sandbox", ["bubblewrap", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_right_program_passes_a_case_type(kind: str, sandbox: str) -> None:
    row = {"case_type": kind, **KINDS[kind]}
    for tolerance in (None, 1e-5):
        assert score(fenced(f"{RIGHT}\n{MAIN}"), row, sandbox=sandbox, tolerance=tolerance, pays="all").value == 1
    passed = [
        one for one in WRONG if score(fenced(f"{one}\n{MAIN}"), row, sandbox=sandbox, tolerance=1e-5, pays="all").value
    ]
    assert passed == []


def test_endings_can_be_told_apart() -> None:
    row = {"case_type": "input", "test_cases": [{"stdin": "", "expected_stdout": "1"}] * 2}
    compiled = score(fenced("def f(:"), row)
    assert (compiled.parts["compile_error"], compiled.parts["timeout"]) == (1.0, 0.0) and "SyntaxError" in compiled.note
    late = score(fenced("while True: pass"), row, cpu_seconds=CPU_EXPIRY, cases="first_failure")
    assert (late.parts["compile_error"], late.parts["timeout"]) == (0.0, 0.5) and late.note.startswith(
        "case 1 of 2: timeout"
    )
    assert CPU_EXPIRY / 2 < late.parts["cpu_seconds"] < 2 * CPU_EXPIRY
    assert score("No code, " * 1000, row).outcome == RewardOutcome.UNPARSABLE


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"case_type": "java"}, "'case_type' is 'java'"),
        ({"case_type": "input", "test_cases": "[{"}, "not JSON"),
        ({"case_type": "input", "test_cases": 3}, "is a int"),
        ({"case_type": "input", "test_cases": [{"stdin": ""}]}, "case 0 .* no text 'expected_stdout'"),
        ({"case_type": "assert", "test_cases": []}, "no 'test_cases'"),
        ({"case_type": "check_based", "test_case_function": "def f(): pass"}, "no function 'check'"),
        (
            {"case_type": "check_based", "test_case_function": "def check(c): assert c(1"},
            "the row's check cannot be read",
        ),
        *(
            (
                {"case_type": kind, "test_cases": ["assert True", {"assert_code": "assert f(1"}]},
                "case 1 of .* cannot be read",
            )
            for kind in ("assert", "pytest", "text")
        ),
    ],
)
def test_rows_that_cannot_be_read(row: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        cases_of(row)


def test_without_a_sandbox_there_is_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "bwrap_path", lambda: broken)
    program.ready.cache_clear()
    result = score("", asserts("assert True"))
    assert (result.value, result.outcome) == (0.0, RewardOutcome.UNAVAILABLE)
    assert "No permissions to create" in result.note and "sandbox: none" in result.note
    assert score(fenced("f = 1"), asserts("assert f == 1"), sandbox="none").value == 1.0
    with pytest.raises(ValueError, match="sandbox is 'nsjail'"):
        score("", asserts("assert True"), sandbox="nsjail")
    with pytest.raises(SandboxUnavailable, match="does not run"):
        find_interpreter(str(tmp_path / "no-python"))


class Fusion(BaseHTTPRequestHandler):
    """Stands in for a SandboxFusion server. Runs programs without a sandbox, or fails."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ran = subprocess.run(
            [sys.executable, "-c", asked["code"]], input=asked["stdin"], capture_output=True, text=True, timeout=RUN
        )
        run_result = {
            "status": "Finished",
            "execution_time": 0.1,
            "stdout": ran.stdout,
            "stderr": ran.stderr,
            "return_code": ran.returncode,
        }
        answer = {"status": "Failed" if ran.returncode else "Success", "message": "", "run_result": run_result}
        body = json.dumps({"status": "SandboxError", "message": "full"} if "broken" in self.path else answer).encode()
        self.send_response(200 if self.path.endswith("/run_code") else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Fusion) as served:
        thread = Thread(target=served.serve_forever)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def test_a_server_may_run_the_programs(server: HTTPServer) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    cases = [{"stdin": "2", "expected_stdout": "4"}, {"stdin": "x", "expected_stdout": "4"}]
    result = score(fenced("print(int(input()) * 2)"), {"case_type": "input", "test_cases": cases}, sandbox=url)
    assert result.value == 0.5 and "ValueError" in result.note
    assert score(fenced("def f(:"), asserts("assert f"), sandbox=url).parts["compile_error"] == 1.0
    broken = score(fenced("f = 1"), asserts("assert f"), sandbox=f"{url}/broken")
    assert broken.outcome == RewardOutcome.UNAVAILABLE and "full" in broken.note


def test_nobody_answers() -> None:
    result = score("", asserts("assert True"), sandbox="http://127.0.0.1:9")
    assert result.outcome == RewardOutcome.UNAVAILABLE and "no answer from" in result.note


@pytest.fixture
def secret(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = Path("/var/tmp") if os.geteuid() == 0 else tmp_path_factory.mktemp("secret")
    path = folder / f"roll-secret-{os.getpid()}"
    path.write_text("secret")
    path.chmod(0o666)
    yield str(path)
    assert path.read_text() == "secret"
    path.unlink()


def processes() -> set[int]:
    """Return the PIDs of the sandboxes that this process or its descendants started, and of orphaned sandboxes."""
    own = {os.getpid(), 1, *(child.pid for child in psutil.Process().children(recursive=True))}
    return {
        process.pid
        for process in psutil.process_iter(["ppid"])
        if START in _command(process) and process.info["ppid"] in own
    }


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def mounts() -> str:
    return Path("/proc/self/mounts").read_text()


def tried(names: list[str], secret: str, server: HTTPServer) -> dict[str, str]:
    """Run attacks, check that no process or mount remains, and return the results of those that the sandbox did not
    withstand.
    """
    before = processes(), mounts()
    found = escapes.try_all(names, secret, server.server_port)
    until(lambda: processes() <= before[0], "all processes of the sandboxes have ended")
    assert mounts() == before[1]
    return {name: came for name, came in found.items() if came != escapes.WITHSTOOD}


def test_there_are_enough_attempts() -> None:
    assert len(escapes.names()) == len(set(escapes.names())) >= 120
    assert set(QUICK) | set(QUICK_AS_OTHER) <= set(escapes.names())


def test_no_escape_works(secret: str, server: HTTPServer) -> None:
    assert tried(list(QUICK), secret, server) == {}


def forged_unisolated(names: list[str]) -> dict[str, str]:
    return {name: came for name, came in escapes.forge_unisolated(names).items() if came != escapes.WITHSTOOD}


def test_no_forgery_works_without_a_sandbox() -> None:
    assert forged_unisolated([name for name in QUICK if name in escapes.sections("forgeries.txt")]) == {}


@pytest.mark.full
def test_no_forgery_of_all_works_without_a_sandbox() -> None:
    assert forged_unisolated(list(escapes.sections("forgeries.txt"))) == {}


@pytest.mark.full
def test_no_escape_works_of_all(secret: str, server: HTTPServer) -> None:
    assert tried(escapes.names(), secret, server) == {}


def as_other(names: list[str], secret: str, server: HTTPServer) -> dict[str, str]:
    """Run attacks as the unprivileged user `nobody`, with a Python interpreter that this user may read.

    Return the results of those that the sandbox did not withstand.
    """
    nobody = pwd.getpwnam("nobody")
    paths = os.pathsep.join([str(ROOT), str(PACKAGES)])
    words = ["-P", str(Path(escapes.__file__)), secret, str(server.server_port), *names]
    for python in (sys.executable, "/usr/bin/python3"):
        whom: dict[str, Any] = {
            "user": nobody.pw_uid,
            "group": nobody.pw_gid,
            "extra_groups": [],
            "env": {"PYTHONPATH": paths},
            "cwd": "/",
        }
        try:
            subprocess.run(
                [python, "-P", "-c", "import roll.rewards.sandbox.program"],
                check=True,
                capture_output=True,
                timeout=RUN,
                **whom,
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        done = subprocess.run([python, *words], check=True, capture_output=True, text=True, timeout=RUN, **whom)
        return {name: came for name, came in json.loads(done.stdout).items() if came != escapes.WITHSTOOD}
    pytest.skip("no Python of this machine can be read by the user 'nobody'")


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests already run as an unprivileged user")
def test_no_escape_works_for_a_user_without_rights(secret: str, server: HTTPServer) -> None:
    assert as_other(list(QUICK_AS_OTHER), secret, server) == {}


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests already run as an unprivileged user")
def test_sandbox_holds_all_escapes_for_unprivileged_user(secret: str, server: HTTPServer) -> None:
    assert as_other(escapes.names(), secret, server) == {}


def test_no_operator_of_equality_is_asked() -> None:
    assert not link.JUDGED.keys() & link.ASKED.keys()
    assert not {"__eq__", "__ne__", "__contains__"} & link.OPERATIONS.keys()
