"""ROLL's agentic files: those of FrozenLake and Sokoban are read unchanged, with the shipped preset; unsupported keys
are named.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from roll.config.load.compose import compose
from roll.config.load.loader import LoadedConfig, read_config
from roll.config.roll_v2.translate import translate
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import FaultCode
from tests.faults import coded

FILE = """
defaults:
  - ../config/traj_envs@_here_
  - ../config/deepspeed_zero2@_here_
hydra:
  run:
    dir: .
  output_subdir: null

exp_name: agentic_pipeline
seed: 42
logging_dir: ./output/logs
output_dir: ./output
render_save_dir: ./output/render
num_gpus_per_node: 8
max_steps: 1024
save_steps: 10000
logging_steps: 1
eval_steps: 10
resume_from_checkpoint: false

rollout_batch_size: 1024
val_batch_size: 1024
sequence_length: 8192
max_tokens_per_step: 64
reward_clip: 20
advantage_clip: 0.2
ppo_epochs: 1
adv_estimator: grpo
whiten_advantages: true
entropy_loss_coef: 0
pretrain: Qwen/Qwen2.5-0.5B-Instruct
reward_pretrain: Qwen/Qwen2.5-0.5B-Instruct

actor_train:
  model_args: {attn_implementation: fa2, disable_gradient_checkpointing: false, dtype: bf16, model_type: ~}
  training_args: {learning_rate: 1.0e-6, weight_decay: 0, per_device_train_batch_size: 2, gradient_accumulation_steps: 64, warmup_steps: 10}
  data_args: {template: qwen2_5}
  strategy_args: {strategy_name: deepspeed_train, strategy_config: "${deepspeed_zero2}"}
  device_mapping: list(range(0,8))
  infer_batch_size: 2
actor_infer:
  model_args: {disable_gradient_checkpointing: true, dtype: bf16}
  generating_args: {max_new_tokens: 64, top_p: 0.99, top_k: 100, num_beams: 1, temperature: 0.99, num_return_sequences: 1}
  data_args: {template: qwen2_5}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8, block_size: 16, load_format: auto}}
  device_mapping: list(range(0,8))
reference:
  model_args: {disable_gradient_checkpointing: true, dtype: bf16, model_type: ~}
  data_args: {template: qwen2_5}
  strategy_args: {strategy_name: hf_infer, strategy_config: ~}
  device_mapping: list(range(0,8))
  infer_batch_size: 2

reward_normalization: {grouping: traj_group_id, method: mean_std}
train_env_manager:
  max_env_num_per_worker: 16
  num_env_groups: 128
  group_size: 8
  tags: [FrozenLake, SimpleSokoban]
  num_groups_partition: [96, 32]
val_env_manager:
  max_env_num_per_worker: 32
  num_env_groups: 1024
  group_size: 1
  tags: [SimpleSokoban, LargerSokoban, SokobanDifferentGridVocab, FrozenLake]
  num_groups_partition: [256, 256, 256, 256]
custom_envs:
  SimpleSokoban: ${custom_env.SimpleSokoban}
  LargerSokoban: ${custom_env.LargerSokoban}
  SokobanDifferentGridVocab: ${custom_env.SokobanDifferentGridVocab}
  FrozenLake: ${custom_env.FrozenLake}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder like a user's copy of ROLL's examples, but without presets: roll ships presets of the same
    names.
    """
    (tmp_path / "agentic").mkdir()
    return tmp_path / "agentic"


def read(folder: Path, text: str) -> tuple[LoadedConfig, list[str]]:
    """Return the loaded file and the warnings about it."""
    (folder / "file.yaml").write_text(text)
    found: list[LoadedConfig] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        words = ["--config-path", str(folder), "--config-name", "file"]
        compose(words, lambda config, presets: found.append(read_config(config, presets)))
    return found[0], [str(warning.message) for warning in caught]


def test_agentic_roll_files_load_unchanged(folder: Path) -> None:
    loaded, said = read(folder, FILE)
    assert loaded.faults == [] and isinstance(loaded.config, RlvrConfig)
    config = loaded.config
    assert config.adv_estimator.name == "grpo"
    assert (config.rollout_batch_size, config.num_return_sequences_in_group) == (128, 8)
    assert (config.sequence_length, config.prompt_length, config.response_length) == (8192, 8128, 64)
    assert config.actor_train.data_args is None
    lake, sokoban = config.environments["FrozenLake"], config.environments["SimpleSokoban"]
    assert (lake.environment, lake.rows, lake.max_turns, lake.sessions_per_process) == (
        "frozen_lake",
        96 * 1024,
        10,
        16,
    )
    assert (sokoban.environment, sokoban.rows) == ("sokoban", 32 * 1024)
    assert lake.environment_args["is_slippery"] is False and lake.environment_args["max_response_length"] == 64
    assert sokoban.environment_args["dim_room"] == [6, 6] and sokoban.environment_args["format_penalty"] == -0.25
    assert config.environments["LargerSokoban"].rows is None, "train_env_manager does not name it"
    assert config.validation is not None and config.rewards == {}
    held_out = config.validation.named_sets()
    assert {name: dict(one.rows) for name, one in held_out.items()} == {
        name: {name: 256} for name in ("SimpleSokoban", "LargerSokoban", "SokobanDifferentGridVocab", "FrozenLake")
    }
    assert len(said) == len(set(said))
    for start in (
        "custom_envs.FrozenLake: ",
        "rollout_batch_size: 1024 episodes",
        "reward_normalization: ",
        "val_env_manager: ",
    ):
        assert len([text for text in said if text.startswith(start)]) == 1, said


BASE: dict[str, Any] = {
    "adv_estimator": "grpo",
    "train_env_manager": {"group_size": 4, "tags": ["lake"], "num_groups_partition": [8]},
    "custom_envs": {"lake": {"env_type": "frozen_lake", "env_config": {}}},
}


def manager(**keys: Any) -> dict[str, Any]:
    """Return the block of the training manager with further keys."""
    return {"train_env_manager": BASE["train_env_manager"] | keys}


@pytest.mark.parametrize(
    ("estimator", "norm", "expected"),
    [
        ("grpo", {"grouping": "traj_group_id", "method": "asym_clip"}, ("grpo", None, None)),
        ("step_reinforce", {"grouping": "batch", "method": "asym_clip"}, ("step_reinforce", "batch", "batch")),
        ("grpo", {"grouping": "traj_group_id", "method": "mean_std"}, ("grpo", None, None)),
        ("grpo", {"grouping": "traj_group_id", "method": "mean"}, ("dr_grpo", None, None)),
        ("grpo", {"grouping": "batch", "method": "mean_std"}, ("reinforce", "batch", "batch")),
        ("grpo", {"grouping": "batch", "method": "identity"}, ("reinforce", None, None)),
        ("grpo", {"grouping": "tags", "method": "mean_std"}, ("reinforce", "domain", "domain")),
        ("step_reinforce", {"grouping": "tags", "method": "mean"}, ("step_reinforce", "domain", None)),
        ("step_reinforce", {"grouping": "batch", "method": "mean"}, ("step_reinforce", "batch", None)),
        (
            "agentic_reinforce",
            {"grouping": "traj_group_id", "method": "mean_std"},
            ("step_reinforce", "group", "group"),
        ),
        ("gigpo", {"grouping": "traj_group_id", "method": "mean_std"}, ("gigpo", None, None)),
    ],
)
def test_what_rewards_are_compared_with(estimator: str, norm: dict[str, str], expected: tuple[str | None, ...]) -> None:
    done = translate(BASE | {"adv_estimator": estimator, "reward_normalization": norm}, "")
    assert not done.faults
    assert tuple(done.values.get(key) for key in ("adv_estimator", "norm_mean_type", "norm_std_type")) == expected


@pytest.mark.parametrize(
    ("changes", "place", "code", "said"),
    [
        ({"custom_envs": {"lake": {"env_type": "webshop"}}}, "custom_envs.lake.env_type", "unknown_name", '"webshop"'),
        ({"custom_envs": {}}, "custom_envs.lake", "missing", "tag"),
        (
            {
                "custom_envs": {
                    "lake": {"env_type": "sokoban", "env_manager_cls": "roll.pipeline.agentic.ProxyEnvManager"}
                }
            },
            "custom_envs.lake.env_manager_cls",
            "not_supported",
            "ProxyEnvManager",
        ),
        (
            {"custom_envs": {"lake": {"env_type": "sokoban", "tools": []}}},
            "custom_envs.lake.tools",
            "not_supported",
            "[]",
        ),
        (
            {"reward_normalization": {"grouping": "env", "method": "mean"}},
            "reward_normalization.grouping",
            "not_supported",
            '"env"',
        ),
        (
            {"reward_normalization": {"grouping": "batch", "method": "clip"}},
            "reward_normalization.method",
            "not_supported",
            '"clip"',
        ),
        (
            {"reward_normalization": {"grouping": "batch", "scale": 2}},
            "reward_normalization.scale",
            "not_supported",
            "2",
        ),
        (
            manager(group_filter_cls="mine.Filter"),
            "train_env_manager.group_filter_cls",
            "not_supported",
            '"mine.Filter"',
        ),
        (
            manager(worker_cls="mine.EnvironmentWorker"),
            "train_env_manager.worker_cls",
            "not_supported",
            '"mine.EnvironmentWorker"',
        ),
        (manager(llm_proxy={"proxy_type": "openai"}), "train_env_manager.llm_proxy", "not_supported", "openai"),
        (manager(groups=[64]), "train_env_manager.groups", "not_supported", "[64]"),
        (
            {"custom_envs": {"lake": {"env_type": "frozen_lake", "agent_runner_cls": "mine.Runner"}}},
            "custom_envs.lake.agent_runner_cls",
            "not_supported",
            "mine",
        ),
        ({"rollout_batch_size": 10}, "rollout_batch_size", "not_divisible", "train_env_manager.group_size, 4"),
        (
            {"train_env_manager": {"group_size": "many", "tags": ["lake"]}},
            "train_env_manager.group_size",
            "out_of_range",
            '"many"',
        ),
        ({"train_env_manager": 3}, "train_env_manager", "wrong_type", "3"),
        (
            {"train_env_manager": {"group_size": 4, "tags": ["lake"], "num_groups_partition": [8, 8]}},
            "train_env_manager.num_groups_partition",
            "contradiction",
            "[8, 8], but there are 1 ",
        ),
        (
            {"val_env_manager": {"tags": ["lake", "lake"]}},
            "val_env_manager.num_groups_partition",
            "contradiction",
            "there are 2 tags: lake, lake",
        ),
        ({"ratio_type": "segment"}, "ratio_type", "not_supported", '"segment"'),
    ],
)
def test_what_has_no_counterpart_is_named(changes: dict[str, Any], place: str, code: FaultCode, said: str) -> None:
    [fault] = translate(BASE | changes, "").faults
    assert coded([fault]) == [(code, place)] and said in fault.problem and fault.remedy


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        (manager(format_penalty=-0.15), "train_env_manager.format_penalty"),
        (manager(group_size_redundancy=2), "train_env_manager.group_size_redundancy"),
        (manager(max_traj_per_env=4), "train_env_manager.max_traj_per_env"),
        (manager(system_envs={"A": "1"}), "train_env_manager.system_envs"),
        (
            manager(group_filter_cls="roll.pipeline.agentic.agentic_pipeline.GroupFilter"),
            "train_env_manager.group_filter_cls",
        ),
        (manager(llm_proxy={"proxy_type": "policy"}), "train_env_manager.llm_proxy"),
        (
            {"custom_envs": {"lake": {"env_type": "frozen_lake", "use_thread_lock": True}}},
            "custom_envs.lake.use_thread_lock",
        ),
        (
            {"reward_normalization": {"grouping": "traj_group_id", "method": "mean", "global_scale_factor": 2}},
            "reward_normalization.global",
        ),
    ],
)
def test_what_has_no_effect_is_said(changes: dict[str, Any], place: str) -> None:
    done = translate(BASE | changes, "")
    assert not done.faults and len([text for text in done.warnings if text.startswith(place)]) == 1


def test_environments_that_no_manager_names_are_left_out() -> None:
    done = translate(BASE | {"custom_envs": BASE["custom_envs"] | {"shop": {"env_type": "webshop"}}}, "")
    assert not done.faults and list(done.values["environments"]) == ["lake"]


def test_without_managers_nothing_is_read() -> None:
    values = {"rollout_batch_size": 8, "adv_estimator": "grpo"}
    done = translate(values, "")
    assert done.values == values and not done.warnings


def test_a_composed_block_is_not_changed() -> None:
    plain = BASE | {"rollout_batch_size": 8}
    before = repr(plain)
    translate(plain, "")
    assert repr(plain) == before
    assert isinstance(DictConfig(plain).custom_envs.lake.env_type, str)


def test_single_turns_become_one_conversation() -> None:
    template = "History: {history}. Now: {current_observation}"
    lake = {
        "env_type": "frozen_lake",
        "env_manager_cls": "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager",
        "max_steps": 10,
        "max_tokens_per_step": 64,
        "history_length": 5,
        "agent_system_template": "You play.",
        "agent_template": template,
    }
    done = translate(BASE | {"sequence_length": 1024, "custom_envs": {"lake": lake}}, "")
    assert done.faults == []
    assert (done.values["sequence_length"], done.values["prompt_length"]) == (10240, 960)
    arguments = done.values["environments"]["lake"]["environment_args"]
    assert arguments["agent_system_template"] == "You play." and "agent_template" not in arguments
    keys = {f"custom_envs.lake.{key}" for key in ("env_manager_cls", "agent_template", "history_length")}
    assert keys | {"sequence_length"} <= {text.split(":")[0] for text in done.warnings}
    done = translate(BASE | {"custom_envs": {"lake": lake | {"agent_template": "{observation}"}}}, "")
    assert done.values["environments"]["lake"]["environment_args"]["agent_template"] == "{observation}"


@pytest.mark.parametrize(
    ("estimator", "given", "gamma"),
    [
        ("step_reinforce", 0.9, 0.9),
        ("step_reinforce", None, 0.95),
        ("agentic_reinforce", 0.9, None),
        ("gigpo", 0.9, None),
    ],
)
def test_turns_are_discounted_as_in_roll(estimator: str, given: float | None, gamma: float | None) -> None:
    changes = {"adv_estimator": estimator} | ({"step_reward_gamma": given} if given else {})
    done = translate(BASE | changes, "")
    assert done.values.get("gamma") == gamma
    assert done.values.get("step_reward_gamma") == (given if estimator == "gigpo" else None)
    assert any(text.startswith("step_reward_gamma: ") for text in done.warnings) is (estimator != "gigpo")


def test_groups_of_an_earlier_version_are_ignored() -> None:
    train = {"group_size": 4, "tags": ["lake"], "env_groups": 64, "n_groups": [64]}
    done = translate(BASE | {"max_steps": 10, "train_env_manager": train, "enable_think": False}, "")
    assert not done.faults and done.values["environments"]["lake"]["rows"] == 1280
    keys = {f"train_env_manager.{key}" for key in ("env_groups", "n_groups", "num_env_groups")}
    assert keys | {"enable_think"} <= {text.split(":")[0] for text in done.warnings}
