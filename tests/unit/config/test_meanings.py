"""Keys that ROLL and roll share: a file of ROLL has ROLL's meaning of them, and a warning says so."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig

from roll.config.load.loader import LoadedConfig, read_config
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import ConfigError
from tests.unit.config.test_keys_of_roll import nested


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the values with those at the given key paths set, or removed if None."""
    for place, value in changes.items():
        block, (*above, key) = values, place.split(".")
        for step in above:
            block = block.setdefault(step, {})
        block.pop(key, None)
        if value is not None:
            block[key] = value
    return values


def read(name: str, changes: dict[str, Any]) -> tuple[LoadedConfig, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = read_config(DictConfig(changed(nested(name), changes)), passing=(), imports=False)
    return loaded, [str(one.message) for one in caught]


def config_of(name: str, changes: dict[str, Any]) -> tuple[RlvrConfig, list[str]]:
    loaded, said = read(name, changes)
    assert isinstance(loaded.config, RlvrConfig), loaded.faults
    assert loaded.faults == []
    return loaded.config, said


ONE_DOMAIN = {f"rewards.{domain}": None for domain in ("crossthinkqa", "ifeval", "code_sandbox", "llm_judge")} | {
    "actor_train.data_args.domain_interleave_probs": None
}
RLVR = [
    ({}, {"whiten_advantages": "domain"}),
    (ONE_DOMAIN, {"whiten_advantages": True}),
    ({"norm_mean_type": "batch", "norm_std_type": "batch"}, {"norm_mean_type": "domain", "norm_std_type": "domain"}),
    ({"norm_mean_type": "group", "norm_std_type": "batch"}, {"norm_mean_type": "group", "norm_std_type": "domain"}),
    ({"norm_mean_type": "batch"} | ONE_DOMAIN, {"norm_mean_type": "batch"}),
    ({"adv_estimator": "grpo"}, {"reward_clip_on": "normalised"}),
    ({"norm_mean_type": "batch"}, {"reward_clip_on": "normalised"}),
    ({}, {"reward_clip_on": "raw"}),
    ({"pg_clip_low": 0.1, "pg_clip_high": 0.3}, {"pg_clip_low": None, "pg_clip_high": None}),
    (
        {"pg_clip_low": 0.1, "pg_clip_high": 0.3, "use_pg_clip_range": False},
        {"pg_clip_low": None, "pg_clip_high": None},
    ),
    ({"pg_clip_low": 0.1, "pg_clip_high": 0.3, "use_pg_clip_range": True}, {"pg_clip_low": 0.1, "pg_clip_high": 0.3}),
]


@pytest.mark.parametrize(("changes", "meant"), RLVR)
def test_a_key_of_rolls_file_has_rolls_meaning(changes: dict[str, Any], meant: dict[str, Any]) -> None:
    config, said = config_of("lora", changes)
    assert {key: getattr(config, key) for key in meant} == meant
    for key, value in meant.items():
        if value != changes.get(key) and value not in ("raw", True):
            assert any(text.startswith((f"{key.replace('_on', '')}: ", "use_pg_clip_range: ")) for text in said)


def test_templates_and_limits_of_rolls_file_are_rolls() -> None:
    config, said = config_of("lora", {"actor_infer.generating_args.max_new_tokens": 1024})
    assert config.actor_train.data_args is not None and config.actor_train.data_args.template == "native"
    assert config.rewards["llm_judge"].template == "native"
    assert config.actor_infer.generating_args.max_new_tokens == config.response_length == 4096
    assert any(text.startswith("actor_infer.generating_args.max_new_tokens: 1024 is read as 4096") for text in said)


def test_ifeval_of_roll_has_its_repetition_penalty() -> None:
    config, said = config_of("lora", {})
    assert {name: part.weight for name, part in config.rewards["ifeval"].parts.items()} == {
        "ifeval": 1.0,
        "repetition_penalty": 1.0,
    }
    assert any(text.startswith("rewards.ifeval.worker_cls: ") and "parts" in text for text in said)


def test_a_file_of_roll_keeps_its_update_size() -> None:
    config, _ = config_of("lora", {})
    assert config.actor_train.training_args.gradient_accumulation_steps == 32


@pytest.mark.parametrize(
    ("place", "value", "remedy"),
    [
        ("actor_train.worker_cls", "mine.workers.ActorWorker", "policy_loss: package.module:Name"),
        ("actor_train.worker_cls", "roll.pipeline.rlvr.mine.ActorWorker", "policy_loss: package.module:Name"),
        ("actor_infer.worker_cls", "mine.InferWorker", "a reward or an environment"),
        ("rewards.math_rule.worker_cls", "mine.MathRuleRewardWorker", "package.module:function"),
    ],
)
def test_a_class_of_the_users_own_is_refused(place: str, value: str, remedy: str) -> None:
    faults = {fault.place: fault for fault in read("lora", {place: value})[0].faults}
    assert faults[place].code == "not_supported"
    assert value in faults[place].problem and remedy in faults[place].remedy


def test_the_variant_counts_only_with_its_worker() -> None:
    pg, plain = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker", "roll.pipeline.rlvr.actor_worker.ActorWorker"
    of_worker = {"actor_train.worker_cls": pg, "actor_train.pg_variant": "topr"}
    assert config_of("lora", of_worker | {"dual_clip_loss": None})[0].policy_loss.name == "topr"
    assert (
        config_of("lora", of_worker | {"actor_train.pg_variant": None, "dual_clip_loss": None})[0].policy_loss.name
        == "pg"
    )
    config, said = config_of("lora", of_worker | {"actor_train.worker_cls": plain})
    assert config.policy_loss.name == "ppo" and any(text.startswith("actor_train.pg_variant: ") for text in said)


DEEPSPEED = {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 3}}}
LAKE = {"actor_train.strategy_args": DEEPSPEED}
SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_new_tokens": 32}


def test_actor_infer_sampling_replaces_env_manager_sampling() -> None:
    config, said = config_of("lake", LAKE | {"actor_infer.generating_args": SAMPLING})
    assert config.validation is not None
    for block in (config.actor_infer, config.validation):
        found = block.generating_args
        assert (found.temperature, found.top_p, found.top_k, found.max_new_tokens) == (0.7, 0.8, 20, 32)
    assert (
        sum(
            text.startswith(("train_env_manager.generating_args: ", "val_env_manager.generating_args: "))
            for text in said
        )
        == 2
    )


def test_without_it_each_manager_has_its_own_sampling() -> None:
    config, _ = config_of("lake", LAKE | {"val_env_manager.generating_args.temperature": 0.2})
    assert config.validation is not None
    assert (
        config.actor_infer.generating_args.temperature == 0.99 and config.validation.generating_args.temperature == 0.2
    )
    assert config.actor_infer.generating_args.max_new_tokens == 64  # the smaller of 128 and max_tokens_per_step


@pytest.mark.parametrize(
    ("norm", "meant"),
    [
        (None, ("reinforce", None, None)),
        ({"grouping": "traj_group_id"}, ("reinforce", None, None)),
        ({"grouping": "traj_group_id", "method": "mean"}, ("dr_grpo", None, None)),
        ({"grouping": "traj_group_id", "method": "mean_std"}, ("grpo", None, None)),
        ({"grouping": "traj_group_id", "norm_mean_type": "group", "norm_std_type": "group"}, ("grpo", None, None)),
        (
            {"grouping": "traj_group_id", "norm_mean_type": "group", "norm_std_type": "batch"},
            ("reinforce", "group", "batch"),
        ),
        ({"grouping": "batch", "norm_mean_type": "group"}, ("reinforce", "batch", None)),
        ({"grouping": "tags", "norm_mean_type": "batch", "method": "mean_std"}, ("reinforce", "batch", "domain")),
    ],
)
def test_rewards_of_episodes_are_normalised_as_in_roll(
    norm: dict[str, str] | None, meant: tuple[str | None, ...]
) -> None:
    config, said = config_of("lake", LAKE | {"reward_normalization": norm, "adv_estimator": "grpo"})
    scopes = (config.norm_mean_type, config.norm_std_type) if config.adv_estimator.name == "reinforce" else (None, None)
    assert (config.adv_estimator.name, *scopes) == meant
    assert any(text.startswith("reward_normalization: ") for text in said)


def test_format_penalty_equals_that_of_roll() -> None:
    config, _ = config_of("lake", LAKE | {"custom_envs.LargerSokoban.env_config.format_penalty": None})
    penalties = {tag: one.environment_args["format_penalty"] for tag, one in config.environments.items()}
    assert (penalties["SimpleSokoban"], penalties["LargerSokoban"], penalties["FrozenLake"]) == (-0.25, -0.1, -0.01)


def test_an_environment_of_ones_own_replaces_rolls() -> None:
    own = {"environment": "mine.worlds:Lake"}
    config, said = config_of("lake", LAKE | {"custom_envs.FrozenLake.env_type": "gem", "environments.FrozenLake": own})
    lake = config.environments["FrozenLake"]
    assert (str(lake.environment), lake.max_turns) == ("mine.worlds:Lake", 10)
    assert any(text.startswith("custom_envs.FrozenLake: ignored") for text in said)


def test_a_critic_starts_from_the_model_of_rewards() -> None:
    changes = {f"{role}.strategy_args": DEEPSPEED for role in ("actor_train", "critic")} | {
        "reward_pretrain": "models/rewards"
    }
    loaded, said = read("ppo", changes | {"reference.strategy_args": {"strategy_name": "hf_infer"}})
    assert isinstance(loaded.config, RlvrConfig) and loaded.config.critic is not None
    assert loaded.config.critic.model_args.model_name_or_path == "models/rewards"
    assert any(text.startswith("reward_pretrain: ") for text in said)


@pytest.mark.parametrize("role", ["sft_train", "student"])
def test_pipeline_of_roll_file_follows_from_roles(role: str) -> None:
    text = f"""
    {{exp_name: a, logging_dir: b, checkpoint_config: {{}}, logging_steps: 1, sequence_length: 512, num_nodes: 1,
     {role}: {{}}}}
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read_config(DictConfig(yaml.safe_load(text)), passing=(), imports=False)
    said = [str(one.message) for one in caught]
    assert any(one.startswith("pipeline: ") for one in said)
    (lengths,) = [one for one in said if one.startswith("sequence_length: 512 ")]
    assert f"max_length=512, truncation={'drop' if role == 'sft_train' else 'end'}" in lengths


def test_folder_named_roll_does_not_shadow_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone of ROLL has such a folder."""
    from roll.config.load.user_code import UserPart, ask

    (tmp_path / "roll").mkdir()
    (tmp_path / "roll" / "__init__.py").write_text("")
    (tmp_path / "beside.py").write_text("def reward(prompt, response, row):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    part = UserPart("beside:reward", ("rewards", "a", "reward"), ("rewards", "a", "reward_args"), {})
    assert ask([part], {})[0].faults == ()


@pytest.mark.parametrize(
    ("mean", "std", "is_said"),
    [("batch", "group", True), (None, "group", True), ("group", "group", False), ("group", "batch", False)],
)
def test_roll_difference_for_equal_rewards_is_reported(mean: str | None, std: str, is_said: bool) -> None:
    norm = {"grouping": "traj_group_id", "norm_mean_type": mean, "norm_std_type": std}
    for name, changes in (
        ("lake", LAKE | {"reward_normalization": norm}),
        ("lora", {"norm_mean_type": mean, "norm_std_type": std}),
    ):
        _, said = read(name, changes)
        assert any(text.startswith("norm_std_type: group without") for text in said) is is_said


SAMPLED = {"actor_infer.generating_args.top_p": 0.99, "actor_infer.generating_args.top_k": 100}


@pytest.mark.parametrize(("ratio", "sampled"), [(1, (1.0, -1)), (None, (0.99, 100))])
def test_stale_samples_come_from_the_whole_distribution(ratio: int | None, sampled: tuple[float, int]) -> None:
    config, said = config_of("lora", {"async_generation_ratio": ratio} | SAMPLED)
    generating = config.actor_infer.generating_args
    assert (generating.top_p, generating.top_k) == sampled
    places = {text.split(":")[0] for text in said}
    assert (set(SAMPLED) <= places) is (ratio is not None)


def test_keys_that_nothing_reads_are_dropped() -> None:
    loaded, said = read("gspo", {"kl_horizon": 10000})
    assert loaded.faults == [] and isinstance(loaded.config, RlvrConfig)
    assert loaded.config.dual_clip_loss is False
    assert {"dual_clip_loss", "kl_horizon"} <= {text.split(":")[0] for text in said}


def test_the_trained_role_decides_about_the_adapter() -> None:
    adapter = {"lora_rank": 32, "lora_alpha": 32}
    changes = {
        f"{role}.model_args.{key}": value for role in ("actor_train", "actor_infer") for key, value in adapter.items()
    }
    targets = {
        "actor_train.model_args.lora_target": "all-linear",
        "actor_infer.model_args.lora_target": "q_proj,k_proj",
    }
    dummy = "actor_infer.strategy_args.strategy_config.load_format"
    config, said = config_of("lora", changes | targets | {dummy: "dummy"})
    assert config.actor_infer.model_args.lora_target == "all-linear"
    assert {"actor_infer.model_args.lora_target", dummy} <= {text.split(":")[0] for text in said}


def test_the_engine_takes_whole_prompts_and_responses() -> None:
    place = "actor_infer.strategy_args.strategy_config.max_model_len"
    config, said = config_of("lora", {"prompt_length": 2048, "response_length": 8192, place: 8000})
    assert config.actor_infer.strategy_args.strategy_config.max_model_len == 10240
    assert any(text.startswith(f"{place}: 8000 is read as 10240") for text in said)


def test_files_without_held_out_prompts_validate_nothing() -> None:
    config, said = config_of("lora", {"validation": None, "eval_steps": 10})
    assert config.eval_steps == 0 and any(text.startswith("eval_steps: 10 is ignored") for text in said)


def test_file_without_training_has_one_fault() -> None:
    loaded, _ = read("lora", {"actor_train": None})
    (fault,) = [fault for fault in loaded.faults if fault.place == "actor_train"]
    assert fault.code == "missing" and "roll.evaluate" in fault.remedy


def test_update_larger_than_step_is_one_update() -> None:
    numbers = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 128}
    config, said = config_of("lake", {f"actor_train.training_args.{key}": value for key, value in numbers.items()})
    assert config.actor_train.training_args.gradient_accumulation_steps == 64
    place = "actor_train.training_args.gradient_accumulation_steps"
    assert any(text.startswith(f"{place}: 128 ") and " 2048" in text and " 1024 " in text for text in said)


@pytest.mark.parametrize("values", [{}, {"dry_run": True}])
def test_an_empty_file_has_one_fault(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(DictConfig(values))
    assert [fault.code for fault in caught.value.faults] == ["empty"]
