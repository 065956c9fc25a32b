"""Writes repositories with a failing test, which the tiny agent learns to repair in a shell.

    python examples/tiny/make_repairs.py FOLDER [--seed 0]

writes tasks (FOLDER/train.jsonl, FOLDER/validation.jsonl) and conversations for the warm-up
(FOLDER/conversations.jsonl). make_image.py writes the image in which they are worked on.

A repository has a module `f.py` with one function of one line, and a test `t.py`, which prints that line and what
happens. There are three kinds of bugs: a wrong operator, a name that is not defined, and a missing colon. Hidden tests
call the repaired function with other numbers, in a process whose output they compare, so that a module that exits with
status 0 does not pass.

In most conversations the agent makes two wrong repairs of any kind. In the others it looks at the test, and then mostly
makes the right repair. Reinforcement learning teaches it to look first, and to do what the output means.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

OPERATORS = {"add": "+", "sub": "-", "mul": "*", "mod": "%"}
LETTERS = "cghkpqvwxyz"
"""Names of parameters: letters that no other word of the line has, so that `sed` finds them."""
KINDS = (*["operator"] * 5, "name", "colon")
"""Kinds of bugs, with their shares. Few have a repair that is right for all of their kind, because a policy that always
writes that one learns nothing else.
"""
GUESSES = ("operator", "operator", "name", "colon")
"""Kinds of repairs at random, with their shares."""
SENSIBLE = 0.6
"""Share of right repairs of those who have looked at the test."""
TRAIN, HELD_OUT, CONVERSATIONS = 400, 64, 12000
LOOKS = 0.2
"""Share of the conversations that begin with the test."""
LOOK = "python3 t.py"
NOTHING = "(no output)"
"""What the shell says of a repair."""
TEST = """\
s=open("f.py").read()
print(s.strip())
try:
 n={{}};exec(s,n);print("{name}({a},{b}) is",n["{name}"]({a},{b}))
except Exception as e:print(type(e).__name__)
"""
HIDDEN = """\
[ "$(python3 -S -c 'import f; print({calls})')" = "{expected}" ]
"""
VERIFY = "sh h"


class Repository(NamedTuple):
    """A function with a bug."""

    name: str
    first: str
    second: str
    kind: str
    wrong: str
    """What the bug has in the place of the right operator or name."""
    numbers: tuple[int, int]
    """Arguments of the visible test."""

    @property
    def line(self) -> str:
        """The only line of `f.py`."""
        operator = self.wrong if self.kind == "operator" else OPERATORS[self.name]
        second = self.wrong if self.kind == "name" else self.second
        colon = "" if self.kind == "colon" else ":"
        return f"def {self.name}({self.first},{self.second}){colon} return {self.first}{operator}{second}"

    @property
    def repair(self) -> str:
        """The command that repairs it."""
        right = OPERATORS[self.name] if self.kind == "operator" else self.second
        return fix(")", "):") if self.kind == "colon" else fix(self.wrong, right)

    @property
    def said(self) -> str:
        """What its test prints."""
        if self.kind != "operator":
            return f"{self.line}\n{'NameError' if self.kind == 'name' else 'SyntaxError'}"
        value = compute(self.wrong, *self.numbers)
        return f"{self.line}\n{self.name}({self.numbers[0]},{self.numbers[1]}) is {value}"


def fix(old: str, new: str) -> str:
    """Return the command that replaces a text of `f.py`."""
    return f"sed -i 's/{old}/{new}/' f.py"


def compute(operator: str, a: int, b: int) -> int:
    """Return the value of an expression."""
    return {"+": a + b, "-": a - b, "*": a * b, "%": a % b}[operator]


def repositories(draw: random.Random, seen: set[str], is_new: bool) -> Iterator[Repository]:
    """Yield repositories whose line is not in `seen`. With `is_new` it is added, and none comes twice."""
    while True:
        name, kind = draw.choice(list(OPERATORS)), draw.choice(KINDS)
        first, second, other = draw.sample(LETTERS, 3)
        others = [one for one in OPERATORS.values() if one != OPERATORS[name]]
        wrong = {"operator": draw.choice(others), "name": other, "colon": ""}[kind]
        one = Repository(name, first, second, kind, wrong, (draw.randint(5, 9), draw.randint(2, 4)))
        if one.line not in seen:
            seen |= {one.line} if is_new else set()
            yield one


def row(one: Repository) -> dict[str, Any]:
    """Return the row of a repository, as the environment `shell` reads it."""
    pairs = [(9, 4), (6, 3), (8, 5)]
    values = [str(compute(OPERATORS[one.name], *pair)) for pair in pairs]
    calls = ",".join(f"f.{one.name}({a},{b})" for a, b in pairs)
    test = TEST.format(name=one.name, a=one.numbers[0], b=one.numbers[1])
    return {
        "messages": [{"role": "user", "content": "Fix f.py"}],
        "tag": "repairs",
        "files": {"f.py": one.line + "\n", "t.py": test},
        "tests": {"h": HIDDEN.format(calls=calls, expected=" ".join(values))},
        "verify": VERIFY,
    }


def guess(one: Repository, draw: random.Random) -> str:
    """Return a repair of any kind that is wrong, with an operator or a letter of the line and any other."""
    present = next(operator for operator in OPERATORS.values() if operator in one.line)
    letters = sorted({one.first, one.second, one.line[-1]})
    while True:
        kind = draw.choice(GUESSES)
        if kind == "operator":
            tried = fix(present, draw.choice([operator for operator in OPERATORS.values() if operator != present]))
        else:
            tried = fix(")", "):") if kind == "colon" else fix(*draw.sample(letters, 2))
        if tried != one.repair:
            return tried


def conversation(one: Repository, draw: random.Random) -> dict[str, Any]:
    """Return an episode of the warm-up."""
    if draw.random() < LOOKS:
        first, said = LOOK, one.said
        last = one.repair if draw.random() < SENSIBLE else guess(one, draw)
    else:
        first, said = guess(one, draw), NOTHING
        last = guess(one, draw)
    answered = [{"role": "assistant", "content": first}, {"role": "user", "content": said}]
    return {"messages": [*row(one)["messages"], *answered, {"role": "assistant", "content": last}]}


def write_repairs(folder: Path, seed: int) -> None:
    """Write all files into a new folder, which replaces `folder` once it is complete."""
    draw = random.Random(seed)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    held_out = set[str]()
    written = {"validation": [row(one) for one in itertools.islice(repositories(draw, held_out, True), HELD_OUT)]}
    written["train"] = [row(one) for one in itertools.islice(repositories(draw, set(held_out), True), TRAIN)]
    others = itertools.islice(repositories(draw, held_out, False), CONVERSATIONS)
    written["conversations"] = [conversation(one, draw) for one in others]
    for name, rows in written.items():
        (partial / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_repairs(given.folder, given.seed)
