"""Weights & Biases. The package is not among roll's requirements and is imported only where it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.errors import ConfigError, Fault
from roll.tracking.base import group_record
from roll.types import Metrics, RolloutGroup

GROUPS_PER_STEP = 1


class WandbTracker:
    """One W&B run for each process; the processes of one experiment share its name as their group."""

    name = "wandb"

    def __init__(self, folder: Path, exp_name: str, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """`settings` are further arguments of `wandb.init` (`project`, `entity`, `mode`, ...); W&B's files go below `folder`.

        Raises:
            ConfigError: the package is not installed.
        """
        try:
            self._wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            if error.name != "wandb":
                raise
            remedy = "install it (`pip install wandb`) or take `wandb` out of `track_with`"
            raise ConfigError([Fault("track_with", "'wandb' is asked for, but the package is not installed", remedy)]) from None
        folder.mkdir(parents=True, exist_ok=True)
        arguments = {"project": "roll", "name": exp_name, "group": exp_name, "config": dict(config), "dir": str(folder), **settings}
        self._run = self._wandb.init(**arguments)
        # The loop's own step, so that a run that resumes may log a step again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **metrics})

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        columns = ["step", "domain", "prompt", "response", "reward", "outcome", "finish_reason", "length"]
        rows = [
            [step, record["domain"], record["prompt"], response["text"], *(response[column] for column in columns[4:])]
            for record in (group_record(step, group) for group in groups[:GROUPS_PER_STEP])
            for response in record["responses"]
        ]
        self._run.log({"step": step, "samples": self._wandb.Table(columns=columns, data=rows)})

    def close(self) -> None:
        self._run.finish()
