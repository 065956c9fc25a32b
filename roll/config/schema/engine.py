"""Keys of the backends: DeepSpeed's, vLLM's, and the strategies that carry them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from roll.config.schema.base import (
    MOST_RANKS,
    Fraction,
    Large,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Ranks,
    StrictConfig,
)


class ZeroOffloadConfig(StrictConfig):
    """DeepSpeed's offload of one kind of state."""

    device: Literal["none", "cpu", "nvme"] = Field("none", description="Where the states live.")
    pin_memory: bool = Field(False, description="Pin the host memory.")
    nvme_path: PathText | None = Field(None, description="Folder on the NVMe device.")
    buffer_count: PositiveInt | None = Field(None, description="Number of swap buffers.")
    buffer_size: Large | None = Field(
        None, description="`offload_param`: elements of a swap buffer; at least those of a rank's share of the largest tensor."
    )
    max_in_cpu: Large | None = Field(None, description="`offload_param` to NVMe: elements that stay in host memory.")
    pipeline_read: bool | None = Field(None, description="`offload_optimizer` to NVMe: read ahead.")
    pipeline_write: bool | None = Field(None, description="`offload_optimizer` to NVMe: write behind.")
    fast_init: bool | None = Field(None, description="Initialise on the NVMe device directly.")
    ratio: Fraction | None = Field(None, description="Share of the updates on the CPU; only 1 is accepted.")


class ZeroOptimizationConfig(StrictConfig):
    """DeepSpeed's `zero_optimization` block. Keys that roll does not read itself go through unchanged."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    stage: Literal[0, 1, 2, 3] = Field(
        description="What is partitioned over the ranks: 1 optimizer states, 2 also gradients, 3 also parameters."
    )
    offload_optimizer: ZeroOffloadConfig | None = Field(None, description="Keep optimizer states off the device.")
    offload_param: ZeroOffloadConfig | None = Field(None, description="Keep parameters off the device (stage 3).")


class TensorParallelConfig(StrictConfig):
    """DeepSpeed's `tensor_parallel` block (AutoTP). What is shared out is what the model's own plan in transformers names."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    autotp_size: NonNegativeInt = Field(
        le=MOST_RANKS,
        description="`deepspeed_train`: so many neighbouring ranks are a replica, which shares the linear layers of the model out; "
        "0 and 1 share nothing. See docs/deepspeed.md for what it goes with.",
    )
    tp_overlap_comm: bool = Field(False, description="In the backward pass, add gradients up over the replica while others are computed.")


class DeepSpeedConfig(StrictConfig):
    """DeepSpeed's own configuration. Precision, batch sizes and clipping come from the role's other keys."""

    zero_optimization: ZeroOptimizationConfig = Field(description="The ZeRO block.")
    bf16: dict[str, Any] | None = Field(None, description="Must agree with `model_args.dtype` if given.")
    fp16: dict[str, Any] | None = Field(None, description="Must agree with `model_args.dtype` if given; also sets the loss scaler.")
    gradient_clipping: NonNegativeFloat | Literal["auto"] | None = Field(None, description="Must agree with `max_grad_norm` if given.")
    train_micro_batch_size_per_gpu: PositiveInt | Literal["auto"] | None = Field(
        None, description="Must agree with `per_device_train_batch_size` if given."
    )
    gradient_accumulation_steps: PositiveInt | Literal["auto"] | None = Field(None, description="Must agree with `training_args` if given.")
    train_batch_size: PositiveInt | Literal["auto"] | None = Field(
        None, description="Must agree with the plan's batch arithmetic if given."
    )
    steps_per_print: PositiveInt | None = Field(None, description="DeepSpeed's own progress line, every so many steps.")
    wall_clock_breakdown: bool = Field(False, description="DeepSpeed's own timers.")
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = Field(None, description="Precision of gradient reduction.")
    data_types: dict[str, Any] | None = Field(None, description="DeepSpeed's `data_types` block (`grad_accum_dtype`).")
    activation_checkpointing: dict[str, Any] | None = Field(None, description="DeepSpeed's block of this name.")
    aio: dict[str, Any] | None = Field(None, description="Asynchronous NVMe I/O.")
    tensor_parallel: TensorParallelConfig | None = Field(None, description="Tensor parallelism (AutoTP).")
    zero_allow_untested_optimizer: Literal[True] | None = Field(None, description="True also where not given: roll makes the optimizer.")
    sequence_parallel_size: Ranks = Field(
        1,
        description="`deepspeed_train`: DeepSpeed-Ulysses. So many neighbouring ranks are a replica: they share the tokens of each "
        "micro-batch out, and its activations. `max_tokens_per_microbatch` and `per_device_train_batch_size` are a replica's.",
    )
    zero_force_ds_cpu_optimizer: Literal[False] | None = Field(None, description="False also where not given, for the same reason.")

    @property
    def tensor_parallel_size(self) -> int:
        """Return the number of ranks that shard the model's linear layers."""
        return max(1, self.tensor_parallel.autotp_size) if self.tensor_parallel else 1


class VllmConfig(StrictConfig):
    """The engine. `engine_args` hands anything else to vLLM's `AsyncEngineArgs`."""

    tensor_parallel_size: Ranks = Field(1, description="Devices that share one engine's layers.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="Share of a device's memory that the engine may take."
    )
    kv_cache_gib: PositiveFloat = Field(1.0, description="On the CPU: GiB of memory for the KV cache.")
    max_model_len: PositiveInt | None = Field(
        None, description="Longest prompt + response, or episode; if not given, the longest that the experiment allows."
    )
    max_num_seqs: PositiveInt = Field(512, description="Sequences that generate at the same time.")
    max_num_batched_tokens: PositiveInt = Field(
        8192, description="Tokens of one engine step; on the CPU at least `max_model_len`, as no prompt is split over two steps there."
    )
    block_size: PositiveInt | None = Field(None, description="Tokens of one KV-cache block; vLLM's choice if not given.")
    enforce_eager: bool = Field(False, description="Do not compile or capture graphs; starts faster, generates slower.")
    enable_prefix_caching: bool = Field(
        True, description="Share the KV cache of common prefixes: the samples of a group share their prompt."
    )
    load_format: Literal["auto", "dummy", "safetensors"] = Field(
        "auto", description="How the engine first loads weights. `dummy` skips the load; the first weight sync then brings them."
    )
    disable_custom_all_reduce: bool = Field(False, description="Tensor parallelism: use NCCL's all-reduce.")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="Further arguments of `AsyncEngineArgs`.")


class HfConfig(StrictConfig):
    """transformers on one device per worker; nothing to set beyond the role's own keys."""


class DeepSpeedTrainStrategyConfig(StrictConfig):
    """Trains with DeepSpeed."""

    strategy_name: Literal["deepspeed_train"] = Field(description="Trains with DeepSpeed ZeRO-0 to 3.")
    strategy_config: DeepSpeedConfig = Field(description="DeepSpeed's configuration; usually `${deepspeed_zero3}`.")


class DeepSpeedInferStrategyConfig(StrictConfig):
    """Log-probs of a model that ZeRO-3 shards over the role's devices."""

    strategy_name: Literal["deepspeed_infer"] = Field(description="Log-probs of a model sharded by ZeRO-3.")
    strategy_config: DeepSpeedConfig = Field(description="DeepSpeed's configuration; stage 3.")


class HfInferStrategyConfig(StrictConfig):
    """Log-probs, and generation for machines without vLLM."""

    strategy_name: Literal["hf_infer"] = Field(description="transformers: log-probs, and generation where vLLM cannot run.")
    strategy_config: HfConfig = Field(default_factory=HfConfig, description="Has no keys.")


class VllmStrategyConfig(StrictConfig):
    """Generation with vLLM."""

    strategy_name: Literal["vllm"] = Field(description="Generates with vLLM.")
    strategy_config: VllmConfig = Field(default_factory=lambda: VllmConfig.model_validate({}), description="The engine's settings.")


StrategyConfig = Annotated[
    DeepSpeedTrainStrategyConfig | DeepSpeedInferStrategyConfig | HfInferStrategyConfig | VllmStrategyConfig,
    Field(discriminator="strategy_name"),
]
