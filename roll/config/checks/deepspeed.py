"""Checks DeepSpeed's configuration against the role's other keys. Does not import DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.config.checks.optimizers import optimizer_faults
from roll.config.derived.batch import accumulates, sequences_per_update
from roll.config.derived.placement import model_roles, ranks
from roll.config.schema.deepspeed_keys import BLOCKS, block_faults
from roll.config.schema.engine import (
    DeepSpeedConfig,
    DeepSpeedInferStrategyConfig,
    DeepSpeedTrainStrategyConfig,
    ZeroOffloadConfig,
)
from roll.config.schema.kinds import PRECISION, SIZE
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import LearnerConfig, RoleConfig
from roll.errors import Fault
from roll.registry import nearest

QUANTISED = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
OFFLOADS = {
    "offload_optimizer": ("buffer_size", "max_in_cpu"),
    "offload_param": ("pipeline_read", "pipeline_write", "fast_init", "ratio"),
}
"""For each of the two offload blocks, the keys of `ZeroOffloadConfig` that only the other block may have."""
ON_HOST, PARTITIONS = "cpu_checkpointing", "partition_activations"
RECOMPUTING = [
    ON_HOST, PARTITIONS, "contiguous_memory_optimization", "number_checkpoints", "synchronize_checkpoint_boundary",
    "profile",
]  # fmt: skip
"""Keys of DeepSpeed's `activation_checkpointing`."""


def role_deepspeed_config(role: RoleConfig) -> DeepSpeedConfig | None:
    """Return the role's DeepSpeed configuration, or None if it runs on another backend."""
    strategy = role.strategy_args
    return (
        strategy.strategy_config
        if isinstance(strategy, DeepSpeedTrainStrategyConfig | DeepSpeedInferStrategyConfig)
        else None
    )


def swap_paths(settings: DeepSpeedConfig) -> dict[str, Path]:
    """Return the `nvme_path` of each block that offloads to NVMe, by the name of the block."""
    zero = settings.zero_optimization
    offloads = {"offload_optimizer": zero.offload_optimizer, "offload_param": zero.offload_param}
    return {
        key: Path(each.nvme_path) for key, each in offloads.items() if each and each.device == "nvme" and each.nvme_path
    }


def deepspeed_faults(config: Config) -> list[Fault]:
    """Return a fault for each contradiction in the roles' DeepSpeed configurations, or between one of them and another
    key.
    """
    faults: list[Fault] = []
    for name, role in model_roles(config).items():
        settings, where = role_deepspeed_config(role), f"{name}.strategy_args.strategy_config"
        if settings is None:
            continue
        zero = f"{where}.zero_optimization"
        faults += [
            *_blocks(settings, where),
            *_zero(settings, zero),
            *_plus_plus(settings, zero, role),
            *_precision(settings, where, name, role),
        ]
        faults += _recomputing(settings, f"{where}.activation_checkpointing", name, role)
        if isinstance(role, LearnerConfig):
            faults += [*_batch(settings, where, name, role, config), *optimizer_faults(name, role)]
    return faults


def _blocks(settings: DeepSpeedConfig, where: str) -> Iterator[Fault]:
    """Yield faults of keys and values in the blocks that the schema passes to DeepSpeed unchecked."""
    given = {name: getattr(settings, name) for name in BLOCKS} | {
        "zero_optimization": settings.zero_optimization.model_extra
    }
    for name, block in given.items():
        yield from block_faults(f"{where}.{name}", block or {}, *BLOCKS[name])


def _zero(settings: DeepSpeedConfig, where: str) -> Iterator[Fault]:
    zero = settings.zero_optimization
    if zero.offload_param and zero.offload_param.device != "none" and zero.stage != 3:
        problem = f"'{zero.offload_param.device}', but stage {zero.stage} does not shard parameters"
        yield Fault(f"{where}.offload_param.device", problem, "use stage 3, or remove offload_param")
    if zero.offload_optimizer and zero.offload_optimizer.device != "none" and zero.stage == 0:
        problem = f"'{zero.offload_optimizer.device}', but stage 0 does not shard the optimizer states"
        yield Fault(f"{where}.offload_optimizer.device", problem, "use stage 1, 2 or 3, or remove offload_optimizer")
    if (zero.model_extra or {}).get("overlap_comm") is True and zero.stage < 2:
        problem = (
            f"true, but on stage {zero.stage} gradients are reduced once per update, when there is no computation to "
            f"overlap with"
        )
        yield Fault(f"{where}.overlap_comm", problem, "use stage 2 or 3, or remove this key")
    if (zero.model_extra or {}).get("compute_grad_norm") is False:
        problem = "false, but roll needs the norm to detect non-finite gradients"
        yield Fault(f"{where}.compute_grad_norm", problem, "remove it")
    for key in OFFLOADS:
        if offload := getattr(zero, key):
            yield from _offload(offload, f"{where}.{key}", zero.stage)
    if zero.offload_optimizer and zero.offload_optimizer.ratio not in (None, 1.0):
        ratio = zero.offload_optimizer.ratio
        problem = (
            f"{ratio}, but DeepSpeed does not apply the learning rate schedule to the part of the optimizer that "
            f"stays on the GPU"
        )
        yield Fault(f"{where}.offload_optimizer.ratio", problem, "remove it")


def _offload(offload: ZeroOffloadConfig, where: str, stage: int) -> Iterator[Fault]:
    for key in OFFLOADS[where.rpartition(".")[2]]:
        if getattr(offload, key) is not None:
            yield Fault(
                f"{where}.{key}", f"{getattr(offload, key)}, but DeepSpeed has no such key in this block", "remove it"
            )
    if offload.device != "nvme":
        return
    if not offload.nvme_path:
        yield Fault(f"{where}.nvme_path", "missing, but device is nvme", "set it to a folder on the NVMe drive")
    elif not offload.nvme_path.startswith("/"):
        problem = f"'{offload.nvme_path}' is relative, but workers run in another working directory"
        yield Fault(f"{where}.nvme_path", problem, "use an absolute path")
    if stage != 3:
        yield Fault(
            f"{where}.device", f"'nvme', but stage {stage} does not swap to NVMe", "use stage 3, or set device to cpu"
        )


def _plus_plus(settings: DeepSpeedConfig, where: str, role: RoleConfig) -> Iterator[Fault]:
    zero, extra = settings.zero_optimization, settings.zero_optimization.model_extra or {}
    count = ranks(role)
    for key in QUANTISED:
        if extra.get(key) is True and not role.device_mapping:
            yield Fault(
                f"{where}.{key}",
                "true, but DeepSpeed quantises only on GPUs, and the role has no device_mapping",
                "remove it",
            )
        elif extra.get(key) is True and zero.stage != 3:
            yield Fault(
                f"{where}.{key}",
                f"true, but stage {zero.stage} does not shard weights",
                "use stage 3, or remove this key",
            )
    if extra.get("zero_quantized_gradients") is True and role.model_args.lora_target:
        problem = "true, but DeepSpeed 0.19 crashes with a misaligned address when it quantises an adapter's gradients"
        yield Fault(
            f"{where}.zero_quantized_gradients", problem, "remove it, or train all parameters (without lora_target)"
        )
    size: Any = extra.get("zero_hpz_partition_size")
    if not SIZE.holds(size):
        return
    if size > 1 and zero.stage != 3:
        problem = f"{size}, but stage {zero.stage} does not shard weights"
        yield Fault(f"{where}.zero_hpz_partition_size", problem, "use stage 3, or remove this key")
    elif count % size:
        problem = (
            f"{size} ranks would share a second copy of the weights, but the role's {count} rank(s) are not a multiple "
            f"of {size}"
        )
        yield Fault(f"{where}.zero_hpz_partition_size", problem, "set it to the number of the role's ranks on one host")


def _recomputing(settings: DeepSpeedConfig, where: str, name: str, role: RoleConfig) -> Iterator[Fault]:
    wish = f"{name}.model_args.gradient_checkpointing"
    for key, value in (settings.activation_checkpointing or {}).items():
        if key not in RECOMPUTING:
            yield Fault(
                f"{where}.{key}", f"unknown key, with the value {value!r}{nearest(key, RECOMPUTING)}", "remove it"
            )
        elif key not in (ON_HOST, PARTITIONS):
            if value:
                problem = (
                    f"{value!r}, but torch recomputes the layers, so only {ON_HOST} and {PARTITIONS} have an effect "
                    f"in this block"
                )
                yield Fault(f"{where}.{key}", problem, f"remove it; {wish} sets which layers are recomputed")
        elif not isinstance(value, bool):
            yield Fault(f"{where}.{key}", f"{value!r} is not allowed", "set it to true or false")
        elif value and role.model_args.gradient_checkpointing in ("none", 0):
            problem = f"true, but {wish} is {role.model_args.gradient_checkpointing}"
            yield Fault(f"{where}.{key}", problem, f"remove it, or set {wish}=auto")
        elif value and key == PARTITIONS and settings.tensor_parallel_size == 1:
            problem = (
                "true, but tensor_parallel.autotp_size is 1, so no two ranks have the same activations to partition"
            )
            yield Fault(
                f"{where}.{key}",
                problem,
                f"remove it; to save GPU memory, {ON_HOST} keeps the inputs of layers in host memory",
            )


def _precision(settings: DeepSpeedConfig, where: str, name: str, role: RoleConfig) -> Iterator[Fault]:
    dtype = role.model_args.dtype
    for key in ("bf16", "fp16"):
        block = getattr(settings, key) or {}
        enabled = block.get("enabled")
        if isinstance(enabled, bool) and enabled != (dtype == key):
            problem = f"{str(enabled).lower()}, but {name}.model_args.dtype is {dtype}"
            yield Fault(f"{where}.{key}.enabled", problem, f"remove it; {name}.model_args.dtype sets the precision")
    if (settings.bf16 or {}).get("check_grad_overflow") is False:
        problem = "false, but non-finite gradients must not reach the optimizer"
        yield Fault(f"{where}.bf16.check_grad_overflow", problem, "remove it")
    sums = (settings.data_types or {}).get("grad_accum_dtype")
    # With fp32 sums stage 0 fails, and stage 1 uses a different optimizer, whose checkpoints cannot be exported in
    # fp32.
    if PRECISION.holds(sums) and sums != dtype and (sums != "fp32" or settings.zero_optimization.stage < 2):
        choice, further = (
            ("", "") if dtype == "fp32" else (", or on stages 2 and 3 in fp32", ", or use stage 2 or 3 with fp32")
        )
        problem = f"'{sums}', but {dtype} gradients are accumulated in {dtype}{choice}"
        yield Fault(f"{where}.data_types.grad_accum_dtype", problem, f"remove it{further}")


def _batch(settings: DeepSpeedConfig, where: str, name: str, role: LearnerConfig, config: Config) -> Iterator[Fault]:
    arguments, by_keys = role.training_args, not isinstance(config, RlvrConfig) or accumulates(role)
    update = "the number of sequences per update" + (" (batch per device x accumulation x replicas)" if by_keys else "")
    same: tuple[tuple[str, object, str], ...] = (
        ("train_batch_size", sequences_per_update(config, role), update),
        ("gradient_clipping", config.max_grad_norm, "max_grad_norm"),
    )
    if by_keys:
        micro, accumulated, own = (
            arguments.per_device_train_batch_size,
            arguments.gradient_accumulation_steps or 1,
            f"{name}.training_args",
        )
        same += (
            ("train_micro_batch_size_per_gpu", micro, f"{own}.per_device_train_batch_size"),
            ("gradient_accumulation_steps", accumulated, f"{own}.gradient_accumulation_steps"),
        )
    for key, ours, meaning in same:
        theirs = getattr(settings, key)
        if theirs not in (None, "auto", ours):
            remedy = f"remove it, or set it to auto; it follows from {meaning}"
            yield Fault(f"{where}.{key}", f"{theirs}, but {meaning} is {ours}", remedy)
    for key in () if by_keys else ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if isinstance(theirs := getattr(settings, key), int):
            problem = f"{theirs}, but updates_per_step says the size of an update, and micro-batches are made by tokens"
            yield Fault(f"{where}.{key}", problem, "remove it, or set it to auto")
