"""Compares several runs by their records. Pure functions.

Compares the configurations of several runs. Pure functions.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.errors import DataError, Fault
from roll.tracking.base import LOSSES
from roll.tracking.report.curves import SMOOTHED_POINTS, half_width, smoothed, spread_indices
from roll.tracking.report.directions import best_of
from roll.tracking.report.figures import EXACT
from roll.tracking.report.records import RunRecord, names_like, series

NAMES_OF_THE_RUN = ("output_dir", "exp_name")
"""Keys that differ between any two runs. They are not compared."""
ABSENT = "-"
"""Shown for a key or a block that a run does not have."""
ONLY_HERE = "only here"
"""Shown for a block that exists in this run only, if the block has no short form."""
PRESENT = "present"
"""Shown for a block that exists in several runs but not in all, if the block has no short form."""
SHORT_BLOCK = 40
"""Largest number of characters of a block that is shown as JSON."""
NAMING_KEYS = ("reward", "environment", "data_args.file_name", "model_args.model_name_or_path")
"""Keys of a block whose value, if given, stands for the block."""


def differing(
    trees: Sequence[Mapping[str, Any] | None], common_only: bool = False, prefix: str = ""
) -> dict[str, list[str]]:
    """Return the keys and blocks whose values differ, each with the text of every run's value, in the order of their
    paths (`a.b.c`).

    A block that only some runs have is one entry. If several runs have it, the keys that differ between those runs
    follow.

    Args:
        trees: one mapping for each run; None for a run that is not compared. The text of its values is `ABSENT`.
        common_only: whether to leave out keys that some of the mappings do not have.
        prefix: the path of the mappings, with a dot at its end.
    """
    compared = [tree for tree in trees if tree is not None]
    names = {name for tree in compared for name in tree if not common_only or all(name in one for one in compared)}
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=str):
        path = f"{prefix}{name}"
        if path in NAMES_OF_THE_RUN:
            continue
        blocks = [_block(tree, name) for tree in trees]
        count = sum(block is not None for block in blocks)
        texts = [ABSENT if tree is None or name not in tree else _text(tree[name]) for tree in trees]
        if not count:
            if len({text for text, tree in zip(texts, trees, strict=True) if tree is not None}) > 1:
                found[path] = texts
            continue
        if count < len(compared):
            unset = (_text(None), _text({}))
            others = [ABSENT if text in unset else text for text in texts]
            found[path] = [
                other if one is None else block_text(one, count == 1) for one, other in zip(blocks, others, strict=True)
            ]
        if count > 1:
            found |= differing(blocks, common_only, f"{path}.")
    return found


def same_keys(trees: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of keys that have the same value in every run, without `NAMES_OF_THE_RUN`."""
    first, *others = [flat_json(tree) for tree in trees]
    return sum(
        key not in NAMES_OF_THE_RUN and all(other.get(key) == value for other in others) for key, value in first.items()
    )


def block_text(block: Mapping[str, Any], is_only: bool) -> str:
    """Return a short text for a block: its JSON, the names in it, the value of one of `NAMING_KEYS`, or else that it
    exists.

    `is_only` states whether no other run has the block.
    """
    if len(text := _text(block)) <= SHORT_BLOCK:
        return text
    if all(isinstance(value, dict) and value for value in block.values()):
        return ", ".join(map(str, block))
    flat = flat_json(block)
    given = [flat[key] for key in NAMING_KEYS if flat.get(key, _text(None)) != _text(None)]
    return given[0] if given else ONLY_HERE if is_only else PRESENT


def flat_json(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the value of each key path (`a.b.c`) as JSON text; strings have no quotes. A list is one value."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat_json(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = _text(value)
    return found


def _block(tree: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    """Return the value of a key if it is a mapping that is not empty."""
    value = None if tree is None else tree.get(name)
    return value if isinstance(value, dict) and value else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


PIPELINE = "pipeline"
KEYS_OF_A_LOSS = (PIPELINE, "preference_loss", "divergence")
"""Keys that determine which quantity a loss measures. The losses of two runs are comparable only if these keys are the
same.
"""
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
    """The last value, or the median for `MEDIANS`. `value` and `best` of noisy training metrics are taken from the
    smoothed curve.
    """
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
    """For a loss that these runs compute differently: the key that differs; then no value is marked as the best.
    Otherwise None.
    """


@dataclass(frozen=True)
class Comparison:
    """The comparison of several runs, in the given order."""

    runs: Sequence[RunRecord]
    labels: Sequence[str]
    """A name for each run."""
    keys: Mapping[str, Sequence[str]]
    """The configuration keys that differ, each with the value of every run. A block that only some runs have is one
    entry.

    For runs of different pipelines, only keys that every run has.
    """
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
    """Return the first of `KEYS_OF_A_LOSS` that differs between the runs, if the metric is a loss. Otherwise return
    None.
    """
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
        at = spread_indices(len(values), SMOOTHED_POINTS)
        steps, values = [steps[index] for index in at], smoothed(values, at, half)
    if best is None:
        return Cell(values[-1], None, None)
    return Cell(values[-1], best(values), steps[values.index(best(values))])
