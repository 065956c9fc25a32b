"""Tracker for Trackio. The package is optional and imported only if `track_with` names it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from roll.tracking.base import RunFacts, sample_table
from roll.types import Metrics, RolloutGroup


class TrackioTracker:
    """Starts one Trackio run for each experiment, or continues it if the run is resumed. The table of samples needs
    pandas.
    """

    name = "trackio"

    def __init__(self, run: RunFacts, settings: Mapping[str, Any]) -> None:
        """`settings` are further arguments of `trackio.init` (`project`, `space_id`, ...)."""
        self._trackio = importlib.import_module("trackio")
        resume = "never" if run.resumed_step is None else "allow"
        arguments = {
            "project": "roll",
            "name": run.exp_name,
            "config": dict(run.config),
            "resume": resume,
            "embed": False,
        }
        self._run = self._trackio.init(**(arguments | dict(settings)))

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        columns, rows = sample_table(step, groups)
        self._run.log({"samples": self._trackio.Table(columns=columns, data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()
