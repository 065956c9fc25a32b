"""DeepSpeed's own configuration: a file or a block, whose optimizer, schedule and batch sizes are roll's keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.api import load_config
from roll.config.load.deepspeed_file import settle_deepspeed
from roll.config.roll_v2.translate import Translation
from roll.config.schema.offline import SftConfig
from roll.errors import ConfigError, Fault

WHERE = "sft_train.strategy_args.strategy_config"
WORDS = [
    "dry_run=true", "~sft_train.training_args", "~sft_train.model_args.dtype", "sft_train.device_mapping=[0,1]",
    "~sft_train.world_size", "sft_train.model_args.gradient_checkpointing=auto", "~sft_train.max_tokens_per_microbatch",
]  # fmt: skip
LOSS_SCALE = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
SIZES = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
TRAINER: dict[str, Any] = {
    **SIZES,
    "fp16": LOSS_SCALE,
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
"""What transformers' own configurations have in common."""
ON_HOST = {"device": "cpu", "pin_memory": True}
PUBLIC: dict[str, tuple[dict[str, Any], tuple[int, str]]] = {
    "transformers, stage 2": (
        TRAINER
        | {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": ON_HOST,
                "allgather_partitions": True,
                "allgather_bucket_size": 2e8,
                "overlap_comm": True,
                "reduce_scatter": True,
                "reduce_bucket_size": 2e8,
                "contiguous_gradients": True,
            }
        },
        (2, "bf16"),
    ),
    "transformers, stage 3": (
        TRAINER
        | {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": ON_HOST,
                "offload_param": ON_HOST | {"buffer_size": "auto"},
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "gather_16bit_weights_on_model_save": True,
            }
        },
        (3, "bf16"),
    ),
    "transformers, bfloat16": (
        {key: value for key, value in TRAINER.items() if key not in ("fp16", "bf16")}
        | {"bfloat16": {"enabled": True}, "zero_optimization": {"stage": 2}},
        (2, "bf16"),
    ),
    "LLaMA-Factory, stage 0": (
        SIZES
        | {
            "_comment": "a list of models",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "fp16": LOSS_SCALE,
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 0, "overlap_comm": True, "round_robin_gradients": True},
        },
        (0, "bf16"),
    ),
    "axolotl, stage 3": (
        SIZES
        | {
            "bf16": {"enabled": True},
            "fp16": LOSS_SCALE | {"enabled": False, "auto_cast": False},
            "zero_optimization": {"stage": 3, "max_live_parameters": 0, "max_reuse_distance": 0},
        },
        (3, "bf16"),
    ),
    "DeepSpeed-Chat": (
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 10,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "none"},
                "offload_optimizer": {"device": "none"},
                "stage3_param_persistence_threshold": 1e4,
                "stage3_max_live_parameters": 3e7,
                "stage3_prefetch_bucket_size": 3e7,
                "memory_efficient_linear": False,
            },
            "fp16": {"enabled": True, "loss_scale_window": 100},
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
            "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
            "tensorboard": {"enabled": False, "output_path": "x/ds_tensorboard_logs/", "job_name": "x_tensorboard"},
        },
        (3, "fp16"),
    ),
    "BERT, without ZeRO": (
        {
            "train_batch_size": 24,
            "train_micro_batch_size_per_gpu": 3,
            "steps_per_print": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "weight_decay": 0.0, "bias_correction": True}},
            "gradient_clipping": 0.5,
            "prescale_gradients": True,
            "gradient_predivide_factor": 8,
            "disable_allgather": True,
            "fp16": {"enabled": False},
            "compression_training": {"layer_reduction": {"enabled": False, "keep_number_layer": 5}},
        },
        (0, "bf16"),
    ),
    "GPT-2, NVMe": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 5},
            },
            "activation_checkpointing": {
                "partition_activations": True,
                "contiguous_memory_optimization": True,
                "number_checkpoints": 4,
            },
            "aio": {
                "block_size": 1048576,
                "queue_depth": 8,
                "thread_count": 1,
                "single_submit": False,
                "use_gds": False,
            },
            "csv_monitor": {"enabled": True, "output_path": "logs"},
        },
        (3, "bf16"),
    ),
}
"""Configurations as other projects write them, with the stage and the precision that they ask for."""
WRITTEN = """{
  "train_batch_size": 64,  // of all GPUs
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": 4,
  "gradient_clipping": 1.0,
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12},  # a loss scale
  "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8, "offload_optimizer": {"device": "cpu"}},
  /* of the optimizer */
  "optimizer": {"type": "Adam", "params": {"lr": 0.003, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": "auto"}},
  "scheduler": {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.003, "warmup_num_steps": 30}
  },
  "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true},
  "tensorboard": {"enabled": true, "output_path": "log/", "job_name": "x"},
  "wandb": {"enabled": false},
  "flops_profiler": {"enabled": false, "profile_step": 1},
  "prescale_gradients": false
}"""


def read(file: Path, *words: str) -> SftConfig:
    config = load_config("tiny/tiny_sft", [*WORDS, f"{WHERE}={file}", *words])
    assert isinstance(config, SftConfig)
    return config


def faults(file: Path, *words: str) -> list[Fault]:
    with pytest.raises(ConfigError) as raised:
        read(file, *words)
    return list(raised.value.faults)


def write(folder: Path, block: dict[str, Any]) -> Path:
    """Write a file with a block and stage 1, and return its path."""
    path = folder / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, **block}))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(WRITTEN)
    return path


def test_a_file_with_comments_sets_the_role(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = read(file)
    role, said = config.sft_train, capsys.readouterr().err
    arguments = role.training_args
    assert (arguments.optimizer, arguments.learning_rate, arguments.weight_decay) == ("adamw", 0.003, 0.0)
    assert (arguments.adam_beta1, arguments.adam_beta2, arguments.adam_epsilon) == (0.8, 0.99, 1e-7)
    assert (arguments.lr_scheduler_type, arguments.warmup_steps) == ("WarmupLR", 30)
    assert arguments.lr_scheduler_kwargs == {"warmup_min_lr": 0}
    assert (arguments.gradient_accumulation_steps, arguments.per_device_train_batch_size) == (4, 8)
    assert role.model_args.dtype == "fp16"
    for key in ("optimizer", "tensorboard", "partition_activations"):
        assert f"{WHERE}.{'activation_checkpointing.' if key[0] == 'p' else ''}{key}" in said or f".{key} " in said


@pytest.mark.parametrize(
    ("block", "word", "place"),
    [
        ({"optimizer": {"params": {"lr": 0.5}}}, "learning_rate=0.25", "optimizer.params.lr"),
        ({"optimizer": {"type": "Lion"}}, "optimizer=adamw", "optimizer.type"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}},
            "warmup_steps=4",
            "scheduler.params.warmup_num_steps",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, "lr_scheduler_type=linear", "scheduler.type"),
    ],
)
def test_two_values_for_one_thing_are_a_fault(tmp_path: Path, block: dict[str, Any], word: str, place: str) -> None:
    key = word.partition("=")[0]
    [fault] = faults(write(tmp_path, block), f"+sft_train.training_args.{word}")
    assert (fault.place, fault.code) == (f"{WHERE}.{place}", "contradiction")
    assert f"sft_train.training_args.{key}" in fault.problem


@pytest.mark.parametrize(
    ("block", "place", "code"),
    [
        ({"optimizer": {"type": "Adamax"}}, "optimizer.type", "unknown_name"),
        ({"optimizer": {"type": "Adam", "params": {"betas": 3}}}, "optimizer.params.betas", "wrong_type"),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, "optimizer.params.adam_w_mode", "not_supported"),
        ({"optimizer": {"type": "Adam", "params": {"momentum": 1}}}, "optimizer.params.momentum", "not_supported"),
        ({"optimizer": {"kind": "Adam"}}, "optimizer.kind", "unknown_key"),
        ({"scheduler": {"type": "LRRangeTest"}}, "scheduler.type", "unknown_name"),
        ({"scheduler": {"type": "WarmupLR", "params": 3}}, "scheduler.params", "wrong_type"),
        ({"comet": {"enabled": True}}, "comet", "not_supported"),
        ({"comms_logger": {"enabled": True}}, "comms_logger", "not_supported"),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler", "not_supported"),
        ({"monitor_config": {"enabled": True}}, "monitor_config", "not_supported"),
        ({"elasticity": {"enabled": True}}, "elasticity", "not_supported"),
        ({"autotuning": {"enabled": True, "fast": True}}, "autotuning", "not_supported"),
    ],
)
def test_what_roll_lacks_is_refused_by_name(tmp_path: Path, block: dict[str, Any], place: str, code: str) -> None:
    [fault] = faults(write(tmp_path, block))
    assert (fault.place, fault.code) == (f"{WHERE}.{place}", code)


@pytest.mark.parametrize(
    ("text", "code"),
    [(None, "unreadable"), ("{", "malformed"), ("[1]", "malformed"), ('{"a": 1, "a": 2}', "malformed")],
)
def test_unreadable_file_is_a_fault(tmp_path: Path, text: str | None, code: str) -> None:
    path = tmp_path / "ds_config.json"
    if text is not None:
        path.write_text(text)
    fault = faults(path)[0]
    assert (fault.place, fault.code) == (WHERE, code) and str(path) in fault.problem


def test_missing_parameters_have_deepspeeds_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}})
    arguments = read(file).sft_train.training_args
    assert (arguments.learning_rate, arguments.warmup_steps) == (1e-3, 1000)
    given = ("+sft_train.training_args.learning_rate=0.5", "+sft_train.training_args.warmup_steps=7")
    arguments = read(file, *given).sft_train.training_args
    assert (arguments.learning_rate, arguments.warmup_steps) == (0.5, 7)


def test_auto_is_the_key_of_the_role(tmp_path: Path) -> None:
    rates = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    steps = dict.fromkeys(("total_num_steps", "warmup_max_lr", "warmup_num_steps"), "auto")
    block = {
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": rates},
        "scheduler": {"type": "WarmupDecayLR", "params": steps},
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
    }
    words = ("+sft_train.training_args.learning_rate=0.5", "+sft_train.training_args.warmup_steps=7")
    role = read(write(tmp_path, block), *words).sft_train
    arguments = role.training_args
    assert (arguments.learning_rate, arguments.warmup_steps, arguments.lr_scheduler_type) == (0.5, 7, "WarmupDecayLR")
    assert role.model_args.dtype == "bf16"


@pytest.mark.parametrize("name", PUBLIC)
def test_configuration_of_another_project_is_planned(tmp_path: Path, name: str) -> None:
    block, expected = PUBLIC[name]
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(block))
    ranks = block["train_batch_size"] // block["train_micro_batch_size_per_gpu"] if "BERT" in name else 2
    role = read(file, f"sft_train.device_mapping={list(range(ranks))}").sft_train
    assert (role.strategy_args.strategy_config.zero_optimization.stage, role.model_args.dtype) == expected


def settled(block: dict[str, Any], **root: Any) -> Translation:
    """Return the translation of an experiment whose role has this block."""
    strategy = {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 1}, **block}}
    done = Translation({"pipeline": "sft", "sft_train": {"strategy_args": strategy}, **root})
    settle_deepspeed(done)
    return done


def test_wandb_is_the_tracker_with_its_arguments() -> None:
    block = {"enabled": True, "project": "p", "team": "t", "group": None}
    done = settled({"wandb": block, "tensorboard": {"enabled": True}})
    assert (done.values["track_with"], done.faults) == (["tensorboard", "wandb"], [])
    assert done.values["tracker_kwargs"] == {"wandb": {"project": "p", "entity": "t"}}
    assert any("tracker_kwargs.wandb.entity" in said for said in done.warnings)


def test_two_projects_of_wandb_are_a_fault() -> None:
    own = {"track_with": "wandb", "tracker_kwargs": {"wandb": {"project": "mine"}}}
    [fault] = settled({"wandb": {"enabled": True, "project": "p"}}, **own).faults
    assert (fault.place, fault.code) == (f"{WHERE}.wandb.project", "contradiction")
    assert "tracker_kwargs.wandb.project" in fault.problem and "mine" in fault.problem


def test_own_choice_of_trackers_is_kept_with_warning() -> None:
    done = settled({"wandb": {"enabled": True}}, track_with="none")
    assert done.values["track_with"] == "none" and f"{WHERE}.wandb: has no effect" in done.warnings[0]


@pytest.mark.parametrize(("given", "norm"), [(0.5, 0.5), (0, 1e12), (1.0, 1.0)])
def test_clipping_is_the_norm_of_the_experiment(given: float, norm: float) -> None:
    done = settled({"gradient_clipping": given})
    assert done.values["max_grad_norm"] == norm and bool(done.warnings) == (norm != 1.0)
    assert settled({"gradient_clipping": given}, max_grad_norm=0.3).values["max_grad_norm"] == 0.3


def test_keys_without_effect_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = {
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "aio": {"thread_count": 1},
        "prescale_gradients": True,
        "csv_monitor": {"enabled": True},
        "_note": "x",
    }
    read(write(tmp_path, block))
    said = capsys.readouterr().err
    for key in ("zero_optimization.overlap_comm", "aio.thread_count", "prescale_gradients", "csv_monitor"):
        assert f"{WHERE}.{key}: has no effect" in said
    assert "_note" in said


def test_preset_is_named_as_a_value(tmp_path: Path) -> None:
    config = load_config("tiny/tiny_sft", ["dry_run=true", f"{WHERE}=deepspeed_zero3_cpuoffload"])
    assert isinstance(config, SftConfig)
    zero = config.sft_train.strategy_args.strategy_config.zero_optimization
    assert zero.stage == 3 and zero.offloads.keys() == {"offload_optimizer"}
    words = ["dry_run=true", f"{WHERE}=deepspeed_zero1", "deepspeed_zero1.zero_optimization.stage=0"]
    config = load_config("tiny/tiny_sft", words)
    assert isinstance(config, SftConfig)
    zero = config.sft_train.strategy_args.strategy_config.zero_optimization
    assert (zero.stage, (zero.model_extra or {})["reduce_bucket_size"]) == (0, 500000000)
