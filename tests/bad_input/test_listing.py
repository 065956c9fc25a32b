"""Which faults of a command line are listed together, and which are left out because they follow from another fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_settings_of_unsupported_strategy_are_not_listed(refused: Callable[..., str]) -> None:
    megatron = "{tensor_model_parallel_size: 8, use_distributed_optimizer: true}"
    message = refused(
        "~actor_train.strategy_args",
        f"+actor_train.strategy_args={{strategy_name: megatron_train, strategy_config: {megatron}}}",
    )
    assert message.startswith("1 fault in the configuration:\n  actor_train.strategy_args.strategy_name:")


def test_all_faults_are_listed_at_once(refused: Callable[..., str]) -> None:
    message = refused("max_step=3", "seed=-1", "actor_train.model_args.dtype=bf61")
    assert message.startswith("3 faults in the configuration:")
    assert all(place in message for place in ("max_step:", "seed:", "actor_train.model_args.dtype:"))


def test_key_of_other_pipeline_is_listed_with_faults(
    refused: Callable[..., str],
) -> None:
    message = refused("beta=0.1", "preference_loss=simpo", "max_step=3", "seed=-1")
    assert message.startswith("4 faults in the configuration:") and "add pipeline" not in message
    assert all(place in message for place in ("beta:", "preference_loss:", "max_step:", "seed:"))
    assert "key of pipeline: dpo;" in message


def test_missing_pipeline_is_listed_with_other_faults(folder: Path, refused: Callable[..., str]) -> None:
    (folder / "exp" / "rows.yaml").write_text("seed: -1\nsft_train: {}\nrewards: {}\n")
    message = refused(name="rows")
    assert all(
        place in message
        for place in ("pipeline: missing, but sft_train is set", "seed: -1", "rewards: unknown", "pretrain: required")
    )


def test_misspelt_role_block_suggests_the_role(
    refused: Callable[..., str],
) -> None:
    message = refused("actor_trian={training_args:{num_train_epochs:2}}")
    assert "did you mean 'actor_train'?" in message


def test_remedy_names_critic_only_if_configured(refused: Callable[..., str]) -> None:
    assert "critic" not in refused("warmup_ratio=0.1")
    assert "or critic.training_args.warmup_ratio" in refused("warmup_ratio=0.1", "critic={}")


def test_faults_of_the_plan_are_listed_at_once(refused: Callable[..., str]) -> None:
    message = refused("rollout_batch_size=5", "kl_loss_coef=1", "pretrain=./nowhere")
    assert message.startswith("3 faults in the configuration:")
