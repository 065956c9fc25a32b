"""Writes pairs for DPO from a model's own answers: a right and a wrong one to the same prompt.

    python examples/recipes/make_pairs.py SAMPLES FILE [--pairs 1] [--seed 0]

SAMPLES is the file `samples.jsonl` of `python -m roll.evaluate` with several samples of each prompt. FILE gets rows
with `prompt`, `chosen` and `rejected`. Prompts whose answers are all right or all wrong give no pair, and answers that
were cut at the length limit are not used.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def answers(record: Mapping[str, Any], passed: bool) -> list[str]:
    """Return the different answers of a record that ended by themselves, and passed or failed."""
    found = [one["text"] for one in record["responses"] if one["passed"] is passed and one["finish_reason"] == "stop"]
    return [text for text in dict.fromkeys(found) if text.strip()]


def pairs(record: Mapping[str, Any], most: int, draw: random.Random) -> list[dict[str, str]]:
    """Return at most `most` pairs of a prompt. No answer is in two of them."""
    right, wrong = (answers(record, passed) for passed in (True, False))
    count = min(most, len(right), len(wrong))
    return [
        {"prompt": record["row"]["prompt"], "chosen": chosen, "rejected": rejected}
        for chosen, rejected in zip(draw.sample(right, count), draw.sample(wrong, count), strict=True)
    ]


def summary(records: Sequence[Mapping[str, Any]], found: Iterable[Sequence[Mapping[str, str]]]) -> str:
    """Return how many pairs there are, and why prompts gave none."""
    lengths = [len(of_one) for of_one in found]
    right = [any(answers(record, True)) for record in records]
    wrong = [any(answers(record, False)) for record in records]
    both = sum(map(bool, lengths))
    only_right, only_wrong = (
        sum(has and not other for has, other in zip(one, two, strict=True))
        for one, two in ((right, wrong), (wrong, right))
    )
    return (
        f"{sum(lengths)} pair(s) from {both} of {len(records)} prompts; of the others, {only_right} had only right "
        f"answers, {only_wrong} only wrong ones, and {len(records) - both - only_right - only_wrong} none that ended"
    )


def write_pairs(samples: Path, file: Path, most: int, seed: int) -> str:
    """Write the pairs of an evaluation, and return the summary to print.

    Raises:
        ValueError: the samples cannot be read, or give no pair. The text says what to do.
    """
    draw = random.Random(seed)
    try:
        records = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
        found = [pairs(record, most, draw) for record in records]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"'{samples}' cannot be read as samples: {error!r}; give samples.jsonl of roll.evaluate"
        ) from error
    said = summary(records, found)
    if not any(found):
        raise ValueError(f"'{samples}': {said}; evaluate with more --samples, or with tasks of another difficulty")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text("".join(json.dumps(row) + "\n" for of_one in found for row in of_one), encoding="utf-8")
    partial.rename(file)
    return said


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--pairs", type=int, default=1, help="largest number of pairs of a prompt (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        print(write_pairs(given.samples, given.file, given.pairs, given.seed))
    except ValueError as error:
        parser.error(str(error))
