"""Writes GSM8K with the prompts of verl's public recipes, from the files of `python -m roll.data.prepare gsm8k`.

    python examples/recipes/make_verl_gsm8k.py data/gsm8k data/verl-gsm8k

The second folder gets train.jsonl, which has the rows of train.jsonl and validation.jsonl of the first, and test.jsonl.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from roll.data.public_rows import BOX

ASKED = 'Let\'s think step by step and output the final answer after "####".'
"""What verl asks for after the question. Both numbers of its table count only answers in this form."""
PARTS = {"train.jsonl": ("train.jsonl", "validation.jsonl"), "test.jsonl": ("test.jsonl",)}


def verl_row(row: dict[str, str]) -> dict[str, str]:
    """Return a prepared row with verl's prompt. Raises ValueError if its prompt is not that of `roll.data.prepare`."""
    question = row["prompt"].removesuffix(f"\n{BOX}")
    if question == row["prompt"]:
        raise ValueError(f"the prompt does not end with '{BOX}'; prepare the rows with roll.data.prepare gsm8k")
    return {"prompt": f"{question} {ASKED}", "ground_truth": row["ground_truth"], "tag": "gsm8k"}


def write_verl(source: Path, folder: Path) -> None:
    """Write both files. Raises OSError and, as `verl_row`, ValueError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, parts in PARTS.items():
        lines = [line for part in parts for line in (source / part).read_text(encoding="utf-8").splitlines()]
        rows = [json.dumps(verl_row(json.loads(line))) + "\n" for line in lines]
        (folder / name).write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    try:
        write_verl(given.source, given.folder)
    except (OSError, ValueError) as error:
        parser.error(str(error))
