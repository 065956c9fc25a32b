"""Writes pairs for DPO from a model's own answers: a right and a wrong one to the same prompt.

    python examples/recipes/make_pairs.py SAMPLES FILE [--pairs 1]

SAMPLES is the file `samples.jsonl` of `python -m roll.evaluate` with several samples of each prompt. FILE gets rows
with `prompt`, `chosen` and `rejected`. Prompts whose answers are all right or all wrong give no pair, and answers that
were cut at the length limit are not used. Of several right or wrong answers the most frequent ones are taken: frequent
mistakes cost the most.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def answers(record: Mapping[str, Any], passed: bool) -> list[str]:
    """Return the different answers of a record that ended by themselves, and passed or failed; the most frequent one is
    the first.
    """
    ended = [one for one in record["responses"] if one["finish_reason"] == "stop" and one["text"].strip()]
    return [text for text, _ in Counter(one["text"] for one in ended if one["passed"] is passed).most_common()]


def pairs(record: Mapping[str, Any], most: int) -> list[dict[str, str]]:
    """Return at most `most` pairs of a prompt. No answer is in two of them."""
    right, wrong = (answers(record, passed) for passed in (True, False))
    prompt = record["row"]["prompt"]
    both = zip(right[:most], wrong[:most], strict=False)
    return [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for chosen, rejected in both]


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


def write_pairs(samples: Path, file: Path, most: int) -> str:
    """Write the pairs of an evaluation, and return the summary to print.

    Raises:
        ValueError: the samples cannot be read, or give no pair. The text says what to do.
    """
    try:
        records = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
        found = [pairs(record, most) for record in records]
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
    given = parser.parse_args()
    try:
        print(write_pairs(given.samples, given.file, given.pairs))
    except ValueError as error:
        parser.error(str(error))
