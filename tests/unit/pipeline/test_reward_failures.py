"""Failures of rewards: the first of each kind is said at once, and all are counted."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RewardConfig
from roll.rewards.verdicts import crashed, parts_of, summed, timed_out
from roll.rollout.group import Scorer
from roll.runs.rlvr.reward_failures import MOST_KINDS, OTHERS, Reported, RewardFailures, kind_of, reported, totalled
from roll.tracking.fanout import Tracking
from roll.tracking.jsonl import NOTICES_FILE, JsonlTracker
from roll.tracking.report.write import write_report
from roll.types import Prompt, RewardOutcome, RewardResult

TRACE = '  File "/home/me/grade.py", line 12, in grade\n    return int(response)\nValueError: invalid literal'
RAISED = crashed("ValueError: invalid literal (/home/me/grade.py, line 12)", TRACE)
FINE = RewardResult(1.0)
SECTIONS = {"sums": RewardConfig.model_validate({"reward": "grade.grade"})}


def asked(row: int, domain: str = "sums") -> Prompt:
    return Prompt(row, np.arange(2, dtype=np.int32), "", domain, {}, f"rows.jsonl:{row}")


def heard(
    *results: RewardResult, sections: dict[str, RewardConfig] = SECTIONS
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return what is said while the results of rows 1, 2, ... arrive, and the totals."""
    said: list[tuple[str, str]] = []
    failures = RewardFailures(sections, lambda topic, text: said.append((topic, text)))
    for row, result in enumerate(results, start=1):
        failures.observe(asked(row, next(iter(sections))), [result])
    return said, failures.totals()


def test_a_first_crash_names_reward_row_trace_count() -> None:
    [(_, text)], _ = heard(FINE, FINE, RAISED)
    first, *trace, _ = text.splitlines()
    assert first == "rewards.sums (grade.grade) crashed on rows.jsonl:3 (1 of 3 responses so far):"
    assert [line.strip() for line in trace] == [line.strip() for line in TRACE.splitlines()]


def test_repeated_crashes_are_counted_not_said() -> None:
    said, [(_, total)] = heard(RAISED, FINE, RAISED, RAISED)
    assert len(said) == 1
    expected = "3 of 4 responses: 3 x ValueError at /home/me/grade.py, line 12 (first: rows.jsonl:1)"
    assert total == f"rewards.sums (grade.grade) gave no verdict on {expected}"


def test_each_kind_of_exception_is_said_once() -> None:
    other_line = crashed("ValueError: invalid literal (/home/me/grade.py, line 40)", TRACE)
    other_kind = crashed("KeyError: 'x' (/home/me/grade.py, line 12)", TRACE)
    other_text = crashed("KeyError: 'y' (/home/me/grade.py, line 12)", TRACE)
    said, [(_, total)] = heard(RAISED, other_line, other_kind, other_text)
    assert len(said) == 3
    assert "2 x KeyError at /home/me/grade.py, line 12 (first: rows.jsonl:3)" in total


def test_a_timeout_is_said_with_its_limit() -> None:
    [(_, text)], _ = heard(timed_out(10.0))
    assert "timed out on rows.jsonl:1 (1 of 1" in text and "10 s (rewards.sums.timeout: 10)" in text


def test_an_unavailable_judge_is_said_with_its_reason() -> None:
    gone = RewardResult(0.0, RewardOutcome.UNAVAILABLE, note="HTTP 503: no capacity for request 17")
    said, [(_, total)] = heard(
        gone, RewardResult(0.0, RewardOutcome.UNAVAILABLE, note="HTTP 503: no capacity for request 18")
    )
    assert len(said) == 1
    assert "was unavailable on rows.jsonl:1" in said[0][1]
    assert "no capacity for request 17" in said[0][1]
    assert "2 of 2 responses: 2 x was unavailable: HTTP N" in total


def test_a_failed_part_is_named_not_its_sum() -> None:
    section = RewardConfig.model_validate(
        {"parts": {"form": {"reward": "grade.form"}, "sum": {"reward": "grade.grade"}}}
    )
    parts = parts_of("sums", section)
    [result] = summed(parts, [[FINE], [RAISED]])
    [(topic, text)], [(_, total)] = heard(result, sections={"sums": section})
    assert topic.startswith("rewards.sums.parts.sum: ")
    assert text.startswith("rewards.sums.parts.sum (grade.grade) crashed on rows.jsonl:1")
    assert TRACE.splitlines()[1].strip() in text
    assert total.startswith("rewards.sums.parts.sum (grade.grade)") and "on 1 of 1" in total


def test_an_overflowing_sum_is_named_by_its_domain() -> None:
    section = RewardConfig.model_validate({"parts": {"a": {"reward": "x.a", "weight": 3.0}, "b": {"reward": "x.b"}}})
    [result] = summed(parts_of("sums", section), [[RewardResult(3e38)], [FINE]])
    [(_, text)], _ = heard(result, sections={"sums": section})
    assert text.startswith("rewards.sums crashed on rows.jsonl:1")


def test_a_flood_of_kinds_ends_after_the_most() -> None:
    results = [crashed(f"Error{number}: x (/home/me/grade.py, line 1)") for number in range(MOST_KINDS + 5)]
    said, [(_, total)] = heard(*results)
    assert len(said) == MOST_KINDS
    assert f"5 x {OTHERS} (first: rows.jsonl:{MOST_KINDS + 1})" in total


def test_an_answer_without_a_number_is_no_failure() -> None:
    assert heard(FINE, RewardResult(0.0, RewardOutcome.UNPARSABLE, note="no answer")) == ([], [])


def test_control_characters_of_an_exception_are_escaped() -> None:
    [(_, text)], _ = heard(crashed("ValueError: \x1b[2Jgone\ud800 (x.py, line 1)", "ValueError: \x1b[2Jgone\ud800"))
    assert "\x1b" not in text
    assert r"\x1b[2Jgone\ud800" in text


@pytest.mark.parametrize(
    ("note", "kind"),
    [
        ("MemoryError (x.py, line 3); memory_gib of the domain limits the memory", "MemoryError at x.py, line 3"),
        ("KeyError: '(a, line 1) b'\n (x y.py, line 3)", "KeyError at x y.py, line 3"),
        ("returned 3 results for 4 responses", "crashed: returned N results for N responses"),
        ("returned a str, not a number: 'a'", "crashed: returned a str, not a number"),
        ("", "crashed"),
    ],
)
def test_a_kind_is_exception_and_line(note: str, kind: str) -> None:
    assert kind_of(crashed(note)) == kind


class Crashing:
    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        return [RAISED if response == "bad" else FINE for response in responses]

    def compares(self, prompt: Prompt) -> bool:
        return False

    def combined(self, prompt: Prompt, results: Sequence[RewardResult]) -> Sequence[RewardResult]:
        return results


def noticed(tracking: Tracking, scorer: Scorer | None = None, **section: Any) -> Reported:
    """Return a scorer of the domain `sums` whose failures become notices of a run with these settings of the reward."""
    zero = {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 3}}}
    values = {
        "exp_name": "e",
        "output_dir": "o",
        "pretrain": "nobody/none",
        "max_steps": 2,
        "rewards": {"sums": {"reward": "grade.grade", **section}},
        "actor_train": {"strategy_args": zero, "data_args": {"file_name": "x", "prompt": "p"}},
        "actor_infer": {"strategy_args": {"strategy_name": "vllm", "strategy_config": {}}},
    }
    plan = cast(Any, SimpleNamespace(environment={}))
    return reported(RlvrConfig.model_validate(values), scorer or Crashing(), plan, tracking)


async def _two_steps(scorer: Reported, tracking: Tracking) -> None:
    async with totalled(scorer.failures, tracking):
        tracking.log(0, {})
        for step in (1, 2):
            assert await scorer.score(asked(step), ["good", "bad"]) == [FINE, RAISED]
            tracking.log(step, {"reward/mean": 1.0})


def test_a_crash_reaches_terminal_log_record_and_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Tracking(JsonlTracker(tmp_path)) as tracking, caplog.at_level(logging.WARNING):
        asyncio.run(_two_steps(noticed(tracking), tracking))
    first, total = (entry.getMessage() for entry in caplog.records)
    assert first.startswith("step 1: rewards.sums (grade.grade) crashed on rows.jsonl:1 (1 of 2")
    assert total.startswith("step 2: since step 0, rewards.sums (grade.grade)")
    assert "2 of 4 responses: 2 x ValueError" in total
    assert [json.loads(line)["step"] for line in (tmp_path / NOTICES_FILE).read_text().splitlines()] == [1, 2]
    page = write_report(tmp_path).read_text()
    assert "return int(response)" in page
    assert "on 2 of 4 responses" in page


def test_totals_are_said_even_if_the_run_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def fails(scorer: Reported, tracking: Tracking) -> None:
        async with totalled(scorer.failures, tracking):
            await scorer.score(asked(7), ["bad"])
            raise OSError("the disk is full")

    with Tracking(JsonlTracker(tmp_path)) as tracking, pytest.raises(OSError, match="disk"):
        asyncio.run(fails(noticed(tracking), tracking))
    assert "on 1 of 1 responses" in caplog.messages[-1]


class Leaking(Crashing):
    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        refused = RewardResult(0.0, RewardOutcome.UNAVAILABLE, note="refused sk-of-the-judge")
        return [crashed("ValueError: sk-of-the-judge (x.py, line 1)", "ValueError: sk-of-the-judge"), refused]


def test_secrets_of_the_run_are_in_no_notice(tmp_path: Path) -> None:
    async def go(scorer: Reported, tracking: Tracking) -> None:
        async with totalled(scorer.failures, tracking):
            await scorer.score(asked(1), ["", ""])

    with Tracking(JsonlTracker(tmp_path)) as tracking:
        asyncio.run(go(noticed(tracking, Leaking(), system_envs={"MY_API_KEY": "sk-of-the-judge"}), tracking))
    written = (tmp_path / NOTICES_FILE).read_text()
    assert len(written.splitlines()) == 3 and "refused" in written
    assert "sk-of-the-judge" not in written
