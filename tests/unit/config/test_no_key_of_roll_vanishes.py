"""Each key of ROLL's files, alone in a small file of ROLL, is read, said in a warning, or refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from roll.config.load.loader import LoadedConfig, read_config
from roll.config.roll_v2.meanings import is_of_roll, settle_defaults, settle_meanings
from roll.config.roll_v2.translate import Translation, translate
from tests.unit.config.test_keys_of_roll import FILES, kind_of, rows

FIELDS = Path(__file__).with_name("fields_of_roll.tsv")
"""Lines of: `rlvr` or `agentic`, path of a key that ROLL v0.2.1 has, value other than ROLL's default as JSON. Keys of
its shipped files are left out.
"""
COMMON: dict[str, Any] = {
    "exp_name": "of_roll",
    "pretrain": "model",
    "logging_dir": "logs",
    "logging_steps": 1,
    "checkpoint_config": {"type": "file_system"},
    "output_dir": "output",
    "max_steps": 10,
    "response_length": 64,
    "num_return_sequences_in_group": 4,
    "actor_train": {
        "data_args": {"file_name": "a.jsonl", "prompt": "prompt"},
        "strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 3}}},
    },
    "actor_infer": {"strategy_args": {"strategy_name": "vllm"}},
}
RLVR = COMMON | {
    "rewards": {"math_rule": {"worker_cls": "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"}}
}
AGENTIC = COMMON | {
    "rollout_batch_size": 8,
    "train_env_manager": {"group_size": 4, "tags": ["FrozenLake"], "num_groups_partition": [2]},
    "reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"},
    "custom_envs": {"FrozenLake": {"env_type": "frozen_lake", "env_config": {}}},
}


def with_key(small: Mapping[str, Any], place: str, value: Any) -> dict[str, Any]:
    """Return a copy of a small file with one more key."""
    whole: dict[str, Any] = dict(small)
    block, (*above, key) = whole, place.split(".")
    for step in above:
        block[step] = dict(block.get(step) or {})
        block = block[step]
    block[key] = value
    return whole


@pytest.mark.parametrize("small", [RLVR, AGENTIC], ids=["rlvr", "agentic"])
def test_the_small_files_have_no_fault(small: Mapping[str, Any]) -> None:
    assert read(small)[0].faults == []


def read(values: Mapping[str, Any]) -> tuple[LoadedConfig, list[str]]:
    """Return the loaded file and the warnings about it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = read_config(DictConfig(dict(values)), passing=(), imports=False)
    return loaded, sorted(str(one.message) for one in caught)


def outcome(small: Mapping[str, Any], place: str, value: Any) -> str:
    values = with_key(small, place, value)
    loaded, said = read(values)
    done: Translation = translate(values, "")
    assert is_of_roll(done)
    settle_meanings(done)
    settle_defaults(done)
    return kind_of(place, value, done.values, said, [fault.place for fault in loaded.faults])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("actor_train.strategy_args.strategy_config.tensor_model_parallel_size", 2),
        ("actor_train.typo", 1),
        ("train_env_manager.format_penalty", -0.15),
        ("train_env_manager.group_filter_cls", "mine.Filter"),
        ("train_env_manager.typo", 1),
        ("val_env_manager.group_size", 2),
        ("custom_envs.Other.env_type", "webshop"),
        ("custom_envs.FrozenLake.tools", []),
        ("reward_normalization.method", "asym_clip"),
        ("reward_normalization.global_scale_factor", 2.0),
        ("reward_normalization.typo", 2.0),
        ("adv_estimator", "agentic_reinforce"),
    ],
)
def test_unshipped_roll_keys_are_reported_or_refused(place: str, value: Any) -> None:
    assert outcome(AGENTIC, place, value) in ("said", "refused")


def test_environments_without_a_manager_are_said() -> None:
    assert outcome(RLVR, "custom_envs.FrozenLake.env_type", "frozen_lake") == "said"


@pytest.mark.parametrize("name", FILES)
def test_keys_of_shipped_roll_files_do_not_vanish(name: str) -> None:
    small = AGENTIC if name == "lake" else RLVR
    silent = [place for _, place, value in rows(name) if outcome(small, place, value) == "silent"]
    assert silent == []


@pytest.mark.parametrize(("kind", "small"), [("rlvr", RLVR), ("agentic", AGENTIC)], ids=["rlvr", "agentic"])
def test_every_roll_field_has_effect_or_report(kind: str, small: Mapping[str, Any]) -> None:
    plain, said = read(small)
    fields = [
        line.split("\t")[1:] for line in FIELDS.read_text(encoding="utf-8").splitlines() if line.startswith(f"{kind}\t")
    ]
    assert len(fields) > 20
    for place, text in fields:
        loaded, warned = read(with_key(small, place, json.loads(text)))
        assert loaded.faults or loaded.config != plain.config or warned != said, place
