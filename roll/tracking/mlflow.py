"""Tracker for MLflow. The package is optional and imported only if `track_with` names it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from roll.tracking.base import GROUPS_PER_STEP, RunFacts, group_record
from roll.types import Metrics, RolloutGroup

FORBIDDEN = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow does not allow in names of metrics."""


class MlflowTracker:
    """Starts one MLflow run for each process, by default in the experiment `roll` on MLflow's default tracking
    server.
    """

    name = "mlflow"

    def __init__(self, run: RunFacts, settings: Mapping[str, Any]) -> None:
        """`settings`: `tracking_uri`, `experiment_name`, and further arguments of `mlflow.start_run` (`run_name`,
        `tags`, ...).
        """
        self._mlflow = importlib.import_module("mlflow")
        arguments = {"run_name": run.exp_name} | dict(settings)
        if uri := arguments.pop("tracking_uri", None):
            self._mlflow.set_tracking_uri(uri)
        self._mlflow.set_experiment(arguments.pop("experiment_name", "roll"))
        self._run_id = self._mlflow.start_run(**arguments).info.run_id
        # As a file, because MLflow truncates parameters after some thousand characters and accepts at most a hundred in
        # one call.
        self._mlflow.log_dict(dict(run.config), "config.yaml", run_id=self._run_id)

    def log(self, step: int, metrics: Metrics) -> None:
        named = {metric_name(name): float(value) for name, value in metrics.items()}
        self._mlflow.log_metrics(named, step=step, run_id=self._run_id)

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        records = [group_record(step, group) for group in groups[:GROUPS_PER_STEP]]
        self._mlflow.log_dict({"groups": records}, f"samples/step_{step}.json", run_id=self._run_id)

    def close(self) -> None:
        self._mlflow.end_run()


def metric_name(name: str) -> str:
    """Return MLflow's name of a metric: `val/gsm8k/pass_at_1` for `val/gsm8k/pass@1`. Other forbidden characters become
    underscores.
    """
    return FORBIDDEN.sub("_", name.replace("@", "_at_"))
