"""Recognises a configuration file of `accelerate launch`, and says what its settings are in an experiment of roll."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from roll.config.shipped import YAML_ENDINGS
from roll.errors import Fault

SIGNS = ("distributed_type", "compute_environment")
"""Keys that every configuration of accelerate has."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DTYPES = {"no": "fp32", "False": "fp32"}
"""accelerate's names of precisions that are not roll's, as text. YAML reads a bare `no` as false."""
NONE = (None, "none")
PRESETS: Mapping[tuple[Any, Any, bool], str] = {
    (2, "cpu", False): "deepspeed_zero2_cpuoffload",
    (3, "cpu", False): "deepspeed_zero3_cpuoffload",
    (3, "cpu", True): "deepspeed_zero3_offload_all",
    (3, "nvme", True): "deepspeed_zero3_nvme",
}
"""Presets by stage, where the optimizer states are offloaded to, and whether parameters are offloaded as well."""
PROBLEM = (
    "this is a configuration of accelerate, whose launcher starts a process for each GPU; roll starts them itself, as "
    "an experiment says"
)


def is_accelerates(values: Mapping[str, Any]) -> bool:
    """Return whether a mapping is a configuration of accelerate."""
    return any(key in values for key in SIGNS)


def read_accelerates(path: str) -> dict[str, Any] | None:
    """Return the configuration of accelerate in a file, or None if the file is none or cannot be read."""
    if not path.endswith((*YAML_ENDINGS, ".json")):
        return None
    try:
        values = yaml.load(Path(path).expanduser().read_text(encoding="utf-8"), LOADER)  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return None
    return values if isinstance(values, dict) and is_accelerates(values) else None


def accelerate_fault(place: str, values: Mapping[str, Any], role: str = "ROLE") -> Fault:
    """Return the fault of a configuration of accelerate. Its remedy is the keys to write, with their values.

    Args:
        place: The key, flag or file that holds the configuration.
        values: The configuration.
        role: The role that is trained, if known.
    """
    start = "write these keys into an experiment (examples/quickstart has one for each pipeline)"
    of_role = ", where ROLE is sft_train, actor_train, reward_train or student" if role == "ROLE" else ""
    return Fault(place, PROBLEM, "\n      ".join([f"{start}{of_role}:", *_keys(values, role)]), "not_supported")


def _keys(values: Mapping[str, Any], role: str) -> Iterator[str]:
    """Yield a line for each setting that has a key in roll."""
    processes, machines = values.get("num_processes"), values.get("num_machines")
    if isinstance(processes, int):
        yield f"{role}.device_mapping: list(range(0,{processes}))"
    if isinstance(machines, int) and machines > 1:
        each = f": {processes // machines}" if isinstance(processes, int) else ""
        yield f"num_gpus_per_node{each}, with the nodes connected by Ray: docs/clusters.md"
    if "mixed_precision" in values:
        dtype = str(values["mixed_precision"])
        yield f"{role}.model_args.dtype: {DTYPES.get(dtype, dtype)}"
    block = values.get("deepspeed_config")
    deepspeed = block if isinstance(block, Mapping) else {}
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        if deepspeed.get(key) not in (None, "auto"):
            name = "max_grad_norm" if key == "gradient_clipping" else f"{role}.training_args.{key}"
            yield f"{name}: {deepspeed[key]}"
    if file := deepspeed.get("deepspeed_config_file"):
        yield f"{role}.strategy_args.strategy_config: {file}"
    elif values.get("distributed_type") in ("FSDP", "MEGATRON_LM"):
        yield f"{role}.strategy_args.strategy_config: ${{deepspeed_zero3}}, in place of {values['distributed_type']}"
    else:
        yield from _deepspeed(deepspeed, f"{role}.strategy_args.strategy_config")
    if deepspeed.keys() & {"zero3_init_flag", "zero3_save_16bit_model"}:
        yield "(zero3_init_flag and zero3_save_16bit_model: always so)"


def _deepspeed(block: Mapping[str, Any], key: str) -> Iterator[str]:
    """Yield the preset for the stage and the offload of accelerate's block, or the changes of one."""
    stage = block.get("zero_stage", 0)
    states, parameters = block.get("offload_optimizer_device"), block.get("offload_param_device")
    wanted = (stage, None if states in NONE else states, parameters not in NONE)
    preset = PRESETS.get(wanted, "deepspeed_zero" if stage == 0 else f"deepspeed_zero{stage}")
    yield f"{key}: ${{{preset}}}, with `- ../config/{preset}@_here_` in `defaults`"
    for name, device in (("offload_optimizer", states), ("offload_param", parameters)):
        if wanted not in PRESETS and device not in NONE:
            yield f"{preset}.zero_optimization.{name}.device: {device}"
        if path := block.get(f"{name}_nvme_path"):
            yield f"{preset}.zero_optimization.{name}.nvme_path: {path}"
