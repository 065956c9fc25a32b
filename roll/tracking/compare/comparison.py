"""Compares several runs by their records. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll.errors import DataError, Fault
from roll.tracking.base import LOSSES
from roll.tracking.compare.keys import differing, same_keys
from roll.tracking.report.curves import SMOOTHED_POINTS, half_width, smoothed, spread
from roll.tracking.report.directions import best_of
from roll.tracking.report.figures import EXACT
from roll.tracking.report.records import RunRecord, names_like, series

PIPELINE = "pipeline"
KEYS_OF_A_LOSS = (PIPELINE, "preference_loss", "divergence")
"""Keys that determine which quantity a loss measures. The losses of two runs are comparable only if these keys are the same."""
LOSS_NAMES = ("/loss", "/divergence")
"""Ends of the names of losses."""
COUNTERS = ("step", "epoch")
"""Columns of the metrics file that are not compared as metrics."""
MEDIANS = ("time/", "throughput/")
"""Prefixes of metrics whose median is shown, because the value of a single step is not informative."""


@dataclass(frozen=True)
class Cell:
    """A metric of one run."""

    value: float
    """The last value, or the median for `MEDIANS`. `value` and `best` of noisy training metrics are taken from the smoothed curve."""
    best: float | None
    """The best value; None for a metric without a better direction."""
    best_step: int | None
    """Step of the best value; None for a median, and for a metric without a better direction."""
    is_best: bool = False
    """Whether no other run has a better `best`."""


@dataclass(frozen=True)
class MetricRow:
    """A metric of all runs."""

    name: str
    cells: Sequence[Cell | None]
    """One cell for each run; None for a run without the metric."""
    obstacle: str | None = None
    """For a loss that these runs compute differently: the key that differs; then no value is marked as the best. Otherwise None."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of several runs, in the given order."""

    runs: Sequence[RunRecord]
    labels: Sequence[str]
    """A name for each run."""
    keys: Mapping[str, Sequence[str]]
    """The configuration keys that differ, each with the value of every run. A block that only some runs have is one entry.

    For runs of different pipelines, only keys that every run has."""
    same_keys: int
    """Number of keys that do not differ."""
    metrics: Sequence[MetricRow]
    """Metrics that at least two runs have."""

    @property
    def results(self) -> list[MetricRow]:
        """Return the main metrics: validation, rewards, losses and speed."""
        return [row for row in self.metrics if is_result(row.name)]


def compare(runs: Sequence[RunRecord], labels: Sequence[str]) -> Comparison:
    """Return the comparison of the runs. `labels` are their names.

    Raises:
        DataError: no metric is common to two of the runs.
    """
    names = {name for run in runs for name in names_like(run.rows, "", "")} - set(COUNTERS)
    rows = [_row(name, runs) for name in sorted(names, key=_place)]
    rows = [row for row in rows if sum(cell is not None for cell in row.cells) > 1]
    if not rows:
        folders = ", ".join(str(run.folder) for run in runs)
        raise DataError([Fault(folders, "no metric is common to two of these runs", "name runs of the same pipeline")])
    trees = [run.keys for run in runs]
    keys = differing(trees, common_only=len({tree.get(PIPELINE) for tree in trees}) > 1)
    return Comparison(runs, labels, keys, same_keys(trees), rows)


def is_result(name: str) -> bool:
    """Whether the metric is a main result: validation, reward, loss or speed."""
    known = ("reward/mean", "time/step", "throughput/tokens_per_second", *LOSSES)
    return name in known or (name.startswith("val/") and best_of(name) is not None)


def is_exact(name: str) -> bool:
    """Whether the metric is not smoothed: it has no noise, or each value was measured on the same prompts."""
    return name.startswith("val/") or name in EXACT


def is_median(name: str) -> bool:
    """Whether the median over all steps is shown for the metric."""
    return name.startswith(MEDIANS)


def obstacle_of(name: str, runs: Sequence[RunRecord]) -> str | None:
    """Return the first of `KEYS_OF_A_LOSS` that differs between the runs, if the metric is a loss. Otherwise return None."""
    if not name.endswith(LOSS_NAMES):
        return None
    return next((key for key in KEYS_OF_A_LOSS if len({run.keys.get(key) for run in runs}) > 1), None)


def _place(name: str) -> tuple[int, str]:
    """Return a sort key: validation first, then rewards and losses, then the rest by name."""
    first = ("val/", "reward/", *LOSSES)
    return next((place for place, prefix in enumerate(first) if name.startswith(prefix)), len(first)), name


def _row(name: str, runs: Sequence[RunRecord]) -> MetricRow:
    cells = [_cell(name, run) for run in runs]
    best = best_of(name)
    values = [cell.best for cell in cells if cell is not None and cell.best is not None]
    if best is None or len(values) < 2:
        return MetricRow(name, cells)
    if obstacle := obstacle_of(name, [run for run, cell in zip(runs, cells, strict=True) if cell is not None]):
        return MetricRow(name, cells, obstacle)
    winner = best(values)
    marked = [cell and Cell(cell.value, cell.best, cell.best_step, is_best=cell.best == winner) for cell in cells]
    return MetricRow(name, marked)


def _cell(name: str, run: RunRecord) -> Cell | None:
    steps, values = series([row for row in run.rows if row["step"]] if is_median(name) else run.rows, name)
    if not values:
        return None
    best = best_of(name)
    if is_median(name):  # the fastest step is only the one with the shortest batch
        median = statistics.median(values)
        return Cell(median, None if best is None else median, None)
    if not is_exact(name) and (half := half_width(len(values))):
        at = spread(len(values), SMOOTHED_POINTS)
        steps, values = [steps[index] for index in at], smoothed(values, at, half)
    if best is None:
        return Cell(values[-1], None, None)
    return Cell(values[-1], best(values), steps[values.index(best(values))])
