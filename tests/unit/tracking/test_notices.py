"""Notices about steps: when they are due, and where they can be read."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from roll.tracking.base import Notice, StepNotices, by_topic
from roll.tracking.fanout import Tracking
from roll.tracking.jsonl import NOTICES_FILE, JsonlTracker
from roll.tracking.report.write import write_report
from roll.types import Metrics


class Full:
    metric, least = "tank/full_fraction", 1.0

    def text(self, metrics: Metrics) -> str:
        return f"the tank is full at {metrics['tank/litres']:g} litres: drain it"


def said(values: Mapping[int, float | None]) -> list[tuple[int, int]]:
    """Return step and length of the row of each notice. A value of None is a step without the metric."""
    notices = StepNotices([Full()])
    steps = {
        step: {"tank/litres": 5.0} | ({} if value is None else {Full.metric: value}) for step, value in values.items()
    }
    return [
        (notice.step, notice.in_a_row) for step, metrics in steps.items() for notice in notices.after(step, metrics)
    ]


def test_lasting_condition_is_reported_at_powers_of_ten() -> None:
    assert said(dict.fromkeys(range(1, 1200), 1.0)) == [(1, 1), (10, 10), (100, 100), (1000, 1000)]
    assert said(dict.fromkeys(range(12), 1.0)) == [(0, 1), (10, 11)], "step 0 is the state before the first step"


def test_later_condition_is_reported_at_once() -> None:
    assert said({step: float(step >= 37) for step in range(1, 120)}) == [(37, 1), (100, 64)]
    ended = {step: float(step == 1 or step >= 500) for step in range(1, 600)}
    assert said(ended) == [(1, 1), (500, 1)]


def test_intermittent_condition_is_reported_rarely() -> None:
    assert said({step: float(step % 2) for step in range(1, 1000)}) == [(1, 1), (11, 1), (101, 1)]


def test_steps_without_the_metric_do_not_count() -> None:
    assert said({0: 1.0, **dict.fromkeys(range(1, 20), None), 20: 1.0, 40: 0.999}) == [(0, 1), (20, 2)]


def test_a_notice_reaches_terminal_log_record_and_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Tracking(JsonlTracker(tmp_path)) as tracking, caplog.at_level(logging.WARNING):
        tracking.watch([Full()])
        for step in range(1, 13):
            tracking.log(step, {Full.metric: 1.0, "tank/litres": float(step)})
    expected = [
        "step 1: the tank is full at 1 litres: drain it",
        "step 10 (10 in a row): the tank is full at 10 litres: drain it",
    ]
    assert [entry.getMessage() for entry in caplog.records] == expected
    assert [json.loads(line)["step"] for line in (tmp_path / NOTICES_FILE).read_text().splitlines()] == [1, 10]
    page = write_report(tmp_path).read_text()
    assert "<p>Steps 1, 10: the tank" in page and "10 litres: drain it</p>" in page


def test_a_resumed_run_says_what_still_holds(tmp_path: Path) -> None:
    for resumed, steps in ((None, range(1, 15)), (7, range(8, 12))):
        with Tracking(JsonlTracker(tmp_path, resumed)) as tracking:
            tracking.watch([Full()])
            for step in steps:
                tracking.log(step, {Full.metric: 1.0, "tank/litres": 1.0})
    lines = [json.loads(line) for line in (tmp_path / NOTICES_FILE).read_text().splitlines()]
    assert [(line["step"], line["in_a_row"]) for line in lines] == [(1, 1), (8, 1), (10, 3)], (
        "step 10 of the first run was repeated"
    )


def test_topics_have_one_line_each_in_the_report() -> None:
    found = [Notice(1, "a", "first"), Notice(2, "b", "other"), Notice(10, "a", "last", 10)]
    assert by_topic(found) == ["Steps 1, 10: last", "Step 2: other"]


def test_report_without_notices_has_no_card(tmp_path: Path) -> None:
    with Tracking(JsonlTracker(tmp_path)) as tracking:
        tracking.log(1, {"reward/mean": 1.0})
    (tmp_path / NOTICES_FILE).unlink()  # as in a run of an earlier release
    assert 'class="card ending"' not in write_report(tmp_path).read_text()
