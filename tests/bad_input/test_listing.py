"""Which faults of a command line are listed together, and which are left out because they follow from another fault."""

from __future__ import annotations

from collections.abc import Callable


def test_settings_of_a_strategy_that_is_not_taken_are_not_listed(refused: Callable[..., str]) -> None:
    megatron = "{tensor_model_parallel_size: 8, use_distributed_optimizer: true}"
    message = refused(
        "~actor_train.strategy_args", f"+actor_train.strategy_args={{strategy_name: megatron_train, strategy_config: {megatron}}}"
    )
    assert message.startswith("1 fault in the configuration:\n  actor_train.strategy_args.strategy_name:")


def test_all_faults_are_listed_at_once(refused: Callable[..., str]) -> None:
    message = refused("max_step=3", "seed=-1", "actor_train.model_args.dtype=bf61")
    assert message.startswith("3 faults in the configuration:")
    assert all(place in message for place in ("max_step:", "seed:", "actor_train.model_args.dtype:"))


def test_faults_of_the_plan_are_listed_at_once(refused: Callable[..., str]) -> None:
    message = refused("rollout_batch_size=5", "kl_loss_coef=1", "pretrain=./nowhere")
    assert message.startswith("3 faults in the configuration:")
