"""Sequence parallelism in the plan: replicas, batch arithmetic, memory, and ROLL's key `ulysses_size`."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from roll.config.derived.batch import sequences_per_update
from roll.config.derived.model_shape import ModelShape, shape_of, uneven_heads
from roll.config.derived.placement import place
from roll.config.plan.memory import estimate, head_tokens
from roll.config.plan.show import show_plan
from roll.config.roll_v2.translate import translate
from roll.config.schema.offline import SftConfig
from roll.config.schema.roles import ActorTrainConfig
from tests.unit.config.test_examples import planned
from tests.unit.config.test_memory import QWEN_7B

LONGEST = 6144


def trainer(size: int, ranks: int = 8) -> ActorTrainConfig:
    settings = {"zero_optimization": {"stage": 3}, "sequence_parallel_size": size}
    return ActorTrainConfig.model_validate(
        {
            "data_args": {"file_name": "x", "prompt": "p"},
            "training_args": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
            "strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": settings},
            "device_mapping": tuple(range(ranks)),
        }
    )


def offline() -> SftConfig:
    return SftConfig.model_construct()


def shape() -> ModelShape:
    found = shape_of(QWEN_7B)
    assert found
    return found


def test_sequence_parallel_ranks_count_as_one_replica() -> None:
    plan = place("actor_train", trainer(4), LONGEST)
    assert (plan.ranks, plan.replica_size, plan.replicas) == (8, 4, 2)
    assert plan.tokens_per_microbatch == 2 * LONGEST  # per replica, as without sequence parallelism
    assert [sequences_per_update(offline(), trainer(size)) for size in (1, 2, 4, 8)] == [48, 24, 12, 6]


def test_activations_are_shared_out_and_states_are_not() -> None:
    roles = [trainer(size) for size in (1, 4)]
    alone, shared = (estimate(place("actor_train", role, LONGEST), role, shape(), LONGEST).device for role in roles)
    assert shared["activations"] == alone["activations"] // 4
    assert {kind: shared[kind] for kind in ("weights", "gradients", "optimizer")} == {
        kind: alone[kind] for kind in ("weights", "gradients", "optimizer")
    }
    gradient = (4 + 2) * 152064 * 3584
    assert alone["head"] == (4 + 2) * 152064 * head_tokens(152064) + gradient
    assert (
        shared["head"] == (4 + 2) * 152064 * (2 * LONGEST // 4) + gradient
    )  # a rank's share has fewer tokens than a chunk of the head


@pytest.mark.parametrize(
    ("heads", "keys", "ranks", "why"),
    [
        (28, 4, 1, None),
        (28, 4, 4, None),
        (28, 4, 7, "4 key-value heads"),
        (28, 4, 8, "28 attention heads"),
        (32, 8, 16, None),
        (32, 1, 32, None),
    ],
)
def test_sequence_parallelism_needs_evenly_divided_heads(heads: int, keys: int, ranks: int, why: str | None) -> None:
    said = uneven_heads(heads, keys, ranks)
    assert said is None if why is None else why in str(said)


def test_the_plan_shows_replicas() -> None:
    config, plan = planned("rlvr_zero3_ulysses")
    out = io.StringIO()
    show_plan(config, plan, Console(file=out, width=200))
    (line,) = [line for line in out.getvalue().splitlines() if "actor_train" in line and "deepspeed_train" in line]
    assert "16 = 8 x 2" in line
    assert plan.batch.updates == 1


def of_roll(strategy: dict[str, Any]) -> Any:
    done = translate({"actor_train": {"model_args": {"ulysses_size": 2}, "strategy_args": strategy}}, "")
    assert "ulysses_size" not in done.values["actor_train"]["model_args"]
    return done


def test_rolls_key_is_deepspeeds() -> None:
    done = of_roll({"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 3}}})
    assert done.values["actor_train"]["strategy_args"]["strategy_config"]["sequence_parallel_size"] == 2
    (warning,) = done.warnings
    assert warning.startswith(
        "actor_train.model_args.ulysses_size: 2 is read as "
        "actor_train.strategy_args.strategy_config.sequence_parallel_size"
    )
    done = of_roll({"strategy_name": "hf_infer"})
    (warning,) = done.warnings
    assert warning.startswith("actor_train.model_args.ulysses_size: 2 is ignored;") and "deepspeed_train" in warning
    done = of_roll({"strategy_name": "deepspeed_train", "strategy_config": {"sequence_parallel_size": 4}})
    assert "sequence_parallel_size is 4" in str(done.faults[0])
