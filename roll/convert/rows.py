"""Counts the rows of files that are on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
