"""Counts the rows of files that are on this machine, and looks at their columns."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.convert.draft import Draft

MESSAGES = "the rows have the column `messages`"
COLUMNS = "the columns are `prompt`, a list of messages, and `solution`"
REFERENCES = ("solution", "ground_truth", "answer", "reward_model.ground_truth")
"""Columns of a reference answer: those of TRL, roll and GSM8K, and the one of verl."""


def count_rows(files: Any) -> int | None:
    """Return the number of rows of files of Parquet or JSON Lines, or None if one of them is not here or another kind.

    Args:
        files: a name, or a list of names.
    """
    names = files if isinstance(files, list) else [files]
    counts = [_count(Path(name)) for name in names if isinstance(name, str)]
    known = [count for count in counts if count]
    return sum(known) if known and len(known) == len(names) else None


def _count(file: Path) -> int | None:
    try:
        if file.suffix == ".parquet":
            from pyarrow import parquet  # imported here because it is slow

            return int(parquet.ParquetFile(file).metadata.num_rows)
        if file.suffix in (".jsonl", ".ndjson"):
            with file.open("rb") as lines:
                return sum(1 for line in lines if line.strip())
    except (OSError, ValueError):  # a damaged file is reported when the experiment starts
        return None
    return None


def first_row(files: Any) -> Mapping[str, Any] | None:
    """Return the first row of the first of the files, Parquet, JSON, JSON Lines or CSV, or None if it is not here."""
    file = Path(str(files[0] if isinstance(files, list) and files else files))
    try:
        if file.suffix == ".parquet":
            from pyarrow import parquet  # imported here because it is slow

            return next((row for part in parquet.ParquetFile(file).iter_batches(1) for row in part.to_pylist()), None)
        if file.suffix in (".jsonl", ".ndjson", ".json"):
            with file.open(encoding="utf-8") as lines:
                row = json.loads(next(lines, "null") if file.suffix != ".json" else _first_of_json(lines.read()))
            return row if isinstance(row, dict) else None
        if file.suffix == ".csv":
            with file.open(encoding="utf-8", newline="") as lines:
                return next(csv.DictReader(lines), None)
    except (OSError, ValueError):
        return None
    return None


def _first_of_json(text: str) -> str:
    """Return the first object of a list of objects, or of objects one after another."""
    start = re.match(r"\s*\[?\s*", text)
    first, _ = json.JSONDecoder().raw_decode(text, start.end() if start else 0)
    return json.dumps(first)


def fit_columns(draft: Draft, row: Mapping[str, Any]) -> None:
    """Name the columns that the rows of an experiment have, instead of those that TRL's own sets have."""
    for at in ("actor_train.data_args", "validation.data_args"):
        if draft.at(f"{at}.messages") == "prompt" and isinstance(row.get("prompt"), str):
            draft.drop(f"{at}.messages")
            draft.put(f"{at}.prompt", "prompt")
        if draft.at(at) and (reference := _reference(row)):
            draft.put(f"{at}.ground_truth", reference)
    if "prompt" in row and _reference(row):
        draft.notes = [note for note in draft.notes if note.said != COLUMNS]


def fit_completions(draft: Draft, row: Mapping[str, Any], role: str, learns_all: bool) -> None:
    """Name the columns `prompt` and `completion` of an experiment for SFT if its rows have them, texts or messages, as
    TRL reads them.

    Args:
        role: the trained role.
        learns_all: whether the prompt is trained on, too.
    """
    if "messages" in row or not {"prompt", "completion"} <= set(row) or draft.at(f"{role}.data_args.text"):
        return
    is_text = isinstance(row["prompt"], str)
    for at in (f"{role}.data_args", "validation.data_args"):
        if draft.at(f"{at}.messages") == "messages":
            draft.drop(f"{at}.messages")
            draft.put(f"{at}.prompt" if is_text else f"{at}.messages", "prompt")
            draft.put(f"{at}.response", "completion")
            draft.put(f"{at}.template", "raw" if is_text else None)  # TRL joins texts as they are
    if draft.at("loss_on") == "all" and not learns_all:
        draft.put("loss_on", "response")
    draft.notes = [note for note in draft.notes if note.said != MESSAGES]


def _reference(row: Mapping[str, Any]) -> str | None:
    nested = row.get("reward_model")
    there = {*row, *(f"reward_model.{key}" for key in nested or () if isinstance(nested, Mapping))}
    return next((name for name in REFERENCES if name in there), None)
