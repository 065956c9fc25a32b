"""What came of a run, on one page: `python -m roll.tracking.report RUN_DIR` writes `RUN_DIR/report.html`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from plotly.offline import get_plotlyjs

from roll.errors import BadInput, DataError, Fault
from roll.tracking.base import LOSSES
from roll.tracking.charts import Row, Section, names_like, sections, series
from roll.tracking.console import duration
from roll.tracking.ending import RunEnd, read_end
from roll.tracking.jsonl import METRICS_FILE, SAMPLES_FILE, read_ends, read_lines
from roll.tracking.page import render

GROUPS_SHOWN = 2
RESPONSES_SHOWN = 4


def write_report(run_dir: Path) -> Path:
    """Write `report.html` from what lies in the run folder, and give its path. It needs no network to be read.

    Raises:
        DataError: the folder holds no metrics, or its configuration cannot be read.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise DataError([Fault(str(path), "there is no such file", "name the run folder (`output_dir`) of a run that finished a step")])
    rows, unreadable = read_lines(path)
    if not rows:
        raise DataError([Fault(str(path), "it holds no metrics", "name the run folder of a run that finished a step")])
    samples, unreadable_samples = read_ends(run_dir / SAMPLES_FILE) if (run_dir / SAMPLES_FILE).is_file() else ([], 0)
    html = _page(run_dir, rows, samples, *_configuration(run_dir / "config.yaml"), unreadable + unreadable_samples)
    report = run_dir / "report.html"
    partial = run_dir / ".report.html.partial"
    try:
        partial.write_text(html, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, report)
    finally:
        partial.unlink(missing_ok=True)
    return report


def _configuration(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Its text and its keys; none where the file is not there."""
    if not path.is_file():
        return "", {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        keys = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        keys = str(error).replace("\n", " ")
    if not isinstance(keys, dict):
        raise DataError([Fault(str(path), f"it is no block of keys: {keys}", "remove it: the page is made without it")])
    return text, keys


def _page(run_dir: Path, rows: Sequence[Row], samples: Sequence[Row], config: str, keys: Mapping[str, Any], unreadable: int) -> str:
    charts = sections(rows)
    remark = f"{unreadable} line(s) of the records could not be read and were left out: a process was ended while it wrote."
    model, end = str(keys.get("pretrain") or ""), read_end(run_dir)
    page: dict[str, object] = {
        "title": keys.get("exp_name") or run_dir.resolve().name,
        "subtitle": " · ".join([*([model] if model else []), f"{_last_step(rows)} steps"]),
        "ending": _ending(end, _last_step(rows)),
        "tiles": _tiles(rows, end.last_step if end and end.last_step else keys.get("max_steps")),
        "validation": [_validation_row(rows, name) for name in _validations(rows)],
        "sections": [
            {
                "title": section.title,
                "charts": [{"title": c.title, "note": c.note, "tall": c.tall, "id": _id(i, j)} for j, c in enumerate(section.charts)],
            }
            for i, section in enumerate(charts)
        ],
        "samples": _samples(samples),
        "config": config,
        "metrics": [_metric_row(rows, name) for name in names_like(rows, "", "") if name != "step" and series(rows, name)[0]],
        "remarks": [remark] if unreadable else [],
    }
    return render(page, _figures(charts), get_plotlyjs())


def _ending(end: RunEnd | None, step: int) -> list[str]:
    """Lines about a run that did not come to its end; none of one that did, or goes on."""
    if end is None or end.outcome == "done":
        return []
    return [
        f"The run {'failed' if end.outcome == 'failed' else 'was interrupted'} after step {step}.",
        end.cause,
        f"Checkpoint: {end.checkpoint}.",
    ]


def _figures(charts: Sequence[Section]) -> str:
    """The figures as JSON by element id; `<` is escaped so that no text in it can end the script element."""
    figures = {_id(i, j): chart.figure for i, section in enumerate(charts) for j, chart in enumerate(section.charts)}
    by_id = {element: json.loads(figure.to_json() or "") for element, figure in figures.items()}
    return json.dumps(by_id).replace("<", "\\u003c")


def _id(section: int, chart: int) -> str:
    return f"chart-{section}-{chart}"


def _tiles(rows: Sequence[Row], max_steps: int | None) -> list[dict[str, str]]:
    step = _last_step(rows)
    tiles = [{"label": "Steps", "value": f"{step:,}", "note": f"of {max_steps:,}" if max_steps else ""}]
    _, seconds = series([row for row in rows if row["step"]], "time/step")
    if seconds:
        pace = f"{statistics.median(seconds):.1f} s a step (median)"
        tiles.append({"label": "Total time", "value": duration(_total_seconds(rows)), "note": pace})
    for name, label in (("reward/mean", "Reward"), *((loss, "Loss") for loss in LOSSES)):
        _, values = series(rows, name)
        if values:
            tiles.append({"label": label, "value": _number(values[-1]), "note": f"from {_number(values[0])}"})
    for name in _validations(rows):
        if name.endswith(("/pass@1", "/loss")):
            row = _validation_row(rows, name)
            tiles.append({"label": f"Validation {row['name']}", "value": row["last"], "note": f"from {row['first']}, best {row['best']}"})
    _, rates = series(rows, "throughput/tokens_per_second")
    if rates:
        tiles.append({"label": "Tokens per second", "value": f"{statistics.median(rates):,.0f}", "note": "median"})
    return tiles


def _total_seconds(rows: Sequence[Row]) -> float:
    """Step 0, the validation before the first, included."""
    return sum(row.get("time/step") or 0.0 for row in rows)


def _validations(rows: Sequence[Row]) -> list[str]:
    return [name for name in names_like(rows, "val/", "") if series(rows, name)[0]]


def _validation_row(rows: Sequence[Row], name: str) -> dict[str, str]:
    steps, values = series(rows, name)
    best = min(values) if name.endswith(("loss", "perplexity")) else max(values)
    return {
        "name": name.removeprefix("val/"),
        "first": _number(values[0]),
        "last": _number(values[-1]),
        "best": _number(best),
        "best_step": str(steps[values.index(best)]),
    }


def _metric_row(rows: Sequence[Row], name: str) -> dict[str, str]:
    _, values = series(rows, name)
    numbers = {"first": values[0], "last": values[-1], "least": min(values), "most": max(values)}
    return {"name": name} | {column: _number(value) for column, value in numbers.items()}


def _samples(records: Sequence[Row]) -> list[dict[str, Any]]:
    """Groups of each step."""
    if not records:
        return []
    rewards = [response["reward"] for record in records for response in record["responses"] if response["reward"] is not None]
    low, high = min([0.0, *rewards]), max([1.0, *rewards])
    parts = []
    for step in sorted({record["step"] for record in records}):
        of_step = [record for record in records if record["step"] == step][:GROUPS_SHOWN]
        parts.append({"step": step, "groups": [_group(record, low, high) for record in of_step]})
    return parts


def _group(record: Row, low: float, high: float) -> dict[str, Any]:
    responses = record["responses"]
    shown = responses[:RESPONSES_SHOWN]
    count = f"{len(responses)} responses" + (f", the first {len(shown)} shown" if len(shown) < len(responses) else "")
    return {
        "heading": f"prompt {record['prompt_id']} · {record['domain']} · {record['prompt_length']} tokens · {count}",
        "prompt": record["prompt"],
        "responses": [_response(response, low, high) for response in shown],
    }


def _response(response: Mapping[str, Any], low: float, high: float) -> dict[str, Any]:
    reward = response["reward"]
    flags = [response["outcome"].replace("_", " ")] if response["outcome"] != "scored" else []
    flags += ["truncated"] if response["finish_reason"] == "length" else []
    flags += ["aborted"] if response["finish_reason"] == "abort" else []
    flags += [response["finish_reason"].replace("_", " ")] if response["finish_reason"] not in ("stop", "length", "abort") else []
    parts = [f"{name} {_number(value)}" for name, value in response["parts"].items() if value is not None]
    return {
        "reward": "n/a" if reward is None else _number(reward),
        # From red over amber to green, dark enough for white text.
        "colour": "#7a828f" if reward is None else f"hsl({8 + 140 * (reward - low) / (high - low):.0f} 55% 38%)",
        "length": response["length"],
        "flags": flags,
        "text": response["text"],
        "segments": _segments(response.get("trajectories", [])),
        "parts": " · ".join([*parts, *([response["note"]] if response["note"] else [])]),
    }


def _segments(trajectories: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What the page shows of each segment but the prompt, which stands above all responses."""
    parts = []
    for number, trajectory in enumerate(trajectories, 1):
        for segment in trajectory["segments"]:
            caption = [f"trajectory {number}"] * (len(trajectories) > 1) + [segment["role"]]
            caption += [f"{segment['length']} tokens"]
            caption += [f"calls {', '.join(call['name'] for call in segment['calls'])}"] if segment.get("calls") else []
            caption += [f"reward {_number(segment['reward'])}"] if segment.get("reward") is not None else []
            parts.append({"caption": " · ".join(caption), "text": segment["text"]})
    return parts[1:]


def _last_step(rows: Sequence[Row]) -> int:
    return max(row["step"] for row in rows)


def _number(value: float) -> str:
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2e}"


def main() -> int:
    """Write the report of the run folder that the command line names; 0, or 2 if there is nothing to report on."""
    parser = argparse.ArgumentParser(prog="python -m roll.tracking.report", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="the run folder (`output_dir`)")
    try:
        print(write_report(parser.parse_args().run_dir))
    except BadInput as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
