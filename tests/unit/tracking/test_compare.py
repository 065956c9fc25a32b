"""`roll.compare`: finding runs, differences between their configurations, and their results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from roll.compare import main
from roll.errors import DataError
from roll.tracking.compare import (
    ABSENT,
    ONLY_HERE,
    PRESENT,
    compare,
    compare_runs,
    comparison_page,
    comparison_text,
    differing,
    find_runs,
    flat_json,
    labels,
    same_keys,
)
from roll.tracking.jsonl import JsonlTracker
from roll.tracking.report.page import render
from roll.tracking.report.records import read_records
from tests import limits

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes the folder of a run with validation at its first and last step."""

    def folder(name: str, solved: tuple[float, float] = (0.25, 0.5), steps: int = 4, **keys: object) -> Path:
        tracker = JsonlTracker(tmp_path / name)
        for step in range(1, steps + 1):
            metrics = {"reward/mean": step / 10, "policy/entropy": 1 / step, "time/step": 10.0 * step}
            metrics |= {"val/gsm8k/pass@1": solved[step // steps]} if step in (1, steps) else {}
            tracker.log(step, metrics)
        tracker.close()
        text = yaml.safe_dump({"exp_name": name, "output_dir": name, "pretrain": "a/model", **keys})
        (tmp_path / name / "config.yaml").write_text(text)
        return tmp_path / name

    return folder


def test_runs_of_folder_are_sorted_by_number(write: Write, tmp_path: Path) -> None:
    runs = [write(f"sweep/seed_{number}") for number in (2, 10, 1)]
    deep = write("sweep/b/deep")
    assert find_runs([tmp_path / "sweep"]) == [deep, runs[2], runs[0], runs[1]]
    assert find_runs([runs[1], tmp_path / "sweep"]) == [runs[1], deep, runs[2], runs[0]], (
        "each run once, in the order of the arguments"
    )
    assert labels([runs[0], deep]) == ["seed_2", "b/deep"]


def test_places_that_are_no_runs_are_all_named(write: Write, tmp_path: Path) -> None:
    run = write("one")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as error:
        find_runs([run, tmp_path / "empty", tmp_path / "gone"])
    empty, gone = error.value.faults
    assert (empty.place, gone.place) == (str(tmp_path / "empty"), str(tmp_path / "gone"))
    assert "no metrics.jsonl" in empty.problem and "no such folder" in gone.problem
    with pytest.raises(DataError) as error:
        find_runs([run, run / "."])
    assert [(fault.place, fault.code) for fault in error.value.faults] == [(str(run), "missing")]


def test_differing_keys_are_paths_with_values_per_run() -> None:
    one = {"seed": 1, "a": {"rate": 1e-5, "list": [1, 2]}, "gone": {}, "output_dir": "x", "text": "1"}
    other = {"seed": 1, "a": {"rate": 2e-5, "list": [1, 2], "new": None}, "gone": {}, "output_dir": "y", "text": 1}
    third = {**one, "a": {**one["a"], "list": [1, 3]}}  # pyright: ignore[reportGeneralTypeIssues]
    assert flat_json(one) == {
        "seed": "1",
        "a.rate": "1e-05",
        "a.list": "[1, 2]",
        "gone": "{}",
        "output_dir": "x",
        "text": "1",
    }
    assert same_keys([one, other, third]) == 3, "seed, gone, and text"
    assert differing([one, other, third]) == {
        "a.list": ["[1, 2]", "[1, 2]", "[1, 3]"],
        "a.new": [ABSENT, "null", ABSENT],
        "a.rate": ["1e-05", "2e-05", "1e-05"],
    }


def test_block_of_only_some_runs_is_one_entry() -> None:
    defaults = {f"default_{number}": None for number in range(9)}
    judge, rule = {"reward": "llm_judge", "timeout": 10.0, **defaults}, {"reward": None, "timeout": 10.0, **defaults}
    one = {
        "rewards": {"a": judge, "both": {"timeout": 5}},
        "critic": rule,
        "validation": None,
        "sets": {},
        "options": {"rate": 0.1},
    }
    other = {
        "rewards": {"b": rule, "both": {"timeout": 6}},
        "critic": None,
        "validation": {"data_args": {"file_name": "x"}, **defaults},
    }
    other |= {"sets": {"easy": rule, "hard": rule}, "options": {}}
    assert differing([one, other]) == {
        "critic": [ONLY_HERE, ABSENT],
        "options": ['{"rate": 0.1}', ABSENT],
        "rewards.a": ["llm_judge", ABSENT],
        "rewards.b": [ABSENT, ONLY_HERE],
        "rewards.both.timeout": ["5", "6"],
        "sets": [ABSENT, "easy, hard"],
        "validation": [ABSENT, "x"],
    }
    assert same_keys([one, other]) == 0


def test_keys_within_partly_present_block_follow_it() -> None:
    block = {f"default_{number}": None for number in range(9)}
    trees = [{"critic": {**block, "rate": 1}}, {"critic": None}, {"critic": {**block, "rate": 2}}]
    assert differing(trees) == {"critic": [PRESENT, ABSENT, PRESENT], "critic.rate": ["1", ABSENT, "2"]}
    assert differing([trees[0], {}, trees[0]]) == {"critic": [PRESENT, ABSENT, PRESENT]}


def test_results_are_last_and_best_of_runs(write: Write) -> None:
    folders = [write("a", solved=(0.75, 0.5)), write("b", solved=(0.125, 0.625), seed=7)]
    found = compare([read_records(folder) for folder in folders], ["a", "b"])
    assert found.keys == {"seed": [ABSENT, "7"]} and found.same_keys == 1
    rows = {row.name: row.cells for row in found.metrics}
    assert list(rows) == ["val/gsm8k/pass@1", "reward/mean", "policy/entropy", "time/step"]
    assert [row.name for row in found.results] == ["val/gsm8k/pass@1", "reward/mean", "time/step"]
    first, second = rows["val/gsm8k/pass@1"]
    assert first and (first.value, first.best, first.best_step, first.is_best) == (0.5, 0.75, 1, True)
    assert second and (second.value, second.best, second.best_step, second.is_best) == (0.625, 0.625, 4, False)
    entropy, _ = rows["policy/entropy"]
    assert entropy and (entropy.value, entropy.best, entropy.is_best) == (0.25, None, False), (
        "neither direction is better"
    )
    seconds, _ = rows["time/step"]
    assert seconds and seconds.value == 25.0 and seconds.is_best, "the median; both runs are equally fast"


def test_different_pipelines_compare_by_common_keys(write: Write) -> None:
    folders = [
        write("tuned", pipeline="sft", loss_on="all", seed=1),
        write("rewarded", pipeline="rlvr", adv_estimator="grpo", seed=2),
    ]
    found = compare_runs(folders)
    assert found.keys == {"pipeline": ["sft", "rlvr"], "seed": ["1", "2"]} and found.same_keys == 1, "pretrain"
    assert "2 of 3 common" in comparison_text(found, 80)
    same = compare_runs(folders[:1] + [write("longer", pipeline="sft", max_steps=9)])
    assert "common" not in comparison_text(same, 80)


@pytest.mark.parametrize("key", ["pipeline", "preference_loss", "divergence"])
def test_differently_computed_losses_have_no_best(key: str, tmp_path: Path) -> None:
    for name, method in (("a", "one"), ("b", "other"), ("c", "one")):
        tracker = JsonlTracker(tmp_path / name)
        tracker.log(1, {"val/x/loss": 0.5, "val/x/accuracy": 0.25} | ({"dpo/loss": 0.5} if method == "one" else {}))
        tracker.close()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump({key: method}))
    rows = {row.name: row for row in compare_runs([tmp_path]).metrics}
    marks = {name: [bool(cell and cell.is_best) for cell in row.cells] for name, row in rows.items()}
    assert marks["val/x/loss"] == [False] * 3 and rows["val/x/loss"].obstacle == key
    assert marks["val/x/accuracy"] == [True] * 3, "only losses depend on it"
    assert marks["dpo/loss"] == [True, False, True], "the runs with this loss have the same value of the key"
    found = compare_runs([tmp_path])
    text = re.sub(r"\s+", " ", comparison_text(found, 80))
    assert "val/x/loss is not comparable" in text and f"because {key} differs" in text
    assert f"not comparable: {key} differs" in render(comparison_page(found))


def test_results_come_before_the_keys_that_differ(write: Write) -> None:
    domain = {"reward": "llm_judge", **{f"default_{number}": None for number in range(9)}}
    found = compare_runs(
        [write("a", rewards={"old": {**domain, "reward": None}}), write("b", rewards={"new": domain}, seed=7)]
    )
    text, page = comparison_text(found, 80), render(comparison_page(found))
    assert text.index("reward/mean") < text.index("marks the best") < text.index("rewards.new") < text.index("3 of 4")
    assert page.index('<h2 id="results">') < page.index('<h2 id="what-differs">') < page.index("rewards.new")
    for shown in (text, page):
        assert "default_0" not in shown
    lines = [line.split() for line in text.splitlines()]
    assert ["rewards.new", "-", "llm_judge"] in lines and ["rewards.old", "only", "here", "-"] in lines


def test_training_is_judged_by_its_smoothed_curve(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tracker = JsonlTracker(tmp_path / name)
        for step in range(1, 51):
            tracker.log(step, {"reward/mean": 9.0 if step == 20 else 0.5})
        tracker.close()
    [row] = compare_runs([tmp_path]).metrics
    for cell in row.cells:  # for 50 steps, the mean covers two neighbours on each side
        assert cell and cell.value == 0.5 and cell.best == pytest.approx((9.0 + 4 * 0.5) / 5) and cell.best_step == 18


def test_runs_with_nothing_in_common_are_refused(tmp_path: Path, write: Write) -> None:
    tracker = JsonlTracker(tmp_path / "sft")
    tracker.log(1, {"sft/loss": 1.0, "epoch": 0.5})
    tracker.close()
    with pytest.raises(DataError) as raised:
        compare_runs([write("rlvr"), tmp_path / "sft"])
    assert [fault.code for fault in raised.value.faults] == ["empty"]


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("count", [2, 9])
def test_comparison_text_fits_width_without_omissions(width: int, count: int, write: Write, tmp_path: Path) -> None:
    for number in range(count):
        path = "/somewhere/" + "far/" * number
        write(
            f"learning_rate_of_the_sweep_{number}",
            solved=(0.1, 0.2 + number / 1000),
            rows=path,
            **{"a_key_of_" + "many_" * 9: number},
        )
    text = comparison_text(compare_runs([tmp_path]), width)
    assert max(map(len, text.splitlines())) <= width
    together = re.sub(r"\s+", "", text)
    for number in range(count):
        assert f"learning_rate_of_the_sweep_{number}" in together
        assert f"{0.2 + number / 1000:.3f}".rstrip("0") in text
    assert f"{0.2 + (count - 1) / 1000:.3f}* (4)".replace("0*", "*") in text.replace("0*", "*"), (
        "the best run is marked"
    )
    assert "2 of 3 configuration keys differ" in text


def test_comparison_page_is_one_file_with_all_curves(write: Write) -> None:
    evil = "</script><img src=x>"
    folders = [write("a"), write("b", note=evil), write("c", note="&")]
    html = render(comparison_page(compare_runs(folders)))
    assert evil not in html and "&lt;/script&gt;&lt;img src=x&gt;" in html
    for number, folder in enumerate(folders, 1):
        assert f'<th scope="row">{number}  {folder.name}</th>' in html, "the runs have the numbers of the curves"
    figures = json.loads(html.split('id="figures">')[1].split("</script>")[0])
    assert len(figures) == 4, "a chart for each metric"
    for figure in figures.values():
        assert [trace["name"] for trace in figure["data"]] == ["1", "2", "3"]
    assert "http-equiv" not in html and not re.search(r"<(link|img|iframe|script src)", html.split("<script>")[0])


def test_the_command(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("sweep/a")
    write("sweep/b", seed=7)
    assert main([str(tmp_path / "sweep")]) == 0
    assert (tmp_path / "sweep" / "compare.html").is_file()
    assert f"page: {tmp_path / 'sweep' / 'compare.html'}" in capsys.readouterr().out
    assert main([str(tmp_path / "sweep"), "--output", str(tmp_path / "no" / "folder.html")]) == 2
    assert "give another file with --output" in capsys.readouterr().err
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "roll.compare", str(tmp_path)]
    failed = subprocess.run(
        [*command, "nothing"], cwd=root, capture_output=True, text=True, timeout=limits.PROCESS, check=False
    )
    assert failed.returncode == 2 and "nothing: " in failed.stderr and "no such folder" in failed.stderr
    assert "Traceback" not in failed.stderr
