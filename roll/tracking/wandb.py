"""Tracker for Weights & Biases. The package is optional and imported only if `track_with` names it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from roll.tracking.base import RunFacts, sample_table
from roll.types import Metrics, RolloutGroup

ID_FILE = "wandb_run_id"
"""Name of the file in the run folder with the id of the W&B run."""


class WandbTracker:
    """Starts one W&B run for each run folder, or continues it if the run is resumed."""

    name = "wandb"

    def __init__(self, run: RunFacts, settings: Mapping[str, Any]) -> None:
        """`settings` are further arguments of `wandb.init` (`project`, `entity`, `mode`, ...). W&B's files go into the
        run folder.
        """
        self._wandb = importlib.import_module("wandb")
        run.folder.mkdir(parents=True, exist_ok=True)
        arguments = {
            "project": "roll",
            "name": run.exp_name,
            "group": run.exp_name,
            "config": dict(run.config),
            "dir": str(run.folder),
        }
        known = run.folder / ID_FILE
        if run.resumed_step is not None and known.is_file():
            arguments |= {"id": known.read_text(encoding="utf-8"), "resume": "allow"}
        self._run = self._wandb.init(**(arguments | dict(settings)))
        known.write_text(self._run.id, encoding="utf-8")
        # Curves use the loop's step as their axis, not W&B's, so that a resumed run can log a step again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **metrics})

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        columns, rows = sample_table(step, groups)
        self._run.log({"step": step, "samples": self._wandb.Table(columns=columns, data=rows)})

    def close(self) -> None:
        self._run.finish()
