"""Small imitations of public data sets: the files, columns and types of the Hub, with a few rows of text written for
the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

SCORES = ((9.0, 7.5), (8.0, 2.0), (6.5, 6.5), (8.5, 4.0), (7.0, 3.0), (9.5, 1.0))


def gsm8k_row(first: int, second: int) -> dict[str, str]:
    """Return a row like those of https://huggingface.co/datasets/openai/gsm8k, with calculator annotations and
    thousands separators.
    """
    total = first + second
    return {
        "question": f"What is {first} plus {second}?",
        "answer": f"It is {first}+{second} = <<{first}+{second}={total}>>{total:,}.\n#### {total:,}",
    }


def write_gsm8k(folder: Path, train: int = 40, test: int = 8) -> Path:
    """Write the data set's configuration `main` to the folder, and return the folder."""
    rows = [gsm8k_row(number * 37 % 101 + number // 101, 950 + number) for number in range(train + test)]
    return _write(folder, {"train-00000-of-00001": rows[:train], "test-00000-of-00001": rows[train:]})


def pair_row(number: int) -> dict[str, Any]:
    """Return a row of https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized. Every sixth pair has equal
    scores.
    """
    question, good, bad = f"Name {number} colours.", f"Red, and {number - 1} others.", "No."
    chosen, rejected = (
        [{"content": question, "role": "user"}, {"content": text, "role": "assistant"}] for text in (good, bad)
    )
    better, worse = SCORES[number % len(SCORES)]
    return {
        "prompt": question,
        "prompt_id": f"{number:064x}",
        "chosen": chosen,
        "rejected": rejected,
        "messages": chosen,
        "score_chosen": better,
        "score_rejected": worse,
    }


def write_ultrafeedback(folder: Path, train: int = 24, test: int = 6) -> Path:
    """Write four of the data set's six splits to the folder, and return the folder."""
    rows = [pair_row(number) for number in range(train + test)]
    splits = {"train": rows[:train], "test": rows[train:]}
    files = {f"data/{split}_{kind}-00000-of-00001": part for kind in ("prefs", "sft") for split, part in splits.items()}
    return _write(folder, files)


def write_capybara(folder: Path, train: int = 12, test: int = 3) -> Path:
    """Write conversations of two turns with the columns of https://huggingface.co/datasets/trl-lib/Capybara, and return
    the folder.
    """
    texts = ("user", "Hello {}."), ("assistant", "Good day."), ("user", "And {}?"), ("assistant", "Fine.")
    rows = [
        {
            "source": "Made",
            "messages": [{"content": text.format(number), "role": role} for role, text in texts],
            "num_turns": 2,
        }
        for number in range(train + test)
    ]
    return _write(folder, {"data/train-00000-of-00001": rows[:train], "data/test-00000-of-00001": rows[train:]})


def _write(folder: Path, files: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
    for name, rows in files.items():
        file = folder / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list([dict(row) for row in rows]).to_parquet(file)
    return folder
