"""Keys that do less than they seem to do, or something different: the plan prints a warning, and the run continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.pipeline import main

TRAINING = "actor_train.training_args"
ENGINE = "actor_infer.strategy_args.strategy_config"
TWO_UPDATES = "rollout_batch_size=8"
KL_IN_LOSS = ["use_kl_loss=true", "kl_loss_coef=0.1", "actor_train.model_args.lora_target=all-linear"]
WARNINGS = [
    (["policy_loss=gspo"], "pg_clip: 0.2 hardly ever clips with policy_loss gspo"),
    (["pg_clip=0.2", "pg_clip_low=0.1", "pg_clip_high=0.3"], "pg_clip: has no effect"),
    (
        ["eval_steps=1", "+validation={data_args: {file_name: train.jsonl, prompt: prompt}}"],
        "validation.data_args.file_name: 'train.jsonl' (split train) is also trained on",
    ),
    (["policy_loss=kl_cov"], "policy_loss: kl_cov penalises changes of the policy"),
    (["policy_loss=pg", TWO_UPDATES], "policy_loss: pg uses no ratio, but only the first of a step's 2 updates"),
    (["actor_infer.generating_args.top_p=0.9"], "with top_p 0.9 responses are sampled from a modified distribution"),
    (
        ["whiten_advantages=true", "adv_estimator=reinforce_plus_plus"],
        "whiten_advantages: adv_estimator reinforce_plus_plus already whitens the advantages",
    ),
    (
        ["+dynamic_sampling={}", "adv_estimator=remax"],
        "dynamic_sampling: drops groups of equal rewards, from which remax",
    ),
    (
        ["rollout_batch_size=256", f"{TRAINING}.per_device_train_batch_size=1"],
        "1 sequences make 512 updates of each step",
    ),
    (
        [f"{TRAINING}.gradient_accumulation_steps=null", "actor_train.max_tokens_per_microbatch=64"],
        "per_device_train_batch_size: has no effect without gradient_accumulation_steps",
    ),
    (["actor_train.infer_batch_size=4"], "actor_train.infer_batch_size: 4 has no effect: a role that trains"),
    (["actor_infer.infer_batch_size=4"], "actor_infer.infer_batch_size: 4 has no effect: a role that generates"),
    (["actor_infer.model_args.attn_implementation=fa2"], "actor_infer.model_args.attn_implementation: fa2 has no"),
    ([f"{ENGINE}.block_size=16"], f"{ENGINE}.block_size: 16 is read as 32: on the CPU vLLM needs a multiple of 32"),
    ([f"{ENGINE}.gpu_memory_utilization=0.6"], f"{ENGINE}.gpu_memory_utilization: has no effect on the CPU"),
    (
        [f"{ENGINE}.kv_cache_gib=2", "actor_infer.device_mapping=[0]", "actor_train.device_mapping=[0]"],
        f"{ENGINE}.kv_cache_gib: has no effect on GPUs",
    ),
    ([*KL_IN_LOSS, "kl_loss_type=k1"], "kl_loss_type: as a loss, the gradient of k1 is zero on average"),
    (KL_IN_LOSS, "kl_loss_type: as a loss, k3 has the gradient of KL(reference || policy), which is off by 54%"),
    (
        [*KL_IN_LOSS, "kl_loss_importance=false", TWO_UPDATES],
        "kl_loss_importance: false, but the policy",
    ),
]


@pytest.mark.parametrize(("overrides", "warning"), WARNINGS, ids=[" ".join(case[0])[:60] for case in WARNINGS])
def test_the_plan_warns_and_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], warning: str
) -> None:
    assert main(["--config-path", "exp", "--config-name", "sound", "dry_run=true", *overrides]) == 0
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", [[TWO_UPDATES], ["kl_loss_importance=true"], ["kl_loss_type=k3+"], ["kl_loss_type=k2"]]
)
def test_kl_estimator_with_own_gradient_does_not_warn(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert main(["--config-path", "exp", "--config-name", "sound", "dry_run=true", *KL_IN_LOSS, *more]) == 0
    assert "kl_loss" not in capsys.readouterr().err


def test_without_such_keys_there_is_no_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-path", "exp", "--config-name", "sound", "dry_run=true"]) == 0
    assert "warning" not in capsys.readouterr().err
