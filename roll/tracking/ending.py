"""Records how a run ended, in `end.json` of its folder. A run that is still running or was killed has no such file."""

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
    """Reason why the run ended before its last step; empty if it completed all steps."""
    checkpoint: str
    """Description of the checkpoint to resume from."""
    last_step: int | None = None
    """Number of the step with which the run would be complete; None if unknown."""


def write_end(folder: Path, end: RunEnd) -> None:
    """Write the file atomically. It replaces the file of an earlier run.

    Raises:
        OSError: the file cannot be written.
    """
    partial = folder / f".{END_FILE}.partial"
    try:
        partial.write_text(
            json.dumps(asdict(end), indent=1, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace"
        )
        os.replace(partial, folder / END_FILE)
    finally:
        partial.unlink(missing_ok=True)


def read_end(folder: Path) -> RunEnd | None:
    """Return how the run ended; None if the file is missing or unreadable."""
    try:
        return RunEnd(**json.loads((folder / END_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
