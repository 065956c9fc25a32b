"""Counts the wrong verdicts of `math_rule` and of math-verify alone on answers judged by hand, and prints them.

    python benchmarks/math_pairs.py              # the pairs of benchmarks/math_pairs.txt
    python benchmarks/math_pairs.py --pairs FILE # other pairs, in the same format

The status is 1 if `math_rule` calls a wrong answer right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from math_verify import parse, verify

from roll.rewards.functions.math_rule import math_rule
from roll.types import Prompt

PAIRS = Path(__file__).with_suffix(".txt")
SEPARATOR, WHOLE = " ;; ", "> "
VERDICTS = {"right": True, "wrong": False}
NO_PROMPT = Prompt(0, np.zeros(1, np.int32), "", "math_rule", {})


@dataclass(frozen=True)
class Pair:
    """A response and a reference, with the verdict that a person gave."""

    line: int
    is_right: bool
    reference: str
    response: str


def read_pairs(file: Path) -> list[Pair]:
    """Return the pairs of a file; its first lines tell the format. Raises ValueError for a line that is no pair."""
    pairs = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        verdict, reference, answer = line.split(SEPARATOR)
        response = answer.removeprefix(WHOLE) if answer.startswith(WHOLE) else f"\\boxed{{{answer}}}"
        pairs.append(Pair(number, VERDICTS[verdict], reference, response))
    return pairs


def by_math_rule(reference: str, response: str) -> bool:
    """Return whether `math_rule` calls the response right."""
    return math_rule(NO_PROMPT, response, {"ground_truth": reference}).value == 1.0


def by_math_verify(reference: str, response: str) -> bool:
    """Return whether math-verify alone calls the response right. The reference is given to it as a box."""
    return verify(
        parse(f"\\boxed{{{reference}}}", parsing_timeout=None),  # type: ignore[arg-type]
        parse(response, parsing_timeout=None),  # type: ignore[arg-type]
        timeout_seconds=None,
    )


def wrong_verdicts(pairs: Sequence[Pair], judge: Callable[[str, str], bool]) -> list[Pair]:
    """Return the pairs on which a judge differs from the person."""
    return [pair for pair in pairs if judge(pair.reference, pair.response) != pair.is_right]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    pairs = read_pairs(parser.parse_args().pairs)
    rights = sum(pair.is_right for pair in pairs)
    print(f"{rights} right and {len(pairs) - rights} wrong answers")
    false_positives = 0
    for name, judge in (("math-verify", by_math_verify), ("math_rule", by_math_rule)):
        differing = wrong_verdicts(pairs, judge)
        misses = sum(pair.is_right for pair in differing)
        false_positives = len(differing) - misses
        print(f"{name:12} {misses:3} false negatives, {false_positives:3} false positives")
    for pair in differing:
        print(f"    line {pair.line:3}, {'right' if pair.is_right else 'wrong'}: {pair.reference!r} {pair.response!r}")
    return int(false_positives > 0)


if __name__ == "__main__":
    sys.exit(main())
