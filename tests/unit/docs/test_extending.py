"""Runs the code of `docs/extending.md`, and compares the loop in the README with its source."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml

from roll.algorithms.advantages import Normalisation, Scores, advantages
from roll.algorithms.losses import LossInputs
from roll.algorithms.methods import EstimatorTraits, PolicyLossTraits, PreferenceTraits
from roll.algorithms.objectives import PolicyLoss
from roll.algorithms.preference import PreferenceLoss
from roll.backend import Rank, ScoreStrategy
from roll.config.load.user_code import inspect_user_code
from roll.config.schema.model import DataConfig
from roll.config.schema.roles import RewardConfig
from roll.data.packing import concatenate
from roll.data.rows import prompt_conversation
from roll.ray.batching import Ranks
from roll.ray.group import WorkerGroup
from roll.rewards.reward_workers import RewardProcess
from roll.tracking import trackers
from roll.tracking.base import RunFacts
from roll.tracking.fanout import Tracking
from roll.tracking.jsonl import JsonlTracker
from roll.training.actor_train import Reference
from roll.types import Prompt, RewardOutcome, RewardResult, Sequences
from tests import limits
from tests.unit.docs.pages import ROOT, Block, blocks, read

PAGE = "docs/extending.md"
LINES = 30


def code(where: str) -> Block:
    """Return the page's Python block for a file."""
    (found,) = [block for block in blocks(PAGE) if block.option("file") == where]
    return found


def written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import and return the module of a `file=` block. It is importable under its name while the test runs."""
    file = tmp_path / Path(name).name
    file.write_text(code(name).text, encoding="utf-8")
    module_name = name.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module_name, module)
    spec.loader.exec_module(module)
    return module


def sequences(*responses: int) -> Sequences:
    """Return sequences with prompts of 1 token and responses of these lengths."""
    return concatenate(
        [np.zeros(1 + length, np.int32) for length in responses], [np.arange(1 + length) > 0 for length in responses]
    )


@pytest.mark.parametrize(
    "section", re.split(r"^## ", read(PAGE), flags=re.MULTILINE)[1:], ids=lambda text: text.split("\n")[0]
)
def test_an_addition_is_short(section: str) -> None:
    code_blocks = re.findall(r"^```(?:python|yaml)[^\n]*\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    lines = [line for block in code_blocks if "reward:" not in block for line in block.splitlines() if line.strip()]
    assert 0 < len(lines) <= LINES


async def scored_by(domain: str, section: Mapping[str, Any], responses: Sequence[str]) -> list[RewardResult]:
    process = RewardProcess(domain, RewardConfig.model_validate({"timeout": limits.CALL, **section}), limits.START)
    try:
        return await process.score(
            Prompt(0, np.zeros(1, np.int32), "17 * 3", domain, {"ground_truth": "51"}), responses
        )
    finally:
        await process.close()


def test_the_reward_that_asks_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written("my_judge.py", tmp_path, monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"{len(await reader.readline())}\n".encode())
        writer.close()

    async def go() -> tuple[list[RewardResult], list[RewardResult]]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            section = {"reward": "my_judge:judged", "reward_args": {"host": host, "port": port}, "concurrency": 2}
            there = await scored_by("judged", section, ["two\nlines", "x"])
        return there, await scored_by("judged", section, ["x"])

    (two, one), (gone,) = asyncio.run(go())
    assert (two.value, one.value) == (10.0, 2.0), "the server counts the newline, too"
    assert gone.outcome is RewardOutcome.UNAVAILABLE
    assert "the judge cannot be reached" in gone.note


def test_the_reward_of_a_group_and_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("my_judge.py", "my_group_reward.py"):
        written(name, tmp_path, monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (section,) = [
        found
        for block in blocks(PAGE)
        if "normalise: group" in block.text
        for found in [yaml.safe_load(block.text)["rewards"]]
    ]
    parts = section["short_answers"]["parts"]
    del parts["judged"]["reward_args"]["port"]
    faults = inspect_user_code({"rewards": section})[1]
    assert [fault.place for fault in faults] == ["rewards.short_answers.parts.judged.reward_args.port"], (
        "there are no other faults"
    )
    del parts["judged"]
    results = asyncio.run(
        scored_by("short_answers", {**section["short_answers"], "concurrency": 1}, ["51", "It is 51.", "5"])
    )
    assert [result.value for result in results] == [2.0, 2.0, 0.5]
    assert [result.parts["brief"] for result in results] == [0.0, 0.0, 1.0]


async def scored(module: ModuleType, responses: Sequence[str]) -> list[Any]:
    section = RewardConfig.model_validate(
        {"reward": f"{module.__name__}:brief_and_right", "reward_args": {"limit": 10}, "failed_value": -1.0}
    )
    prompt = Prompt(0, np.zeros(1, np.int32), "17 * 3", "short_answers", {"ground_truth": "51"})
    process = RewardProcess("short_answers", section, start_seconds=limits.START)
    try:
        await process.start()
        return await process.score(prompt, responses)
    finally:
        await process.close()


def test_documented_reward_scores_in_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = written("my_rewards.py", tmp_path, monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    right, long, wrong, none = asyncio.run(scored(module, ["51", "It is surely 51.", "52", "  "]))
    assert right.value == pytest.approx(1 - 0.5 * 0.2)
    assert long.value == pytest.approx(0.5)
    assert wrong.value == 0.0
    assert wrong.parts == {"right": 0.0, "length": 0.2}
    assert (none.outcome, none.value) == (RewardOutcome.UNPARSABLE, -1.0)


def test_the_estimator_ranks_within_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written("my_estimators.py", tmp_path, monkeypatch)
    rewards = np.array([0.0, 10.0, 1.0, 5.0, 5.0], np.float32)
    scores = Scores(sequences(2, 1, 1, 1, 1), rewards, np.array([0, 0, 0, 1, 1], np.int32))
    estimated = advantages("my_estimators:group_rank", scores, Normalisation(advantage_clip=1.5), {"best": 2.0})
    assert estimated.tolist() == [0, -1.5, -1.5, 0, 1.5, 0, 0, 0, 0, 0, 0]


def test_documented_policy_loss_detaches_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = written("my_losses.py", tmp_path, monkeypatch)
    loss = pickle.loads(pickle.dumps(PolicyLoss(module.ClippedImportance(cap=1.5))))
    log_probs = torch.log(torch.tensor([0.2, 0.8])).requires_grad_()
    inputs = LossInputs(torch.tensor([2.0, -1.0]), torch.tensor([2]), torch.log(torch.tensor([0.4, 0.4])))
    result = loss(log_probs, torch.zeros(2), inputs)
    assert result.losses.tolist() == pytest.approx([-0.5 * 2 * math.log(0.2), 1.5 * math.log(0.8)])
    assert result.metrics["policy/clip_fraction"].tolist() == [0.0, 1.0]
    result.losses.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-0.5 * 2, 1.5])


def test_the_preference_loss_is_a_hinge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = written("my_preferences.py", tmp_path, monkeypatch)
    loss = pickle.loads(pickle.dumps(PreferenceLoss(module.Hinge(beta=0.5))))
    log_probs = torch.tensor([-1.0, -2.0, -4.0, -6.0, -1.0]).requires_grad_()  # pairs of 2 and 1, and of 1 and 1 tokens
    ref = torch.tensor([-2.0, -2.0, -4.0, -1.0, -2.0])
    result = loss(log_probs, torch.zeros(5), LossInputs(torch.zeros(5), torch.tensor([2, 1, 1, 1]), ref_log_probs=ref))
    assert result.losses.tolist() == pytest.approx([0.5] * 3 + [4.0] * 2)  # 1 - 0.5 (1 - 0) and 1 - 0.5 (-5 - 1)
    assert result.counted["dpo/accuracy"][0].tolist() == [1.0, 0.0]


def test_documented_extensions_pass_check_with_declared_traits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fragments = [yaml.safe_load(block.text) for block in blocks(PAGE) if block.info == "yaml fragment"]
    values = {key: value for fragment in fragments for key, value in fragment.items()}
    values["rewards"] = {
        str(number): reward
        for number, fragment in enumerate(fragments)
        for reward in fragment.get("rewards", {}).values()
    }
    assert len(values["rewards"]) == 4, "two use functions, two use models"
    for name in (
        "my_rewards.py",
        "my_judge.py",
        "my_group_reward.py",
        "my_estimators.py",
        "my_losses.py",
        "my_preferences.py",
    ):
        (tmp_path / name).write_text(code(name).text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    methods, faults = inspect_user_code(values)
    assert faults == []
    assert {key: method.traits for key, method in methods.items()} == {
        "adv_estimator": EstimatorTraits(),
        "policy_loss": PolicyLossTraits(),
        "preference_loss": PreferenceTraits(),
    }


class InProcess(Ranks[Any]):
    """Group of workers that run in the test's process."""

    def __init__(self, strategies: Sequence[Any]) -> None:
        self._strategies = strategies

    def __len__(self) -> int:
        return len(self._strategies)

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        return [getattr(self._strategies[rank], method)(*given) for rank, given in arguments.items()]


def test_the_strategy_serves_as_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = written("roll/engines/uniform/settings.py", tmp_path, monkeypatch).UniformStrategyConfig
    module = written("roll/engines/uniform/strategy.py", tmp_path, monkeypatch)
    for name, wanted in inspect.getmembers(ScoreStrategy, inspect.isfunction):
        if not name.startswith("_"):
            assert (
                inspect.signature(getattr(module.UniformScore, name)).parameters.keys()
                == inspect.signature(wanted).parameters.keys()
            )
    strategy = block.model_validate({"strategy_name": "uniform", "strategy_config": {"vocab_size": 8}})
    ranks = [Rank("reference", number, 2, "localhost", 0, "cpu", limits.START) for number in range(2)]
    settings: Any = strategy.score_settings(cast(Any, None), cast(Any, None))
    group = InProcess([settings.build(rank) for rank in ranks])
    step = sequences(2, 3, 1)
    reference = Reference(
        cast(WorkerGroup, group), token_budget=4, temperature=1.0, seconds=limits.CALL, move_seconds=limits.CALL
    )
    values = asyncio.run(reference.ref_log_probs(step))
    assert values.tolist() == pytest.approx([-math.log(8) if learns else 0.0 for learns in step.response_mask])


def test_the_tracker_writes_beside_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = written("roll/tracking/csv.py", tmp_path, monkeypatch)
    monkeypatch.setattr(trackers, "OPENERS", {**trackers.OPENERS, "csv": module.CsvTracker})
    opened, _ = trackers.open_named(["csv"], RunFacts(tmp_path, "a_run", {}, None), {"csv": {"file": "curves.csv"}})
    with Tracking(JsonlTracker(tmp_path), opened) as tracking:
        tracking.log(1, {"reward/mean": 0.5, "time/step": 2.0})
        assert (tmp_path / "curves.csv").read_text(encoding="utf-8").splitlines() == [
            "1,reward/mean,0.5",
            "1,time/step,2.0",
        ]
        tracking.samples(1, [])
    assert json.loads((tmp_path / "metrics.jsonl").read_text(encoding="utf-8")) == {
        "step": 1,
        "reward/mean": 0.5,
        "time/step": 2.0,
    }


def test_documented_row_reads_as_a_prompt() -> None:
    (row,) = [json.loads(block.text) for block in blocks(PAGE) if block.info == "json row"]
    messages = prompt_conversation(
        row, DataConfig.model_validate({"file_name": "my_problems.jsonl", "prompt": "question"})
    )
    assert messages == [{"role": "user", "content": "What is 17 * 3?"}]
    assert row["tag"] == "math_rule"


def test_the_readme_shows_the_loop_as_it_is() -> None:
    (shown,) = [block for block in blocks("README.md") if block.option("source")]
    source = (ROOT / str(shown.option("source"))).read_text(encoding="utf-8")
    assert f"\n\n\n{shown.text}" in source
