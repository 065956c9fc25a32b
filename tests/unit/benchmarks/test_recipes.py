"""The record of a recipe: its values against figures worked out by hand, its files, and what it refuses."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.recipe_picture import Plot
from benchmarks.recipe_runs import Run, curve, over_seeds, read_run, shown_metrics
from benchmarks.recipes import BEGIN, END, main, plain, with_record

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
METRIC = "val/sums/pass@1"


def run_folder(folder: Path, seed: int, accuracies: list[float], starts: int = 1) -> Path:
    """Write a run of 10 s a step, of which validation takes 4 s, with 64 held-out prompts."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"seed: {seed}\nexp_name: sums\n")
    lines, samples = [], []
    for step, accuracy in enumerate(accuracies):
        lines.append({"step": step, METRIC: accuracy, "time/step": 10.0, "time/evaluate": 4.0, "engine/healthy": 1})
        answer = {"text": f"answer {step}", "reward": 1.0}
        samples.append(
            {
                "set": "sums",
                "step": step,
                "prompt_id": 0,
                "prompt": "<|im_start|>1 + 1<|im_end|>",
                "responses": [answer],
            }
            | {"responses_of_step": 64}
        )
    for name, rows in (("metrics", lines), ("validation_samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start = {
        "time": START.isoformat(),
        "command": "",
        "folder": "/x",
        "host": "name, Linux-6, 2 cores",
        "versions": {"roll": "1"},
    }
    (folder / "starts.jsonl").write_text((json.dumps(start | {"commits": {}}) + "\n") * starts)
    begin = "2026-01-02 03:04:05,000"
    logged = [f"2026-01-02 03:04:{35 + 10 * step},000" for step in range(len(accuracies))]
    said = [f"{begin} INFO roll.runs.assemble: the plan:", "step 0/9 of a plan"]
    said += [f"{time} INFO roll.tracking.console: step {step}/9  10 s" for step, time in enumerate(logged)]
    (folder / "logs").mkdir()
    (folder / "logs" / "driver.log").write_text("".join(f"{line}\n" for line in said))
    return folder


def cells(markdown: str) -> list[list[str]]:
    """Return the rows of all tables."""
    rows = [line.strip("|").split("|") for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def test_one_run_has_intervals_and_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run", 42, [0.25, 0.5])
    assert main(["sums", str(run), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    rows = cells(printed)
    # Wilson's interval of 16 of 64 is 16.0% to 36.8%, that of 32 of 64 is 38.1% to 61.9%.
    assert rows[2:4] == [["0", "0", "30", "25.0% [16.0%, 36.8%]"], ["1", "6", "40", "50.0% [38.1%, 61.9%]"]]
    assert printed.count("answer 0") == printed.count("answer 1") == 1 and "im_start" not in printed
    assert "name" not in printed and "2 cores" in printed


def test_several_seeds_stand_beside_their_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [run_folder(tmp_path / str(seed), seed, [0.1, 0.1 * seed]) for seed in (1, 2, 3)]
    assert main(["sums", *map(str, folders), "--out", str(tmp_path / "out")]) == 0
    rows = cells(capsys.readouterr().out)
    assert [cell.split()[0] for cell in rows[3]] == ["1", "6", "40", "10.0%", "20.0%", "30.0%", "20.0%"]
    mean = over_seeds([0.1, 0.2, 0.3])
    # Student's quantile for two degrees of freedom is 4.3027.
    assert (mean.low, mean.high) == pytest.approx((0.2 - 4.3027 * 0.1 / 3**0.5, 0.2 + 4.3027 * 0.1 / 3**0.5), abs=1e-4)


def test_the_files_hold_curve_and_log(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / str(seed), seed, [0.2, 0.4, 0.6]) for seed in (1, 2)]
    assert main(["sums", *map(str, folders), "--out", str(tmp_path / "out")]) == 0
    with (tmp_path / "out" / "sums.csv").open() as file:
        log = list(csv.DictReader(file))
    assert [(row["seed"], row["step"], row[METRIC]) for row in log[2:4]] == [("1", "2", "0.6"), ("2", "0", "0.2")]
    assert "engine/healthy" not in log[0] and log[2]["training_seconds"] == "12.00"
    drawn = ET.parse(tmp_path / "out" / "sums.svg").getroot()
    dots = [float(dot.attrib["cy"]) for dot in drawn.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(dots) == 3 and dots == sorted(dots, reverse=True)


def test_a_page_keeps_the_text_around_its_record(tmp_path: Path) -> None:
    page = with_record(f"# Sums\n\nBefore.\n\n{BEGIN}old\n{END}\nAfter.\n", "new")
    assert "old" not in page and page.startswith("# Sums\n\nBefore.") and page.endswith("\nAfter.\n")
    assert with_record(page, "new") == page
    with pytest.raises(ValueError, match="no lines"):
        with_record("# Sums\n", "new")


def test_evaluations_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("raw", 0.25), ("tuned", 0.5)):
        estimate = {"value": value, "low": value - 0.1, "high": value + 0.1}
        results = {"sets": {"test": {"prompts": 64, "estimates": {"accuracy": estimate, "avg@1": estimate}}}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "evaluation.json").write_text(json.dumps(results))
    words = [word for name in ("raw", "tuned") for word in ("--evaluation", f"{name} model={tmp_path / name}")]
    assert main(["sums", *words, "--out", str(tmp_path / "out")]) == 0
    rows = cells(capsys.readouterr().out)
    assert rows[2] == ["raw model", "test", "64", "accuracy", "25.0% [15.0%, 35.0%]"]
    assert rows[5] == ["tuned model", "test", "64", "avg@1", "0.5 [0.4, 0.6]"]


@pytest.mark.parametrize("words", [["nothing"], ["run", "--metric", "val/sums/loss"], ["run", "--evaluation", "run"]])
def test_unusable_folders_are_refused(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder(tmp_path / "run", 42, [0.25, 0.5])
    given = [str(tmp_path / word) if word in ("run", "nothing") else word for word in words]
    assert main(["sums", *given, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_resumed_run_has_no_seconds_since_start(tmp_path: Path) -> None:
    resumed, whole = (read_run(run_folder(tmp_path / str(count), 1, [0.5], starts=count)) for count in (2, 1))
    assert [resumed.points[0].seconds, whole.points[0].seconds] == [None, 30.0]


def test_losses_have_no_interval(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path / "run", 1, [0.5]))
    offline = Run(run.folder, 1, None, [], {"sums": 64})
    with pytest.raises(ValueError, match="--metric"):
        shown_metrics([offline])
    lines = [point.__class__(point.step, {"val/sums/loss": 0.5}, 0.0, None) for point in run.points]
    assert shown_metrics([Run(run.folder, 1, None, lines, {"sums": 64})]) == ["val/sums/loss"]
    [(_, value)] = curve([Run(run.folder, 1, None, lines, {"sums": 64})], "val/sums/loss")
    assert (value.value, value.low) == (0.5, None)


def test_a_plot_stays_inside_its_picture() -> None:
    plot = Plot(80, 0.6)
    assert plot.x(0) < plot.x(80) < 760 and plot.y(0.9) == plot.y(0.6) == 40
    assert plain("<|im_end|>```x") == "'''x"
