"""Writes the arithmetic problems of the tiny examples: sums of four digits, `7+4+9+2=` -> `22`.

    python examples/tiny/make_problems.py FOLDER [--seed 0]

writes FOLDER/train.jsonl and FOLDER/heldout.jsonl, which have no problem in common, and FOLDER/hinted.jsonl: the
problems of train.jsonl after their answer, `22>7+4+9+2=`, from which a model learns to read hints.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

DIGITS = 4
TRAIN, HELDOUT = 4000, 256


def problem(digits: str) -> dict[str, str]:
    """Return the row of one problem.

    It has the `prompt`, the right answer as `response` and `ground_truth`, a wrong one as `rejected`, and the `tag` of
    the reward domain.
    """
    total = sum(map(int, digits))
    answer, wrong = str(total), str(total + 1 + int(digits[-1]) % 3)
    return {
        "prompt": "+".join(digits) + "=",
        "response": answer,
        "rejected": wrong,
        "ground_truth": answer,
        "tag": "arithmetic",
    }


def hinted(row: dict[str, str]) -> dict[str, str]:
    """Return the row of a problem whose prompt begins with its answer."""
    return {**row, "prompt": f"{row['response']}>{row['prompt']}"}


def draw_problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return (TRAIN rows, HELDOUT rows), drawn without replacement from all 10,000 problems."""
    drawn = random.Random(seed).sample(range(10**DIGITS), TRAIN + HELDOUT)
    rows = [problem(f"{number:0{DIGITS}d}") for number in drawn]
    return rows[:TRAIN], rows[TRAIN:]


def write_problems(folder: Path, seed: int) -> None:
    """Write the files into a new folder, which replaces `folder` once it is complete."""
    train, heldout = draw_problems(seed)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_jsonl(partial / "train.jsonl", train)
    _write_jsonl(partial / "heldout.jsonl", heldout)
    _write_jsonl(partial / "hinted.jsonl", map(hinted, train))
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)


def _write_jsonl(file: Path, rows: Iterable[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_problems(given.folder, given.seed)
    print(f"{given.folder}: train.jsonl and hinted.jsonl with {TRAIN:,} problems, heldout.jsonl with {HELDOUT:,}")
