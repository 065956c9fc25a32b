"""Which roles share devices, which of them take turns, and the memory that they then need."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll.config.derived.placement import (
    RolePlan,
    interrupting,
    keeps_kv_cache,
    model_roles,
    neighbours,
    placement_faults,
    placement_warnings,
    turns,
)
from roll.config.plan.memory import FROZEN_TOKEN, RoleMemory, with_turns
from roll.config.plan.plan import make_plan
from roll.config.plan.show import arithmetic_lines, device_lines
from roll.config.schema.curriculum import CurriculumConfig
from roll.config.schema.offline import DistillConfig, DpoConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.system.sizes import GIB

KV_CACHE = "(engines take 90% of the device with the KV cache)"


def roles(**devices: range) -> dict[str, RolePlan]:
    return {name: RolePlan(name, "any", tuple((device,) for device in group)) for name, group in devices.items()}


def experiment(train: range | None, infer: range | None, reference: range | None, **keys: Any) -> RlvrConfig:
    """Return a configuration with these device mappings."""

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
        "actor_train": role(train, zero, data_args=columns, model_args=keys.pop("policy", {})),
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
        # On the trainer's devices, they pause for it.
        (range(1), range(1), range(1), {"async_generation_ratio": 1.0}, {"actor_train", "actor_infer", "reference"}),
        (range(1), range(1), range(1), {"async_generation_ratio": 1.0, "time_sharing": False}, set()),
    ],
)
def test_who_takes_turns(
    train: range | None,
    infer: range | None,
    reference: range | None,
    keys: dict[str, Any],
    expected: set[str],
    tmp_path: Path,
) -> None:
    config = experiment(train, infer, reference, **keys)
    assert not placement_faults(config)
    assert make_plan(config).turns.keys() == expected


def test_turns_are_of_both_sides() -> None:
    plans = roles(actor_train=range(16), actor_infer=range(12), reference=range(12, 16))
    found = turns(experiment(range(16), range(12), range(12, 16)), plans)
    assert all(role in found[other] for role, others in found.items() for other in others)


def offline(pipeline: str, **keys: Any) -> DpoConfig | DistillConfig:
    """Return a configuration whose learner has GPUs 0 and 1 and whose other role has GPU 1."""
    zero = {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 3}}}
    learner = {"strategy_args": zero, "device_mapping": (0, 1), "data_args": {"file_name": "x", "prompt": "p"}}
    other = {"strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": (1,)}
    values = {
        "exp_name": "e",
        "output_dir": "o",
        "pretrain": "nobody/none",
        "max_steps": 1,
        "dry_run": True,
        "pipeline": pipeline,
    }
    if pipeline == "dpo":
        learner["data_args"] |= {"chosen": "c", "rejected": "r"}
        return DpoConfig.model_validate(values | {"actor_train": learner, "reference": other} | keys)
    learner["data_args"] |= {"response": "r"}
    teacher = other | {"model_args": {"model_name_or_path": "nobody/larger"}}
    return DistillConfig.model_validate(values | {"student": learner, "teacher": teacher} | keys)


@pytest.mark.parametrize(
    ("pipeline", "learner", "other"), [("dpo", "actor_train", "reference"), ("distill", "student", "teacher")]
)
def test_offline_roles_on_same_devices_are_time_shared(pipeline: str, learner: str, other: str) -> None:
    plan = make_plan(offline(pipeline))
    assert plan.turns == {learner: {other}, other: {learner}}
    memory = {learner: MEMORY["actor_train"], other: MEMORY["reference"]}
    lines = device_lines(replace(plan, memory=memory))
    assert stages(lines) == {"0": ["all at once 116.00 GiB"], "1": [f"{other} 14.00 GiB", "training 116.00 GiB"]}
    assert make_plan(offline(pipeline, time_sharing=False)).turns == {}


def test_large_engine_beside_resident_roles_warns() -> None:
    everywhere = (range(1), range(1), range(1))
    assert placement_warnings(experiment(*everywhere)) == []
    (warning,) = placement_warnings(experiment(*everywhere, time_sharing=False))
    assert ": 0.9 " in warning and "actor_train and reference" in warning and "; 0.6 " in warning
    (warning,) = placement_warnings(experiment(*everywhere, utilization=0.97))
    assert "CUDA contexts stay" in warning


@pytest.mark.parametrize(
    ("train", "infer", "reference", "keys", "stops_for", "keeps"),
    [
        (range(1), range(1), range(1), {}, set(), False),
        (range(4), range(4, 8), range(4, 8), {"async_generation_ratio": 1.0}, set(), True),
        (range(2), range(2), range(2), {"async_generation_ratio": 0.5}, {"actor_train", "reference"}, False),
        (
            range(2),
            range(2),
            range(2, 3),
            {"async_generation_ratio": 1.0, "time_sharing": False},
            {"actor_train"},
            True,
        ),
        (
            range(2),
            range(1, 3),
            range(2, 3),
            {"async_generation_ratio": 1.0, "time_sharing": False, "weight_sync": {"kv_cache": "recompute"}},
            {"actor_train", "reference"},
            False,
        ),
        (
            range(2),
            range(1, 3),
            range(2, 3),
            {"async_generation_ratio": 1.0, "time_sharing": False, "generate_while_training": True},
            set(),
            True,
        ),
        (None, None, None, {"async_generation_ratio": 1.0}, set(), True),
    ],
)
def test_roles_that_interrupt_generation_and_kept_cache(
    train: range | None,
    infer: range | None,
    reference: range | None,
    keys: dict[str, Any],
    stops_for: set[str],
    keeps: bool,
) -> None:
    config = experiment(train, infer, reference, **keys)
    assert not placement_faults(config)
    assert interrupting(config) == stops_for
    assert keeps_kv_cache(config) == keeps


MEMORY = {
    "actor_train": RoleMemory({"weights": 15 * GIB, "optimizer": 90 * GIB, "activations": 9 * GIB, "head": 2 * GIB}),
    "actor_infer": RoleMemory({"weights": 14 * GIB}, reserved_fraction=0.9),
    "reference": RoleMemory({"weights": 13 * GIB, "activations": GIB}),
}


def host_bytes(name: str, **keys: Any) -> int:
    """Return the host memory, in bytes, of a role that shares its devices with all other roles, while they use the
    devices.
    """
    config = experiment(
        range(2), range(2), range(2), rollout_batch_size=64, prompt_length=1000, response_length=3000, **keys
    )
    plan = make_plan(config)
    return with_turns(MEMORY[name], plan.roles[name], model_roles(config)[name], config, plan.batch).host


def test_offloaded_roles_need_host_memory() -> None:
    assert host_bytes("actor_train") == 105 * GIB
    assert host_bytes("reference") == 13 * GIB
    assert host_bytes("actor_infer") == 0  # the next weight sync sends all weights
    assert host_bytes("actor_infer", policy={"lora_target": "all-linear", "lora_rank": 8}) == 14 * GIB


def test_frozen_requests_need_host_memory() -> None:
    # Each of the two engines has half of 2 batches x 64 prompts x 8 samples, as many as max_num_seqs. Below: half of
    # 768, half of 100.
    assert host_bytes("actor_infer", async_generation_ratio=1.0) == 512 * 4000 * FROZEN_TOKEN
    assert host_bytes("actor_infer", async_generation_ratio=0.5, rollout_window=64) == 384 * 4000 * FROZEN_TOKEN
    assert host_bytes("actor_infer", async_generation_ratio=1.0, max_running_samples=100) == 50 * 4000 * FROZEN_TOKEN


def stages(lines: list[str]) -> dict[str, list[str]]:
    """Return the memory of each stage by devices, from the lines that a dry run prints about them."""
    found = [re.fullmatch(r"Device ([\d-]+) [^:]*: (.*)", line) for line in lines]
    return {match[1]: match[2].split(", ") for match in found if match}


def shown(*placement: Any, **keys: Any) -> dict[str, list[str]]:
    """Return the memory of each stage by devices, as a dry run prints it."""
    return stages(device_lines(replace(make_plan(experiment(*placement, **keys)), memory=MEMORY)))


def test_plan_lists_memory_by_stage_when_time_shared() -> None:
    alone = ["reference 14.00 GiB", "training 116.00 GiB"]
    # A weight sync needs the trainer's states and the engine's weights, but neither activations nor the KV cache.
    assert shown(range(16), range(12), range(16)) == {
        "0-11": [f"generation 14.00 GiB {KV_CACHE}", *alone, "weight sync 119.00 GiB"],
        "12-15": alone,
    }
    assert shown(range(4), range(4, 8), range(4)) == {"0-3": alone, "4-7": [f"all at once 14.00 GiB {KV_CACHE}"]}


def test_plan_shows_rollout_window_and_age_limit() -> None:
    placed = (range(4), range(4, 8), range(4, 8))

    def told(**keys: Any) -> str:
        config = experiment(*placed, **keys)
        return next(line for line in arithmetic_lines(config, make_plan(config)) if line.startswith("Generation"))

    assert told() == "Generation: synchronous"
    assert re.fullmatch("Generation: up to 1.5 steps [^;]*", told(async_generation_ratio=1.5))
    window = 3 * experiment(*placed).rollout_batch_size
    assert re.fullmatch(
        "Generation: up to 1.5 .*; .* 3 batches; .* 4 steps",
        told(async_generation_ratio=1.5, rollout_window=window),
    )


def test_plan_shows_the_curriculum_with_its_defaults() -> None:
    curriculum = CurriculumConfig.model_validate({"hard_at_most": 0.25, "shares": {"solved": 0.05}})
    config = experiment(range(4), range(4, 8), range(4, 8), curriculum=curriculum)
    [line] = [line for line in arithmetic_lines(config, make_plan(config)) if line.startswith("Prompts")]
    assert "at most 0.25" in line and "at least 0.9" in line
    assert line.split(": ")[-1].split(", ") == ["unseen 0.3", "hard 0.1", "learnable 0.5", "solved 0.05"]


def test_memory_is_added_up_where_roles_stay() -> None:
    together = [f"all at once 144.00 GiB {KV_CACHE}"]
    assert shown(range(1), range(1), range(1), time_sharing=False) == {"0": together}
    assert shown(range(4), range(4, 8), range(4, 8), async_generation_ratio=1.0) == {
        "0-3": ["all at once 116.00 GiB"],
        "4-7": [f"all at once 28.00 GiB {KV_CACHE}"],
    }


def test_roles_without_time_sharing_add_up_on_device() -> None:
    # The reference takes turns with the trainer. On device 4 it shares memory with the engine, which never pauses.
    found = shown(range(4), range(4, 8), range(5), async_generation_ratio=1.0)
    assert found["0-3"] == ["reference 14.00 GiB", "training 116.00 GiB"]
    assert found["4"] == [f"all at once 28.00 GiB {KV_CACHE}"]
