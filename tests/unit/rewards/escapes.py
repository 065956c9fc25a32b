"""Attacks of programs on the sandbox that judges them.

attempts.txt has programs that escape if they run without an error. forgeries.txt has programs, each with a test that it
must not pass. endless.txt has programs that never end.

`python escapes.py SECRET PORT NAME...` runs attacks as the current user. SECRET is a file that they must not read or
change, and PORT the port of a local server that they must not reach. The script prints a JSON object that maps the name
of each attack to its result.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from roll.rewards.sandbox.bubblewrap import find_interpreter
from roll.rewards.sandbox.program import CaseEnd, Job, Outcome, ProgramLimits, run_program

HERE = Path(__file__).parent
CPU, WALL = 2, 300.0
SHORT_WALL = 3.0
"""Wall time limit of programs that sleep, in seconds. The limits are not in tests/limits.py because this file runs as a
script.
"""
LIMITS = ProgramLimits(cpu_seconds=CPU, wall_seconds=WALL, memory_mib=512, disk_mib=16, output_mib=1)
WITHSTOOD = "withstood"
BESIDE_THE_POINT = re.compile(
    "ESCAPED|ModuleNotFound|ImportError|LookupError|NameError|SyntaxError|AttributeError|TypeError"
)
"""Found in the output of an attack that succeeded, or that failed for a reason unrelated to the sandbox and so proves
nothing.
"""
CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    result = libc.syscall(*map(ctypes.c_long, arguments))
    assert result >= 0, ctypes.get_errno()
    return result
"""
LIAR = """
class Liar:
    def yes(self, other=None): return True
    def nothing(self, other=None): return 0
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = __contains__ = yes
    __sub__ = __rsub__ = __abs__ = __hash__ = nothing
    def __ne__(self, other): return False
    def __float__(self): return 5.0
"""
FIND = """
import gc
from roll.rewards.sandbox.inside.link import Link
def find(): return next(item for item in gc.get_objects() if type(item) is Link)
"""


def sections(name: str) -> dict[str, str]:
    """Return the programs of a file by name."""
    parts = re.split(r"^### (\w+)\n", (HERE / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def names() -> list[str]:
    """Return the names of all attacks."""
    return [*sections("attempts.txt"), *sections("endless.txt"), *sections("forgeries.txt")]


def try_all(chosen: Iterable[str], secret: str, port: int) -> dict[str, str]:
    """Run attacks. Return the result of each by name: WITHSTOOD, or a description if the sandbox did not withstand
    it.
    """
    attempts, endless, forgeries = sections("attempts.txt"), sections("endless.txt"), sections("forgeries.txt")
    found = {}
    for name in chosen:
        if name in attempts:
            found[name] = attempt(name, attempts[name].replace("SECRET", repr(secret)).replace("PORT", str(port)))
        elif name in endless:
            found[name] = go_on(endless[name], sleeps="sleep" in name)
        else:
            found[name] = forge(forgeries[name])
    return found


def attempt(name: str, body: str) -> str:
    """Run the code on two inputs. It must not see the second input while it runs on the first one. Return WITHSTOOD or
    the output.
    """
    guarded = f"{CALL}\ntry:\n{textwrap.indent(body, '    ')}\n    print('ESCAPED')\nexcept BaseException as error:\n"
    source = f"{guarded}    print(type(error).__name__, error)\n"
    outcomes = _outcomes(Job(source, "input", (b"first", b"LATERCASE")), LIMITS)
    looked_at = outcomes[:1] if name == "search_memory" else outcomes
    said = "; ".join(outcome.output.decode("utf-8", "replace") for outcome in looked_at)
    return said if BESIDE_THE_POINT.search(said) else WITHSTOOD


def forge(section: str, sandboxed: bool = True) -> str:
    """Run a program with a test that it must not pass. Return WITHSTOOD, or the outcome if it passes or proves
    nothing.
    """
    source, test = section.split("--- test\n")
    source = source.replace("LIAR\n", LIAR).replace("FIND\n", FIND)
    kind = "text" if "{response}" in test else "assert"
    judged = {"kind": kind, "code": test, "source": source, "entry": "", "response": source}
    outcome = _outcomes(Job("" if kind == "text" else source, kind, (), (judged,)), LIMITS, sandboxed)[0]
    beside = outcome.ending == CaseEnd.COMPILE_ERROR or outcome.note.startswith(
        ("NameError", "SyntaxError", "ModuleNotFound")
    )
    return str(outcome) if outcome.ending == CaseEnd.OK or beside else WITHSTOOD


def go_on(source: str, sleeps: bool) -> str:
    """Run a program that never ends. Return WITHSTOOD if a limit ends it, and the outcome otherwise."""
    limits = ProgramLimits(1, SHORT_WALL if sleeps else LIMITS.wall_seconds, 256, 16, 1)
    outcome = _outcomes(Job(source, "input", (b"",)), limits)[0]
    ended = (
        outcome.ending == CaseEnd.WALL_TIME
        if sleeps
        else outcome.ending in (CaseEnd.CPU_TIME, CaseEnd.OUTPUT_SIZE, CaseEnd.FAILED)
    )
    return WITHSTOOD if ended and outcome.cpu_seconds < 2 * limits.cpu_seconds else str(outcome)


def forge_unisolated(names: Iterable[str]) -> dict[str, str]:
    """Run forgeries without a sandbox. Return the result of each by name, as `try_all` does.

    What they write into /tmp goes into a folder instead: a module there would hide one of the standard library.
    """
    forgeries = sections("forgeries.txt")
    with TemporaryDirectory() as folder:
        return {name: forge(forgeries[name].replace("/tmp", folder), sandboxed=False) for name in names}


def _outcomes(job: Job, limits: ProgramLimits, sandboxed: bool = True) -> list[Outcome]:
    return list(run_program(job, limits, find_interpreter(None), sandboxed))


if __name__ == "__main__":
    print(json.dumps(try_all(sys.argv[3:] or names(), sys.argv[1], int(sys.argv[2]))))
