"""Writes the report of a run: one page with its results, its charts, its samples, and how it was started.

A page shows those of the recorded responses that fit onto it, spread evenly over the steps.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from roll.tracking.base import LOSSES, by_topic
from roll.tracking.console import duration, headline_metrics
from roll.tracking.history import RunEnd, RunStart
from roll.tracking.jsonl import SAMPLES_FILE, VALIDATION_SAMPLES_FILE, each_record
from roll.tracking.report.charts import chart_sections
from roll.tracking.report.page import Page, PageTable, write_page
from roll.tracking.report.records import (
    Row,
    RunRecord,
    best_of,
    constants,
    is_idle,
    names_like,
    number_text,
    read_records,
    series,
)

BUDGET = 2_000_000
"""Largest number of characters of prompts and responses that a page takes from each file."""
LONGEST = 12_000
"""Largest number of characters of one text. Only the beginning and the end of a longer text are shown."""


@dataclass(frozen=True)
class PageSamples:
    """The part of a file that goes onto a page."""

    groups: Sequence[Mapping[str, Any]]
    """Records for the page's script, one for each prompt."""
    shown: int
    """Number of responses in `groups`."""
    kept: int
    """Number of responses in the file."""
    sampled: int | None
    """Number of responses that the run sampled in the steps of the file; None if the file does not contain this number.
    """
    unreadable: int
    """Number of unreadable lines of the file."""


REPORT_FILE = "report.html"


def write_report(run_dir: Path, refresh_seconds: float | None = None) -> Path:
    """Write `report.html` into the run folder, from the files there, and return its path. The page works offline.

    Args:
        refresh_seconds: for a run in progress: seconds after which an opened page loads itself again.

    Raises:
        DataError: the folder has no metrics, or its configuration cannot be read.
        OSError: the page cannot be written.
    """
    run = read_records(run_dir)
    page = report_page(run, *page_samples(run_dir))
    if refresh_seconds is not None:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        page = replace(page, subtitle=f"{page.subtitle} · running, as of {now}", refresh_seconds=refresh_seconds)
    return write_page(run_dir / REPORT_FILE, page)


def report_page(run: RunRecord, training: PageSamples, validation: PageSamples) -> Page:
    """Return the page of a run."""
    rows, unreadable = run.rows, run.unreadable + training.unreadable + validation.unreadable
    model = str(run.keys.get("pretrain") or "")
    steps = run.end.last_step if run.end and run.end.last_step else run.keys.get("max_steps")
    names = [name for name in names_like(rows, "", "") if name != "step" and series(rows, name)[0]]
    metrics = [_metric_row(rows, name) for name in names]
    held_out = [
        [name.removeprefix("val/"), row["first"], row["last"], row["best"], row["best_step"]]
        for name, row in zip(names, metrics, strict=True)
        if name.startswith("val/") and not is_idle(rows, name)
    ]
    all_metrics = [
        [name, *(row[column] for column in ("first", "last", "least", "most", "best"))]
        for name, row in zip(names, metrics, strict=True)
    ]
    remark = (
        f"{unreadable} line(s) of the records could not be read and were left out: a process was killed while it was "
        f"writing."
    )
    started = provenance(run.starts)
    kinds = [(kind, samples) for kind, samples in (("training", training), ("validation", validation)) if samples.kept]
    columns = ("Metric", "First", "Last", "Minimum", "Maximum", "Best")
    return Page(
        title=run.name,
        subtitle=" · ".join([*([model] if model else []), f"{run.last_step} steps"]),
        alerts=[lines for lines in (_ending(run.end, run.last_step), by_topic(run.notices)) if lines],
        tiles=_tiles(run, steps),
        tables=[_validation(rows, held_out)] if held_out else [],
        sections=chart_sections(rows),
        sample_counts=[_count(kind, samples) for kind, samples in kinds],
        sample_groups=[group for _, samples in kinds for group in samples.groups],
        appendix=[
            *([PageTable("How it was run", (), started, is_numeric=False)] if started else []),
            PageTable("All metrics", columns, all_metrics, is_folded=True),
        ],
        config=run.config,
        remarks=[remark] if unreadable else [],
    )


def _validation(rows: Sequence[Row], held_out: Sequence[Sequence[str]]) -> PageTable:
    names = names_like(rows, "val/", "")
    constant = [f"{name.removeprefix('val/')} = {number_text(value)}" for name, value in constants(rows, names)]
    note = f"constant: {', '.join(constant)}" if constant else ""
    return PageTable("Validation", ("Measure", "First", "Last", "Best", "at step"), held_out, note)


def _ending(end: RunEnd | None, step: int) -> list[str]:
    """Return lines about the end of a run that failed, was interrupted or stopped early; no lines for other runs."""
    if end is None or end.outcome == "done":
        return [f"The run {end.cause}."] if end and end.cause else []
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
    """Return a metric's summary as texts. `best` and `best_step` are empty without a better direction."""
    steps, values = series(rows, name)
    numbers = {"first": values[0], "last": values[-1], "least": min(values), "most": max(values)}
    row = {"best": "", "best_step": ""} | {column: number_text(value) for column, value in numbers.items()}
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


def _count(kind: str, samples: PageSamples) -> str:
    of = f" of {samples.sampled:,} sampled responses" if samples.sampled is not None else " responses"
    shown = "all are on this page"
    if samples.shown < samples.kept:
        shown = f"{samples.shown:,} of them, spread over the steps, are on this page"
    return f"{kind.capitalize()}: {samples.kept:,}{of} were recorded; {shown}."


def page_samples(folder: Path) -> tuple[PageSamples, PageSamples]:
    """Return the samples of training and of validation."""
    return _read(folder / SAMPLES_FILE), _read(folder / VALIDATION_SAMPLES_FILE)


def _read(path: Path, budget: int = BUDGET) -> PageSamples:
    """Return the samples of a file. It is read twice, so that only the records of the page are in memory."""
    characters: Counter[int] = Counter()
    sampled: dict[tuple[int, str], int | None] = {}
    kept = unreadable = 0
    for record in each_record(path) if path.is_file() else ():
        if record is None:
            unreadable += 1
            continue
        kept += len(record["responses"])
        characters[record["step"]] += _characters(page_group(record))
        sampled[record["step"], record.get("set", "")] = record.get("responses_of_step")
    steps = choose_steps(characters, budget)
    records = (record for record in each_record(path) if record) if kept else iter(())
    if steps:
        groups = [page_group(record) for record in records if record["step"] in steps]
    else:  # even the first step is too large, or there is none
        groups = [page_group(record) for record in islice(records, 1)]
    counts = [count for count in sampled.values() if count is not None]
    return PageSamples(
        groups=groups,
        shown=sum(len(group["responses"]) for group in groups),
        kept=kept,
        sampled=sum(counts) if len(counts) == len(sampled) else None,
        unreadable=unreadable,
    )


def _characters(group: Mapping[str, Any]) -> int:
    """Return the number of characters that a group takes on the page."""
    turns = [turn for response in group["responses"] for turn in response["turns"]]
    return len(group["prompt"]) + sum(len(one["text"]) for one in (*group["responses"], *turns))


def choose_steps(characters: Mapping[int, int], budget: int) -> set[int]:
    """Return the steps whose samples a page shows.

    They are chosen in the order of `halving` until the next one does not fit: the first and the last step, then steps
    between them.

    Args:
        characters: number of characters of each step.
        budget: largest number of characters in all.
    """
    steps = sorted(characters)
    chosen: set[int] = set()
    for place in halving(len(steps)):
        budget -= characters[steps[place]]
        if budget < 0:
            break
        chosen.add(steps[place])
    return chosen


def halving(count: int) -> Iterator[int]:
    """Yield 0 to count - 1: the two ends, then the middle, then the middles of the halves, and so on.

    The values yielded so far are always spread about evenly.
    """
    if count:
        yield 0
    if count > 1:
        yield count - 1
    gaps = [(0, count - 1)]
    while gaps:
        halves: list[tuple[int, int]] = []
        for low, high in gaps:
            if high - low > 1:
                middle = (low + high) // 2
                yield middle
                halves += [(low, middle), (middle, high)]
        gaps = halves


def page_group(record: Row) -> dict[str, Any]:
    """Return the record of a group for the page's script."""
    return {
        "set": record.get("set", ""),
        "step": record["step"],
        "domain": record["domain"],
        "id": record["prompt_id"],
        "prompt": _with_names({"text": record["prompt"], "pictures": record.get("pictures", ())}),
        "tokens": record["prompt_length"],
        "answer": record.get("ground_truth"),
        "responses": [_response(response) for response in record["responses"]],
    }


def _response(response: Mapping[str, Any]) -> dict[str, Any]:
    turns = _turns(response.get("trajectories", []), response.get("partner_turns", []))
    parts = [f"{name} {number_text(value)}" for name, value in response["parts"].items() if value is not None]
    return {
        "reward": response["reward"],
        "tokens": response["length"],
        "flags": _flags(response),
        "text": "" if turns else shortened(response["text"]),
        "turns": turns,
        "note": " · ".join([*parts, *([response["note"]] if response["note"] else [])]),
    }


def _flags(response: Mapping[str, Any]) -> list[str]:
    flags = [response["outcome"].replace("_", " ")] if response["outcome"] != "scored" else []
    known = {"stop": [], "length": ["truncated"], "abort": ["aborted"]}
    return flags + known.get(response["finish_reason"], [response["finish_reason"].replace("_", " ")])


def _turns(trajectories: Sequence[Mapping[str, Any]], of_partners: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the segments of an episode, except the first, which is the prompt, and the turns of partners."""
    turns, sampled = [], 0
    for count, trajectory in enumerate(trajectories, 1):
        for segment in trajectory["segments"]:
            caption = [f"trajectory {count}"] * (len(trajectories) > 1) + [segment["role"]]
            caption += [f"{segment['length']} tokens"]
            caption += [f"calls {', '.join(call['name'] for call in segment['calls'])}"] if segment.get("calls") else []
            caption += [f"reward {number_text(segment['reward'])}"] if segment.get("reward") is not None else []
            turns.append({"role": segment["role"], "caption": " · ".join(caption), "text": _with_names(segment)})
            is_own = segment["role"] == "assistant"
            sampled += is_own
            heard = [turn for turn in of_partners if is_own and turn["after"] == sampled]
            turns += [
                {"role": "environment", "caption": f"partner {turn['partner']}", "text": shortened(turn["text"])}
                for turn in heard
            ]
    return turns[1:]


def _with_names(record: Mapping[str, Any]) -> str:
    """Return the text of a record, and below it the names of its pictures."""
    return "\n".join([shortened(record["text"]), *(f"[{name}]" for name in record.get("pictures", ()))])


def shortened(text: str) -> str:
    """Return the text; if it is longer than `LONGEST`, its two ends and the number of omitted characters."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"
