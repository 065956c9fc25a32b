"""Compares runs, and writes the comparison as an HTML page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.tracking.compare.comparison import Comparison, MetricRow, compare, is_exact, is_median
from roll.tracking.compare.runs import find_runs, labels
from roll.tracking.console import duration
from roll.tracking.report.charts import Chart, Section
from roll.tracking.report.curves import BUCKETS, SMOOTHED_POINTS, short, spread_indices
from roll.tracking.report.directions import Direction, direction
from roll.tracking.report.figures import Style, add_curve, blank
from roll.tracking.report.page import render
from roll.tracking.report.records import RunRecord, number_text, read_records, series
from roll.tracking.report.write import page_sections, write_page

PAGE = "compare.html"
POINTS = 200_000
"""Largest total number of points of all curves of a page."""
FEWEST_BUCKETS = 20
"""Smallest number of buckets of a curve, whatever the number of curves."""
CLOCK_POINTS = 200
"""Largest number of steps of a run for which a page has the time since the start."""
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


def compare_runs(places: Sequence[Path]) -> Comparison:
    """Return the comparison of the runs at the given places; see `find_runs`.

    Raises:
        DataError: a place has no run, a record cannot be read, or no metric is common to two runs.
    """
    folders = find_runs(places)
    return compare([read_records(folder) for folder in folders], labels(folders))


def write_comparison(places: Sequence[Path], output: Path) -> Path:
    """Write the comparison of the runs as an HTML page, and return its path. The page works offline.

    Raises:
        DataError: see `compare_runs`.
        OSError: the page cannot be written.
    """
    return write_page(output, comparison_page(compare_runs(places)))


def comparison_page(comparison: Comparison) -> str:
    """Return the HTML of the page."""
    unreadable = sum(run.unreadable for run in comparison.runs)
    count = len(comparison.runs)
    page: dict[str, Any] = {
        "title": f"{count} runs compared",
        "subtitle": os.path.commonpath([run.folder.resolve() for run in comparison.runs]),
        "labels": comparison.labels,
        "runs": [
            _run(run, label, place)
            for place, (run, label) in enumerate(zip(comparison.runs, comparison.labels, strict=True))
        ],
        "keys": comparison.keys,
        "same_keys": comparison.same_keys,
        "results": [_metric(row) for row in comparison.results],
        "metrics": [_metric(row) for row in comparison.metrics],
        "clocks": clocks(comparison.runs),
        "remarks": [f"{unreadable} line(s) of the records could not be read and were left out."] if unreadable else [],
    }
    return render("compare.html.jinja", page, page_sections(_sections(comparison)), ["charts.js", "compare.js"])


def _run(run: RunRecord, label: str, place: int) -> dict[str, str]:
    style = Style(label, place)
    return {
        "label": label,
        "colour": style.colour,
        "line": {"solid": "solid", "dash": "dashed"}.get(style.dash, "dotted"),
        "steps": f"{run.last_step:,}",
        "time": duration(run.seconds),
        "ended": run.end.outcome if run.end else "not yet",
        "commit": (run.starts[-1].commits.get("working directory") if run.starts else None) or "",
    }


def _metric(row: MetricRow) -> dict[str, Any]:
    """Return the row of a metric for the template. Each cell has the last and the best value as text, and whether its
    run is the best.
    """
    cells = [
        None
        if cell is None
        else {
            "value": number_text(cell.value),
            "best": "" if cell.best is None or is_median(row.name) else f"{number_text(cell.best)} at {cell.best_step}",
            "is_best": cell.is_best,
        }
        for cell in row.cells
    ]
    kind = "median" if is_median(row.name) else "last" if is_exact(row.name) else "last, smoothed"
    return {
        "name": row.name,
        "cells": cells,
        "obstacle": row.obstacle,
        "note": "; ".join(filter(None, [kind, _better(row)])),
    }


def _better(row: MetricRow) -> str:
    """Return which values of the metric are better, or that its values are not comparable."""
    return f"not comparable: {row.obstacle} differs" if row.obstacle else BETTER[direction(row.name)]


def _sections(comparison: Comparison) -> list[Section]:
    """Return a chart of all runs for each metric that at least two runs have."""
    buckets = max(FEWEST_BUCKETS, min(BUCKETS, POINTS // (4 * len(comparison.metrics) * len(comparison.runs))))
    found: dict[str, list[Chart]] = {}
    for row in comparison.metrics:
        title = TITLES.get(row.name.split("/")[0], LEARNING)
        found.setdefault(title, []).append(_chart(row, comparison, buckets))
    order = [LEARNING, *dict.fromkeys(TITLES.values())]
    return [Section(title, found[title]) for title in order if title in found]


def _chart(row: MetricRow, comparison: Comparison, buckets: int) -> Chart:
    figure = blank()
    for place, (run, label) in enumerate(zip(comparison.runs, comparison.labels, strict=True)):
        steps, values = series(run.rows, row.name)
        if not steps:
            continue
        style = Style(label, place, row.name.startswith("val/"), buckets, min(SMOOTHED_POINTS, 2 * buckets))
        add_curve(figure, row.name, steps, values, style)
    figure.update_layout(showlegend=False)
    return Chart(row.name, _better(row), figure)


def clocks(runs: Sequence[RunRecord]) -> list[Mapping[str, list[float]]]:
    """Return some `steps` of each run, and the `hours` from the start of the run to the end of each of them.

    Return an empty list if any run has no step times.
    """
    found = []
    for run in runs:
        steps, seconds = series(run.rows, "time/step")
        if not steps:
            return []
        at = spread_indices(len(steps), CLOCK_POINTS)
        hours, total = [], 0.0
        for second in seconds:
            total += second / 3600
            hours.append(short(total))
        found.append({"steps": [steps[index] for index in at], "hours": [hours[index] for index in at]})
    return found
