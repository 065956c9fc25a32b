"""Whole runs that keep their rollouts, resume, and are replayed without engines; and the trace of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tests.integration.conftest import TIMED, World
from tests.integration.test_agents import agent
from tests.unit.tracking.test_trace import assert_spans_nest, spans_of

pytestmark = pytest.mark.engines
STEPS = 3
SMALL = (f"max_steps={STEPS}", "save_steps=2", "deterministic=true")


@pytest.fixture(scope="module")
def kept(world: World) -> str:
    """Make a run that keeps its rollouts and traces two steps, and return its name."""
    outcome = world.run(*world.rlvr("kept", *SMALL, "keep_rollouts=true", "trace_steps=2"))
    assert outcome.status == 0, outcome.output
    return "kept"


def rollouts(folder: Path) -> list[dict[str, Any]]:
    """Return all rows of a run, without their times."""
    files = sorted((folder / "rollouts").iterdir())
    rows = [row for file in files for row in parquet.read_table(file).to_pylist()]
    return [{name: value for name, value in row.items() if name not in ("began", "ended")} for row in rows]


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith(TIMED)}


def test_rollouts_are_those_of_the_records(world: World, kept: str) -> None:
    rows, lines = rollouts(world.folder / kept), world.metrics(kept)
    assert len(rows) == STEPS * 16 * 8
    for line in lines[1:]:
        step = [row for row in rows if row["step"] == line["step"]]
        assert sum(row["reward"] for row in step) / len(step) == pytest.approx(line["reward/mean"])
        assert sum(row["length"] for row in step) / len(step) == pytest.approx(line["response/length_mean"])
    samples = [json.loads(text) for text in (world.folder / kept / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        of = [row for row in rows if (row["step"], row["prompt_id"]) == (sample["step"], sample["prompt_id"])]
        segments = [row["trajectories"][0]["segments"] for row in of]
        assert {parts[0]["text"] for parts in segments} == {sample["prompt"]}
        assert [parts[1]["text"] for parts in segments] == [one["text"] for one in sample["responses"]]
        assert {row["ground_truth"] for row in of} == {sample["ground_truth"]}
        versions = {run["version"] for parts in segments for run in parts[1]["versions"]}
        assert versions == {2 * (sample["step"] - 1)}  # two updates a step


def test_replayed_metrics_equal_those_of_first(world: World, kept: str) -> None:
    outcome = world.run(*world.rlvr("again", *SMALL, f"replay_from={kept}"))
    assert outcome.status == 0, outcome.output
    first, again = world.metrics(kept), world.metrics("again")
    assert list(map(without_times, again)) == list(map(without_times, first))
    logs = {path.name.rpartition("-")[0] for path in (world.folder / "again" / "logs").glob("*-*.log")}
    assert logs == {"actor_train", "reference"}
    own, copied = (sorted((world.folder / name / "samples.jsonl").read_text().splitlines()) for name in (kept, "again"))
    assert copied == own


def test_another_loss_learns_from_same_rollouts(world: World, kept: str) -> None:
    outcome = world.run(*world.rlvr("other", *SMALL, f"replay_from={kept}", "policy_loss=gspo"))
    assert outcome.status == 0, outcome.output
    first, other = world.metrics(kept)[1:], world.metrics("other")[1:]
    assert [line["reward/mean"] for line in other] == [line["reward/mean"] for line in first]
    assert all(one["policy/loss"] != two["policy/loss"] for one, two in zip(first, other, strict=True))


@pytest.mark.full
def test_resumed_run_replaces_later_steps(world: World, kept: str) -> None:
    world.go_back(kept, "resumed", STEPS)
    outcome = world.run(*world.rlvr("resumed", *SMALL, "keep_rollouts=true"))
    assert outcome.status == 0 and "resumed from step 2" in outcome.output, outcome.output
    assert rollouts(world.folder / "resumed") == rollouts(world.folder / kept)


@pytest.mark.full
def test_replay_resumes_where_it_was(world: World, kept: str) -> None:
    words = (*SMALL, f"replay_from={kept}")
    outcome = world.run(*world.rlvr("halves", *words[1:], "max_steps=2"))
    assert outcome.status == 0, outcome.output
    outcome = world.run(*world.rlvr("halves", *words))
    assert outcome.status == 0 and "resumed from step 2" in outcome.output, outcome.output
    halves, whole = ([line["reward/mean"] for line in world.metrics(name)[1:]] for name in ("halves", kept))
    assert len(halves) == STEPS and halves == whole


@pytest.mark.full
def test_replayed_episodes_need_no_environment(world: World) -> None:
    """Their metrics are those of the first run, but for the environments' processes, which are not started."""
    outcome = world.run(*agent(world, "acted", *SMALL, "keep_rollouts=true"))
    assert outcome.status == 0, outcome.output
    outcome = world.run(*agent(world, "acted_again", *SMALL, "replay_from=acted"))
    assert outcome.status == 0, outcome.output
    for first, again in zip(world.metrics("acted"), world.metrics("acted_again"), strict=True):
        of_processes = {f"episode/{name}" for name in ("crashed", "timed_out", "neighbours_lost")}
        expected = {name: value for name, value in without_times(first).items() if name not in of_processes}
        assert without_times(again) == expected
    segments = [path["segments"] for row in rollouts(world.folder / "acted") for path in row["trajectories"]]
    assert max(map(len, segments)) == 4


def test_trace_has_engines_rewards_and_steps(world: World, kept: str) -> None:
    path = world.folder / kept / "trace.json"
    assert_spans_nest(path)
    names = {
        event["pid"]: event["args"]["name"]
        for event in json.loads(path.read_text())["traceEvents"]
        if event["name"] == "process_name"
    }
    spans = spans_of(path)
    assert set(names.values()) == {"driver", "actor_infer rank 0", "rewards.arithmetic"}
    lines = {f"step {line['step']}": line for line in world.metrics(kept)}
    steps = [span for span in spans if span["name"].startswith("step ")]
    assert [span["name"] for span in steps] == ["step 1", "step 2"]
    for step in steps:
        end = step["ts"] + step["dur"]
        own = [span for span in spans if span is not step and step["ts"] <= span["ts"] and span["ts"] < end]
        driver = [span for span in own if names[span["pid"]] == "driver"]
        line = lines[step["name"]]
        assert step["dur"] == pytest.approx(line["time/step"] * 1e6, abs=2)
        for part in ("reference", "train", "weight_sync", "keep_rollouts"):
            [span] = [one for one in driver if one["name"] == part]
            # The metric leaves out the parts within it.
            inner = sum(one["dur"] for one in driver if one is not span and 0 <= one["ts"] - span["ts"] < span["dur"])
            assert span["dur"] - inner == pytest.approx(line[f"time/{part}"] * 1e6, abs=6)
        requests = [span for span in own if span["name"] == "generate"]
        assert sum(span["args"]["samples"] for span in requests) == 16 * 8
        assert sum(span["args"]["responses"] for span in own if span["name"] == "score") == 16 * 8
        [rollout] = [span for span in own if span["name"] == "rollout"]
        assert all(rollout["ts"] <= one["ts"] + one["dur"] <= rollout["ts"] + rollout["dur"] for one in requests)
