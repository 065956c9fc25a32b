"""Writes how a run ended to `end.json` in its folder. A run that continues or was killed has none."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

END_FILE = "end.json"


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    outcome: Literal["done", "interrupted", "failed"]
    cause: str
    """Reason, if the run did not take all of its steps."""
    checkpoint: str
    """The checkpoint to continue from, in words."""
    last_step: int | None = None
    """Last step of the complete run, None if unknown."""


def write_end(folder: Path, end: RunEnd) -> None:
    """Write the file, in place of an earlier run's.

    Raises:
        OSError: the file cannot be written.
    """
    partial = folder / f".{END_FILE}.partial"
    try:
        partial.write_text(json.dumps(asdict(end), indent=1, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace")
        os.replace(partial, folder / END_FILE)
    finally:
        partial.unlink(missing_ok=True)


def read_end(folder: Path) -> RunEnd | None:
    """Read the file. None if it is absent or unreadable."""
    try:
        return RunEnd(**json.loads((folder / END_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
