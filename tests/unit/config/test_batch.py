"""The size of an update: one a step by default, for any number of devices, and ROLL's way to say it."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from roll.config.derived.batch import batch_faults, batch_warnings, plan_batch, sequences_per_update
from roll.config.schema.rlvr import RlvrConfig
from roll.config.shipped import experiments
from tests.faults import coded
from tests.unit.config.test_examples import planned_without_inputs

ROOT = Path(__file__).resolve().parents[3]


def config(
    devices: int = 1, arguments: dict[str, Any] | None = None, role: dict[str, Any] | None = None, **keys: Any
) -> RlvrConfig:
    """Return a configuration of 8 prompts with 8 responses, unless `keys` say otherwise."""
    trainer = {
        "data_args": {"file_name": "x", "prompt": "p"},
        "training_args": arguments or {},
        "strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 3}}},
        "device_mapping": tuple(range(devices)),
        **(role or {}),
    }
    engine = {"strategy_args": {"strategy_name": "vllm", "strategy_config": {}}, "device_mapping": (0,)}
    base = {
        "exp_name": "x",
        "output_dir": "x",
        "pretrain": "m",
        "max_steps": 1,
        "prompt_length": 8,
        "response_length": 8,
    }
    base |= {"rollout_batch_size": 8, "rewards": {"math_rule": {}}, "actor_train": trainer, "actor_infer": engine}
    return RlvrConfig.model_validate(base | keys)


@pytest.mark.parametrize("devices", [1, 2, 3, 16])
def test_step_makes_one_update_on_any_device_count(devices: int) -> None:
    plan = plan_batch(config(devices))
    assert (plan.sequences_per_step, plan.sequences_per_update, plan.updates) == (64, 64, 1)


@pytest.mark.parametrize(
    ("updates", "epochs", "size", "all_updates"), [(1, 1, 64, 1), (4, 1, 16, 4), (4, 3, 16, 12), (64, 1, 1, 64)]
)
def test_updates_per_step_count_one_pass(updates: int, epochs: int, size: int, all_updates: int) -> None:
    plan = plan_batch(config(2, updates_per_step=updates, ppo_epochs=epochs))
    assert (plan.sequences_per_update, plan.updates) == (size, all_updates)


@pytest.mark.parametrize(
    ("arguments", "devices", "size"),
    [
        ({"gradient_accumulation_steps": 4}, 2, 8),
        ({"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}, 2, 16),
        ({"gradient_accumulation_steps": 1, "per_device_train_batch_size": 32}, 1, 32),
        ({"per_device_train_batch_size": 2}, 2, 64),
    ],
)
def test_accumulation_counts_devices_as_in_roll(arguments: dict[str, Any], devices: int, size: int) -> None:
    assert plan_batch(config(devices, arguments)).sequences_per_update == size


@pytest.mark.parametrize(
    ("updates", "prompts", "remedy"), [(5, 8, "4 or 8"), (3, 9, None), (7, 9, "6 or 8"), (100, 1, "set it to 8")]
)
def test_updates_must_divide_the_sequences_of_a_step(updates: int, prompts: int, remedy: str | None) -> None:
    faults = [
        fault
        for fault in batch_faults(config(updates_per_step=updates, rollout_batch_size=prompts))
        if "updates" in fault.place
    ]
    assert coded(faults) == ([("not_divisible", "updates_per_step")] if remedy else [])
    assert all(str(remedy) in fault.remedy for fault in faults)


def test_critic_updates_follow_the_actor_unless_accumulating() -> None:
    arguments = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16}
    for own, size in (({}, 32), (arguments, 32 * 2)):
        critic = {
            "training_args": own,
            "strategy_args": {
                "strategy_name": "deepspeed_train",
                "strategy_config": {"zero_optimization": {"stage": 3}},
            },
            "device_mapping": (0, 1),
        }
        keys = config(2, adv_estimator="gae", critic=critic, updates_per_step=2)
        assert keys.critic
        assert sequences_per_update(keys, keys.critic) == size
        assert plan_batch(keys).sequences_per_update == 32


def test_micro_batches_without_effect_are_warned_of() -> None:
    tokens = {"max_tokens_per_microbatch": 64}
    given, both = (
        {"per_device_train_batch_size": 2},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    )
    for arguments, budget, count in ((given, {}, 0), (given, tokens, 1), (both, tokens, 0), ({}, tokens, 0)):
        assert len(list(batch_warnings(config(1, arguments, budget)))) == count


def test_infer_batch_size_without_effect_is_warned_of() -> None:
    reference = {"strategy_args": {"strategy_name": "hf_infer"}, "infer_batch_size": 4}
    assert not list(batch_warnings(config(reference=reference)))
    (said,) = batch_warnings(config(reference=reference | {"max_tokens_per_microbatch": 64}))
    assert said.startswith("reference.infer_batch_size: 4 ") and "max_tokens_per_microbatch" in said
    (said,) = batch_warnings(config(role={"infer_batch_size": 4}))
    assert said.startswith("actor_train.infer_batch_size: 4 ")


def test_many_updates_of_a_step_are_warned_of() -> None:
    (said,) = batch_warnings(config(1, {"gradient_accumulation_steps": 1}))
    assert "64 updates" in said
    assert not list(batch_warnings(config(1, {"gradient_accumulation_steps": 2})))


def documented() -> list[tuple[list[str], list[int]]]:
    """Return the patterns and the numbers of each row of the table of experiments."""
    lines = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").splitlines()
    begin = lines.index("| experiment | sequences | updates before | updates |") + 2
    cells = [line.strip("|").split("|") for line in takewhile(lambda line: line.startswith("|"), lines[begin:])]
    return [(re.findall(r"`([^`]+)`", first), [int(cell) for cell in numbers]) for first, *numbers in cells]


def test_the_table_of_experiments_has_their_updates() -> None:
    table = documented()
    for name in experiments():
        keys, plan = planned_without_inputs(name)
        if isinstance(keys, RlvrConfig):
            (_, numbers) = next(row for row in table if any(fnmatch(name, pattern) for pattern in row[0]))
            assert [plan.batch.sequences_per_step, plan.batch.updates] == [numbers[0], numbers[2]], name
