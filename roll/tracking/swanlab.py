"""Tracker for SwanLab. The package is optional and imported only if `track_with` names it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from roll.tracking.base import RunFacts, sample_lines
from roll.types import Metrics, RolloutGroup


class SwanLabTracker:
    """Starts one SwanLab run for each process. The runs of one experiment have its name as their group."""

    name = "swanlab"

    def __init__(self, run: RunFacts, settings: Mapping[str, Any]) -> None:
        """`settings` are further arguments of `swanlab.init` (`project`, `workspace`, `mode`, ...). Files go into the
        run folder.
        """
        self._swanlab = importlib.import_module("swanlab")
        folder = run.folder / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        arguments = {
            "project": "roll",
            "name": run.exp_name,
            "group": run.exp_name,
            "config": dict(run.config),
            "log_dir": str(folder),
        }
        self._run = self._swanlab.init(**(arguments | dict(settings)))

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        self._run.log(
            {"samples": [self._swanlab.Text(text, caption=caption) for caption, text in sample_lines(step, groups)]},
            step=step,
        )

    def close(self) -> None:
        self._run.finish()
