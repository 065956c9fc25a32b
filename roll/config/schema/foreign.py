"""Backends and keys in files of ROLL that roll does not support, with replacements."""

from __future__ import annotations

from collections.abc import Mapping

TRAINS = (
    "use deepspeed_train, with strategy_config: ${deepspeed_zero3} and ../config/deepspeed_zero3@_here_ in `defaults`"
)
SCORES = (
    "use hf_infer, or deepspeed_infer with strategy_config: ${deepspeed_zero3} for a model that does not fit on one GPU"
)
STRATEGIES: Mapping[str, tuple[str, str]] = {
    "megatron_train": ("Megatron", TRAINS),
    "megatron_infer": ("Megatron", SCORES),
    "fsdp2_train": ("FSDP2", TRAINS),
    "fsdp2_infer": ("FSDP2", SCORES),
    "sglang": ("SGLang", "use vllm"),
}
"""By strategy name, the backend that roll does not support, and its replacement."""

SHARDED = "use ZeRO-3, tensor_parallel or sequence_parallel_size"
REMOVED = "remove it; docs/deepspeed.md lists what is supported"
MEGATRON_KEYS: Mapping[str, str] = {
    "tensor_model_parallel_size": "use tensor_parallel: {autotp_size: ...}",
    "sequence_parallel": "use sequence_parallel_size",
    "context_parallel_size": "use sequence_parallel_size",
    "pipeline_model_parallel_size": SHARDED,
    "virtual_pipeline_model_parallel_size": SHARDED,
    "expert_model_parallel_size": SHARDED,
    "expert_tensor_parallel_size": SHARDED,
    "use_distributed_optimizer": "remove it; ZeRO shards the optimizer states from stage 1 on",
    "overlap_grad_reduce": "use zero_optimization: {overlap_comm: ...}",
    "overlap_param_gather": "use zero_optimization: {overlap_comm: ...}",
    "recompute_granularity": "use model_args.gradient_checkpointing",
    "recompute_method": "use model_args.gradient_checkpointing",
    "recompute_num_layers": "use model_args.gradient_checkpointing",
    "moe_token_dispatcher_type": REMOVED,
    "moe_grouped_gemm": REMOVED,
    "moe_layer_recompute": REMOVED,
    "moe_shared_expert_overlap": REMOVED,
    "variable_seq_lengths": REMOVED,
    "bias_activation_fusion": REMOVED,
    "apply_rope_fusion": REMOVED,
    "use_precision_aware_optimizer": REMOVED,
    "main_grads_dtype": REMOVED,
    "optimizer_cpu_offload": "use zero_optimization: {offload_optimizer: {device: cpu}}",
    "optimizer_offload_fraction": "use zero_optimization: {offload_optimizer: {device: cpu}}",
}
"""Keys of Megatron's `strategy_config`, with their replacements in that of DeepSpeed."""
