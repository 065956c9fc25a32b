"""Writes the report of a run: one page with its results, its charts, its samples, and how it was started."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll.tracking.base import LOSSES
from roll.tracking.console import duration, headline_metrics
from roll.tracking.ending import RunEnd
from roll.tracking.notices import by_topic
from roll.tracking.report.charts import Section, chart_sections
from roll.tracking.report.directions import best_of
from roll.tracking.report.page import PageChart, PageSection, render
from roll.tracking.report.records import Row, RunRecord, names_like, number_text, read_records, series
from roll.tracking.report.samples import PageSamples, page_samples
from roll.tracking.start import RunStart


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run folder, from the files there, and return its path. The page works offline.

    Raises:
        DataError: the folder has no metrics, or its configuration cannot be read.
        OSError: the page cannot be written.
    """
    run = read_records(run_dir)
    return write_page(run_dir / "report.html", _page(run, *page_samples(run_dir)))


def write_page(path: Path, html: str) -> Path:
    """Write a page atomically and return its path.

    Raises:
        OSError: the page cannot be written. A previous page stays in place.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(html, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _page(run: RunRecord, training: PageSamples, validation: PageSamples) -> str:
    rows = run.rows
    unreadable = run.unreadable + training.unreadable + validation.unreadable
    remark = (
        f"{unreadable} line(s) of the records could not be read and were left out: a process was killed while it was "
        f"writing."
    )
    model = str(run.keys.get("pretrain") or "")
    steps = run.end.last_step if run.end and run.end.last_step else run.keys.get("max_steps")
    names = [name for name in names_like(rows, "", "") if name != "step" and series(rows, name)[0]]
    page: dict[str, Any] = {
        "title": run.name,
        "subtitle": " · ".join([*([model] if model else []), f"{run.last_step} steps"]),
        "ending": _ending(run.end, run.last_step),
        "notices": by_topic(run.notices),
        "tiles": _tiles(run, steps),
        "validation": [
            _metric_row(rows, name) | {"name": name.removeprefix("val/")} for name in names if name.startswith("val/")
        ],
        "provenance": provenance(run.starts),
        "samples": samples_block(training, validation),
        "config": run.config,
        "metrics": [_metric_row(rows, name) for name in names],
        "remarks": [remark] if unreadable else [],
    }
    return render("report.html.jinja", page, page_sections(chart_sections(rows)), ["charts.js", "samples.js"])


def page_sections(found: Sequence[Section]) -> list[PageSection]:
    """Return the sections with an element id for each chart."""
    return [
        PageSection(section.title, [PageChart(f"chart-{i}-{j}", chart) for j, chart in enumerate(section.charts)])
        for i, section in enumerate(found)
    ]


def _ending(end: RunEnd | None, step: int) -> list[str]:
    """Return lines about the end of a run that failed or was interrupted; no lines for other runs."""
    if end is None or end.outcome == "done":
        return []
    return [
        f"The run {'failed' if end.outcome == 'failed' else 'was interrupted'} after step {step}.",
        end.cause,
        f"Checkpoint: {end.checkpoint}.",
    ]


def _tiles(run: RunRecord, max_steps: int | None) -> list[dict[str, str]]:
    rows, step = run.rows, run.last_step
    tiles = [{"label": "Steps", "value": f"{step:,}", "note": f"of {max_steps:,}" if max_steps else ""}]
    _, seconds = series([row for row in rows if row["step"]], "time/step")
    if seconds:
        pace = f"{statistics.median(seconds):.1f} s per step (median)"
        tiles.append({"label": "Total time", "value": duration(run.seconds), "note": pace})
    for name, label in (("reward/mean", "Reward"), *((loss, "Loss") for loss in LOSSES)):
        _, values = series(rows, name)
        if values:
            tiles.append({"label": label, "value": number_text(values[-1]), "note": f"from {number_text(values[0])}"})
    for name in headline_metrics(names_like(rows, "val/", "")):
        if series(rows, name)[0]:
            row = _metric_row(rows, name)
            note = f"from {row['first']}, best {row['best']}"
            tiles.append({"label": f"Validation {name.removeprefix('val/')}", "value": row["last"], "note": note})
    _, rates = series(rows, "throughput/tokens_per_second")
    if rates:
        tiles.append({"label": "Tokens per second", "value": f"{statistics.median(rates):,.0f}", "note": "median"})
    return tiles


def _metric_row(rows: Sequence[Row], name: str) -> dict[str, str]:
    """Return the summary of a metric as texts. `best` and `best_step` are empty for a metric without a better
    direction.
    """
    steps, values = series(rows, name)
    numbers = {"first": values[0], "last": values[-1], "least": min(values), "most": max(values)}
    row = {"name": name, "best": "", "best_step": ""} | {
        column: number_text(value) for column, value in numbers.items()
    }
    if best := best_of(name):
        row |= {"best": number_text(best(values)), "best_step": str(steps[values.index(best(values))])}
    return row


def provenance(starts: Sequence[RunStart]) -> list[tuple[str, str]]:
    """Return (label, text) pairs about the last start; no pairs if no start is recorded."""
    if not starts:
        return []
    last = starts[-1]
    again = f", the last of {len(starts)}" if len(starts) > 1 else ""
    commits = dict(sorted(last.commits.items(), reverse=True))
    said = " and ".join(sorted(set(commits.values()))) if len(set(commits.values())) == 1 else None
    return [
        ("Started", last.time.replace("T", " ").replace("+00:00", " UTC") + again),
        ("Command", last.command),
        ("Working directory", last.folder),
        ("Host", last.host),
        ("Versions", ", ".join(f"{name} {version}" for name, version in last.versions.items())),
        *((f"Changed after step {start.after_step}", "; ".join(start.changed)) for start in starts if start.changed),
        ("Commit", said or ", ".join(f"{commit} ({where})" for where, commit in commits.items()) or "no repository"),
    ]


def samples_block(training: PageSamples, validation: PageSamples) -> dict[str, Any] | None:
    """Return the groups for the page's script, and lines with the number of responses; None if no samples were
    recorded.
    """
    if not training.kept and not validation.kept:
        return None
    counts = [
        _count(kind, samples) for kind, samples in (("training", training), ("validation", validation)) if samples.kept
    ]
    return {"groups": [*training.groups, *validation.groups], "counts": counts}


def _count(kind: str, samples: PageSamples) -> str:
    of = f" of {samples.sampled:,} sampled responses" if samples.sampled is not None else " responses"
    shown = "all are on this page"
    if samples.shown < samples.kept:
        shown = f"{samples.shown:,} of them, spread over the steps, are on this page"
    return f"{kind.capitalize()}: {samples.kept:,}{of} were recorded; {shown}."
