"""Keys that changed since the checkpoint: which are named, which are refused, and which are the same although written
differently.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.schema.pipelines import Config
from roll.runs.changed_keys import RUN_ONLY, Change, change_faults, changes, recorded


@cache
def composed(name: str, *words: str) -> Config:
    found: list[Config] = []
    compose(
        ["--config-name", name, "dry_run=true", *words],
        lambda config, presets: found.append(checked_config(config, presets, imports=False)),
    )
    return found[0]


ROOT = Path(__file__).resolve().parents[3]
RLVR = "tiny/tiny_rlvr_lora_zero3"


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    return recorded(composed(RLVR))


def texts(before: dict[str, Any], *words: str) -> list[str]:
    return [str(one) for one in changes(before, composed(RLVR, *words))]


def refused(before: dict[str, Any], *words: str) -> bool:
    config = composed(RLVR, *words)
    return bool(change_faults(changes(before, config), config, "checkpoints/step_1"))


def test_an_equal_configuration_has_no_changes(before: dict[str, Any]) -> None:
    assert texts(before) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["actor_train.training_args.learning_rate=1e-4"],
            ["actor_train.training_args.learning_rate: 0.001 -> 0.0001"],
        ),
        (["adv_estimator=rloo"], ['adv_estimator: "grpo" -> "rloo"']),
        (["rewards.arithmetic.reward=math_rule"], ['rewards.arithmetic.reward: "exact_match" -> "math_rule"']),
        (["actor_train.data_args.file_name=other.jsonl"], None),
        (["actor_train.data_args.template=chatml"], None),
        (["lora_rank=4", "lora_alpha=4"], None),
        (["response_length=7"], ["response_length: 8 -> 7"]),
        (["seed=43"], ["seed: 42 -> 43"]),
        (["+dynamic_sampling={}"], None),
        (["policy_loss=gspo"], None),
        (["+rewards.arithmetic.reward_args={timeout: 3}"], None),
        (["+rewards.arithmetic.reward_args={concurrency: 3, system_envs: {A: b}}"], None),
        (["+policy_loss_args={memory_gib: 2}"], None),
    ],
)
def test_a_changed_experiment_is_named_and_refused(
    before: dict[str, Any], words: list[str], expected: list[str] | None
) -> None:
    found = texts(before, *words)
    assert found if expected is None else found == expected
    assert refused(before, *words)
    assert not refused(before, *words, "resume_with_changes=true")


@pytest.mark.parametrize(
    "words",
    [
        ["max_steps=99"],
        ["save_steps=7", "keep_checkpoints=5"],
        ["actor_train.world_size=1"],
        ["deadlines.train=1000"],
        ["track_with=none"],
        ["actor_infer.strategy_args.strategy_config.max_num_seqs=3"],
        ["actor_train.max_tokens_per_microbatch=1024"],
        ["rewards.arithmetic.world_size=1"],
        ["++system_envs={OMP_NUM_THREADS: '2'}"],
    ],
)
def test_operational_key_changes_are_named_and_allowed(before: dict[str, Any], words: list[str]) -> None:
    assert texts(before, *words)
    assert not refused(before, *words)


def test_changed_key_fault_names_keys_and_remedy(before: dict[str, Any]) -> None:
    config = composed(RLVR, "adv_estimator=rloo", "pg_clip=0.3", "max_steps=99")
    (fault,) = change_faults(changes(before, config), config, "out/checkpoints/step_4")
    assert fault.place == "resume_with_changes"
    for part in (
        'adv_estimator: "grpo" -> "rloo"',
        "pg_clip: ",
        "-> 0.3",
        "max_steps: ",
        "(allowed)",
        "out/checkpoints/step_4",
    ):
        assert part in fault.problem
    assert "resume_with_changes=true" in fault.remedy and "output_dir" in fault.remedy


def test_added_or_removed_block_is_one_change(before: dict[str, Any]) -> None:
    (with_block,) = changes(before, composed(RLVR, "+dynamic_sampling={max_num_gen_batches: 3}"))
    assert (with_block.key, with_block.before) == ("dynamic_sampling", "null")
    assert "max_num_gen_batches" in with_block.now
    (without,) = changes(recorded(composed(RLVR, "+dynamic_sampling={}")), composed(RLVR))
    assert (without.key, without.now) == ("dynamic_sampling", "null")


def test_added_or_removed_reward_is_named(before: dict[str, Any]) -> None:
    older = {**before, "rewards": {**before["rewards"], "removed": {"reward": "math_rule"}}}
    assert [str(one) for one in changes(older, composed(RLVR))] == ['rewards.removed.reward: "math_rule" -> not set']
    fewer = {**before, "rewards": {}}
    assert any(one.key.startswith("rewards") for one in changes(fewer, composed(RLVR)))


def test_key_unknown_to_earlier_version_counts_as_default(before: dict[str, Any]) -> None:
    older = {key: value for key, value in before.items() if key not in ("resume_with_changes", "pg_clip", "deadlines")}
    assert changes(older, composed(RLVR)) == []
    assert [str(one) for one in changes(older, composed(RLVR, "pg_clip=0.3"))] == ["pg_clip: 0.2 -> 0.3"]


def test_numbers_and_lists_are_compared_by_value(before: dict[str, Any]) -> None:
    assert (
        changes(
            {**before, "gamma": int(before["gamma"]), "prompt_length": float(before["prompt_length"])}, composed(RLVR)
        )
        == []
    )
    ordered = recorded(composed(RLVR, "actor_train.data_args.file_name=[a.jsonl,b.jsonl]"))
    swapped = changes(ordered, composed(RLVR, "actor_train.data_args.file_name=[b.jsonl,a.jsonl]"))
    assert [one.key for one in swapped] == ["actor_train.data_args.file_name"]


def test_secrets_are_not_shown() -> None:
    old = recorded(composed(RLVR, "++system_envs={WANDB_API_KEY: one-secret}"))
    assert "secret" not in str(changes(old, composed(RLVR, "++system_envs={WANDB_API_KEY: another-secret}")))


def test_operational_key_patterns_match_existing_keys() -> None:
    """A pattern that matches nothing would be a misspelt key, whose change is then refused."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    keys = set(re.findall(r"^\| `([a-z_]+)`", page, re.MULTILINE)) | set(
        re.findall(r"^#+ `?([a-z_.<>]+)`?$", page, re.MULTILINE)
    )
    last = {pattern.removesuffix(".*").rpartition(".")[2] for pattern in RUN_ONLY}
    assert {key for key in last if key not in keys} == set()


def test_patterns_match_whole_keys() -> None:
    assert Change("actor_train.world_size", "1", "2").is_of_experiment is False
    assert Change("world_size_of_mine", "1", "2").is_of_experiment
    assert any(fnmatchcase("deadlines.train", pattern) for pattern in RUN_ONLY)
