"""Faults in DeepSpeed's configuration and in the optimizer's keys: exit status 2, with place, value and remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

TRAIN = "actor_train.training_args"
DEEPSPEED = "deepspeed_zero3"
ZERO = f"{DEEPSPEED}.zero_optimization"
ULYSSES = "actor_train.strategy_args.strategy_config.sequence_parallel_size"
SCORING = "reference.strategy_args"
INFER = "strategy_name: deepspeed_infer, strategy_config: {zero_optimization: {stage: 3}, sequence_parallel_size: 2}"

CASES = [
    ([f"{DEEPSPEED}.bf16.check_grad_overflow=false"], "strategy_config.bf16.check_grad_overflow", "false", "remove it"),
    ([f"{ZERO}.compute_grad_norm=false"], "zero_optimization.compute_grad_norm", "false", "remove it"),
    ([f"{ZERO}.stage=1"], "zero_optimization.overlap_comm", "true, but on stage 1", "use stage 2 or 3"),
    (
        [f"+{ZERO}.mics_shard_size=2"],
        "zero_optimization.mics_shard_size",
        "2, but DeepSpeed 0.19 has removed it",
        "remove it",
    ),
    (
        [f"+{ZERO}.zero_quantized_weights=true"],
        "zero_optimization.zero_quantized_weights",
        "no device_mapping",
        "remove it",
    ),
    (
        [f"+{ZERO}.zero_quantized_gradients=true", f"{ZERO}.stage=2", "actor_train.device_mapping=[0]"],
        "zero_optimization.zero_quantized_gradients",
        "stage 2",
        "use stage 3",
    ),
    (
        [
            f"+{ZERO}.zero_quantized_gradients=true",
            "actor_train.device_mapping=[0]",
            "+actor_train.model_args.lora_target=all-linear",
        ],
        "zero_optimization.zero_quantized_gradients",
        "an adapter's gradients",
        "train all parameters",
    ),
    (
        ["actor_train.model_args.dtype=fp16"],
        "actor_train.model_args.dtype",
        "trains on the CPU",
        "set it to fp32 or bf16",
    ),
    (
        [f"{ZERO}.sub_group_size=lots"],
        "zero_optimization.sub_group_size",
        "'lots' is not allowed",
        "a whole number, at least 0, or auto",
    ),
    ([f"{ZERO}.contiguous_gradients=maybe"], "zero_optimization.contiguous_gradients", "'maybe'", "true or false"),
    (
        [f"+{ZERO}.round_robin_gradient=true"],
        "zero_optimization.round_robin_gradient",
        "did you mean 'round_robin_gradients'",
        "correct the name",
    ),
    (
        [f"+{ZERO}.cpu_offload=true"],
        "zero_optimization.cpu_offload",
        "true, but DeepSpeed has removed it",
        "offload_optimizer: {device: cpu",
    ),
    ([f"+{ZERO}.zero3_init=true"], "zero_optimization.zero3_init", "always sharded as it loads", "remove it"),
    ([f"+{ZERO}.zero_hpz_partition_size=two"], "zero_optimization.zero_hpz_partition_size", "'two'", "at least 1"),
    (
        [f"+{ZERO}.zero_hpz_partition_size=0"],
        "zero_optimization.zero_hpz_partition_size",
        "0 is not allowed",
        "at least 1",
    ),
    (
        [f"+{ZERO}.offload_optimizer={{device: cpu, ratio: 0.5}}"],
        "offload_optimizer.ratio",
        "learning rate schedule",
        "remove it",
    ),
    (
        [f"+{ZERO}.offload_optimizer={{device: cpu, buffer_size: 9}}"],
        "offload_optimizer.buffer_size",
        "9, but DeepSpeed has",
        "remove it",
    ),
    ([f"+{DEEPSPEED}.fp16.colour=9"], "strategy_config.fp16.colour", "unknown key, with the value 9", "hysteresis"),
    (
        [f"+{DEEPSPEED}.fp16.loss_scale_windw=9"],
        "strategy_config.fp16.loss_scale_windw",
        "did you mean 'loss_scale_window'",
        "correct the name",
    ),
    ([f"{DEEPSPEED}.bf16.enabled=sometimes"], "strategy_config.bf16.enabled", "'sometimes'", "true or false"),
    (
        [f"+{DEEPSPEED}.bf16.bf16_optimizer_states=true"],
        "strategy_config.bf16.bf16_optimizer_states",
        "fp32",
        "offload them",
    ),
    ([f"+{DEEPSPEED}.aio={{thread_count: 1}}"], "strategy_config.aio.thread_count", "1, but", "intra_op_parallelism"),
    (
        [f"+{DEEPSPEED}.aio={{use_gds: true}}"],
        "strategy_config.aio.use_gds",
        "roll has not been tested with it",
        "remove it",
    ),
    (
        [f"+{ZERO}.stage3_module_granularity_threshold=9"],
        "stage3_module_granularity_threshold",
        "backward pass failed",
        "leaf_module",
    ),
    ([f"+{DEEPSPEED}.aio={{block_size: big}}"], "strategy_config.aio.block_size", "'big'", "at least 1"),
    (
        [f"+{DEEPSPEED}.data_types={{grad_accum_dtype: fp12}}"],
        "data_types.grad_accum_dtype",
        "'fp12'",
        "fp32, fp16 or bf16",
    ),
    (
        [f"+{DEEPSPEED}.data_types={{grad_accum_dtype: bf16}}"],
        "data_types.grad_accum_dtype",
        "'bf16', but fp32 gradients",
        "remove it",
    ),
    (
        [f"+{DEEPSPEED}.data_types={{grad_accum_dtype: fp32}}", "actor_train.model_args.dtype=bf16", f"{ZERO}.stage=1"],
        "data_types.grad_accum_dtype",
        "'fp32', but bf16 gradients",
        "use stage 2 or 3",
    ),
    (
        [f"+{DEEPSPEED}.optimizer={{type: Adam}}"],
        "strategy_config.optimizer",
        "the role creates its optimizer",
        "training_args.optimizer",
    ),
    (
        [f"+{DEEPSPEED}.scheduler={{type: WarmupLR}}"],
        "strategy_config.scheduler",
        "the role creates",
        "lr_scheduler_type",
    ),
    (
        [f"+{DEEPSPEED}.tensorboard={{enabled: true}}"],
        "strategy_config.tensorboard",
        "roll has its own trackers",
        "track_with",
    ),
    ([f"+{DEEPSPEED}.zero3_init_flag=true"], "strategy_config.zero3_init_flag", "sharded as it loads", "remove it"),
    ([f"+{DEEPSPEED}.prescale_gradients=false"], "strategy_config.prescale_gradients", "not passed on", "remove it"),
    (
        [f"+{ZERO}.zero_hpz_partition_size=4"],
        "zero_optimization.zero_hpz_partition_size",
        "4 ranks would share",
        "one host",
    ),
    (
        [f"+{ZERO}.offload_param={{device: nvme, nvme_path: swap}}"],
        "offload_param.nvme_path",
        "'swap' is relative",
        "absolute",
    ),
    (
        [f"+{ZERO}.offload_optimizer={{device: nvme, nvme_path: /swap}}", f"{ZERO}.stage=2"],
        "offload_optimizer.device",
        "stage 2 does not swap",
        "cpu",
    ),
    (
        [f"+{DEEPSPEED}.activation_checkpointing.partition_activations=true"],
        "activation_checkpointing.partition_activations",
        "no two ranks have the same activations",
        "cpu_checkpointing",
    ),
    (
        [f"+{DEEPSPEED}.activation_checkpointing.cpu_checkpointing=9"],
        "activation_checkpointing.cpu_checkpointing",
        "9",
        "true or false",
    ),
    (
        [f"+{DEEPSPEED}.activation_checkpointing.number_checkpoints=4"],
        "activation_checkpointing.number_checkpoints",
        "torch recomputes",
        "gradient_checkpointing",
    ),
    (
        [
            f"+{DEEPSPEED}.activation_checkpointing.cpu_checkpointing=true",
            "actor_train.model_args.gradient_checkpointing=none",
        ],
        "activation_checkpointing.cpu_checkpointing",
        "is none",
        "gradient_checkpointing=auto",
    ),
    (
        [f"{DEEPSPEED}.sequence_parallel_size=2"],
        ULYSSES,
        "2, but actor_train has 1 rank(s)",
        "give a divisor of the ranks",
    ),
    (
        [f"{DEEPSPEED}.sequence_parallel_size=4", "actor_train.device_mapping=[0,1,2,3,4,5]"],
        ULYSSES,
        "6 rank(s)",
        "change device_mapping",
    ),
    (
        [f"{DEEPSPEED}.sequence_parallel_size=3", "actor_train.world_size=3"],
        ULYSSES,
        "4 attention heads",
        "set it to a divisor of 4",
    ),
    ([f"{DEEPSPEED}.sequence_parallel_size=0"], ULYSSES, "0", "give a number above 0"),
    (
        [f"+{SCORING}={{{INFER}}}"],
        f"{SCORING}.strategy_config.sequence_parallel_size",
        "whole sequences on each rank",
        "deepspeed_train",
    ),
    (
        ["actor_infer.strategy_args.strategy_config.sequence_parallel_size=2"],
        "strategy_config.sequence_parallel_size",
        "2",
        "tensor_parallel_size",
    ),
    (
        [f"{DEEPSPEED}.sequence_parallel_size=2", "actor_train.world_size=2", "+actor_train.model_args.ulysses_size=4"],
        "actor_train.model_args.ulysses_size",
        "4, but actor_train.strategy_args.strategy_config.sequence_parallel_size is 2",
        "remove it",
    ),
    ([f"{TRAIN}.optimizer=sgd"], f"{TRAIN}.optimizer", "sgd", "'adamw'"),
    ([f"{TRAIN}.optimizer=muon"], f"{TRAIN}.optimizer", "stage 3 gives each rank a flat part", "stage 0"),
    ([f"{TRAIN}.optimizer=onebit_adam"], f"{TRAIN}.optimizer", "no longer has 1-bit optimizers", "ZeRO++"),
    ([f"{TRAIN}.optimizer=adamw_8bit"], f"{TRAIN}.optimizer", "no device_mapping", "use adamw"),
    (
        [f"{TRAIN}.optimizer=adamw_8bit", f"+{ZERO}.offload_optimizer.device=cpu", "actor_train.device_mapping=[0]"],
        f"{TRAIN}.optimizer",
        "is cpu",
        "offload_optimizer",
    ),
    ([f"{TRAIN}.lora_learning_rate=1e-4"], f"{TRAIN}.lora_learning_rate", "0.0001", "lora_target"),
    (
        [f"{TRAIN}.lr_scheduler_type=greedy"],
        f"{TRAIN}.lr_scheduler_type",
        "follows an evaluation loss",
        "warmup_stable_decay",
    ),
    (
        [f"{TRAIN}.lr_scheduler_kwargs={{min_lr: 1}}"],
        f"{TRAIN}.lr_scheduler_kwargs.min_lr",
        "'linear' has no argument",
        "no further",
    ),
    (
        [f"{TRAIN}.lr_scheduler_type=cosine_with_min_lr"],
        f"{TRAIN}.lr_scheduler_kwargs",
        "min_lr or min_lr_rate",
        "set min_lr_rate",
    ),
    (
        [
            f"{TRAIN}.lr_scheduler_type=cosine_with_min_lr",
            f"{TRAIN}.lr_scheduler_kwargs={{min_lr: 1e-7, min_lr_rate: 0.1}}",
        ],
        f"{TRAIN}.lr_scheduler_kwargs",
        "both min_lr and min_lr_rate",
        "one of the two",
    ),
    (
        [f"{TRAIN}.lr_scheduler_type=cosine_with_min_lr", f"{TRAIN}.lr_scheduler_kwargs={{min_lr: 1e-5}}"],
        f"{TRAIN}.lr_scheduler_kwargs.min_lr",
        "1e-05, but learning_rate is 1e-06",
        "set it below learning_rate",
    ),
    (
        [
            f"{TRAIN}.lr_scheduler_type=cosine_with_min_lr",
            f"{TRAIN}.lr_scheduler_kwargs={{min_lr: 1e-7}}",
            f"{TRAIN}.lora_learning_rate=1e-4",
            "+actor_train.model_args.lora_target=all-linear",
            "+actor_infer.model_args.lora_target=all-linear",
        ],
        f"{TRAIN}.lr_scheduler_kwargs.min_lr",
        "a lora_learning_rate of 0.0001",
        "min_lr_rate",
    ),
    (
        [f"{TRAIN}.lr_scheduler_type=polynomial", f"{TRAIN}.lr_scheduler_kwargs={{power: two}}"],
        f"{TRAIN}.lr_scheduler_kwargs.power",
        "'two' is not allowed",
        "a number",
    ),
    (
        [f"{TRAIN}.lr_scheduler_type=polynomial", f"{TRAIN}.learning_rate=1e-8"],
        f"{TRAIN}.lr_scheduler_kwargs.lr_end",
        "1e-07",
        "below",
    ),
    (
        [
            f"{TRAIN}.lr_scheduler_type=warmup_stable_decay",
            f"{TRAIN}.lr_scheduler_kwargs={{num_decay_steps: 9, decay_type: sqrt}}",
        ],
        f"{TRAIN}.lr_scheduler_kwargs.decay_type",
        "'sqrt'",
        "linear, cosine or 1-sqrt",
    ),
    (
        [f"{TRAIN}.lr_scheduler_type=constant", f"{TRAIN}.warmup_steps=5"],
        f"{TRAIN}.lr_scheduler_type",
        "warmup_steps is 5",
        "_with_warmup",
    ),
    ([f"{TRAIN}.adam_beta2=1.0"], f"{TRAIN}.adam_beta2", "1.0 is not allowed", "below 1"),
    ([f"{TRAIN}.max_consecutive_skips=-1"], f"{TRAIN}.max_consecutive_skips", "-1", "at least 0"),
]


@pytest.mark.parametrize(
    ("overrides", "place", "value", "remedy"), CASES, ids=[" ".join(case[0])[:70] for case in CASES]
)
def test_a_bad_override_is_refused(
    refused: Callable[..., str], overrides: list[str], place: str, value: str, remedy: str
) -> None:
    message = refused(*overrides)
    faults = message.split("\n  ")
    said = [index for index, line in enumerate(faults) if f"{place}:" in line]
    assert said, message
    fault = "\n".join(faults[said[0] : said[0] + 2])
    assert value in fault, message
    assert remedy in fault, message
