"""Makes the record of a recipe from finished runs: tables, a picture and a log.

    python benchmarks/recipes.py NAME RUN ... [--metric METRIC ...] [--evaluation LABEL=FOLDER ...] [--out docs/recipes]

RUN are the output folders of the recipe, one for each seed; FOLDER are those of `roll.evaluate`. NAME.svg (curves) and
NAME.csv (metrics of all runs) are written into the folder OUT, and the record is printed as Markdown. It also replaces
the text between the lines `<!-- record -->` and `<!-- end of the record -->` of OUT/NAME.md, a page that is written
if there is none.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.recipe_picture import picture
from benchmarks.recipe_runs import Run, Value, curve, is_share, of_run, read_run, shown_metrics
from roll.evaluation.results import RESULTS_FILE
from roll.tracking.jsonl import VALIDATION_SAMPLES_FILE, each_record

BEGIN, END = "<!-- record -->\n", "<!-- end of the record -->\n"
UNUSED = ("engine/", "memory/", "run/", "time/onload", "time/pause", "time/checkpoint")
"""Beginnings of metrics that the log leaves out: the state of the machine, not what was learnt."""
ALWAYS = ("val/", "reward/mean")
"""Beginnings of metrics that are in the log even if they never change. All others that never change are left out."""
DIGITS = 6
"""Significant digits of the log."""
SAMPLES = 3
"""Number of prompts of which the answers are shown."""
LONGEST_ANSWER = 600
"""Number of characters of a shown answer."""


def shown(value: Value, share: bool) -> str:
    """Return a value with its interval, as text."""

    def said(number: float) -> str:
        return f"{number * 100:.1f}%" if share else f"{number:.4g}"

    if value.low is None or value.high is None:
        return said(value.value)
    return f"{said(value.value)} [{said(value.low)}, {said(value.high)}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    cells = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def curve_table(runs: Sequence[Run], metric: str) -> str:
    """Return a metric of each run over the steps, and the mean of several runs."""
    share, means = is_share(metric), dict(curve(runs, metric))
    points = [{point.step: point for point in run.validations(metric)} for run in runs]
    rows = []
    for step, mean in means.items():
        at = [by_step[step] for by_step in points]
        since = [point.seconds for point in at if point.seconds is not None]
        cells = [shown(of_run(run, metric, point), share) for run, point in zip(runs, at, strict=True)]
        training = fmean(point.training_seconds for point in at)
        whole = f"{fmean(since):.0f}" if len(since) == len(at) else "not known"
        rows.append([str(step), f"{training:.0f}", whole, *cells, *([shown(mean, share)] if len(runs) > 1 else [])])
    head = ["step", "seconds of training", "seconds since the start", *(f"seed {run.seed}" for run in runs)]
    return table([*head, *(["mean"] if len(runs) > 1 else [])], rows)


def evaluation_table(labelled: Sequence[tuple[str, Path]]) -> str:
    """Return the results of `roll.evaluate`, such as those before and after training.

    Raises:
        ValueError: a folder has no results.
    """
    rows = []
    for label, folder in labelled:
        try:
            sets = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))["sets"]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"'{folder}' has no readable {RESULTS_FILE}; give a folder of roll.evaluate") from error
        for name, one in sets.items():
            for estimate, found in one["estimates"].items():
                value = Value(found["value"], found["low"], found["high"])
                share = not estimate.startswith("avg@")
                rows.append([label, name, str(one["prompts"]), estimate, shown(value, share)])
    return table(["model", "set", "prompts", "estimate", "value and 95% interval"], rows)


def facts(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a sentence on the machine and on the versions of each run; equal ones once."""
    for run in {run.start.host: run for run in runs if run.start}.values():
        assert run.start is not None
        machine = run.start.host.split(", ", 2)[-1]  # without the host's name and kernel
        versions = ", ".join(f"{name} {version}" for name, version in run.start.versions.items())
        seeds = ", ".join(str(one.seed) for one in runs if one.start and one.start.host == run.start.host)
        yield f"Seed {seeds}: {machine}; {versions}."


def log_text(runs: Sequence[Run]) -> str:
    """Return the metrics of all runs as CSV, with the fewest columns that tell what was learnt."""
    lines = [(run, point) for run in runs for point in run.points]
    names = dict.fromkeys(name for _, point in lines for name in point.metrics if name != "step")
    kept = [
        name
        for name in names
        if name.startswith(ALWAYS)
        or (not name.startswith(UNUSED) and len({point.metrics.get(name) for _, point in lines} - {None}) > 1)
    ]
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["seed", "step", "training_seconds", "seconds_since_start", *kept])
    for run, point in lines:
        since = "" if point.seconds is None else f"{point.seconds:.1f}"
        values = [f"{point.metrics[name]:.{DIGITS}g}" if name in point.metrics else "" for name in kept]
        writer.writerow([run.seed, point.step, f"{point.training_seconds:.2f}", since, *values])
    return written.getvalue()


def answers(run: Run) -> Iterator[str]:
    """Yield the answers to a few held-out prompts before and after training, as far as the run recorded them."""
    path = run.folder / VALIDATION_SAMPLES_FILE
    records = [record for record in each_record(path) if record and record["responses"]] if path.is_file() else []
    steps = sorted({record["step"] for record in records})
    if len(steps) < 2:
        return
    ends = {
        step: {(record["set"], record["prompt_id"]): record for record in records if record["step"] == step}
        for step in (steps[0], steps[-1])
    }
    both = [key for key in ends[steps[0]] if key in ends[steps[-1]]][:SAMPLES]
    for key in both:
        yield f"```text\n{plain(ends[steps[0]][key]['prompt'])}\n```\n"
        for step, found in ends.items():
            said = found[key]["responses"][0]
            text = said["text"] if len(said["text"]) <= LONGEST_ANSWER else said["text"][:LONGEST_ANSWER] + " ..."
            yield f"After step {step}, reward {said['reward']:.3g}:\n\n```text\n{plain(text)}\n```\n"


def plain(text: str) -> str:
    """Return a text without marks of chat templates, and without fences that would end a block."""
    return re.sub(r"<\|[^|<>]*\|>", "", text).replace("```", "'''").strip()


def record(name: str, runs: Sequence[Run], metrics: Sequence[str], evaluations: Sequence[tuple[str, Path]]) -> str:
    """Return the record as Markdown. Raises ValueError as `evaluation_table`."""
    parts = list[str]()
    if runs:
        parts.append(f"![Validation over the steps]({name}.svg)\n")
        if any(map(is_share, metrics)):
            several = "; the mean has Student's over the seeds" if len(runs) > 1 else ""
            sizes = ", ".join(f"{held} ({count} prompts)" for held, count in runs[0].prompts.items())
            parts.append(f"Held-out sets: {sizes or 'their sizes are not recorded'}.")
            parts.append(f"Intervals are 95%, Wilson's for one response to each prompt{several}.\n")
        for metric in metrics:
            parts.append(f"**`{metric}`**\n\n{curve_table(runs, metric)}")
    if evaluations:
        parts.append(f"**Evaluation**\n\n{evaluation_table(evaluations)}")
    if runs:
        parts.append("\n".join(facts(runs)) + f"\n[{name}.csv]({name}.csv) has the metrics of every step.\n")
        said = list(answers(runs[0]))
        parts += ["**Answers to held-out prompts**\n", *said] if said else []
    return "\n".join(parts)


def with_record(page: str, text: str) -> str:
    """Return a page with this record instead of its own. Raises ValueError if the page has no place for one."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN.strip()} and {END.strip()}; write them where the record goes")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def write(
    name: str, runs: Sequence[Run], named: Sequence[str], evaluated: Sequence[tuple[str, Path]], out: Path
) -> str:
    """Write the files of a record and return its Markdown. Raises ValueError if a run or a page cannot be used."""
    metrics = list(named) or (shown_metrics(runs) if runs else [])
    for metric in metrics:
        if not all(run.validations(metric) for run in runs) or not curve(runs, metric):
            raise ValueError(f"not every run has '{metric}' at the same steps; it is a name in {runs[0].folder}")
    text = record(name, runs, metrics, evaluated)
    out.mkdir(parents=True, exist_ok=True)
    page = out / f"{name}.md"
    before = page.read_text(encoding="utf-8") if page.is_file() else f"# {name}\n\n{BEGIN}{END}"
    page.write_text(with_record(before, text), encoding="utf-8")
    if runs:
        curves = {metric.removeprefix("val/"): curve(runs, metric) for metric in metrics}
        seconds = {point.step: point.training_seconds for point in runs[0].validations(metrics[0])}
        drawn = picture(f"{name}: {', '.join(curves)}", curves, seconds, all(map(is_share, metrics)))
        (out / f"{name}.svg").write_text(drawn, encoding="utf-8")
        (out / f"{name}.csv").write_text(log_text(runs), encoding="utf-8")
    return text


def labelled(word: str) -> tuple[str, Path]:
    """Return the label and the folder of `LABEL=FOLDER`."""
    label, _, folder = word.rpartition("=")
    return label or Path(folder).name, Path(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Write a record and print its Markdown. Return 0, or 2 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="name of the recipe and of the files")
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="output folder of a finished run")
    parser.add_argument("--metric", action="append", default=[], help="default: val/<set>/pass@1 of every set")
    parser.add_argument("--evaluation", type=labelled, action="append", default=[], metavar="LABEL=FOLDER")
    parser.add_argument("--out", type=Path, default=Path("docs/recipes"), help="default: docs/recipes")
    given = parser.parse_args(argv)
    if not given.runs and not given.evaluation:
        parser.error("give run folders or --evaluation")
    try:
        runs = [read_run(folder) for folder in given.runs]
        print(write(given.name, runs, given.metric, given.evaluation, given.out))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
