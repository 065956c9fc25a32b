"""Keys of the configuration of DeepSpeed 0.19: those that are passed on, and those that are refused, with the
reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roll.config.schema.kinds import BLOCK, COUNT, FLAG, NUMBER, PRECISION, SIZE, ValueKind
from roll.errors import Fault
from roll.registry import nearest

STAGES = (
    "DeepSpeed reads it only for a PipelineModule (a list of layers); for a transformers model it ignores it and "
    "trains without stages"
)
EXPERTS = (
    "DeepSpeed's AutoEP finds no experts in models as roll loads them: it ignores the block, and every rank keeps "
    "all experts"
)
OTHER_PROGRAM = "it is a key of Accelerate, which roll does not use"
TENSORS = "use tensor_parallel: {autotp_size: ...}"
SHARD = "use ZeRO-3, tensor_parallel or sequence_parallel_size"
SHARDS_AT_LOAD = ("with stage 3 a model is always sharded as it loads", "zero_optimization.stage is enough")
TRACKERS = ("roll has its own trackers", "use track_with")

REFUSED: Mapping[str, tuple[str, str]] = {
    "pipeline": (STAGES, SHARD),
    "pipeline_parallel_size": (STAGES, SHARD),
    "expert_parallel": (EXPERTS, SHARD),
    "autotp_size": ("it belongs in the block tensor_parallel", TENSORS),
    "tensor_parallel_size": ("that is vLLM's key", TENSORS),
    "optimizer": (
        "the role creates its optimizer",
        "use training_args.optimizer, learning_rate, weight_decay, adam_beta1, ...",
    ),
    "scheduler": ("the role creates its schedule", "use training_args.lr_scheduler_type and warmup_steps"),
    "tensorboard": TRACKERS,
    "wandb": TRACKERS,
    "comet": TRACKERS,
    "csv_monitor": TRACKERS,
    **dict.fromkeys(
        (
            "prescale_gradients",
            "gradient_predivide_factor",
            "sparse_gradients",
            "flops_profiler",
            "comms_logger",
            "dump_state",
            "memory_breakdown",
            "elasticity",
            "curriculum_learning",
            "data_efficiency",
            "compression_training",
            "hybrid_engine",
            "compile",
            "autotuning",
            "disable_allgather",
            "seq_parallel_communication_data_type",
        ),
        (
            "it is not passed on to DeepSpeed, because roll has not been tested with it",
            "docs/deepspeed.md lists the supported keys",
        ),
    ),
    "amp": ("model_args.dtype sets the precision", "set model_args.dtype to fp16 or bf16"),
    "torch_autocast": ("model_args.dtype sets the precision", "set model_args.dtype to fp16 or bf16"),
    "zero_stage": (OTHER_PROGRAM, "use zero_optimization: {stage: ...}"),
    "zero3_init_flag": SHARDS_AT_LOAD,
    "zero3_save_16bit_model": ("the whole model is always exported, in its dtype", "see save_at_end"),
    "offload_optimizer_device": (OTHER_PROGRAM, "use zero_optimization: {offload_optimizer: {device: ...}}"),
    "offload_param_device": (OTHER_PROGRAM, "use zero_optimization: {offload_param: {device: ...}}"),
    "offload_optimizer_nvme_path": (OTHER_PROGRAM, "use zero_optimization: {offload_optimizer: {nvme_path: ...}}"),
    "offload_param_nvme_path": (OTHER_PROGRAM, "use zero_optimization: {offload_param: {nvme_path: ...}}"),
    "deepspeed_multinode_launcher": (OTHER_PROGRAM, "see docs/clusters.md"),
    "deepspeed_config": (OTHER_PROGRAM, "put the blocks of DeepSpeed's configuration here"),
}
"""Refused keys at the top level, with reason and remedy."""

OLD_OFFLOAD = (
    "DeepSpeed has removed it",
    "use offload_optimizer: {device: cpu, pin_memory: true}, and offload_param likewise",
)
OLD_SHARDS = (
    "DeepSpeed 0.19 has removed it",
    "zero_hpz_partition_size keeps a second copy of the weights on each host",
)
FP32_MASTER = (
    "master weights and optimizer states are fp32 here",
    "to save their memory, offload them or shard them over more ranks",
)
ZERO_REFUSED: Mapping[str, tuple[str, str]] = {
    "cpu_offload": OLD_OFFLOAD,
    "cpu_offload_param": OLD_OFFLOAD,
    "cpu_offload_use_pin_memory": OLD_OFFLOAD,
    "mics_shard_size": OLD_SHARDS,
    "mics_hierarchical_params_gather": OLD_SHARDS,
    "zeropp_loco_param": ("DeepSpeed 0.19 has removed it", "zero_quantized_gradients works without it"),
    "legacy_stage1": ("DeepSpeed has removed this implementation of stage 1", "stage: 1 uses its successor"),
    "elastic_checkpoint": (
        "a checkpoint moves to another number of ranks in the universal format",
        "see `python -m roll.export`",
    ),
    "zenflow": ("it requires its own optimizer", "use offload_optimizer"),
    "save_muon_momentum_buffer_in_memory": (
        "it belongs to DeepSpeed's Muon",
        "training_args.optimizer: muon uses torch's Muon",
    ),
    "stage3_module_granularity_threshold": (
        "the first backward pass failed with it in tests",
        "use leaf_module, which lists the modules",
    ),
    "zero3_init_flag": SHARDS_AT_LOAD,
    "zero3_init": SHARDS_AT_LOAD,
}

ZERO: Mapping[str, ValueKind] = dict.fromkeys(
    (
        "contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce", "allgather_partitions",
        "overlap_comm",
        "load_from_fp32_weights", "compute_grad_norm", "stage3_gather_16bit_weights_on_model_save",
        "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
        "stage3_gather_fp16_weights_on_model_save",
        "ignore_unused_parameters", "round_robin_gradients", "parameter_alignment", "zero_quantized_weights",
        "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "memory_efficient_linear",
        "pipeline_loading_checkpoint",
        "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks",
    ),
    FLAG,
) | dict.fromkeys(
    (
        "allgather_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold", "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
    ),
    COUNT,
) | {"reduce_bucket_size": SIZE, "zero_hpz_partition_size": SIZE, "leaf_module": BLOCK}  # fmt: skip
"""Keys of `zero_optimization` that are not in the schema (`deepspeed/runtime/zero/config.py`), with their kinds."""
BF16: Mapping[str, ValueKind] = {"enabled": FLAG, "immediate_grad_update": FLAG, "check_grad_overflow": FLAG}
BF16_REFUSED: Mapping[str, tuple[str, str]] = {
    "bf16_master_weights_and_grads": FP32_MASTER,
    "bf16_optimizer_states": FP32_MASTER,
}
FP16: Mapping[str, ValueKind] = {
    "enabled": FLAG,
    "loss_scale": NUMBER,
    "initial_scale_power": COUNT,
    "loss_scale_window": SIZE,
    "hysteresis": SIZE,
    "consecutive_hysteresis": FLAG,
    "min_loss_scale": SIZE,
}
FP16_REFUSED: Mapping[str, tuple[str, str]] = {
    "fp16_master_weights_and_grads": FP32_MASTER,
    "auto_cast": ("inputs are token ids, which cannot be cast", "model_args.dtype sets the precision"),
    "opt_level": ("it is an option of Apex", "model_args.dtype sets the precision"),
}
AIO: Mapping[str, ValueKind] = {
    "block_size": SIZE,
    "queue_depth": SIZE,
    "intra_op_parallelism": SIZE,
    "single_submit": FLAG,
    "overlap_events": FLAG,
}
AIO_REFUSED: Mapping[str, tuple[str, str]] = {
    "thread_count": ("DeepSpeed 0.19 no longer reads it", "use intra_op_parallelism"),
    "use_gds": ("roll has not been tested with it", "libaio is used for swapping"),
}
DATA_TYPES: Mapping[str, ValueKind] = {"grad_accum_dtype": PRECISION}
BLOCKS: Mapping[str, tuple[Mapping[str, ValueKind], Mapping[str, tuple[str, str]]]] = {
    "zero_optimization": (ZERO, ZERO_REFUSED),
    "bf16": (BF16, BF16_REFUSED),
    "fp16": (FP16, FP16_REFUSED),
    "aio": (AIO, AIO_REFUSED),
    "data_types": (DATA_TYPES, {}),
}
"""By block, the kinds of its keys and its refused keys."""


def block_faults(
    where: str, given: Mapping[str, Any], kinds: Mapping[str, ValueKind], refused: Mapping[str, tuple[str, str]]
) -> Iterator[Fault]:
    """Yield faults of unknown keys, refused keys and values of the wrong kind.

    The value `auto`, DeepSpeed's own choice, is valid for every key.
    """
    for key, value in given.items():
        said = str(value).lower() if isinstance(value, bool) else repr(value)
        if key in refused:
            why, instead = refused[key]
            yield Fault(f"{where}.{key}", f"{said}, but {why}", f"remove it; {instead}")
        elif key not in kinds:
            near = nearest(key, list(kinds))
            remedy = "correct the name, or remove the key" if near else f"known keys of this block: {', '.join(kinds)}"
            yield Fault(f"{where}.{key}", f"unknown key, with the value {said}{near}", remedy)
        elif value != "auto" and not kinds[key].holds(value):
            yield Fault(
                f"{where}.{key}",
                f"{said} is not allowed",
                f"give {kinds[key].said}, or auto for DeepSpeed's own choice",
            )
