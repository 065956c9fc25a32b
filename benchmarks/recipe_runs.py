"""Reads the finished runs of a recipe: validations with their seconds, and the sizes of the held-out sets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import yaml

from benchmarks.intervals import quantile
from roll.tracking.history import RunStart, read_starts
from roll.tracking.intervals import wilson
from roll.tracking.jsonl import METRICS_FILE, VALIDATION_SAMPLES_FILE, each_record

SHARE_NAMES = ("pass@", "accuracy", "maj@")
"""Beginnings of the last part of a metric that is a share of prompts or rows."""
PREFERRED = ("/pass@1", "/accuracy", "/loss")
"""Ends of the metrics that a record shows, unless others are named: the first of them that the runs have."""

LOGGED = re.compile(r"(?P<time>[\d-]+ [\d:]+,\d+) [A-Z]+ (roll\.tracking\.console: step (?P<step>\d+)/)?")
"""A line of the driver's log; `step` is the step that it reports."""


@dataclass(frozen=True)
class Point:
    """One line of `metrics.jsonl`."""

    step: int
    metrics: Mapping[str, float]
    training_seconds: float
    """Seconds of all steps so far, without validations and without the start."""
    seconds: float | None
    """Seconds since the first line of the driver's log, validations included; None for a resumed run."""


@dataclass(frozen=True)
class Run:
    """One finished run."""

    folder: Path
    seed: int
    start: RunStart | None
    points: Sequence[Point]
    prompts: Mapping[str, int]
    """Number of prompts of each held-out set."""

    def validations(self, metric: str) -> list[Point]:
        """Return the points that have a metric."""
        return [point for point in self.points if metric in point.metrics]


@dataclass(frozen=True)
class Value:
    """A value, with the confidence interval of the mean if there is one."""

    value: float
    low: float | None = None
    high: float | None = None


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        ValueError: the folder has no metrics or no configuration.
    """
    metrics, written = folder / METRICS_FILE, folder / "config.yaml"
    if not metrics.is_file() or not written.is_file():
        raise ValueError(f"'{folder}' has no {METRICS_FILE} or no config.yaml; give the output folder of a run")
    starts = read_starts(folder)
    lines = [line for line in each_record(metrics) if line]
    since = _walls(folder / "logs" / "driver.log", len(starts))
    points, training = list[Point](), 0.0
    for line in lines:
        if line["step"]:
            training += line.get("time/step", 0.0) - line.get("time/evaluate", 0.0)
        points.append(Point(line["step"], line, training, since.get(line["step"])))
    seed = yaml.safe_load(written.read_text(encoding="utf-8")).get("seed", 0)
    return Run(folder, seed, starts[-1] if starts else None, points, _prompts(folder / VALIDATION_SAMPLES_FILE))


def _walls(log: Path, starts: int) -> dict[int, float]:
    """Return the seconds since the first line of the driver's log at which each step was logged."""
    if starts != 1 or not log.is_file():
        return {}
    times = [found for line in log.read_text(encoding="utf-8").splitlines() if (found := LOGGED.match(line))]
    begin = datetime.fromisoformat(times[0]["time"]) if times else datetime.min
    ended = {int(one["step"]): datetime.fromisoformat(one["time"]) for one in times if one["step"]}
    return {step: (time - begin).total_seconds() for step, time in ended.items()}


def _prompts(samples: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for record in each_record(samples) if samples.is_file() else ():
        if record and record["responses"]:
            found[record["set"]] = record["responses_of_step"] // len(record["responses"])
    return found


def shown_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the metrics to show: accuracies of the held-out sets; or else losses. Raises ValueError without any."""
    names = {name for run in runs for point in run.points for name in point.metrics if name.startswith("val/")}
    for end in PREFERRED:
        if found := sorted(name for name in names if name.endswith(end)):
            return found
    raise ValueError("the runs have no validation with an accuracy or a loss; name one with --metric")


def is_share(metric: str) -> bool:
    """Return whether a metric is a share between 0 and 1."""
    return metric.rpartition("/")[2].startswith(SHARE_NAMES)


def of_run(run: Run, metric: str, point: Point) -> Value:
    """Return a metric of one run, with Wilson's interval for one response to each prompt if it is a share."""
    value = float(point.metrics[metric])
    size = run.prompts.get(metric.split("/")[1])
    return Value(value, *wilson(value, size)) if size and is_share(metric) else Value(value)


def over_seeds(values: Sequence[float]) -> Value:
    """Return the mean of several runs with Student's interval."""
    mean = fmean(values)
    if len(values) == 1:
        return Value(mean)
    half = quantile(len(values) - 1) * stdev(values) / sqrt(len(values))
    return Value(mean, mean - half, mean + half)


def curve(runs: Sequence[Run], metric: str) -> list[tuple[int, Value]]:
    """Return the steps that all runs validated, each with the mean over the runs; of one run, with its own interval."""
    if len(runs) == 1:
        return [(point.step, of_run(runs[0], metric, point)) for point in runs[0].validations(metric)]
    by_run = [{point.step: float(point.metrics[metric]) for point in run.validations(metric)} for run in runs]
    shared = sorted(set.intersection(*(set(steps) for steps in by_run)))
    return [(step, over_seeds([steps[step] for steps in by_run])) for step in shared]
