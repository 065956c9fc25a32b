"""Finds the run folders to compare."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from roll.errors import DataError, Fault
from roll.tracking.jsonl import METRICS_FILE

DEPTHS = ("*", "*/*")
"""Glob patterns of run folders in a folder of several runs."""


def find_runs(places: Sequence[Path]) -> list[Path]:
    """Return the run folders at the given places, each once. A place is a run folder, or a folder of runs, such as that
    of a multirun.

    Raises:
        DataError: a place is neither, or there are fewer than two runs in all.
    """
    found: list[Path] = []
    faults: list[Fault] = []
    for place in places:
        runs = _runs_of(place)
        found += runs
        if not runs:
            problem = (
                f"there is no {METRICS_FILE} in it or in a folder below it"
                if place.is_dir()
                else "there is no such folder"
            )
            remedy = (
                "give the run folder (`output_dir`) of a run that finished a step, or the folder with the runs of a "
                "multirun"
            )
            faults.append(Fault(str(place), problem, remedy))
    if faults:
        raise DataError(faults)
    resolved = [run.resolve() for run in found]
    runs = [run for place, run in enumerate(found) if resolved[place] not in resolved[:place]]
    if len(runs) < 2:
        raise DataError(
            [
                Fault(
                    str(places[0]),
                    "this is the only run, so there is nothing to compare it with",
                    "give a second run folder",
                )
            ]
        )
    return runs


def _runs_of(place: Path) -> list[Path]:
    if (place / METRICS_FILE).is_file():
        return [place]
    below = [path.parent for depth in DEPTHS for path in place.glob(f"{depth}/{METRICS_FILE}")]
    return sorted(below, key=lambda path: _natural(str(path)))


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key by which `seed_10` comes after `seed_9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def labels(folders: Sequence[Path]) -> list[str]:
    """Return a name for each run: its path relative to the common folder of all."""
    paths = [str(folder.resolve()) for folder in folders]
    common = os.path.commonpath(paths)
    return [os.path.relpath(path, common) if path != common else os.path.basename(path) for path in paths]
