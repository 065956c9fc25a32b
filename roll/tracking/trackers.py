"""Trackers of TensorBoard and of tracking services. Each imports its package when it is opened."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll.errors import Fault
from roll.tracking.base import GROUPS_PER_STEP, RunFacts, Tracker, group_record, sample_lines, sample_table
from roll.tracking.fanout import FAILURES
from roll.types import Metrics, RolloutGroup

Settings = Mapping[str, Any]
ID_FILE = "wandb_run_id"
"""Name of the file in the run folder with the id of the W&B run."""
FORBIDDEN = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow does not allow in names of metrics."""
LOG = logging.getLogger(__name__)


class TensorBoardTracker:
    """Writes event files into `tensorboard/` of the run folder."""

    name = "tensorboard"

    def __init__(self, run: RunFacts, settings: Settings) -> None:
        """`settings` are further arguments of `SummaryWriter` (`log_dir`, `flush_secs`, ...).

        TensorBoard hides the metrics that earlier processes logged for steps after the checkpoint; in a fresh start it
        hides all of them.
        """
        purge = 0 if run.resumed_step is None else run.resumed_step + 1
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            **({"log_dir": str(run.folder / "tensorboard"), "purge_step": purge} | dict(settings))
        )

    def log(self, step: int, metrics: Metrics) -> None:
        for metric, value in metrics.items():
            self._writer.add_scalar(metric, value, global_step=step)
        self._writer.flush()

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        pass

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Starts one W&B run for each run folder, or continues it if the run is resumed."""

    name = "wandb"

    def __init__(self, run: RunFacts, settings: Settings) -> None:
        """`settings` are further arguments of `wandb.init` (`project`, `mode`, ...). Files go into the run folder."""
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


class SwanLabTracker:
    """Starts one SwanLab run for each process. The runs of one experiment have its name as their group."""

    name = "swanlab"

    def __init__(self, run: RunFacts, settings: Settings) -> None:
        """`settings` are further arguments of `swanlab.init` (`project`, `mode`, ...). Files go into the run folder."""
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


class MlflowTracker:
    """Starts one MLflow run for each process, by default in experiment `roll` on MLflow's default server."""

    name = "mlflow"

    def __init__(self, run: RunFacts, settings: Settings) -> None:
        """`settings`: `tracking_uri`, `experiment_name`, and further arguments of `mlflow.start_run`."""
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
    """Return MLflow's name of a metric: `val/gsm8k/pass_at_1` for `val/gsm8k/pass@1`, other characters as `_`."""
    return FORBIDDEN.sub("_", name.replace("@", "_at_"))


class TrackioTracker:
    """Starts a Trackio run for each experiment; a resumed run continues it. The table of samples needs pandas."""

    name = "trackio"

    def __init__(self, run: RunFacts, settings: Settings) -> None:
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


OPENERS: Mapping[str, Callable[[RunFacts, Settings], Tracker]] = {
    tracker.name: tracker
    for tracker in (TensorBoardTracker, WandbTracker, SwanLabTracker, MlflowTracker, TrackioTracker)
}


def open_named(
    names: Sequence[str], facts: RunFacts, settings: Mapping[str, Settings]
) -> tuple[list[Tracker], list[Fault]]:
    """Open the trackers `names`. Return those that opened, and a fault for each of the others.

    The name `none` is skipped. `settings` are further arguments, by tracker.
    """
    opened, faults = list[Tracker](), list[Fault]()
    for name in names:
        if name == "none":
            continue
        try:
            opened.append(OPENERS[name](facts, settings.get(name, {})))
        except FAILURES as error:
            LOG.info("traceback of tracker '%s'", name, exc_info=error)
            problem = f"'{name}' cannot be opened: {type(error).__name__}: {error}"
            faults.append(Fault("track_with", problem, f"correct it, or remove `{name}` from `track_with`", "failed"))
    return opened, faults
