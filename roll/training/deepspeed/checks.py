"""Checks the blocks of DeepSpeed against each other, the role's other keys, its ranks and its model.

Imports neither DeepSpeed nor transformers. Each restriction of tensor parallelism was observed in a run or is stated by
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roll.config.derived.batch import accumulates, sequences_per_update
from roll.config.derived.model_shape import ModelShape, uneven_heads, uneven_layers
from roll.config.derived.placement import ranks
from roll.config.plan.memory import compiles
from roll.config.schema.foreign_names import (
    COUNT,
    DEEPSPEED_BLOCKS,
    FLAG,
    FRACTION,
    NUMBER,
    PRECISION,
    REMOVED_OPTIMIZERS,
    SIZE,
    ValueKind,
    block_faults,
    one_of,
)
from roll.config.schema.model import ModelConfig, TrainingConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import LearnerConfig, RoleConfig
from roll.errors import Fault
from roll.registry import nearest
from roll.training.deepspeed.settings import (
    DeepSpeedConfig,
    ExpertParallelConfig,
    TensorParallelConfig,
    ZeroOffloadConfig,
)

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
TENSOR_KEYS = list(TensorParallelConfig.model_fields)
BY_PLAN = "transformers' tensor-parallel plan of the model determines what is sharded"
WHOLE_HEAD = "log-probs need the whole matrix of the head, so each rank keeps it"
REFUSED_TENSOR_KEYS: Mapping[str, str] = {
    "partition_config": BY_PLAN,
    "preset_model": BY_PLAN,
    "injection_policy_tuple": BY_PLAN,
    "vocab_parallel_lm_head": WHOLE_HEAD,
    "vocab_parallel_ce_backend": WHOLE_HEAD,
    "tp": "autotp_size sets it",
    "dtype": "model_args.dtype sets it",
}
"""Keys of DeepSpeed's block `tensor_parallel` that are refused, with the reason."""
EXPERT_KEYS = list(ExpertParallelConfig.model_fields)
OTHER_EXPERT_KEYS = [
    "preset_model", "moe_layer_pattern", "router_pattern", "expert_pattern", "expert_tensor_parallel_size",
    "validate_folding_routing", "async_split_plan", "use_grouped_mm", "disable_triton_grouped_mm", "route_norm",
    "route_scale", "score_apply", "score_func", "combine_impl", "row_weighting_impl", "gate_up_impl", "comm_backend",
    "comm_num_sm", "comm_qp_margin", "comm_max_tokens_per_rank", "num_expert_groups", "num_limited_groups", "top_k",
    "load_balance_coeff", "routed_scaling_factor", "expert_w1", "expert_w2", "expert_w3", "num_experts_attr",
    "top_k_attr", "has_shared_experts", "shared_experts_pattern", "shared_experts_gate_pattern", "expert_activation",
]  # fmt: skip
"""Keys of DeepSpeed's block `expert_parallel` that are refused."""
BY_MODEL = "the model's own router and configuration, and roll's device, determine it"
ONLY_TRAINING = "remove it; only deepspeed_train has it"
DIVISOR = "set it to a divisor of all of them"
RISES = one_of("log", "linear")
SHAPES = one_of("linear", "cosine", "1-sqrt")
LEAST: Mapping[str, ValueKind] = {"min_lr": NUMBER, "min_lr_rate": FRACTION}
SCHEDULES: Mapping[str, Mapping[str, ValueKind]] = {
    "linear": {},
    "cosine": {"num_cycles": NUMBER},
    "cosine_with_restarts": {"num_cycles": SIZE},
    "polynomial": {"lr_end": NUMBER, "power": NUMBER},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": SIZE},
    "cosine_with_min_lr": {"num_cycles": NUMBER, **LEAST},
    "cosine_warmup_with_min_lr": {"num_cycles": NUMBER, "warmup_lr_rate": FRACTION, **LEAST},
    "warmup_stable_decay": {
        "num_decay_steps": COUNT,
        "warmup_type": SHAPES,
        "decay_type": SHAPES,
        "min_lr_ratio": FRACTION,
        "num_cycles": NUMBER,
    },
    "WarmupLR": {"warmup_min_lr": NUMBER, "warmup_type": RISES},
    "WarmupDecayLR": {"warmup_min_lr": NUMBER, "warmup_type": RISES, "total_num_steps": SIZE},
    "WarmupCosineLR": {
        "warmup_min_ratio": FRACTION,
        "warmup_type": RISES,
        "cos_min_ratio": FRACTION,
        "total_num_steps": SIZE,
    },
    "OneCycle": {
        "cycle_min_lr": NUMBER,
        "decay_lr_rate": NUMBER,
        "cycle_first_step_size": SIZE,
        "cycle_second_step_size": SIZE,
        "cycle_first_stair_count": COUNT,
        "cycle_second_stair_count": COUNT,
        "decay_step_size": COUNT,
        "cycle_momentum": FLAG,
        "cycle_min_mom": FRACTION,
        "cycle_max_mom": FRACTION,
        "decay_mom_rate": NUMBER,
    },
}
"""The schedules of transformers and DeepSpeed that depend only on the number of updates, with the types of their
additional arguments.
"""
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
NEEDED: Mapping[str, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
    "OneCycle": ("cycle_min_lr",),
}
"""By schedule: arguments of which exactly one must be set."""
LR_END = 1e-7
"""Default final learning rate of `polynomial`."""


def train_faults(
    settings: DeepSpeedConfig, name: str, role: RoleConfig, config: Config, shape: ModelShape | None
) -> Iterator[Fault]:
    """Yield faults of a trained role. `shape` is that of a model here; others are checked when they are loaded."""
    assert isinstance(role, LearnerConfig)
    where = f"{name}.strategy_args.strategy_config"
    yield from _shared_faults(settings, where, name, role)
    yield from _batch(settings, where, name, role, config)
    yield from optimizer_faults(settings, name, role)
    yield from _router_loss(name, role, shape)
    yield from _expert_adapter(name, role, shape)
    yield from _sequence_parallel(settings.sequence_parallel_size, where, name, role, shape)
    size, place = settings.tensor_parallel_size, f"{where}.tensor_parallel.autotp_size"
    if size > 1:
        yield from _tensor_parallel(settings, place, name, role)
        if why := uneven_layers(shape, size):
            of_delta = shape is not None and shape.delta is not None
            remedy = "remove it: ZeRO-3 shards the weights of every layer" if of_delta else DIVISOR
            yield Fault(place, f"{size}, but {why}", remedy, "not_supported" if of_delta else "not_divisible")
    if settings.expert_parallel_size > 1:
        yield from _expert_parallel(settings, where, name, role, shape)


def infer_faults(settings: DeepSpeedConfig, name: str, role: RoleConfig) -> Iterator[Fault]:
    """Yield faults of a role that scores with a sharded model."""
    where = f"{name}.strategy_args.strategy_config"
    yield from _shared_faults(settings, where, name, role)
    if (stage := settings.zero_optimization.stage) != 3:
        problem = f"stage {stage} shards no parameters, but deepspeed_infer requires that"
        yield Fault(f"{where}.zero_optimization.stage", problem, "use stage 3, or hf_infer", "not_supported")
    if (size := settings.sequence_parallel_size) > 1:
        problem = f"{size}, but deepspeed_infer scores whole sequences on each rank"
        yield Fault(f"{where}.sequence_parallel_size", problem, ONLY_TRAINING, "not_supported")
    if (size := settings.tensor_parallel_size) > 1:
        problem = f"{size}, but deepspeed_infer shards the model with ZeRO-3"
        yield Fault(f"{where}.tensor_parallel.autotp_size", problem, ONLY_TRAINING, "not_supported")
    if (size := settings.expert_parallel_size) > 1:
        problem = f"{size}, but deepspeed_infer shards experts with ZeRO-3"
        yield Fault(f"{where}.expert_parallel.autoep_size", problem, ONLY_TRAINING, "not_supported")


def _shared_faults(settings: DeepSpeedConfig, where: str, name: str, role: RoleConfig) -> Iterator[Fault]:
    zero = f"{where}.zero_optimization"
    yield from _blocks(settings, where)
    yield from _zero(settings, zero)
    yield from _plus_plus(settings, zero, role)
    yield from _precision(settings, where, name, role)
    yield from _recomputing(settings, f"{where}.activation_checkpointing", name, role)
    if settings.tensor_parallel:
        yield from _tensor_parallel_keys(settings.tensor_parallel, f"{where}.tensor_parallel")
    if settings.expert_parallel:
        yield from _expert_parallel_keys(settings.expert_parallel, f"{where}.expert_parallel")


def _blocks(settings: DeepSpeedConfig, where: str) -> Iterator[Fault]:
    """Yield faults of keys and values in the blocks that the schema passes to DeepSpeed unchecked."""
    given = {name: getattr(settings, name) for name in DEEPSPEED_BLOCKS} | {
        "zero_optimization": settings.zero_optimization.model_extra
    }
    for name, block in given.items():
        yield from block_faults(f"{where}.{name}", block or {}, *DEEPSPEED_BLOCKS[name])


def _zero(settings: DeepSpeedConfig, where: str) -> Iterator[Fault]:
    zero = settings.zero_optimization
    if zero.offload_param and zero.offload_param.device != "none" and zero.stage != 3:
        problem = f"'{zero.offload_param.device}', but stage {zero.stage} does not shard parameters"
        yield Fault(f"{where}.offload_param.device", problem, "use stage 3, or remove offload_param", "not_supported")
    if zero.offload_optimizer and zero.offload_optimizer.device != "none" and zero.stage == 0:
        problem = f"'{zero.offload_optimizer.device}', but stage 0 does not shard the optimizer states"
        yield Fault(
            f"{where}.offload_optimizer.device",
            problem,
            "use stage 1, 2 or 3, or remove offload_optimizer",
            "not_supported",
        )
    if (zero.model_extra or {}).get("overlap_comm") is True and zero.stage < 2:
        problem = f"true, but on stage {zero.stage} gradients are reduced once per update, with nothing to overlap"
        yield Fault(f"{where}.overlap_comm", problem, "use stage 2 or 3, or remove this key", "no_effect")
    if (zero.model_extra or {}).get("compute_grad_norm") is False:
        problem = "false, but roll needs the norm to detect non-finite gradients"
        yield Fault(f"{where}.compute_grad_norm", problem, "remove it", "not_allowed")
    for key in OFFLOADS:
        if offload := getattr(zero, key):
            yield from _offload(offload, f"{where}.{key}", zero.stage)
    if zero.offload_optimizer and zero.offload_optimizer.ratio not in (None, 1.0):
        ratio = zero.offload_optimizer.ratio
        problem = (
            f"{ratio}, but DeepSpeed does not apply the learning rate schedule to the part of the optimizer that "
            f"stays on the GPU"
        )
        yield Fault(f"{where}.offload_optimizer.ratio", problem, "remove it", "not_supported")


def _offload(offload: ZeroOffloadConfig, where: str, stage: int) -> Iterator[Fault]:
    for key in OFFLOADS[where.rpartition(".")[2]]:
        if getattr(offload, key) is not None:
            yield Fault(
                f"{where}.{key}",
                f"{getattr(offload, key)}, but DeepSpeed has no such key in this block",
                "remove it",
                "unknown_key",
            )
    if offload.device != "nvme":
        return
    if not offload.nvme_path:
        yield Fault(
            f"{where}.nvme_path", "missing, but device is nvme", "set it to a folder on the NVMe drive", "missing"
        )
    elif not offload.nvme_path.startswith("/"):
        problem = f"'{offload.nvme_path}' is relative, but workers run in another working directory"
        yield Fault(f"{where}.nvme_path", problem, "use an absolute path", "malformed")
    if stage != 3:
        yield Fault(
            f"{where}.device",
            f"'nvme', but stage {stage} does not swap to NVMe",
            "use stage 3, or set device to cpu",
            "not_supported",
        )


def _plus_plus(settings: DeepSpeedConfig, where: str, role: RoleConfig) -> Iterator[Fault]:
    zero, extra = settings.zero_optimization, settings.zero_optimization.model_extra or {}
    count = ranks(role)
    for key in QUANTISED:
        if extra.get(key) is True and not role.device_mapping:
            problem = "true, but DeepSpeed quantises only on GPUs, and the role has no device_mapping"
            yield Fault(f"{where}.{key}", problem, "remove it", "not_supported")
        elif extra.get(key) is True and zero.stage != 3:
            problem = f"true, but stage {zero.stage} does not shard weights"
            yield Fault(f"{where}.{key}", problem, "use stage 3, or remove this key", "not_supported")
    if extra.get("zero_quantized_gradients") is True and role.model_args.lora_target:
        problem = "true, but DeepSpeed 0.19 crashes with a misaligned address when it quantises an adapter's gradients"
        yield Fault(
            f"{where}.zero_quantized_gradients",
            problem,
            "remove it, or train all parameters (without lora_target)",
            "not_supported",
        )
    size: Any = extra.get("zero_hpz_partition_size")
    if not SIZE.holds(size):
        return
    if size > 1 and zero.stage != 3:
        problem = f"{size}, but stage {zero.stage} does not shard weights"
        yield Fault(f"{where}.zero_hpz_partition_size", problem, "use stage 3, or remove this key", "not_supported")
    elif count % size:
        problem = f"{size} ranks would share a second copy, but the role has {count} rank(s), no multiple of it"
        yield Fault(
            f"{where}.zero_hpz_partition_size",
            problem,
            "set it to the number of the role's ranks on one host",
            "not_divisible",
        )


def _recomputing(settings: DeepSpeedConfig, where: str, name: str, role: RoleConfig) -> Iterator[Fault]:
    wish = f"{name}.model_args.gradient_checkpointing"
    for key, value in (settings.activation_checkpointing or {}).items():
        if key not in RECOMPUTING:
            yield Fault(
                f"{where}.{key}",
                f"unknown key, with the value {value!r}{nearest(key, RECOMPUTING)}",
                "remove it",
                "unknown_key",
            )
        elif key not in (ON_HOST, PARTITIONS):
            if value:
                problem = (
                    f"{value!r}, but torch recomputes the layers, so only {ON_HOST} and {PARTITIONS} have an effect "
                    f"in this block"
                )
                yield Fault(
                    f"{where}.{key}", problem, f"remove it; {wish} sets which layers are recomputed", "no_effect"
                )
        elif not isinstance(value, bool):
            yield Fault(f"{where}.{key}", f"{value!r} is not allowed", "set it to true or false", "wrong_type")
        elif value and role.model_args.gradient_checkpointing in ("none", 0, "attention"):
            problem = f"true, but {wish} is {role.model_args.gradient_checkpointing}"
            yield Fault(f"{where}.{key}", problem, f"remove it, or set {wish}=auto", "no_effect")
        elif value and key == PARTITIONS and settings.tensor_parallel_size == 1:
            problem = (
                "true, but tensor_parallel.autotp_size is 1, so no two ranks have the same activations to partition"
            )
            remedy = f"remove it; to save GPU memory, {ON_HOST} keeps the inputs of layers in host memory"
            yield Fault(f"{where}.{key}", problem, remedy, "no_effect")


def _precision(settings: DeepSpeedConfig, where: str, name: str, role: RoleConfig) -> Iterator[Fault]:
    dtype = role.model_args.dtype
    for key in ("bf16", "fp16"):
        block = getattr(settings, key) or {}
        enabled = block.get("enabled")
        if isinstance(enabled, bool) and enabled != (dtype == key):
            problem = f"{str(enabled).lower()}, but {name}.model_args.dtype is {dtype}"
            yield Fault(
                f"{where}.{key}.enabled",
                problem,
                f"remove it; {name}.model_args.dtype sets the precision",
                "contradiction",
            )
    if (settings.bf16 or {}).get("check_grad_overflow") is False:
        problem = "false, but non-finite gradients must not reach the optimizer"
        yield Fault(f"{where}.bf16.check_grad_overflow", problem, "remove it", "not_allowed")
    sums = (settings.data_types or {}).get("grad_accum_dtype")
    # With fp32 sums stage 0 fails, and stage 1 uses a different optimizer, whose checkpoints cannot be exported in
    # fp32.
    if PRECISION.holds(sums) and sums != dtype and (sums != "fp32" or settings.zero_optimization.stage < 2):
        choice, further = (
            ("", "") if dtype == "fp32" else (", or on stages 2 and 3 in fp32", ", or use stage 2 or 3 with fp32")
        )
        problem = f"'{sums}', but {dtype} gradients are accumulated in {dtype}{choice}"
        yield Fault(f"{where}.data_types.grad_accum_dtype", problem, f"remove it{further}", "not_supported")


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
            yield Fault(f"{where}.{key}", f"{theirs}, but {meaning} is {ours}", remedy, "contradiction")
    for key in () if by_keys else ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if isinstance(theirs := getattr(settings, key), int):
            problem = f"{theirs}, but updates_per_step says the size of an update, and micro-batches are made by tokens"
            yield Fault(f"{where}.{key}", problem, "remove it, or set it to auto", "exclusive")


def _sequence_parallel(size: int, where: str, name: str, role: RoleConfig, shape: ModelShape | None) -> Iterator[Fault]:
    where = f"{where}.sequence_parallel_size"
    yield from _uneven_replicas(where, name, role, size)
    if shape and shape.delta and size > 1:
        problem = f"{size}, but {shape.delta.layers} of the model's {shape.num_hidden_layers} layers pass states on"
        remedy = "remove it; to save memory, lower max_tokens_per_microbatch, or set gradient_checkpointing to all"
        yield Fault(where, problem, remedy, "not_supported")
    elif shape and (why := uneven_heads(shape.num_attention_heads, shape.num_key_value_heads, size)):
        yield Fault(where, f"{size}, but {why}", f"set it to a divisor of {shape.num_attention_heads}", "not_divisible")


def _uneven_replicas(where: str, name: str, role: RoleConfig, size: int, over_tokens: int = 1) -> Iterator[Fault]:
    """Yield a fault if the ranks of a role are not a whole number of replicas of `size * over_tokens` ranks."""
    if ranks(role) % (size * over_tokens):
        product = f"{size} x sequence_parallel_size {over_tokens}" if over_tokens > 1 else f"{size}"
        problem = f"{product}, but {name} has {ranks(role)} rank(s), which are not a whole number of such replicas"
        yield Fault(
            where,
            problem,
            "give a divisor of the ranks, or change device_mapping (on the CPU: world_size)",
            "not_divisible",
        )


def _tensor_parallel_keys(block: TensorParallelConfig, where: str) -> Iterator[Fault]:
    for key, value in (block.model_extra or {}).items():
        why = REFUSED_TENSOR_KEYS.get(key)
        problem = (
            f"{value!r}, but {why}" if why else f"unknown key, with the value {value!r}{nearest(key, TENSOR_KEYS)}"
        )
        remedy = f"remove it; the block has the keys {' and '.join(TENSOR_KEYS)}"
        yield Fault(f"{where}.{key}", problem, remedy, "not_supported" if why else "unknown_key")


def _tensor_parallel(settings: DeepSpeedConfig, where: str, name: str, role: RoleConfig) -> Iterator[Fault]:
    """Check the size against the role's other keys."""
    size, stage, dtype = settings.tensor_parallel_size, settings.zero_optimization.stage, role.model_args.dtype
    if stage == 0 and dtype != "fp32":
        problem = f"{size}, but in {dtype} DeepSpeed's stage 0 clips by the norm of only a part of the gradient"
        yield Fault(where, problem, "use stage 1 or 2", "not_supported")
    zero = settings.zero_optimization
    extra = zero.model_extra or {}
    kept_on = {"offload_optimizer": zero.memory.optimizer_on, "offload_param": zero.memory.parameters_on}
    away = [key for key, place in kept_on.items() if place != "none"]
    away += [key for key in QUANTISED if extra.get(key) is True]
    away += ["zero_hpz_partition_size"] * (zero.memory.secondary_ranks > 1)
    if stage == 3 and away:
        problem = f"{size}, but AutoTP with ZeRO-3 was not tested with {' and '.join(away)}"
        yield Fault(where, problem, "remove one of them, or use stage 1 or 2", "not_supported")
    for key in ("dropout", "lora_dropout"):
        if value := getattr(role.model_args, key):
            problem = (
                f"{size}, but {name}.model_args.{key} is {value}, and each rank of a replica would drop other values"
            )
            yield Fault(where, problem, "set only one of the two", "exclusive")
    for key, given in variants(role.model_args).items():
        problem = f"{size}, but {name}.model_args.{key} is {given}, for which no rank has a whole matrix"
        yield Fault(where, problem, "set only one of the two", "exclusive")
    yield from _uneven_replicas(where, name, role, size, settings.sequence_parallel_size)


def variants(model: ModelConfig) -> dict[str, str]:
    """Return the keys of LoRA variants that need whole matrices, with their values as text."""
    return ({"use_dora": "true"} if model.use_dora else {}) | (
        {"init_lora_weights": model.init_lora_weights} if isinstance(model.init_lora_weights, str) else {}
    )


def _expert_parallel_keys(block: ExpertParallelConfig, where: str) -> Iterator[Fault]:
    for key, value in (block.model_extra or {}).items():
        known = key in OTHER_EXPERT_KEYS
        problem = f"{value!r}, but {BY_MODEL}" if known else f"unknown key, with the value {value!r}"
        problem += "" if known else nearest(key, EXPERT_KEYS)
        remedy = f"remove it; the block has the keys {' and '.join(EXPERT_KEYS)}"
        yield Fault(f"{where}.{key}", problem, remedy, "not_supported" if known else "unknown_key")


def _expert_parallel(
    settings: DeepSpeedConfig, where: str, name: str, role: RoleConfig, shape: ModelShape | None
) -> Iterator[Fault]:
    """Check the size against the model, the ranks and the other keys."""
    size, place = settings.expert_parallel_size, f"{where}.expert_parallel.autoep_size"
    if shape and shape.experts is None:
        yield Fault(place, f"{size}, but the model has no experts", "remove it", "no_effect")
    elif shape and shape.experts and shape.experts.count % size:
        problem = f"{size}, but {shape.experts.count} experts cannot be divided evenly among {size} ranks"
        yield Fault(place, problem, f"set it to a divisor of {shape.experts.count}", "not_divisible")
    if ranks(role) % size:
        problem = f"{size}, but {name} has {ranks(role)} rank(s), which are not a whole number of such groups"
        remedy = "give a divisor of the ranks, or change device_mapping (on the CPU: world_size)"
        yield Fault(place, problem, remedy, "not_divisible")
    for why in _without_experts(settings, role):
        yield Fault(place, f"{size}, but {why}", "set only one of the two", "not_supported")
    if compiles(role.model_args, on_gpu=role.device_mapping is not None):
        problem = f"{role.model_args.compile_layers}, which compiles here, and was not tried with expert_parallel"
        remedy = f"set {name}.model_args.compile_layers=false"
        yield Fault(f"{name}.model_args.compile_layers", problem, remedy, "not_supported")


def _without_experts(settings: DeepSpeedConfig, role: RoleConfig) -> Iterator[str]:
    """Yield why expert parallelism does not combine with keys that are set."""
    zero, model = settings.zero_optimization, role.model_args
    extra = zero.model_extra or {}
    if zero.stage == 0 and model.dtype != "fp32":
        yield f"in {model.dtype} DeepSpeed's stage 0 clips by a norm without the experts (stages 1 to 3 do not)"
    if model.lora_target:
        yield (
            f"lora_target is {model.lora_target}: with frozen experts DeepSpeed's stages 1 and 2 do not start, and "
            f"stage 3 writes no checkpoint"
        )
    if settings.tensor_parallel_size > 1:
        yield f"tensor_parallel.autotp_size is {settings.tensor_parallel_size}, and the two were not tested together"
    if zero.memory.secondary_ranks > 1:
        yield "zero_hpz_partition_size would share a second copy of the experts among ranks with other experts"
    if quantised := [key for key in QUANTISED if extra.get(key) is True]:
        yield f"{quantised[0]} is true, and was not tested with it"
    if on_nvme := [key for key, block in zero.offloads.items() if block.device == "nvme"]:
        yield f"{on_nvme[0]}.device is nvme, from which DeepSpeed writes no checkpoint of experts"
    for key in ("contiguous_gradients", "reduce_scatter"):
        if extra.get(key) is False and zero.stage in (1, 2):
            yield f"{key} is false, which DeepSpeed does not support with experts"


def optimizer_faults(settings: DeepSpeedConfig, name: str, role: LearnerConfig) -> Iterator[Fault]:
    """Yield faults of the optimizer keys of a trained role."""
    yield from _optimizer(settings, name, role)
    yield from _rates(name, role)
    yield from _schedule(name, role)


def _optimizer(settings: DeepSpeedConfig, name: str, role: LearnerConfig) -> Iterator[Fault]:
    chosen, where = role.training_args.optimizer, f"{name}.training_args.optimizer"
    zero = settings.zero_optimization
    if chosen in REMOVED_OPTIMIZERS:
        problem = f"'{chosen}', but DeepSpeed 0.19 no longer has 1-bit optimizers"
        yield Fault(
            where, problem, "use adamw; to reduce communication, see ZeRO++ in docs/deepspeed.md", "not_supported"
        )
    if chosen == "muon":
        yield from _muon(settings, where)
    if chosen == "adamw_8bit" and not role.device_mapping:
        problem = "'adamw_8bit' keeps its states on a GPU, but the role has no device_mapping"
        yield Fault(where, problem, "use adamw, or give it GPUs", "not_supported")
    elif chosen == "adamw_8bit" and zero.offload_optimizer and zero.offload_optimizer.device != "none":
        problem = (
            f"'adamw_8bit' keeps its states on a GPU, but offload_optimizer.device is {zero.offload_optimizer.device}"
        )
        yield Fault(where, problem, "use adamw, or remove offload_optimizer", "not_supported")


def _muon(settings: DeepSpeedConfig, where: str) -> Iterator[Fault]:
    """Yield faults of settings under which a rank cannot get whole matrices for Muon."""
    zero = settings.zero_optimization
    if settings.tensor_parallel_size > 1:
        problem = "'muon' updates whole matrices, but tensor_parallel.autotp_size splits them"
        yield Fault(where, problem, "use adamw, or remove autotp_size", "not_supported")
    if settings.expert_parallel_size > 1:
        problem = "'muon', but expert_parallel.autoep_size divides experts, and the two were not tested together"
        yield Fault(where, problem, "use adamw, or remove expert_parallel", "not_supported")
    if zero.memory.optimizer_on == "nvme":
        problem = "'muon', but offload_optimizer.device is nvme, and the two were not tested together"
        yield Fault(where, problem, "use adamw, or set offload_optimizer.device to cpu", "not_supported")


def _rates(name: str, role: LearnerConfig) -> Iterator[Fault]:
    arguments, where = role.training_args, f"{name}.training_args"
    if arguments.lora_learning_rate is not None and role.model_args.lora_target is None:
        problem = f"{arguments.lora_learning_rate}, but {name}.model_args.lora_target is not set"
        yield Fault(f"{where}.lora_learning_rate", problem, "remove it, or set lora_target", "owner_missing")
    if arguments.loraplus_lr_ratio is not None and role.model_args.lora_target is None:
        problem = f"{arguments.loraplus_lr_ratio:g}, but {name}.model_args.lora_target is not set"
        yield Fault(f"{where}.loraplus_lr_ratio", problem, "remove it, or set lora_target", "owner_missing")


def _schedule(name: str, role: LearnerConfig) -> Iterator[Fault]:
    kind, given = role.training_args.lr_scheduler_type, role.training_args.lr_scheduler_kwargs
    where = f"{name}.training_args.lr_scheduler"
    if kind in BY_METRIC:
        problem = f"'{kind}' follows an evaluation loss, which roll does not compute during training"
        yield Fault(f"{where}_type", problem, f"use one of: {', '.join(SCHEDULES)}", "not_supported")
        return
    for key, value in given.items():
        if key not in SCHEDULES[kind]:
            known = ", ".join(SCHEDULES[kind]) or "no further argument"
            problem = f"{value!r}, but '{kind}' has no argument {key}{nearest(key, list(SCHEDULES[kind]))}"
            yield Fault(f"{where}_kwargs.{key}", problem, f"remove it; '{kind}' accepts {known}", "unknown_key")
        elif not SCHEDULES[kind][key].holds(value):
            yield Fault(
                f"{where}_kwargs.{key}",
                f"{value!r} is not allowed",
                f"set it to {SCHEDULES[kind][key].said}",
                "not_allowed",
            )
    needed = NEEDED.get(kind, ())
    if needed and not any(key in given for key in needed):
        yield Fault(
            f"{where}_kwargs",
            f"{dict(given)}, but '{kind}' needs {' or '.join(needed)}",
            f"set {needed[-1]}",
            "missing",
        )
    elif len(needed) > 1 and all(key in given for key in needed):
        yield Fault(
            f"{where}_kwargs", f"{dict(given)} has both {' and '.join(needed)}", "set only one of the two", "exclusive"
        )
    yield from _bounds(name, role)


def own_rates(training: TrainingConfig) -> list[str]:
    """Return the keys, with their values as text, that give some parameters another rate than `learning_rate`."""
    keys = ("lora_learning_rate", "loraplus_lr_ratio")
    return [f"{key} of {value:g}" for key in keys if (value := getattr(training, key)) is not None]


def _bounds(name: str, role: LearnerConfig) -> Iterator[Fault]:
    """Yield faults of a final learning rate and of a warm-up.

    The final learning rate must be below the initial one, and apply to the rates of an adapter too. `constant` has no
    warm-up.
    """
    arguments, where = role.training_args, f"{name}.training_args"
    kind, given, rate = arguments.lr_scheduler_type, arguments.lr_scheduler_kwargs, arguments.learning_rate
    key = "lr_end" if kind == "polynomial" else "min_lr"
    least = given.get(key, LR_END if kind == "polynomial" else None)
    if isinstance(least, int | float) and key in SCHEDULES[kind]:
        if key == "min_lr" and (others := own_rates(arguments)):
            problem = f"{least:g}, but there is also a {others[0]}, to whose rates this bound does not apply"
            yield Fault(
                f"{where}.lr_scheduler_kwargs.min_lr",
                problem,
                "set min_lr_rate instead, which is a fraction of each",
                "exclusive",
            )
        elif least >= rate:
            problem = f"{least:g}, but learning_rate is {rate:g}"
            yield Fault(f"{where}.lr_scheduler_kwargs.{key}", problem, "set it below learning_rate", "not_below")
    if kind == "OneCycle" and (others := own_rates(arguments)):
        problem = f"'{kind}', but there is also a {others[0]}, and this schedule gives all parameters the same rate"
        yield Fault(f"{where}.lr_scheduler_type", problem, "use another schedule, or remove the other key", "exclusive")
    if kind in ("constant", "OneCycle") and (arguments.warmup_steps or arguments.warmup_ratio):
        warmup = (
            f"warmup_steps is {arguments.warmup_steps}"
            if arguments.warmup_steps
            else f"warmup_ratio is {arguments.warmup_ratio:g}"
        )
        yield Fault(
            f"{where}.lr_scheduler_type",
            f"'{kind}', but {warmup}",
            "use constant_with_warmup, or remove the warm-up",
            "contradiction",
        )


def _router_loss(name: str, role: LearnerConfig, shape: ModelShape | None) -> Iterator[Fault]:
    where, coefficient = f"{name}.training_args.router_aux_loss_coef", role.training_args.router_aux_loss_coef
    if coefficient is None:
        return
    if shape and shape.experts is None:
        yield Fault(where, f"{coefficient:g}, but the model has no experts, and so no router", "remove it", "no_effect")
    if role.model_args.dtype == "fp16":
        problem = f"{coefficient:g}, but dtype is fp16, whose loss scale is not applied to the routers' loss"
        yield Fault(where, problem, f"set {name}.model_args.dtype to bf16, or remove this key", "not_supported")
    if (size := role.strategy_args.traits.sequence_parallel) > 1:
        problem = f"{coefficient:g}, but sequence_parallel_size is {size}: a rank sees only a part of the routing"
        yield Fault(where, problem, "set only one of the two", "exclusive")


def _expert_adapter(name: str, role: LearnerConfig, shape: ModelShape | None) -> Iterator[Fault]:
    given, remedy = role.model_args, "set lora_target to q_proj,k_proj,v_proj,o_proj"
    if not (shape and shape.experts and given.lora_target == "all-linear"):
        return
    if given.lora_dropout:
        problem = f"{given.lora_dropout:g}, but lora_target all-linear adapts experts, where PEFT has no dropout"
        yield Fault(f"{name}.model_args.lora_dropout", problem, f"set it to 0, or {remedy}", "not_supported")
    for key, value in variants(given).items():
        problem = f"{value}, but lora_target all-linear adapts experts, where PEFT has no such adapter"
        yield Fault(f"{name}.model_args.{key}", problem, f"remove it, or {remedy}", "not_supported")
