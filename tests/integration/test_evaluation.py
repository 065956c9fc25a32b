"""`python -m roll.evaluate` with the real engines, for a checkpoint and for runs. A run's last validation is the
expected result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from roll.runs.rlvr.validation import estimate_pass_at_k
from tests import limits
from tests.integration.conftest import World
from tests.integration.test_agents import agent

pytestmark = pytest.mark.engines


def evaluated(world: World, *arguments: str, folder: str) -> dict[str, Any]:
    """Run the command and return the content of `evaluation.json`."""
    command = [sys.executable, "-m", "roll.evaluate", *arguments]
    done = subprocess.run(command, cwd=world.folder, capture_output=True, text=True, timeout=limits.RUN, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    return json.loads((world.folder / folder / "evaluation.json").read_text())


def test_a_checkpoint_is_answered_by_transformers(world: World, leaves_nothing: Callable[[], None]) -> None:
    asked = (
        "--data",
        "output/tiny/problems/heldout.jsonl",
        "--reward",
        "exact_match",
        "--samples",
        "4",
        "--limit",
        "24",
    )
    checkpoint = next((world.folder / "warm" / "checkpoints").glob("step_*"))
    found = evaluated(world, str(checkpoint), *asked, "--strategy", "hf_infer", "--output", "ours", folder="ours")
    estimates = found["sets"]["heldout"]["estimates"]
    lines = [json.loads(line) for line in (world.folder / "ours" / "samples.jsonl").read_text().splitlines()]
    assert sorted(line["prompt_id"] for line in lines) == list(range(24))
    right = [
        [response["text"].strip() == line["row"]["ground_truth"] for response in line["responses"]] for line in lines
    ]
    assert {len(one) for one in right} == {4}
    assert [[response["passed"] for response in line["responses"]] for line in lines] == right
    assert estimates["accuracy"]["value"] == pytest.approx(sum(map(sum, right)) / 96)
    assert estimates["accuracy"]["low"] < estimates["accuracy"]["value"] < estimates["accuracy"]["high"]
    assert estimates["pass@4"]["value"] == pytest.approx(sum(map(any, right)) / 24)
    assert estimates["pass@2"]["value"] == pytest.approx(sum(estimate_pass_at_k(4, sum(one), 2) for one in right) / 24)
    assert not list((world.folder / "ours").glob("roll-*")), "the exported weights must be removed"
    leaves_nothing()


@pytest.mark.full
def test_evaluation_reproduces_last_validation(world: World, leaves_nothing: Callable[[], None]) -> None:
    """Prompts, sampling, seeds and engine are the same. The evaluation merges the adapter, while the run applied it in
    the engine.
    """
    outcome = world.run(*world.rlvr("judged", "max_steps=2", "eval_steps=2"))
    assert outcome.status == 0, outcome.output
    found = evaluated(world, "judged", folder="judged/evaluations/step_2")
    validated = world.metrics("judged")[-1]
    for name, value in found["sets"]["heldout"]["metrics"].items():
        assert value == pytest.approx(validated[name], abs=0.02), name
    estimates = found["sets"]["heldout"]["estimates"]
    assert estimates["accuracy"]["value"] == found["sets"]["heldout"]["metrics"]["val/heldout/pass@1"]
    leaves_nothing()


@pytest.mark.full
def test_environments_of_a_run_are_evaluated(world: World, leaves_nothing: Callable[[], None]) -> None:
    """Multi-turn episodes, on the code path of validation."""
    outcome = world.run(*agent(world, "player", "max_steps=1"))
    assert outcome.status == 0, outcome.output
    found = evaluated(world, "player", "--limit", "4", folder="player/evaluations/step_1")
    [one] = found["sets"].values()
    assert one["prompts"] == 4 and one["estimates"]["accuracy"]["high"] > 0
    lines = (world.folder / "player" / "evaluations" / "step_1" / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 4
    paths = [response["trajectories"][0]["segments"] for line in lines for response in json.loads(line)["responses"]]
    assert any(
        [segment["role"] for segment in path[1:4]] == ["assistant", "environment", "assistant"] for path in paths
    )
    leaves_nothing()
