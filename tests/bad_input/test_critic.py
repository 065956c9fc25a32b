"""An unused critic, a missing critic, and keys that need a critic: exit status 2, with place, value and remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import Plan, make_plan
from roll.errors import Fault, FaultCode
from tests.faults import assert_fault

ZERO = "strategy_args:{strategy_name:deepspeed_train,strategy_config:{zero_optimization:{stage:3}}}"
BATCHES = "training_args:{per_device_train_batch_size:8,gradient_accumulation_steps:1}"
CRITIC = f"+critic={{model_args:{{dtype:fp32}},{BATCHES},{ZERO}}}"
GAE = ("adv_estimator=gae", CRITIC)
GPUS = ("actor_train.device_mapping=[0]", "critic.device_mapping=[1]")
CASES = [
    (["adv_estimator=gae"], "critic", "missing", "missing, but adv_estimator gae", "add a critic block"),
    ([CRITIC], "critic", "unread", "adv_estimator grpo", "adv_estimator=gae"),
    (["lambd=0.9"], "lambd", "unread", "0.9, but adv_estimator grpo", "adv_estimator=gae"),
    (["critic_warmup=1"], "critic_warmup", "unread", "1, but adv_estimator grpo", "adv_estimator=gae"),
    ([*GAE, "critic_warmup=2"], "critic_warmup", "not_below", "2, but max_steps is 2", "below 2"),
    ([*GAE, "lambd=1.5"], "lambd", "out_of_range", "1.5", "at most 1"),
    ([*GAE, "value_clip=0"], "value_clip", "out_of_range", "0", "above 0"),
    (
        [*GAE, "norm_std_type=batch"],
        "norm_std_type",
        "unread",
        "adv_estimator gae",
        "adv_estimator=reinforce",
    ),
    ([*GAE, "critic.data_args2=x"], "critic.data_args2", "unknown_key", "x", "known keys"),
    (
        [*GAE, "critic.strategy_args.strategy_name=hf_infer"],
        "critic.strategy_args.strategy_name",
        "not_allowed",
        '"hf_infer"',
        "'deepspeed_train'",
    ),
    ([*GAE, "critic.model_args.lora_rank=4"], "critic.model_args.lora_rank", "owner_missing", "4", "lora_target"),
    (
        [*GAE, "critic.training_args.per_device_train_batch_size=3"],
        "critic.training_args.gradient_accumulation_steps",
        "not_divisible",
        "updates of 3",
        "3",
    ),
    (
        [*GAE, "critic.training_args.warmup_steps=2", "critic.training_args.warmup_ratio=0.1"],
        "critic.training_args.warmup_ratio",
        "exclusive",
        "0.1",
        "one of the two",
    ),
    (
        [*GAE, "critic.strategy_args.strategy_config.gradient_clipping=0.5"],
        "critic.strategy_args.strategy_config.gradient_clipping",
        "contradiction",
        "0.5",
        "max_grad_norm",
    ),
    (
        [*GAE, "critic.model_args.model_name_or_path=./nowhere"],
        "critic.model_args.model_name_or_path",
        "not_found",
        "./nowhere",
        "config.json",
    ),
    (
        [*GAE, *GPUS, "actor_infer.device_mapping=[1]", "async_generation_ratio=1", "weight_sync.kv_cache=keep"],
        "weight_sync.kv_cache",
        "contradiction",
        "devices to critic",
        "time_sharing=false",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "place", "code", "value", "remedy"),
    CASES,
    ids=[" ".join(case[0]).replace(CRITIC, "critic") for case in CASES],
)
def test_what_makes_no_sense_is_refused(
    faults_of: Callable[..., tuple[Fault, ...]],
    overrides: list[str],
    place: str,
    code: FaultCode,
    value: str,
    remedy: str,
) -> None:
    assert_fault(faults_of(*overrides), place, code, value, remedy)


def plan_of(folder: Path, *overrides: str) -> Plan:
    """Return the plan of the valid experiment with these overrides."""
    plans: list[Plan] = []
    arguments = ["--config-path", str(folder / "exp"), "--config-name", "sound", "dry_run=true", *overrides]
    compose(arguments, lambda composed, presets: plans.append(make_plan(checked_config(composed, presets))))
    (plan,) = plans
    return plan


def test_critic_allows_one_sample_per_prompt(folder: Path) -> None:
    alone = (
        "num_return_sequences_in_group=1",
        "rollout_batch_size=8",
        "whiten_advantages=true",
        "gamma=0.99",
        "value_clip=0.2",
    )
    plan = plan_of(folder, *GAE, *alone)
    assert plan.roles["critic"].strategy == "deepspeed_train"
    assert plan.warnings == ()


def test_value_clip_without_critic_warns(folder: Path) -> None:
    """It is not a fault, because ROLL's files set the key with every estimator."""
    (warning,) = plan_of(folder, "value_clip=0.5").warnings
    assert warning.startswith("value_clip: ") and "adv_estimator grpo" in warning
