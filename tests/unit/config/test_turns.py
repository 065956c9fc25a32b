"""Which roles share devices, and which of them take turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.placement import RolePlan, neighbours, placement_faults, placement_warnings, turns
from roll.config.plan import make_plan
from roll.config.schema import RlvrConfig


def roles(**devices: range) -> dict[str, RolePlan]:
    return {name: RolePlan(name, "any", tuple((device,) for device in group)) for name, group in devices.items()}


def experiment(train: range | None, infer: range | None, reference: range | None, **keys: Any) -> RlvrConfig:
    """A config with these device mappings."""

    def role(devices: range | None, strategy: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"strategy_args": strategy, **more} | ({"device_mapping": tuple(devices)} if devices else {})

    zero = {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 3}}}
    columns = {"file_name": "x", "prompt": "p"}
    engine = {"strategy_name": "vllm", "strategy_config": {"gpu_memory_utilization": keys.pop("utilization", 0.9)}}
    values: dict[str, Any] = {
        "exp_name": "e",
        "output_dir": "o",
        "pretrain": "nobody/none",
        "max_steps": 1,
        "dry_run": True,
        "num_return_sequences_in_group": 8,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "rewards": {"math_rule": {}},
        "actor_train": role(train, zero, data_args=columns),
        "actor_infer": role(infer, engine),
        "reference": role(reference, {"strategy_name": "hf_infer"}),
    }
    return RlvrConfig.model_validate(values | keys)


def test_neighbours_overlap() -> None:
    plans = roles(actor_train=range(16), actor_infer=range(12), reference=range(12, 16), judge=range(16, 20)) | {
        "rewards.a": RolePlan("rewards.a", "reward", ((), ()))
    }
    assert neighbours(plans) == {
        "actor_train": {"actor_infer", "reference"},
        "actor_infer": {"actor_train"},
        "reference": {"actor_train"},
    }


@pytest.mark.parametrize(
    ("train", "infer", "reference", "keys", "expected"),
    [
        (range(1), range(1), range(1), {}, {"actor_train", "actor_infer", "reference"}),
        (range(16), range(12), range(16), {}, {"actor_train", "actor_infer", "reference"}),
        (range(4), range(4, 8), range(4), {}, {"actor_train", "reference"}),
        (range(4), range(4, 8), range(8, 9), {}, set()),
        (range(1), range(1), range(1), {"time_sharing": False}, set()),
        (None, None, None, {}, set()),
        # Engines that generate ahead are never idle.
        (range(4), range(4, 8), range(4, 8), {"async_generation_ratio": 1.0}, set()),
        (range(4), range(4, 8), range(8), {"async_generation_ratio": 1.0}, {"actor_train", "reference"}),
    ],
)
def test_who_takes_turns(
    train: range | None, infer: range | None, reference: range | None, keys: dict[str, Any], expected: set[str], tmp_path: Path
) -> None:
    config = experiment(train, infer, reference, **keys)
    assert not placement_faults(config)
    assert make_plan(config).turns.keys() == expected


def test_turns_are_of_both_sides() -> None:
    plans = roles(actor_train=range(16), actor_infer=range(12), reference=range(12, 16))
    found = turns(experiment(range(16), range(12), range(12, 16)), plans)
    assert all(role in found[other] for role, others in found.items() for other in others)


def test_a_large_engine_is_warned_of_where_others_stay_beside_it() -> None:
    everywhere = (range(1), range(1), range(1))
    assert placement_warnings(experiment(*everywhere)) == []
    (warning,) = placement_warnings(experiment(*everywhere, time_sharing=False))
    assert "0.9 leaves little beside actor_train and reference; 0.6 is usual" in warning
    (warning,) = placement_warnings(experiment(*everywhere, utilization=0.97))
    assert "CUDA contexts stay" in warning
