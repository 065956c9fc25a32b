"""How a run ended, in its folder: `end.json`. There is none while the run goes on, nor of one that was killed."""

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
    """Why, where it did not take all of its steps."""
    checkpoint: str
    """What can be gone on from, in words."""
    last_step: int | None = None
    """Last step of the whole run if it reaches its end; None where that is not known."""


def write_end(folder: Path, end: RunEnd) -> None:
    """Replace what an earlier run left.

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
    """None where there is none that can be read."""
    try:
        return RunEnd(**json.loads((folder / END_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
