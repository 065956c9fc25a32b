"""The report while the run goes on, and what a page leaves out: curves that never change, and the middle of texts."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from shutil import which

import pytest

from roll.tracking.jsonl import JsonlTracker
from roll.tracking.report import live
from roll.tracking.report.charts import chart_sections
from roll.tracking.report.live import EVERY, LiveReport
from roll.tracking.report.page import PARTS
from roll.tracking.report.write import REPORT_FILE, write_report
from tests import limits


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_report_is_rewritten_when_it_is_due(tmp_path: Path) -> None:
    record, clock = JsonlTracker(tmp_path), Clock()
    report, pages = LiveReport(tmp_path, clock), []
    for step, now in enumerate((0.0, EVERY - 1, EVERY, EVERY + 1)):
        clock.now = now
        record.log(step, {"reward/mean": float(step)})
        report.log(step, {})
        report.close()
        pages.append((tmp_path / REPORT_FILE).read_text())
    record.close()
    assert [re.findall(r"(\d) steps · running", page) for page in pages] == [["0"], ["0"], ["2"], ["2"]]
    assert 'data-refresh="60.0"' in pages[-1]
    final = write_report(tmp_path).read_text()
    assert "3 steps" in final and "running, as of" not in final and "data-refresh=" not in final


def test_slow_reports_are_written_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, written = Clock(), list[float]()

    def write(folder: Path, every: float) -> None:
        written.append(clock.now)
        clock.now += 10.0

    monkeypatch.setattr(live, "write_report", write)
    report = LiveReport(tmp_path, clock)
    for now in (0.0, 400.0, 499.0, 501.0):
        clock.now = now
        report.log(1, {})
        report.close()
    assert written == [0.0, 501.0]


def test_a_failed_report_does_not_end_a_run(tmp_path: Path) -> None:
    report = LiveReport(tmp_path)
    report.log(1, {})  # there are no metrics to read
    report.close()
    assert not (tmp_path / REPORT_FILE).exists()


def test_what_never_changes_is_one_line(tmp_path: Path) -> None:
    record = JsonlTracker(tmp_path)
    for step in range(3):
        held_out = {"val/a/pass@1": 0.5, "val/a/length_max": 8.0, "val/a/policy_version": 2.0 * step}
        record.log(step, held_out | {"val/a/length_mean": 6.0 + step, "policy/lr": 1e-6, "reward/mean": 0.2})
    record.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    sections = {section.title: section for section in chart_sections(rows)}
    assert [chart.title for chart in sections["Learning"].charts] == ["Reward", "Validation", "a/length_mean"]
    assert sections["Learning"].constants == ["a/length_max = 8"]
    assert not sections["Policy"].charts and sections["Policy"].constants == ["Learning rate = 1.00e-06"]
    page = write_report(tmp_path).read_text().replace("<wbr>", "")
    table = page[page.index('aria-label="Validation"') : page.index('id="learning"')]
    assert re.findall(r'<th scope="row">(.+?)</th>', table) == ["a/length_mean", "a/pass@1"]
    assert "constant: a/length_max = 8" in table


@pytest.mark.skipif(which("node") is None, reason="needs node")
def test_a_long_text_shows_its_end() -> None:
    script = (PARTS / "page.js").read_text(encoding="utf-8")
    parts = re.findall(r"^const HEAD = .+?;$|^function cut\(text\) \{.+?^\}", script, re.MULTILINE | re.DOTALL)
    calls = 'console.log(JSON.stringify([cut("x".repeat(9000) + "42"), cut("short"), cut("a\\n".repeat(40) + "end")]))'
    done = subprocess.run(
        ["node", "-e", "\n".join([*parts, calls])], capture_output=True, text=True, timeout=limits.PROCESS, check=True
    )
    long, short, lines = json.loads(done.stdout)
    assert len(long) < 520 and long.startswith("xxx") and long.endswith("x42") and "[…]" in long
    assert short == "short" and lines.splitlines().count("a") < 12 and lines.endswith("end")
