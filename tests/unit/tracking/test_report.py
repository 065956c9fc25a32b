"""The report page of a run: its charts, tables and samples, safety against markup, and the command that writes it."""

import json
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from roll.errors import DataError
from roll.tracking.history import RunEnd, read_starts, write_end, write_start
from roll.tracking.jsonl import METRICS_FILE, JsonlTracker, read_lines
from roll.tracking.report.charts import chart_sections
from roll.tracking.report.records import series
from roll.tracking.report.write import write_report
from roll.types import PartnerTurn, RolloutGroup
from tests import limits

LOADS = {"src", "href", "srcset", "data", "poster", "action"}


class Page(HTMLParser):
    """Collects the URLs that a browser would load, the ids, and the text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.targets: list[str] = []
        """Ids that links within the page point to."""
        self.text = ""
        self._inside: list[str] = []
        self._groups, self._is_groups = "", False
        self.feed(html)
        self.groups: list[dict[str, Any]] = json.loads(self._groups)
        """Data of the samples viewer."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside.append(tag)
        self._is_groups = ("id", "sample-groups") in attrs
        self.loads += [(name, value) for name, value in attrs if name in LOADS]
        self.targets += [value[1:] for name, value in attrs if name == "href" and value and value[0] == "#"]
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        self._is_groups = False
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._is_groups:
            self._groups += data
        if not {"script", "style"} & set(self._inside):
            self.text += data


def test_the_report_is_one_file_that_loads_nothing(run_dir: Path) -> None:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    html = path.read_text()
    page = Page(html)
    assert page.loads == [("href", f"#{target}") for target in page.targets] and set(page.targets) <= set(page.ids)
    assert "link" not in page.tags and "img" not in page.tags and "iframe" not in page.tags
    own = html.split("<style>")[1].split("</style>")[0]
    assert "url(" not in own and "@import" not in own
    assert html.count("plotly.js v") == 1, "plotly is inlined once"
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "config.yaml", "metrics.jsonl", "notices.jsonl", "report.html", "samples.jsonl", "validation_samples.jsonl",
    ]  # fmt: skip


def test_the_page_says_what_came_of_the_run(run_dir: Path) -> None:
    page = Page(write_report(run_dir).read_text())
    for part in ("7B-rlvr", "Qwen/Qwen2.5-7B-Instruct · 120 steps", "max_steps: 120"):
        assert part in page.text, part
    rows, _ = read_lines(run_dir / METRICS_FILE)
    _, solved = series(rows, "val/gsm8k/pass@1")
    assert (round(solved[0], 3), round(solved[-1], 3), round(max(solved), 3)) == (0.321, 0.667, 0.667)
    assert "from 0.321, best 0.667" in page.text
    assert "Training: 960 of 960 sampled responses" in page.text and "; all are" in page.text
    assert [group["step"] for group in page.groups] == [step for step in range(1, 121) for _ in range(2)]
    [right, wrong, cut, late] = page.groups[0]["responses"]
    assert page.groups[0]["answer"] == "391" and (right["reward"], right["flags"], wrong["note"]) == (
        1.0,
        [],
        "format 1 · read 381",
    )
    assert (
        cut["flags"] == ["unparsable", "truncated"] and late["flags"] == ["timed out"] and late["note"] == "10 s passed"
    )


def test_best_stands_only_where_one_way_is_better(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    for step, value in enumerate((3.0, 1.0, 2.0)):
        tracker.log(step, {"val/a/loss": value, "val/a/accuracy": value / 4, "val/a/length_mean": 100 * value})
    tracker.close()
    page = write_report(tmp_path).read_text().replace("<wbr>", "")
    found = re.findall(r'<th scope="row">(a/.+?)</th>(.+?)</tr>', page)
    assert {name: re.findall(r"<td[^>]*>(.*?)</td>", cells) for name, cells in found} == {
        "a/loss": ["3", "2", "1", "1"],
        "a/accuracy": ["0.75", "0.5", "0.75", "0"],
        "a/length_mean": ["300", "200", "", ""],
    }


def test_the_page_says_how_the_run_was_started(run_dir: Path) -> None:
    write_start(run_dir, str)
    write_start(run_dir, str)
    _, last = read_starts(run_dir)
    assert last.command == shlex.join(sys.orig_argv)
    text = Page(write_report(run_dir).read_text()).text
    for part in (
        ", the last of 2",
        last.command,
        socket.gethostname(),
        f"python {platform.python_version()}",
        str(Path.cwd()),
    ):
        assert part in text, part


def test_every_chart_has_its_place_on_the_page(run_dir: Path) -> None:
    rows, _ = read_lines(run_dir / METRICS_FILE)
    titles = [chart.title for section in chart_sections(rows) for chart in section.charts]
    assert titles == [
        "Reward", "Reward by domain", "Validation", "Response length", "Truncated responses",
        "Policy loss", "KL to the reference", "Entropy", "Clip fraction", "Gradient norm", "Learning rate",
        "Mismatch", "Staleness", "Who worked when", "Tokens per second", "MFU", "Peak memory",
        "KV cache", "Requests", "Tokens of a step", "Tokens in flight",
    ]  # fmt: skip
    html = write_report(run_dir).read_text()
    drawn = set(re.findall(r'"(chart-\d+-\d+)":', html))
    assert len(drawn) == len(titles) and drawn == {
        element for element in Page(html).ids if element.startswith("chart-")
    }


def test_the_curves_are_the_metrics() -> None:
    rows = [
        {"step": 0, "val/a/pass@1": 0.25, "time/evaluate": 4.0},
        {
            "step": 1,
            "reward/mean": 0.5,
            "reward/std": 0.25,
            "mismatch/kl": None,
            "time/step": 10.0,
            "time/rollout": 6.0,
            "time/train": 3.0,
        },
        {
            "step": 2,
            "reward/mean": 0.75,
            "reward/std": 0.5,
            "mismatch/kl": 0.01,
            "time/step": 8.0,
            "time/rollout": 5.0,
            "time/train": 3.0,
        },
    ]
    figures = {
        chart.title: chart.figure.to_plotly_json() for section in chart_sections(rows) for chart in section.charts
    }
    assert set(figures) == {"Reward", "Validation", "Mismatch", "Who worked when"}
    line, band = figures["Reward"]["data"]
    assert (line["x"], line["y"]) == ([1, 2], [0.5, 0.75])
    assert (band["x"], band["y"]) == ([1, 2, 2, 1], [0.25, 0.25, 1.25, 0.75])
    assert figures["Mismatch"]["data"][0]["x"] == [2] and figures["Mismatch"]["layout"]["yaxis"]["type"] == "log"
    bars = {bar["name"]: bar["y"] for bar in figures["Who worked when"]["data"]}
    assert bars == {
        "waits for rollouts": [0.0, 6.0, 5.0],
        "train": [0.0, 3.0, 3.0],
        "evaluate": [4.0, 0.0, 0.0],
        "other": [0.0, 1.0, 0.0],
    }


def test_difficulty_of_prompts_has_its_own_section() -> None:
    pools = ("unseen", "hard", "learnable", "solved")
    rows = [
        {
            "step": step,
            "curriculum/solve_rate": 0.1 * step,
            "curriculum/promoted": float(step),
            "curriculum/demoted": 0.0,
        }
        | {f"curriculum/{pool}_fraction": 0.25 + 0.01 * step for pool in pools}
        | {f"curriculum/drawn_{pool}": 0.5 - 0.1 * step for pool in pools}
        for step in (1, 2)
    ]
    [section] = [one for one in chart_sections(rows) if one.title == "Difficulty of prompts"]
    lines = {chart.title: chart.figure.to_plotly_json()["data"] for chart in section.charts}
    assert list(lines) == ["Solve rate", "Pools", "Draws", "Changes of pool"]
    assert lines["Solve rate"][0]["y"] == [0.1, 0.2]
    assert {line["name"]: line["y"] for line in lines["Pools"]} == dict.fromkeys(pools, [0.26, 0.27])
    assert {line["name"]: line["y"] for line in lines["Draws"]} == dict.fromkeys(pools, [0.4, 0.3])
    assert [line["y"] for line in lines["Changes of pool"]] == [[1.0, 2.0], [0.0, 0.0]]


def test_engine_lane_has_seconds_of_the_step() -> None:
    """The first step takes 10 s: the loop waits for 2 s, and the engines work for 7.5 s. In the second step, they get
    no requests.
    """
    rows = [
        {"step": 1, "time/step": 10.0, "time/rollout": 2.0, "time/train": 8.0, "engine/idle_fraction": 0.25},
        {"step": 2, "time/step": 4.0, "time/train": 4.0, "engine/idle_fraction": None},
    ]
    [chart] = [
        chart for section in chart_sections(rows) for chart in section.charts if chart.title == "Who worked when"
    ]
    lanes: dict[str, dict[str, list[float]]] = {"y": {}, "y2": {}}
    figure = chart.figure.to_plotly_json()
    for bar in figure["data"]:
        lanes[bar["yaxis"]][bar["name"]] = bar["y"]
    assert lanes == {
        "y": {"waits for rollouts": [2.0, 0.0], "train": [8.0, 4.0]},
        "y2": {"engines generate": [7.5, 0.0], "engines are idle": [2.5, 4.0]},
    }
    assert chart.tall and figure["layout"]["yaxis2"]["matches"] == "y", "both lanes have the same scale"


def test_text_of_the_run_cannot_become_markup(tmp_path: Path, group: Callable[..., RolloutGroup]) -> None:
    evil = "</script></pre><script>alert('x')</script><img src=x onerror=alert(1)> & {{ 7 * 7 }}"
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"reward/mean": 0.5, f"reward/{evil}/mean": 0.5, f"val/{evil}/pass@1": 0.1})
    tracker.samples(1, [group(prompt=evil)])
    tracker.close()
    (tmp_path / "config.yaml").write_text(f'exp_name: run\nnote: "{evil}"\n')
    page = Page(write_report(tmp_path).read_text())
    assert page.text.count(evil) >= 3, "configuration, validation table and list of metrics show it as plain text"
    assert page.groups[0]["prompt"] == evil
    assert "img" not in page.tags and page.tags.count("script") == 4


def test_the_page_shows_the_segments_of_several_turns(tmp_path: Path, of_several_turns: RolloutGroup) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"reward/mean": 0.5})
    tracker.samples(1, [of_several_turns])
    tracker.close()
    [group] = Page(write_report(tmp_path).read_text()).groups
    tool, compacted = group["responses"]
    assert [(turn["role"], turn["caption"], turn["text"]) for turn in tool["turns"]] == [
        ("assistant", "assistant · 3 tokens · reward 0.25", "Let me ask."),
        ("environment", "environment · 2 tokens", "<tool>391</tool>"),
        ("assistant", "assistant · 3 tokens · reward 0.5", "It is 391."),
    ]
    assert [(turn["caption"], turn["text"]) for turn in compacted["turns"]] == [
        ("trajectory 1 · assistant · 3 tokens", "A long thought."),
        ("trajectory 2 · environment · 5 tokens", "In short: 17 · 23"),
        ("trajectory 2 · assistant · 3 tokens", "391"),
    ]
    assert tool["flags"] == ["max turns"] and tool["text"] == "", "an episode is shown as turns below its prompt"


def test_the_page_shows_turns_of_partners(tmp_path: Path, of_several_turns: RolloutGroup) -> None:
    first, second = of_several_turns.episodes
    heard = (PartnerTurn(1, "rival", "I doubt it."), PartnerTurn(2, "rival", "Well done."))
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"reward/mean": 0.5})
    tracker.samples(1, [replace(of_several_turns, episodes=[replace(first, partner_turns=heard), second])])
    tracker.close()
    [group] = Page(write_report(tmp_path).read_text()).groups
    shown = [(turn["caption"].split(" ·")[0], turn["text"]) for turn in group["responses"][0]["turns"]]
    assert shown == [
        ("assistant", "Let me ask."),
        ("partner rival", "I doubt it."),
        ("environment", "<tool>391</tool>"),
        ("assistant", "It is 391."),
        ("partner rival", "Well done."),
    ]


def test_start_time_counts_in_total_not_pace(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    for step, seconds in enumerate((50.0, 4.0, 6.0)):
        tracker.log(step, {"reward/mean": 0.5, "time/step": seconds, "time/evaluate": seconds / 2})
    tracker.close()
    text = Page(write_report(tmp_path).read_text()).text
    assert "5.0 s per step (median)" in text and "1m00s" in text


def test_a_run_of_supervised_fine_tuning(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "sft-run")
    for step in (1, 2, 3):
        tracker.log(
            step, {"sft/loss": 3.0 - step / 2, "policy/lr": 1e-5, "time/step": 1.0, "val/held_out/loss": 3.0 - step / 4}
        )
    tracker.close()
    page = Page(write_report(tmp_path / "sft-run").read_text())
    assert "sft-run" in page.text and "Learning rate" in page.text and "held_out/loss" in page.text
    assert "from 2.75, best 2.25" in page.text, "for a loss, lower is better"


def test_page_shows_planned_number_of_steps(tmp_path: Path) -> None:
    """Without end.json, the page shows `max_steps`. With it, the page shows `last_step`, which is lower if the epochs
    end earlier.
    """
    tracker = JsonlTracker(tmp_path)
    tracker.log(7, {"sft/loss": 1.0, "time/step": 1.0, "epoch": 0.25})
    tracker.close()
    (tmp_path / "config.yaml").write_text("max_steps: 1000\n")
    assert "of 1,000" in Page(write_report(tmp_path).read_text()).text
    write_end(tmp_path, RunEnd("interrupted", "stopped by a signal", "", last_step=29))
    page = Page(write_report(tmp_path).read_text()).text
    assert "of 29" in page and "of 1,000" not in page


def test_a_torn_line_is_left_out_and_said(run_dir: Path) -> None:
    with (run_dir / METRICS_FILE).open("a") as file:
        file.write('{"step": 121, "rew')
    assert "1 line(s) of the records" in Page(write_report(run_dir).read_text()).text


def test_without_metrics_the_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path / METRICS_FILE)):
        write_report(tmp_path)
    (tmp_path / METRICS_FILE).touch()
    with pytest.raises(DataError, match="no metrics"):
        write_report(tmp_path)


@pytest.mark.parametrize("text", ["exp_name: [a", "only words", "a: \x01"])
def test_a_configuration_that_cannot_be_read_is_named(text: str, run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text(text)
    with pytest.raises(DataError, match="config.yaml: .* block of keys"):
        write_report(run_dir)


def test_failed_report_keeps_the_old_one(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(run_dir)
    before = (run_dir / "report.html").read_bytes()
    monkeypatch.setattr("os.replace", lambda source, target: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report(run_dir)
    assert (run_dir / "report.html").read_bytes() == before
    assert not list(run_dir.glob(".report*"))


def test_the_command_prints_the_path(run_dir: Path) -> None:
    command = [sys.executable, "-m", "roll.tracking.report"]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [*command, str(run_dir)], cwd=root, capture_output=True, text=True, timeout=limits.PROCESS, check=True
    )
    assert done.stdout.strip() == str(run_dir / "report.html")
    shutil.rmtree(run_dir)
    failed = subprocess.run(
        [*command, str(run_dir)], cwd=root, capture_output=True, text=True, timeout=limits.PROCESS, check=False
    )
    assert failed.returncode == 2 and "no such file" in failed.stderr and "Traceback" not in failed.stderr
