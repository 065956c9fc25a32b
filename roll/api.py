"""The Python interface of roll: the commands as functions that return results and raise errors.

docs/running.md has an example. The functions may be called inside a running event loop, as in a notebook. They must be
called from the main thread, because they install signal handlers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from roll.config.load.compose import without_hydra
from roll.config.plan.plan import make_plan
from roll.config.schema.pipelines import Config
from roll.errors import ConfigError, Fault
from roll.evaluation.request import Request
from roll.evaluation.results import EvaluationResult
from roll.evaluation.run import run_evaluation
from roll.evaluation.settings import find_subject, plan_evaluation
from roll.pipeline import job_of, jobs_of
from roll.runs.assemble import run_experiment
from roll.runs.checkpointer import EXPORT
from roll.tracking.jsonl import METRICS_FILE, read_ends
from roll.tracking.life import ActivityDisplay
from roll.types import Metrics


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run."""

    folder: Path
    """The run folder."""
    step: int
    """Number of the last completed step."""
    metrics: Metrics
    """Metrics of the last completed step."""
    export: Path | None
    """Folder of the trained model in the format of Hugging Face. None if the model was not exported."""


def load_config(
    experiment: str | Mapping[str, Any] | DictConfig,
    overrides: Sequence[str] = (),
    config_path: str | Path | None = None,
) -> Config:
    """Compose and check the configuration of an experiment, like `python -m roll.pipeline --config-name NAME KEY=VALUE
    ...`, or check one that is composed already.

    Args:
        experiment: Name of a shipped experiment, or of one in `config_path`; or the configuration itself, such as that
            of a Hydra application. Its node `hydra` is ignored.
        overrides: Overrides of the form `key=value`, for a name.
        config_path: Folder with the YAML file of the experiment. None searches the shipped experiments.

    Raises:
        ConfigError: The configuration has faults. The error lists all of them.
    """
    if not isinstance(experiment, str):
        if overrides or config_path is not None:
            remedy = "change the configuration itself, or give the name of an experiment"
            raise ConfigError(Fault("overrides", "are given for a configuration, not a name", remedy, "misplaced"))
        try:
            composed = experiment if isinstance(experiment, DictConfig) else OmegaConf.create(dict(experiment))
        except OmegaConfBaseException as error:
            problem, remedy = " ".join(str(error).split()), "give numbers, texts, lists and blocks"
            raise ConfigError(Fault("experiment", problem, remedy, "wrong_type")) from None
        return job_of(without_hydra(composed))[0]
    if flags := [word for word in overrides if word.startswith("-")]:
        raise ConfigError(
            Fault("overrides", f"'{flags[0]}' is a flag of the command", "give only key=value", "misplaced")
        )
    place = ["--config-path", str(config_path)] if config_path is not None else []
    jobs = jobs_of([*place, "--config-name", experiment, *overrides])
    if len(jobs) != 1:
        raise ConfigError(
            Fault(
                "overrides", f"they define a sweep of {len(jobs)} jobs", "give one value for each key", "not_supported"
            )
        )
    return jobs[0][0]


def train(config: Config) -> TrainResult:
    """Run an experiment to its end. If its run folder has a checkpoint, continue from it.

    Raises:
        BadInput: `dry_run` is set, or the models or the data cannot be used. Nothing has started.
        RollError: A part of the run failed.
        KeyboardInterrupt: A signal ended the run. After a single signal during training, it has completed its step and
            written a checkpoint, unless `save_at_end` is false.
    """
    if config.dry_run:
        raise ConfigError(Fault("dry_run", "true", "remove it: load_config has checked everything", "not_supported"))
    plan = make_plan(config, [])
    with ActivityDisplay(Console()) as life:
        life.driver("loading models and data")
        run_experiment(config, plan, life)
    folder = Path(config.output_dir)
    records, _ = read_ends(folder / METRICS_FILE)
    last = dict(records[-1])
    export = folder / EXPORT
    return TrainResult(folder, int(last.pop("step")), last, export if export.is_dir() else None)


def evaluate(request: Request | str | Path) -> EvaluationResult:
    """Generate responses to held-out prompts and score them, like `python -m roll.evaluate`.

    Args:
        request: What to evaluate and how. A run folder, a checkpoint folder or a model is evaluated with all defaults.

    Raises:
        BadInput: The request, the model or the data cannot be used. Nothing has started.
        RollError: A part of the evaluation failed.
        KeyboardInterrupt: The evaluation was interrupted. The samples so far are written.
    """
    asked = request if isinstance(request, Request) else Request(str(request))
    with ActivityDisplay(Console(stderr=True)) as life:
        life.driver("loading models and data")
        return run_evaluation(plan_evaluation(asked, find_subject(asked.subject)), life)
