"""Writes training rows for a judge (`22=22?` -> `yes`, `22=23?` -> `no`), and pairs of a right and a wrong sum for a
reward model.

    python examples/tiny/make_judgements.py PROBLEMS FOLDER [--seed 0]

PROBLEMS is a file that make_problems.py wrote; its right answers are used. The script writes FOLDER/judgements.jsonl
for a judge, FOLDER/pairs.jsonl for a reward model, and FOLDER/prompt.txt with the prompt template of the judge:
`judge_prompt` of tiny_llm_judge.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from pathlib import Path

TEMPLATE = "{reference}={response}?"
EACH = 4
"""Number of rows for each problem. Half of the judgements are about the right answer."""


def wrong_response(answer: str, draw: random.Random) -> str:
    """Return a wrong answer: a number near the right one, changed digits, random digits, or a wrong character.

    Most of the near numbers are wrong by 1 or 2, like the wrong answers of the policy.
    """
    near = str(max(0, int(answer) + draw.choice((-10, -3, -2, -2, -1, -1, -1, 1, 1, 1, 2, 2, 3, 10))))
    digits = "".join(draw.choices("0123456789", k=draw.randint(1, 4)))
    letter = answer[:-1] + chr(draw.randrange(128))
    response = draw.choice(
        (near, near, near, answer[::-1], answer + draw.choice("0123456789"), answer[:-1], digits, letter)
    )
    return response if response != answer else f"{answer}0"


def judgements(problems: list[dict[str, str]], seed: int) -> list[dict[str, str]]:
    """Return the rows for a judge: the question as `prompt`, and the verdict to learn as `response`."""
    draw, rows = random.Random(seed), []
    for problem in problems:
        answer = problem["ground_truth"]
        for number in range(EACH):
            response = wrong_response(answer, draw) if number % 2 else answer
            rows.append(
                {
                    "prompt": TEMPLATE.format(response=response, reference=answer),
                    "response": "no" if number % 2 else "yes",
                }
            )
    return rows


def pairs(problems: list[dict[str, str]], seed: int) -> list[dict[str, str]]:
    """Return the rows for a reward model: `prompt`, the right answer as `response`, and a wrong answer as
    `rejected`.
    """
    draw = random.Random(seed)
    return [
        {
            "prompt": problem["prompt"],
            "response": problem["ground_truth"],
            "rejected": wrong_response(problem["ground_truth"], draw),
        }
        for problem in problems
        for _ in range(EACH)
    ]


def write_judgements(problems: Path, folder: Path, seed: int) -> None:
    """Write the files into a new folder, which replaces `folder` once it is complete."""
    rows = [json.loads(line) for line in problems.read_text(encoding="utf-8").splitlines()]
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, made in (("judgements", judgements(rows, seed)), ("pairs", pairs(rows, seed))):
        (partial / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    (partial / "prompt.txt").write_text(f"{TEMPLATE}\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_judgements(given.problems, given.folder, given.seed)
