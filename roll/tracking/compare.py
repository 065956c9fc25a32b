"""Compares several runs by their records: results, configuration keys that differ, and curves.

The terminal and the page show the same tables.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.errors import DataError, Fault
from roll.tracking.base import LOSSES
from roll.tracking.console import duration
from roll.tracking.jsonl import METRICS_FILE
from roll.tracking.report.charts import (
    BUCKETS,
    EXACT,
    SMOOTHED_POINTS,
    Chart,
    Section,
    add_curve,
    blank,
    half_width,
    smoothed,
    spread_indices,
)
from roll.tracking.report.page import Page, PageTable
from roll.tracking.report.records import (
    Direction,
    RunRecord,
    best_of,
    direction,
    names_like,
    number_text,
    read_records,
    series,
)

DEPTHS = ("*", "*/*")
"""Glob patterns of run folders in a folder of several runs."""
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
"""Keys that determine which quantity a loss measures. Losses are comparable only if these are the same."""
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
    """The last value, or the median for `MEDIANS`. For noisy training metrics, `value` and `best` are smoothed."""
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
    """For a loss that these runs compute differently: the key that differs; no value is marked. Else None."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of several runs, in the given order."""

    runs: Sequence[RunRecord]
    labels: Sequence[str]
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
    """Return the comparison of the runs, named `labels`. Raises DataError if two runs have no common metric."""
    names = {name for run in runs for name in names_like(run.rows, "", "")} - set(COUNTERS)
    rows = [_row(name, runs) for name in sorted(names, key=_place)]
    rows = [row for row in rows if sum(cell is not None for cell in row.cells) > 1]
    if not rows:
        folders = ", ".join(str(run.folder) for run in runs)
        raise DataError(
            Fault(folders, "no metric is common to two of these runs", "name runs of the same pipeline", "empty")
        )
    trees = [run.keys for run in runs]
    keys = differing(trees, common_only=len({tree.get(PIPELINE) for tree in trees}) > 1)
    return Comparison(runs, labels, keys, same_keys(trees), rows)


def is_result(name: str) -> bool:
    """Whether the metric is a main result: validation, reward, loss or speed."""
    known = ("reward/mean", "time/step", "throughput/tokens_per_second", *LOSSES)
    return name in known or (name.startswith("val/") and best_of(name) is not None)


def is_median(name: str) -> bool:
    """Whether the median over all steps is shown for the metric."""
    return name.startswith(MEDIANS)


def obstacle_of(name: str, runs: Sequence[RunRecord]) -> str | None:
    """Return the first of `KEYS_OF_A_LOSS` that differs between the runs, if the metric is a loss; else None."""
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
    if not (name.startswith("val/") or name in EXACT) and (half := half_width(len(values))):
        at = spread_indices(len(values), SMOOTHED_POINTS)
        steps, values = [steps[index] for index in at], smoothed(values, at, half)
    if best is None:
        return Cell(values[-1], None, None)
    return Cell(values[-1], best(values), steps[values.index(best(values))])


def compare_runs(places: Sequence[Path]) -> Comparison:
    """Return the comparison of the runs at the given places; see `find_runs`.

    Raises:
        DataError: a place has no run, a record cannot be read, or no metric is common to two runs.
    """
    folders = find_runs(places)
    return compare([read_records(folder) for folder in folders], labels(folders))


def find_runs(places: Sequence[Path]) -> list[Path]:
    """Return the run folders at the given places, each once. A place is a run folder, or a folder of runs, such as that
    of a multirun.

    Raises:
        DataError: a place is neither, or there are fewer than two runs in all.
    """
    found: list[Path] = []
    faults: list[Fault] = []
    for place in places:
        runs = _runs_of(place)
        found += runs
        if not runs:
            problem = (
                f"there is no {METRICS_FILE} in it or in a folder below it"
                if place.is_dir()
                else "there is no such folder"
            )
            remedy = "give the folder of a run (`output_dir`) that finished a step, or of the runs of a multirun"
            faults.append(Fault(str(place), problem, remedy, "not_found"))
    if faults:
        raise DataError(*faults)
    resolved = [run.resolve() for run in found]
    runs = [run for place, run in enumerate(found) if resolved[place] not in resolved[:place]]
    if len(runs) < 2:
        raise DataError(
            Fault(
                str(places[0]),
                "this is the only run, so there is nothing to compare it with",
                "give a second run folder",
                "missing",
            )
        )
    return runs


def _runs_of(place: Path) -> list[Path]:
    if (place / METRICS_FILE).is_file():
        return [place]
    below = [path.parent for depth in DEPTHS for path in place.glob(f"{depth}/{METRICS_FILE}")]
    return sorted(below, key=lambda path: _natural(str(path)))


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key by which `seed_10` comes after `seed_9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def labels(folders: Sequence[Path]) -> list[str]:
    """Return a name for each run: its path relative to the common folder of all."""
    paths = [str(folder.resolve()) for folder in folders]
    common = os.path.commonpath(paths)
    return [os.path.relpath(path, common) if path != common else os.path.basename(path) for path in paths]


PAGE = "compare.html"
POINTS = 200_000
"""Largest total number of points of all curves of a page."""
FEWEST_BUCKETS = 20
"""Smallest number of buckets of a curve, whatever the number of curves."""
TITLES = {
    "val": "Validation",
    "reward": "Rewards",
    "response": "Responses",
    "episode": "Episodes",
    "environment": "Environments",
    "policy": "Policy",
    "critic": "Critic",
    "mismatch": "Trainer against engine",
    "staleness": "Trainer against engine",
    "throughput": "Speed",
    "time": "Speed",
    "engine": "Engines",
    "memory": "Memory",
}
"""Title of a section, by the prefix of its metrics."""
BETTER: Mapping[Direction | None, str] = {"higher": "higher is better", "lower": "lower is better", None: ""}
LEARNING = "Learning"
"""Title of the section with losses such as `sft/loss`."""
WIDEST_CELL = 20
"""Largest number of characters of a value in one line of the terminal. Longer values are wrapped."""
GAP = 2
"""Number of blanks between columns of the terminal."""


def comparison_page(comparison: Comparison) -> Page:
    """Return the page of a comparison, with a chart of all runs for each metric that at least two runs have."""
    unreadable = sum(run.unreadable for run in comparison.runs)
    buckets = max(FEWEST_BUCKETS, min(BUCKETS, POINTS // (4 * len(comparison.metrics) * len(comparison.runs))))
    charts: dict[str, list[Chart]] = {}
    for row in comparison.metrics:
        figure = blank()
        for place, run in enumerate(comparison.runs):
            steps, values = series(run.rows, row.name)
            if steps:
                markers = row.name.startswith("val/")
                add_curve(figure, row.name, steps, values, str(place + 1), place, markers, buckets)
        figure.update_layout(showlegend=True)
        title = TITLES.get(row.name.split("/")[0], LEARNING)
        charts.setdefault(title, []).append(Chart(row.name, _better(row), figure))
    order = [LEARNING, *dict.fromkeys(TITLES.values())]
    every = PageTable("All metrics", _columns("Metric", comparison), _results(comparison.metrics), is_folded=True)
    return Page(
        title=f"{len(comparison.runs)} runs compared",
        subtitle=os.path.commonpath([run.folder.resolve() for run in comparison.runs]),
        tables=comparison_tables(comparison),
        sections=[Section(title, charts[title]) for title in order if title in charts],
        appendix=[every],
        remarks=[f"{unreadable} line(s) of the records could not be read and were left out."] if unreadable else [],
    )


def comparison_tables(comparison: Comparison) -> list[PageTable]:
    """Return the numbered runs, their main metrics, and the keys that differ. A column is a run."""
    rows = [
        [
            f"{place}  {label}",
            f"{run.last_step:,}",
            duration(run.seconds),
            run.end.outcome if run.end else "not yet",
            run.starts[-1].commits.get("working directory", "") if run.starts else "",
        ]
        for place, (run, label) in enumerate(zip(comparison.runs, comparison.labels, strict=True), 1)
    ]
    columns = ["run", "steps", "time", "ended", "commit"]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    unmarked = [
        f"{row.name} is not comparable because {row.obstacle} differs" for row in comparison.results if row.obstacle
    ]
    results = _results(comparison.results)
    every = len(comparison.keys) + comparison.same_keys
    which = "common configuration keys" if PIPELINE in comparison.keys else "configuration keys"
    counted = f"{len(comparison.keys)} of {every} {which} differ"
    keys = [[key, *values] for key, values in comparison.keys.items()]
    return [
        PageTable("Runs", columns, rows),
        PageTable(
            "Results",
            _columns("result", comparison),
            results,
            "; ".join(["* marks the best value of all runs", *unmarked]),
        ),
        PageTable("What differs", _columns("key", comparison) if keys else (), keys, counted, is_numeric=False),
    ]


def _columns(first: str, comparison: Comparison) -> list[str]:
    return [first, *(str(place + 1) for place in range(len(comparison.runs)))]


def _results(rows: Sequence[MetricRow]) -> list[list[str]]:
    """Return the rows of a table: the median of each metric, or its last and its best value."""
    found: list[list[str]] = []
    for row in rows:
        kind = "median" if is_median(row.name) else "last"
        stars = ["*" if cell and cell.is_best else "" for cell in row.cells]
        values = ["" if cell is None else number_text(cell.value) for cell in row.cells]
        if is_median(row.name):
            values = [value + star for value, star in zip(values, stars, strict=True)]
        found.append([f"{row.name}, {kind}", *values])
        if not is_median(row.name) and any(cell and cell.best is not None for cell in row.cells):
            best = [
                "" if cell is None or cell.best is None else f"{number_text(cell.best)}{star} ({cell.best_step})"
                for cell, star in zip(row.cells, stars, strict=True)
            ]
            found.append([f"{row.name}, best (step)", *best])
    return found


def _better(row: MetricRow) -> str:
    """Return which values of the metric are better, or that its values are not comparable."""
    return f"not comparable: {row.obstacle} differs" if row.obstacle else BETTER[direction(row.name)]


def comparison_text(comparison: Comparison, width: int) -> str:
    """Return the tables as plain text that is at most `width` characters wide."""
    file = StringIO()
    console = Console(file=file, width=width, color_system=None)
    for table in comparison_tables(comparison):
        for part in [*_side_by_side(table, width), *([table.note] if table.note else [])]:
            console.print(part, highlight=False, markup=False)
            console.print()
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _side_by_side(table: PageTable, width: int) -> list[Table]:
    """Return a table in parts that fit the width. Each has the first column and some of the others."""
    if not table.rows:
        return []
    others = len(table.columns) - 1
    widths = [max(map(len, cells)) + GAP for cells in zip(table.columns, *table.rows, strict=True)]
    column = min(max(widths[1:]), WIDEST_CELL + GAP)
    first = min(widths[0], max(width // 3, width - others * column)) - GAP
    at_a_time = others if sum(widths) - GAP <= width else max(1, (width - first) // column)
    parts = []
    for start in range(1, others + 1, at_a_time):
        numbers = range(start, min(start + at_a_time, others + 1))
        part = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
        part.add_column(table.columns[0], overflow="fold", max_width=first)
        for number in numbers:
            part.add_column(table.columns[number], justify="right", overflow="fold", max_width=WIDEST_CELL)
        for row in table.rows:
            part.add_row(Text(row[0]), *(Text(row[number]) for number in numbers))
        parts.append(part)
    return parts
