"""DeepSpeed's own configuration: a file or a block, whose optimizer, schedule and batch sizes are roll's keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.api import load_config
from roll.config.schema.offline import SftConfig
from roll.errors import ConfigError, Fault

WHERE = "sft_train.strategy_args.strategy_config"
WORDS = [
    "dry_run=true", "~sft_train.training_args", "~sft_train.model_args.dtype", "sft_train.device_mapping=[0,1]",
    "~sft_train.world_size", "sft_train.model_args.gradient_checkpointing=auto", "~sft_train.max_tokens_per_microbatch",
]  # fmt: skip
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
        ({"wandb": {"enabled": True}}, "wandb", "not_supported"),
        ({"comms_logger": {"enabled": True}}, "comms_logger", "not_supported"),
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
