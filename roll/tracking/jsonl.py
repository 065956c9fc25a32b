"""The record of a run: `metrics.jsonl`, `notices.jsonl`, `samples.jsonl` and `validation_samples.jsonl`.

Each line is a JSON object with its `step`.

No step is recorded twice, even if a resumed run repeats it.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from roll.errors import RollError
from roll.tracking.base import Notice, group_record
from roll.types import Metrics, RolloutGroup

LOG = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
NOTICES_FILE = "notices.jsonl"
SAMPLES_FILE = "samples.jsonl"
VALIDATION_SAMPLES_FILE = "validation_samples.jsonl"


class JsonlTracker:
    """Implements `Record`: appends complete lines to the four files."""

    name = "jsonl"

    def __init__(
        self, folder: Path, resumed_from: int | None = None, groups_per_step: int = 4, groups_per_set: int = 8
    ) -> None:
        """Open the files in `folder`.

        Args:
            resumed_from: step of the checkpoint that the run resumes from. Records of later steps are removed, because
                the run repeats these steps. None begins new files; the files of an earlier run are kept as
                `<name>.previous`.
            groups_per_step: largest number of training groups to keep for each step.
            groups_per_set: largest number of groups to keep for each validation of a held-out set.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._groups_per_step, self._groups_per_set = groups_per_step, groups_per_set
        self._metrics = _continue(folder / METRICS_FILE, resumed_from)
        self._notices = _continue(folder / NOTICES_FILE, resumed_from)
        self._samples = _continue(folder / SAMPLES_FILE, resumed_from)
        self._held_out = _continue(folder / VALIDATION_SAMPLES_FILE, resumed_from)

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`. Raises RollError if the file cannot be written."""
        _append(self._metrics, to_line({"step": step, **metrics}))

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """See `Tracker`. Raises RollError if the file cannot be written."""
        _append(self._samples, _sample_lines({}, step, groups, self._groups_per_step))

    def held_out(self, step: int, name: str, groups: Sequence[RolloutGroup]) -> None:
        """See `Record`. Keep the first groups of the set, so that the prompts are the same at each validation.

        Raises RollError if the file cannot be written.
        """
        _append(self._held_out, _sample_lines({"set": name}, step, groups, self._groups_per_set))

    def notices(self, found: Sequence[Notice]) -> None:
        """See `Record`. Raises RollError if the file cannot be written."""
        _append(self._notices, b"".join(to_line(notice.record()) for notice in found))

    def close(self) -> None:
        self._metrics.close()
        self._notices.close()
        self._samples.close()
        self._held_out.close()


def _sample_lines(first: dict[str, Any], step: int, groups: Sequence[RolloutGroup], most: int) -> bytes:
    """Return the lines of at most `most` groups. Each line also has the number of all responses of the step."""
    total = sum(len(group.episodes) for group in groups)
    return b"".join(
        to_line({**first, **group_record(step, group), "responses_of_step": total}) for group in groups[:most]
    )


def to_line(record: dict[str, Any]) -> bytes:
    """Return a record as one line of valid JSON.

    Non-finite numbers become null. Characters that UTF-8 cannot encode become JSON escapes.
    """
    text = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return a file's records and its number of unreadable lines. A killed process may leave half a line."""
    records, unreadable = [], 0
    for _, record in _lines(path):
        if record is None:
            unreadable += 1
        else:
            records.append(record)
    return records, unreadable


def read_ends(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of the first and the last step, and the number of unreadable lines.

    Only these records are kept in memory, because the samples of a long run are large.
    """
    first: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    unreadable = 0
    for _, record in _lines(path):
        if record is None:
            unreadable += 1
        elif not first or record["step"] == first[0]["step"]:
            first.append(record)
        elif last and record["step"] == last[0]["step"]:
            last.append(record)
        else:
            last = [record]
    return first + last, unreadable


def each_record(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the record of each line; None for an unreadable line. Only one is kept in memory."""
    for _, record in _lines(path):
        yield record


def truncate_after(path: Path, step: int) -> int:
    """Remove the lines of later steps and the unreadable lines. Return the number of removed lines.

    The file is replaced atomically: a crash leaves either the old file or the new one.
    """
    shorter = path.with_name(f".{path.name}.shorter")
    cut = 0
    with shorter.open("wb") as kept:
        for line, record in _lines(path):
            if record is not None and record["step"] <= step:
                kept.write(line)
            else:
                cut += 1
        kept.flush()
        os.fsync(kept.fileno())
    if cut:
        os.replace(shorter, path)
        LOG.info("%s: removed %d unreadable lines and lines after step %d", path, cut, step)
    else:
        shorter.unlink()
    return cut


def _append(file: FileIO, lines: bytes) -> None:
    try:
        while lines:
            lines = lines[file.write(lines) :]
    except OSError as error:
        remedy = "free space or fix the folder, then start again: the run resumes from its last checkpoint"
        raise RollError(f"{file.name}: cannot be written: {error}; {remedy}") from error


def _continue(path: Path, resumed_from: int | None) -> FileIO:
    if (
        path.exists() and path.stat().st_size
    ):  # an empty file is not a record of an earlier run, and must not replace one
        if resumed_from is None:
            os.replace(path, path.with_name(f"{path.name}.previous"))
        else:
            truncate_after(path, resumed_from)
    return path.open("ab", buffering=0)


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    with path.open("rb") as file:
        for line in file:
            yield line, _record(line)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if whole else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
