"""A configuration of accelerate is refused with the keys of roll that do the same, and these keys plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.config.load.accelerate_file import accelerate_fault, read_accelerates
from roll.pipeline import main

BOTH = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "mixed_precision": "bf16"}
EIGHT = {**BOTH, "num_machines": 1, "num_processes": 8, "machine_rank": 0, "rdzv_backend": "static"}
ZERO_3 = {"zero_stage": 3, "zero3_init_flag": True, "offload_optimizer_device": "none", "offload_param_device": "none"}
ON_HOST = {"zero_stage": 2, "offload_optimizer_device": "cpu", "gradient_accumulation_steps": 4}
SWAPPED = {
    "zero_stage": 3,
    "offload_optimizer_device": "nvme",
    "offload_param_device": "nvme",
    "offload_optimizer_nvme_path": "/tmp",
    "offload_param_nvme_path": "/tmp",
}
STATES_ON_NVME = {"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/tmp"}
FILES = [
    (ZERO_3, "${deepspeed_zero3}"),
    ({"zero_stage": 1, "gradient_clipping": 1.0}, "${deepspeed_zero1}"),
    (ON_HOST, "${deepspeed_zero2_cpuoffload}"),
    (ZERO_3 | {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}, "${deepspeed_zero3_offload_all}"),
    (SWAPPED, "${deepspeed_zero3_nvme}"),
    (STATES_ON_NVME, "${deepspeed_zero3}"),
    ({}, "${deepspeed_zero}"),
]
"""Blocks `deepspeed_config` of accelerate, and the presets that do the same."""


def written(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


@pytest.mark.parametrize(("block", "preset"), FILES)
def test_the_remedy_of_an_accelerate_file_plans(block: dict[str, Any], preset: str, tmp_path: Path) -> None:
    fault = accelerate_fault("--config_file", EIGHT | {"deepspeed_config": block}, "sft_train")
    said = str(fault).splitlines()[2:]
    keys = dict(line.strip().partition(", with ")[0].split(": ", 1) for line in said if ": always" not in line)
    assert keys["sft_train.strategy_args.strategy_config"] == preset
    assert keys["sft_train.device_mapping"] == "list(range(0,8))"
    keys["sft_train.strategy_args.strategy_config"] = preset.strip("${}")  # its name, in place of `defaults`
    words = [f'{key}="{value}"' if "(" in value else f"{key}={value}" for key, value in keys.items()]
    command = ("--config-name", "quickstart/gsm8k_sft", "num_gpus_per_node=8", *words, "dry_run=true")
    assert main(command) == 0


@pytest.mark.parametrize(
    ("value", "dtype"), [("no", "fp32"), (False, "fp32"), ("fp16", "fp16"), ("bf16", "bf16")], ids=str
)
def test_accelerates_precisions_are_rolls(value: Any, dtype: str) -> None:
    assert f"ROLE.model_args.dtype: {dtype}\n" in f"{accelerate_fault('x', BOTH | {'mixed_precision': value})}\n"


def test_several_machines_and_a_deepspeed_file_are_named() -> None:
    block = {"deepspeed_config_file": "ds_config.json", "zero3_init_flag": True}
    said = str(accelerate_fault("x", BOTH | {"num_machines": 2, "num_processes": 16, "deepspeed_config": block}))
    assert "num_gpus_per_node: 8, " in said and "ROLE.strategy_args.strategy_config: ds_config.json\n" in said
    assert "in place of FSDP" in str(accelerate_fault("x", BOTH | {"distributed_type": "FSDP"}))


@pytest.mark.parametrize("door", ["flag", "flag=", "experiment", "strategy_config"])
def test_an_accelerate_file_is_one_fault(door: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, EIGHT | {"deepspeed_config": ZERO_3})
    named = ("--config-name", "quickstart/gsm8k_sft")
    words = {
        "flag": (*named, "--config_file", str(file)),
        "flag=": (*named, f"--config_file={file}"),
        "experiment": ("--config-path", str(tmp_path), "--config-name", "accelerate"),
        "strategy_config": (*named, f"sft_train.strategy_args.strategy_config={file}"),
    }
    assert main([*words[door], "dry_run=true"]) == 2
    said = capsys.readouterr().err
    assert "1 fault in " in said and "configuration of accelerate" in said
    role = "sft_train" if door == "strategy_config" else "ROLE"
    assert f"{role}.device_mapping: list(range(0,8))" in said


def test_a_file_of_other_keys_is_not_accelerates(tmp_path: Path) -> None:
    assert read_accelerates(str(written(tmp_path, {"zero_optimization": {"stage": 3}}))) is None
    assert read_accelerates(str(tmp_path / "missing.yaml")) is None
    (tmp_path / "broken.yaml").write_text("a: [", encoding="utf-8")
    assert read_accelerates(str(tmp_path / "broken.yaml")) is None
