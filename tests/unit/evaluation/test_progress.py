"""What an evaluation says: its stages, failures of rewards, and how many responses were not scored."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path

import pytest
from rich.console import Console

from roll.evaluation.results import EvaluationResult, result_table, set_result
from roll.evaluation.run import EvaluationProgress
from roll.types import RewardOutcome, RolloutGroup
from tests.unit.rollout.build import make_episode, make_group


def group(*rewards: float | None) -> RolloutGroup:
    """Return a group of responses. None: the reward crashed."""
    crashed = RewardOutcome.CRASHED
    return make_group(
        0, [make_episode([5], 1.0, outcome=crashed) if one is None else make_episode([5], one) for one in rewards]
    )


def table(**sets: list[RolloutGroup]) -> str:
    results = {name: set_result(name, groups, len(groups[0].episodes)) for name, groups in sets.items()}
    out = Console(file=io.StringIO(), width=80)
    out.print(result_table(EvaluationResult(Path(), "model", None, results)))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_stages_are_said_once_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    samples = io.BytesIO()
    progress = EvaluationProgress(samples, {"held": 20}, 40, {})
    progress.begun()
    for _ in range(20):
        progress.answered(1)
        progress.answered(1)
        progress.finished("held", group(1.0, 0.0))
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("answering held: 0 of 40 responses")
    assert [line for line in said if line.startswith("answering: ")] == [
        f"answering: {4 * part} of 40 responses" for part in range(1, 11)
    ]
    scored = [line for line in said if line.startswith("scoring held: ")]
    assert [re.findall(r"\d+", line) for line in scored] == [[f"{2 * part}", "20"] for part in range(1, 11)]
    assert len([json.loads(line) for line in samples.getvalue().splitlines()]) == 20


@pytest.mark.parametrize(("total", "lines"), [(1, 1), (3, 3), (10, 10), (7, 7), (1000, 10)])
def test_small_sets_have_fewer_lines(total: int, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    progress = EvaluationProgress(io.BytesIO(), {"held": total}, total, {})
    for _ in range(total):
        progress.answered(1)
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_responses_asked_again_never_exceed_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    progress = EvaluationProgress(io.BytesIO(), {"held": 2}, 2, {})
    for _ in range(5):
        progress.answered(1)
    assert capsys.readouterr().err.splitlines() == ["answering: 1 of 2 responses", "answering: 2 of 2 responses"]


def test_a_failed_reward_is_warned_of_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    progress = EvaluationProgress(io.BytesIO(), {"held": 2}, 2, {})
    with caplog.at_level(logging.WARNING):
        progress.failed("rewards.sums: x", "rewards.sums crashed on rows.jsonl:3")
    assert caplog.messages == progress.failures == ["rewards.sums crashed on rows.jsonl:3"]


def test_the_accuracy_says_what_was_not_scored() -> None:
    shown = table(held=[group(1.0, None), group(1.0, 0.0), group(None, None)])
    first = shown.splitlines()[1]
    assert (
        "accuracy" in first and "0.3333" in first and first.rstrip().endswith("3 of 6") and shown.count("3 of 6") == 1
    )


def test_a_set_without_any_verdict_shows_no_accuracy() -> None:
    shown = table(broken=[group(None), group(None)], sound=[group(1.0), group(0.0)])
    broken = next(line for line in shown.splitlines() if "broken" in line)
    assert "no result" in broken and "2 of 2" in broken and "0.0000" not in broken
    assert "0.5000" in next(line for line in shown.splitlines() if "sound" in line)


def test_a_wholly_scored_evaluation_names_no_failures() -> None:
    assert "not scored" not in table(held=[group(1.0), group(0.0)])


@pytest.mark.parametrize(("rewards", "unscored"), [((1.0, 0.0), 0), ((1.0, None), 1), ((None, None), 2)])
def test_the_result_counts_what_was_not_scored(rewards: tuple[float | None, ...], unscored: int) -> None:
    found = set_result("held", [group(*rewards)], 2)
    assert found.unscored == unscored
    assert bool(found.estimates) == (unscored < 2)
