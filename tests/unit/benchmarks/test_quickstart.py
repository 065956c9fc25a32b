"""The rows and commands of the benchmark that runs the quickstart's experiments, and its verdict on their metrics."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest

from benchmarks.quickstart import EXPERIMENTS, GPU_GIB, OVERHEAD, Experiment, command, finite, named, row
from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.schema.pipelines import Config
from roll.config.shipped import experiments
from roll.tracking.jsonl import JsonlTracker


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_a_command_keeps_the_lengths_of_its_experiment(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[Config] = []
    compose(
        [*command(experiment, GPU_GIB, 3)[2:], "dry_run=true"],
        lambda composed, presets: found.append(checked_config(composed, presets)),
    )
    (config,) = found
    assert (config.prompt_length, config.response_length, config.max_steps) == (
        experiment.prompt,
        experiment.response,
        3,
    )


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_a_row_nearly_fills_the_lengths(experiment: Experiment) -> None:
    letters = sum(map(len, json.dumps(row(experiment, random.Random(0)))))
    most = experiment.prompt + experiment.response * (2 if experiment.kind == "pair" else 1)
    assert most - 5 * OVERHEAD < letters < most + 2 * OVERHEAD, (
        "keys and marks are counted, and a chat template may add OVERHEAD tokens"
    )


def test_every_experiment_of_the_quickstart_is_run() -> None:
    assert {f"quickstart/{one.name}" for one in EXPERIMENTS} == {
        name for name in experiments() if name.startswith("quickstart/")
    }


def test_an_unknown_name_is_refused() -> None:
    assert [one.name for one in named("gsm8k_sft,capybara_sft")] == ["gsm8k_sft", "capybara_sft"]
    with pytest.raises(argparse.ArgumentTypeError, match="experiment gsm8k_stf; .* gsm8k_rlvr, "):
        named("gsm8k_stf,capybara_sft")


def test_non_finite_loss_is_found_in_metrics(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"sft/loss": 1.5})
    tracker.log(2, {"sft/loss": float("nan")})
    tracker.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [finite(json.loads(line)) for line in lines] == [True, False]
