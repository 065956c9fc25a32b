"""Composition, ROLL's keys and the plan's decisions, on an experiment that is written with ROLL's own keys."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from roll.config import shipped
from roll.config.load.compose import compose
from roll.config.load.loader import ConfigWarning, checked_config
from roll.config.load.removed import without_removed
from roll.config.plan.plan import Plan, make_plan
from roll.config.schema.foreign_names import REWARD_CLASSES
from roll.config.schema.model_rewards import MODEL_REWARDS
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.engines.hf.settings import HfConfig
from roll.errors import ConfigError
from roll.pipeline import main
from tests.faults import coded

pytestmark = pytest.mark.filterwarnings("ignore::roll.config.load.loader.ConfigWarning")

ROLL_WORDS = """
defaults:
  - ../config/deepspeed_zero@_here_
  - ../config/deepspeed_zero2@_here_
  - ../config/deepspeed_zero3@_here_
  - ../config/deepspeed_zero3_cpuoffload@_here_

hydra:
  run:
    dir: .
  output_subdir: null

exp_name: in-the-words-of-roll
seed: 42
logging_dir: ./output/logs
output_dir: ./output
system_envs:
  USE_MODELSCOPE: '1'
checkpoint_config:
  type: file_system
  output_dir: /data/models/${exp_name}
track_with: tensorboard
tracker_kwargs:
  log_dir: ./output/tensorboard
num_gpus_per_node: 8
max_steps: 500
save_steps: 100
logging_steps: 1
eval_steps: 10
resume_from_checkpoint: false
rollout_batch_size: 64
prompt_length: 2048
response_length: 4096
num_return_sequences_in_group: 8
ppo_epochs: 1
adv_estimator: "reinforce"
value_clip: 0.5
reward_clip: 10
advantage_clip: 2.0
dual_clip_loss: true
norm_mean_type: ~
norm_std_type: ~
max_len_mask: true
difficulty_mask: true
difficulty_low_threshold: 0.1
difficulty_high_threshold: 0.95
error_max_len_clip: false
difficulty_loss_weight: false
length_loss_weight: false
add_token_level_kl: false
whiten_advantages: true
lora_target: o_proj,q_proj,k_proj,v_proj
lora_rank: 32
lora_alpha: 32
pretrain: Qwen/Qwen2.5-7B
reward_pretrain: Qwen/Qwen2.5-7B

validation:
  data_args: {template: qwen2_5, file_name: [data/math_benchmarks.jsonl]}
  generating_args: {top_p: 0.6, top_k: 50, num_beams: 1, temperature: 0.6, num_return_sequences: 1}
  eval_steps: 10

actor_train:
  worker_cls: roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker
  model_args:
    flash_attn: fa2
    disable_gradient_checkpointing: true
    dtype: bf16
    lora_target: ${lora_target}
    lora_rank: ${lora_rank}
    lora_alpha: ${lora_alpha}
    model_type: ~
  training_args:
    learning_rate: 1.0e-5
    weight_decay: 0
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 32
    warmup_steps: 20
    num_train_epochs: 50
  data_args:
    template: qwen2_5
    file_name: [data/math_deepmath_deal.jsonl]
    domain_interleave_probs: {maths: 1.0}
    dataset_dir: data
    messages: messages
    interleave_probs: "1.0"
    preprocessing_num_workers: 16
  strategy_args:
    strategy_name: deepspeed_train
    strategy_config: ${deepspeed_zero3}
  use_dynamic_batching_in_train: true
  max_tokens_per_microbatch_in_train: 8192
  device_mapping: list(range(0,16))
  infer_batch_size: 4

actor_infer:
  model_args: {disable_gradient_checkpointing: true, dtype: bf16}
  generating_args:
    max_new_tokens: ${response_length}
    top_p: 0.99
    top_k: 100
    num_beams: 1
    temperature: 0.99
    num_return_sequences: ${num_return_sequences_in_group}
    logprobs: 1
  data_args: {template: qwen2_5}
  strategy_args:
    strategy_name: vllm
    strategy_config:
      {gpu_memory_utilization: 0.6, enforce_eager: false, block_size: 16, max_model_len: 8000, dtype: bfloat16,
       sleep_level: 2}
  device_mapping: list(range(0,8)) + list(range(8,12))
  infer_batch_size: 1

reference:
  model_args: {attn_implementation: fa2, disable_gradient_checkpointing: true, dtype: bf16, model_type: ~}
  data_args: {template: qwen2_5}
  strategy_args: {strategy_name: hf_infer, strategy_config: ~}
  device_mapping: list(range(0,16))
  infer_batch_size: 4

rewards:
  maths:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
    model_args: {model_name_or_path: "${reward_pretrain}"}
    data_args: {template: qwen2_5}
    tag_included: [deepmath_103k, aime, math_rule]
    world_size: 8
    infer_batch_size: 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder outside the examples that contains one experiment, `mine/roll_words.yaml`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "roll_words.yaml").write_text(
        ROLL_WORDS.replace("[data/math_deepmath_deal.jsonl]", "[a.jsonl]")
    )
    return tmp_path


def jobs_of(folder: Path, *words: str) -> list[tuple[Config, Plan]]:
    jobs: list[tuple[Config, Plan]] = []

    def check(composed: DictConfig, presets: set[str]) -> None:
        config = checked_config(composed, presets)
        jobs.append((config, make_plan(config)))

    compose(["--config-path", str(folder / "mine"), "--config-name", "roll_words", "dry_run=true", *words], check)
    return jobs


def test_roll_file_loads_with_one_warning_per_key(folder: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ((config, plan),) = jobs_of(folder)
    texts = [str(warning.message) for warning in caught if warning.category is ConfigWarning]
    places = [text.split(":")[0] for text in texts]
    assert len(places) == len(set(places))
    assert {"logging_dir", "checkpoint_config", "actor_train.model_args.flash_attn"} <= set(places)
    assert {
        "rewards.maths.worker_cls",
        "resume_from_checkpoint",
        "actor_infer.generating_args.logprobs",
        "tracker_kwargs",
    } <= set(places)
    assert any(text.startswith("logging_steps: 1 is ignored;") for text in texts)
    assert [text.split(":")[0] for text in plan.warnings].count("value_clip") == 1
    (asleep,) = [
        text
        for text in texts
        if text.startswith("actor_infer.strategy_args.strategy_config.sleep_level: 2 is ignored;")
    ]
    assert "time_sharing" in asleep
    assert isinstance(config, RlvrConfig)
    assert config.actor_train.model_args.attn_implementation == "fa2"
    assert config.actor_train.model_args.gradient_checkpointing == "none"
    model = "actor_train.model_args"
    (recomputed,) = [text for text in texts if text.startswith(f"{model}.disable_gradient_checkpointing: true ")]
    assert f" {model}.gradient_checkpointing=none;" in recomputed
    assert config.validation and config.validation.data_args and config.validation.data_args.messages == "messages"
    assert config.actor_train.model_args.lora_rank == 32
    assert config.actor_train.max_tokens_per_microbatch == 8192
    assert config.actor_infer.device_mapping == tuple(range(12))
    assert config.rewards["maths"].reward == "math_rule"
    assert config.resume_from_checkpoint == "never"
    assert config.tracker_kwargs == {"tensorboard": {"log_dir": "./output/tensorboard"}}
    assert config.reference
    assert isinstance(config.reference.strategy_args.strategy_config, HfConfig)
    assert plan.roles["actor_train"].tokens_per_microbatch == 8192


def test_sweep_is_checked_whole_and_writes_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    jobs = jobs_of(folder, "--multirun", "seed=1,2", "output_dir=runs/${hydra:job.num}")
    assert [(config.seed, config.output_dir) for config, _ in jobs] == [(1, "runs/0"), (2, "runs/1")]
    with pytest.raises(ConfigError) as caught:
        jobs_of(folder, "--multirun", "max_steps=1,0", "output_dir=runs/${hydra:job.num}")
    assert coded(caught.value.faults) == [("out_of_range", "max_steps")]
    assert sorted(folder.rglob("*")) == before


def test_overrides_set_or_add(folder: Path) -> None:
    ((config, _),) = jobs_of(
        folder, "deadlines.start=7", "actor_train.training_args.learning_rate=2e-5", "+gamma=0.5", "~value_clip"
    )
    assert isinstance(config, RlvrConfig)
    assert (config.deadlines.start, config.actor_train.training_args.learning_rate, config.gamma) == (7, 2e-5, 0.5)


def test_override_changes_one_key_of_a_preset(folder: Path) -> None:
    ((config, _),) = jobs_of(folder, "deepspeed_zero3.zero_optimization.stage3_max_live_parameters=7")
    assert isinstance(config, RlvrConfig)
    zero = config.actor_train.strategy_args.strategy_config.zero_optimization
    assert zero.model_extra is not None
    assert (zero.stage, zero.model_extra["stage3_max_live_parameters"], zero.model_extra["overlap_comm"]) == (
        3,
        7,
        True,
    )


def test_a_preset_of_ones_own_beside_the_experiment(folder: Path) -> None:
    (folder / "config").mkdir()
    (folder / "config" / "my_zero.yaml").write_text("my_zero:\n  zero_optimization: {stage: 1}\n")
    file = folder / "mine" / "roll_words.yaml"
    text = file.read_text().replace("  - ../config/deepspeed_zero@_here_", "  - ../config/my_zero@_here_")
    file.write_text(text.replace("${deepspeed_zero3}", "${my_zero}"))
    ((config, _),) = jobs_of(folder)
    assert isinstance(config, RlvrConfig)
    assert config.actor_train.strategy_args.strategy_config.zero_optimization.stage == 1


def test_own_variable_must_be_used(folder: Path) -> None:
    file = folder / "mine" / "roll_words.yaml"
    text = file.read_text().replace("device_mapping: list(range(0,16))", "device_mapping: ${my.gpus}", 1)
    file.write_text(text + "\nmy: {gpus: 'list(range(0,16))'}\nsteps: 7\n")
    ((config, _),) = jobs_of(folder, "max_steps=${steps}")
    assert isinstance(config, RlvrConfig)
    assert config.actor_train.device_mapping == tuple(range(16))
    assert config.max_steps == 7
    with pytest.raises(ConfigError) as caught:
        jobs_of(folder)
    assert coded(caught.value.faults) == [("unknown_key", "steps")]


def test_own_experiment_may_extend_a_shipped_one(folder: Path) -> None:
    shipped_one = "defaults: [../tiny/tiny_sft@_here_, _self_]\nexp_name: mine\n"
    (folder / "mine" / "roll_words.yaml").write_text(shipped_one)
    ((config, _),) = jobs_of(folder)
    assert (config.exp_name, config.pipeline) == ("mine", "sft")
    (folder / "mine" / "roll_words.yaml").write_text(shipped_one.replace("../", ""))
    with pytest.raises(ConfigError, match="FOLDER/NAME@_here_") as caught:
        jobs_of(folder)
    assert coded(caught.value.faults) == [("not_found", "defaults")]


REMOVING = """defaults: [../tiny/tiny_agent@_here_, _self_]
environments:
  calculator: ~
  sokoban: {rows: 8, max_turns: 20}
validation:
  rows: {calculator: ~, sokoban: 4}
rewards: ~
"""


def test_null_removes_an_inherited_entry(folder: Path) -> None:
    (folder / "mine" / "roll_words.yaml").write_text(REMOVING)
    ((config, _),) = jobs_of(folder)
    assert isinstance(config, RlvrConfig)
    assert list(config.environments) == ["sokoban"]
    assert config.validation
    assert config.validation.rows == {"sokoban": 4}
    with pytest.raises(ConfigError) as caught:
        jobs_of(folder, "environments.sokoban=null")
    assert ("missing", "rewards") in coded(caught.value.faults)


def test_null_stays_where_values_are_free(folder: Path) -> None:
    values = {"pipeline": "rlvr", "adv_estimator_args": {"a": None}, "system_envs": {"A": None, "B": "1"}}
    kept = without_removed(values, RlvrConfig)
    assert kept == {"pipeline": "rlvr", "adv_estimator_args": {"a": None}, "system_envs": {"B": "1"}}


def test_deepspeed_json_file_is_preset_of_one_role(folder: Path) -> None:
    (folder / "mine" / "ds_config.yaml").write_text(
        '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}, "bf16": {"enabled": true}}'
    )
    file = folder / "mine" / "roll_words.yaml"
    text = file.read_text().replace(
        "  - ../config/deepspeed_zero@_here_", "  - ds_config@actor_train.strategy_args.strategy_config"
    )
    file.write_text(text.replace("    strategy_config: ${deepspeed_zero3}\n", ""))
    ((config, _),) = jobs_of(folder, "actor_train.strategy_args.strategy_config.zero_optimization.overlap_comm=true")
    assert isinstance(config, RlvrConfig)
    zero = config.actor_train.strategy_args.strategy_config.zero_optimization
    assert (zero.stage, zero.model_extra) == (2, {"reduce_bucket_size": 5e8, "overlap_comm": True})


@pytest.mark.parametrize(
    ("words", "reference", "started"),
    [
        ((), "unused", False),
        (("use_kl_loss=true", "kl_loss_coef=0.1"), "role", True),
        (("use_kl_loss=true", "kl_loss_coef=0.1", "~reference"), "adapter_off", False),
        (("add_token_level_kl=true", "init_kl_coef=0.1", "kl_penalty=kl", "~reference"), "adapter_off", False),
    ],
)
def test_where_the_reference_runs(folder: Path, words: tuple[str, ...], reference: str, started: bool) -> None:
    ((_, plan),) = jobs_of(folder, *words)
    assert plan.reference == reference
    assert ("reference" in plan.roles) is started


def test_missing_file_is_warning_in_dry_run(folder: Path) -> None:
    ((config, plan),) = jobs_of(folder)
    assert any(
        warning.startswith("actor_train.data_args.file_name[0]: ") and "'a.jsonl'" in warning
        for warning in plan.warnings
    )
    with pytest.raises(ConfigError) as error:
        make_plan(config.model_copy(update={"dry_run": False}))
    assert ("not_found", "actor_train.data_args.file_name[0]") in coded(error.value.faults)


@pytest.mark.parametrize(
    ("model", "command"),
    [
        ("models/smollm2-135m", "python -m roll.models.fetch smollm2-135m"),
        ("./mine/smollm2-135m", "python -m roll.models.fetch smollm2-135m --output ./mine/smollm2-135m"),
        ("models/smollm3", ""),
        ("someone/smollm2-135m", ""),
        ("smollm2-135m", ""),
    ],
)
def test_missing_fetched_model_names_its_command(model: str, command: str, folder: Path) -> None:
    ((config, _),) = jobs_of(folder, f"pretrain={model}")
    with pytest.raises(ConfigError) as error:
        make_plan(config.model_copy(update={"dry_run": False}))
    remedies = [fault.remedy for fault in error.value.faults if fault.place == "pretrain"]
    assert [remedy for remedy in remedies if "fetch" in remedy] == ([f"fetch it first: {command}"] if command else [])


def test_full_sync_rejects_engine_partly_on_trainer_devices(folder: Path) -> None:
    astride = (
        "actor_infer.device_mapping=[14,15,16,17]",
        "actor_infer.strategy_args.strategy_config.tensor_parallel_size=4",
    )
    astride = (*astride, "num_gpus_per_node=32")
    jobs_of(folder, *astride, "weight_sync.lora=adapter")
    with pytest.raises(ConfigError) as error:
        jobs_of(folder, *astride, "weight_sync.lora=merged")
    (fault,) = [fault for fault in error.value.faults if fault.place == "actor_infer.device_mapping"]
    assert fault.code == "not_supported" and re.search("14, 15, 16, 17 .* 14, 15 with actor_train", fault.problem)
    jobs_of(folder, *astride, "actor_infer.device_mapping=[16,17,18,19]", "weight_sync.lora=merged")


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ((), ": with top_p 0.99 and top_k 100 responses are sampled from a modified distribution"),
        (
            ("actor_infer.generating_args.top_p=1",),
            ": with top_k 100 responses are sampled from a modified distribution",
        ),
        (
            ("actor_infer.generating_args.top_k=0",),
            ": with top_p 0.99 responses are sampled from a modified distribution",
        ),
        (("actor_infer.generating_args.top_p=1", "actor_infer.generating_args.top_k=-1"), None),
    ],
)
def test_a_truncated_rollout_distribution_is_warned_of(folder: Path, words: tuple[str, ...], given: str | None) -> None:
    ((_, plan),) = jobs_of(folder, *words)
    texts = [warning for warning in plan.warnings if warning.startswith("actor_infer.generating_args:")]
    assert len(texts) == (given is not None)
    assert given is None or (given in texts[0] and "top_p=1, top_k=-1 and repetition_penalty=1" in texts[0])


def test_variable_may_lose_its_last_use_by_override(folder: Path) -> None:
    gone = [f"actor_train.model_args.{key}" for key in ("lora_target=q_proj", "lora_rank=4", "lora_alpha=4")]
    gone += ["~rewards.maths.model_args"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ((config, _),) = jobs_of(folder, *gone)
    assert isinstance(config, RlvrConfig)
    assert config.actor_train.model_args.lora_rank == 4
    said = [str(one.message) for one in caught if str(one.message).startswith(("lora", "reward_pretrain"))]
    assert [text.partition(":")[0] for text in said] == ["reward_pretrain"]  # ROLL's critic would start from it
    with pytest.raises(ConfigError) as refused:
        jobs_of(folder, *gone, "lora_rank=64")
    assert coded(refused.value.faults) == [("unknown_key", "lora_rank")]


def test_adapted_modules_may_be_a_list(folder: Path) -> None:
    listed = [f"{role}.model_args.lora_target=[q_proj,v_proj]" for role in ("actor_train", "actor_infer")]
    ((config, _),) = jobs_of(folder, *listed)
    assert isinstance(config, RlvrConfig)
    assert config.actor_train.model_args.lora_target == config.actor_infer.model_args.lora_target == "q_proj,v_proj"


@pytest.mark.parametrize("given", ["[]", "[q_proj,3]", "[[q_proj]]"])
def test_a_list_of_other_things_is_no_module(folder: Path, given: str) -> None:
    with pytest.raises(ConfigError) as refused:
        jobs_of(folder, *(f"{role}.model_args.lora_target={given}" for role in ("actor_train", "actor_infer")))
    key = "model_args.lora_target"
    assert coded(refused.value.faults) == [("wrong_type", f"{role}.{key}") for role in ("actor_train", "actor_infer")]


def test_roll_reward_class_without_counterpart_is_a_fault(folder: Path) -> None:
    judge = "rewards.maths.worker_cls=roll.pipeline.rlvr.rewards.GeneralValRuleRewardWorker"
    with pytest.raises(ConfigError) as error:
        jobs_of(folder, judge)
    (fault,) = error.value.faults
    assert coded([fault]) == [("not_supported", "rewards.maths.worker_cls")]
    assert ", ".join([*shipped.known_rewards(), *MODEL_REWARDS]) in fault.remedy
    assert "~rewards.maths" in fault.remedy
    ((config, _),) = jobs_of(folder, judge, "rewards.maths.reward=multiple_choice")
    assert isinstance(config, RlvrConfig)
    assert config.rewards["maths"].reward == "multiple_choice"


def test_every_reward_class_that_is_translated_exists_here() -> None:
    assert set(REWARD_CLASSES.values()) <= {*shipped.known_rewards(), *MODEL_REWARDS}


def test_a_resolved_configuration_loads_again(folder: Path) -> None:
    ((config, _),) = jobs_of(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checked_config(OmegaConf.create(config.model_dump(mode="json"))) == config


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Remove the log handler that Hydra's `--info` leaves behind: its stream is closed when the test ends."""
    handlers, level = list(logging.root.handlers), logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.mark.usefixtures("logging_as_before")
def test_flags_of_hydra(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--config-path", "mine", "--config-name", "roll_words"]
    assert main([*where, "--cfg", "job", "--resolve", "max_steps=7"]) == 0
    assert "max_steps: 7" in capsys.readouterr().out
    assert main([*where, "--info", "defaults"]) == 0
    assert main([*where, "--help"]) == 0
    assert "roll.pipeline is powered by Hydra" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "qwen2.5-7B-rlvr/rlvr_lora_zero3" in capsys.readouterr().out


def test_an_ambiguous_name_lists_the_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/same.yaml", "b/same.yaml", "b/other.yaml", "config/preset.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(shipped, "examples_folder", lambda: tmp_path)
    assert shipped.find_experiment("other") == tmp_path / "b" / "other.yaml"
    assert shipped.find_experiment("a/same") == tmp_path / "a" / "same.yaml"
    with pytest.raises(ConfigError, match="a/same, b/same") as several:
        shipped.find_experiment("same")
    with pytest.raises(ConfigError, match="'preset'") as none:
        shipped.find_experiment("preset")
    assert coded([*several.value.faults, *none.value.faults]) == [
        ("duplicate", "--config-name"),
        ("unknown_name", "--config-name"),
    ]


@pytest.mark.parametrize("place", [".", "..", "/", "/etc", "~", "repository", "link"])
def test_run_folder_is_its_own(folder: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    (folder / "repository" / ".git").mkdir(parents=True)
    (folder / "link").symlink_to(folder / "repository")
    value = str(folder / "home") if place == "~" else place
    with pytest.raises(ConfigError) as caught:
        jobs_of(folder, f"output_dir={value}")
    assert coded(caught.value.faults) == [("not_allowed", "output_dir")]
    jobs_of(folder, "output_dir=repository/output")
