"""roll's Python interface: the commands as functions that return results and raise errors.

docs/running.md has an example. They may be called inside a running event loop, as in a notebook, and from the main thread, whose signals
interrupt them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from roll.config.plan.plan import make_plan
from roll.config.schema.pipelines import Config
from roll.errors import ConfigError, Fault
from roll.evaluation.request import Request
from roll.evaluation.results import EvaluationResult
from roll.evaluation.run import run as run_evaluation
from roll.evaluation.settings import plan_evaluation
from roll.evaluation.subject import find_subject
from roll.pipeline.assemble import run
from roll.pipeline.checkpointer import EXPORT
from roll.pipeline.jobs import jobs_of
from roll.tracking.jsonl import METRICS_FILE, read_ends
from roll.tracking.life import Life
from roll.types import Metrics


@dataclass(frozen=True)
class TrainResult:
    """The result of a training."""

    folder: Path
    """The run folder."""
    step: int
    """Number of the last completed step."""
    metrics: Metrics
    """Metrics of that step."""
    export: Path | None
    """Folder of the trained model for Hugging Face's libraries. None if it was not exported."""


def load_config(name: str, overrides: Sequence[str] = (), config_path: str | Path | None = None) -> Config:
    """Compose and check an experiment, as `python -m roll.pipeline --config-name NAME KEY=VALUE ...` does.

    Args:
        name: of a shipped experiment, or of one in `config_path`.
        overrides: `key=value` each.

    Raises:
        ConfigError: with every fault found.
    """
    if flags := [word for word in overrides if word.startswith("-")]:
        raise ConfigError([Fault("overrides", f"'{flags[0]}' is a flag of the command", "give key=value alone")])
    place = ["--config-path", str(config_path)] if config_path is not None else []
    jobs = jobs_of([*place, "--config-name", name, *overrides])
    if len(jobs) != 1:
        raise ConfigError([Fault("overrides", f"they describe {len(jobs)} jobs", "give one value for each key")])
    return jobs[0][0]


def train(config: Config) -> TrainResult:
    """Run an experiment to its end. Continue from its run folder's checkpoint, if there is one.

    Raises:
        BadInput: models or data cannot be used; nothing has started.
        RollError: a part failed.
        KeyboardInterrupt: it was interrupted; its checkpoint is written.
    """
    if config.dry_run:
        raise ConfigError([Fault("dry_run", "true", "leave it out: load_config has checked everything")])
    plan = make_plan(config, [])
    with Life(Console()) as life:
        life.driver("loading models and data")
        run(config, plan, life)
    folder = Path(config.output_dir)
    records, _ = read_ends(folder / METRICS_FILE)
    last = dict(records[-1])
    export = folder / EXPORT
    return TrainResult(folder, int(last.pop("step")), last, export if export.is_dir() else None)


def evaluate(request: Request | str | Path) -> EvaluationResult:
    """Answer held-out prompts and score the answers, as `python -m roll.evaluate` does.

    Args:
        request: what to evaluate and how; a run folder, a checkpoint's folder, or a model stands for itself with all defaults.

    Raises:
        BadInput: the request, the model or the data cannot be used; nothing has started.
        RollError: a part failed.
        KeyboardInterrupt: it was interrupted; the samples so far are written.
    """
    asked = request if isinstance(request, Request) else Request(str(request))
    return run_evaluation(plan_evaluation(asked, find_subject(asked.subject)))
