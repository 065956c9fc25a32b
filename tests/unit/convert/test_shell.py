"""Commands of shell scripts, with the variables that the scripts assign."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from roll.convert.shell import script_commands, unassigned

SCRIPTS = [
    "A=1; B=$((A * 2 + 3)); run x=$B y=${A}z",
    "run a='b c' \"d e\" f\\ g",
    'LIST=(--x 1 # a remark\n  --y "2 3"\n)\nrun ${LIST[@]} "${LIST[@]}"',
    'X="one two"\nrun $X "$X" \'$X\'',
    "run a=1 \\\n  b=2 \\\n  c=3",
    "A=${NONE:-default}; B=${A:-other}; run $A $B",
    'A=yes\nif [ "$A" = "no" ]; then B=1; else B=2; fi\nrun $B',
    'A=yes\nif [ "$A" != "no" ]\nthen\n B=1\nelif [ -z "$A" ]; then B=3\nelse B=2\nfi\nrun $B',
    "export A=3 && run $A > /dev/null 2>&1",
    "read -r -d '' TEXT <<EOF\nfirst \\\n  second\nEOF\nrun $TEXT",
    "A=a; A+=b; run $A # not this",
    "run files=\"['$HOME/x', '$HOME/y']\"",
    'run x=["a","b"] y=\'["a","b"]\'',
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_of_bash(script: str) -> None:
    """The command `run` prints its words, one a line."""
    assert (bash := shutil.which("bash")) is not None
    function = "run() { printf '%s\\n' \"$@\" >&3; }\n"
    done = subprocess.run(
        [bash, "-c", f"exec 3>&1\n{function}{script}"],
        capture_output=True,
        text=True,
        env={"HOME": "/home/me"},
        check=False,
    )
    (found,) = [words for words in script_commands(script, {"HOME": "/home/me"}) if words[0] == "run"]
    assert found[1:] == done.stdout.splitlines()


def test_unassigned_variables_and_programs_are_named() -> None:
    ((_, first, second),) = script_commands('run "$A/x" $(date +%Y %m)', {})
    assert unassigned(first) == ["A"]
    assert unassigned(second) == ["$(date_+%Y_%m)"]


def test_given_variables_precede_assignments() -> None:
    assert script_commands("A=1\nrun $A", {"A": "2"}) == [["run", "2"]]


def test_undecidable_condition_is_false() -> None:
    assert script_commands('if [ "$#" -lt 2 ]; then run a; exit 1; fi\nrun b', {}) == [["run", "b"]]
