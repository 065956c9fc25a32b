"""Writes judgements for the judge of the tiny world to learn: `22=22?` -> `yes`, `22=23?` -> `no`.

    python examples/tiny/make_judgements.py PROBLEMS FILE [--seed 0]

PROBLEMS is a file of make_problems.py, whose prompts and right answers are taken. What is asked is what judge_prompt.txt makes of
a problem, a response and the right answer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path

TEMPLATE = Path(__file__).with_name("judge_prompt.txt")
EACH = 4
"""Judgements of each problem, half of them of the right answer."""


def wrong_response(answer: str, draw: random.Random) -> str:
    """Something else than the right answer: a number near it, its digits changed, any digits, or nothing."""
    near = str(max(0, int(answer) + draw.choice((-10, -3, -2, -1, 1, 2, 3, 10))))
    digits = "".join(draw.choices("0123456789", k=draw.randint(1, 4)))
    response = draw.choice((near, near, near, answer[::-1], answer + draw.choice("0123456789"), answer[:-1], digits, digits))
    return response if response != answer else f"{answer}0"


def judgements(problems: list[dict[str, str]], seed: int) -> list[dict[str, str]]:
    """`prompt` to show and `response` to learn."""
    draw, template = random.Random(seed), TEMPLATE.read_text(encoding="utf-8").rstrip("\n")
    rows = []
    for problem in problems:
        answer = problem["ground_truth"]
        for number in range(EACH):
            response = wrong_response(answer, draw) if number % 2 else answer
            asked = template.format(question=problem["prompt"], response=response, reference=answer)
            rows.append({"prompt": asked, "response": "no" if number % 2 else "yes"})
    return rows


def write_judgements(problems: Path, file: Path, seed: int) -> None:
    """Writes the file. It appears when it is whole."""
    rows = judgements([json.loads(line) for line in problems.read_text(encoding="utf-8").splitlines()], seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.rename(partial, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_judgements(given.problems, given.file, given.seed)
