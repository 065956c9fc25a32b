"""A reward that fails on some rows, in a run and in an evaluation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from roll.tracking.jsonl import NOTICES_FILE
from tests import limits
from tests.integration.conftest import World

pytestmark = [pytest.mark.engines, pytest.mark.full]
REWARD = '''
from pathlib import Path


def some(prompt, response, row):
    """Fails for the first summands 7."""
    table = {"7": {}}.get(row["prompt"][0], row)
    return float(table["ground_truth"] == response.strip())


def none(prompt, response, row):
    """Fails as soon as the run has begun."""
    has_begun = Path(__file__).with_name("unscored").joinpath("metrics.jsonl").exists()
    return float(int(row["ground_truth"]) / (not has_begun))
'''


@pytest.fixture(scope="module")
def failing(world: World) -> World:
    (world.folder / "failing_reward.py").write_text(REWARD)
    return world


def test_run_reports_first_reward_failure_and_total(failing: World, leaves_nothing: Callable[[], None]) -> None:
    words = failing.rlvr("failing", "max_steps=1", "eval_steps=1", "rewards.arithmetic.reward=failing_reward:some")
    outcome = failing.run(*words)
    assert outcome.status == 0, outcome.output
    assert outcome.output.count("crashed on few.jsonl:") == 1
    assert 'table["ground_truth"] == response.strip()' in outcome.output
    assert "not scored)" in next(line for line in outcome.output.splitlines() if line.startswith("step 0/1"))
    first, *_, total = [
        json.loads(line)["text"] for line in (failing.folder / "failing" / NOTICES_FILE).read_text().splitlines()
    ]
    assert "KeyError: 'ground_truth'" in first and "gave no verdict on" in total
    assert "KeyError" in (failing.folder / "failing" / "report.html").read_text()
    leaves_nothing()


def test_a_step_without_any_reward_ends_the_run(failing: World, leaves_nothing: Callable[[], None]) -> None:
    outcome = failing.run(*failing.rlvr("unscored", "max_steps=1", "rewards.arithmetic.reward=failing_reward:none"))
    assert outcome.status == 3, outcome.output
    line = next(line for line in outcome.output.splitlines() if line.startswith("step 1/1"))
    assert "reward none (100% crashed)" in line
    last = failing.metrics("unscored")[-1]
    assert last["reward/crashed_fraction"] == 1 and "reward/mean" not in last and "policy/loss" not in last
    leaves_nothing()


def test_an_evaluation_says_stages_and_failures(failing: World, leaves_nothing: Callable[[], None]) -> None:
    asked = (
        "warm/export",
        "--data",
        "few.jsonl",
        "--template",
        "raw",
        "--reward",
        "failing_reward:some",
        "--max-new-tokens",
        "8",
    )
    command = [
        sys.executable,
        "-m",
        "roll.evaluate",
        *asked,
        "--strategy",
        "hf_infer",
        "--output",
        "failed",
        "prompt_length=16",
    ]
    done = subprocess.run(
        command, cwd=failing.folder, capture_output=True, text=True, timeout=limits.RUN, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    stages = (
        "loading libraries",
        "reading the rows",
        "starting Ray",
        "all roles are ready",
        "answering: 64 of 64",
        "scoring few: 64 of 64",
    )
    places = [done.stderr.find(stage) for stage in stages]
    assert -1 not in places and places == sorted(places)
    assert done.stderr.count("crashed on few.jsonl:") == 1
    sevens = sum(
        json.loads(line)["prompt"][0] == "7" for line in (failing.folder / "few.jsonl").read_text().splitlines()
    )
    results = json.loads((failing.folder / "failed" / "evaluation.json").read_text())
    assert results["sets"]["few"]["unscored"] == sevens > 0
    assert f"{sevens} of 64" in done.stdout
    assert any("KeyError: 'ground_truth'" in notice for notice in results["notices"])
    leaves_nothing()
