"""Keys of the backends DeepSpeed, vLLM and transformers, and of the strategies that select them."""

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
    """DeepSpeed's offload of optimizer states or of parameters."""

    device: Literal["none", "cpu", "nvme"] = Field(
        "none", description="Where the states are kept; `none` keeps them on the GPU."
    )
    pin_memory: bool = Field(False, description="Use pinned (page-locked) host memory, which makes transfers faster.")
    nvme_path: PathText | None = Field(None, description="Folder on the NVMe device, for `device: nvme`.")
    buffer_count: PositiveInt | None = Field(
        None, description="Number of swap buffers; DeepSpeed's default if not given."
    )
    buffer_size: Large | None = Field(
        None,
        description="`offload_param`: size of a swap buffer in elements, at least a rank's shard of the largest "
        "tensor.",
    )
    max_in_cpu: Large | None = Field(
        None, description="`offload_param` to NVMe: number of elements that stay in host memory."
    )
    pipeline_read: bool | None = Field(
        None, description="`offload_optimizer` to NVMe: overlap reading the next states with the update."
    )
    pipeline_write: bool | None = Field(
        None, description="`offload_optimizer` to NVMe: overlap writing the last states with the update."
    )
    fast_init: bool | None = Field(None, description="`offload_optimizer` to NVMe: initialise the states faster.")
    ratio: Fraction | None = Field(
        None, description="Fraction of the optimizer updates that run on the CPU. Only 1 is accepted."
    )


class ZeroOptimizationConfig(StrictConfig):
    """DeepSpeed's block `zero_optimization`.

    Keys that roll does not read are passed on unchanged.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    stage: Literal[0, 1, 2, 3] = Field(
        description="What is sharded over the ranks. 0: nothing; 1: optimizer states; 2: also gradients; 3: also "
        "parameters."
    )
    offload_optimizer: ZeroOffloadConfig | None = Field(
        None, description="Keep optimizer states in host memory or on NVMe."
    )
    offload_param: ZeroOffloadConfig | None = Field(
        None, description="Keep parameters in host memory or on NVMe; needs stage 3."
    )


class TensorParallelConfig(StrictConfig):
    """DeepSpeed's block `tensor_parallel` (AutoTP).

    It shards the layers named in the model's tensor-parallel plan in transformers.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    autotp_size: NonNegativeInt = Field(
        le=MOST_RANKS,
        description="`deepspeed_train`: number of consecutive ranks that form a replica and shard the model's linear "
        "layers; 0 and 1 shard nothing. See docs/deepspeed.md for its requirements.",
    )
    tp_overlap_comm: bool = Field(
        False, description="Overlap the all-reduce of gradients over the replica with the backward pass."
    )


class DeepSpeedConfig(StrictConfig):
    """DeepSpeed's configuration.

    The role's other keys set precision, batch sizes and gradient clipping.
    """

    zero_optimization: ZeroOptimizationConfig = Field(description="Settings of ZeRO.")
    bf16: dict[str, Any] | None = Field(
        None, description="DeepSpeed's block of this name. Must agree with `model_args.dtype`."
    )
    fp16: dict[str, Any] | None = Field(
        None, description="DeepSpeed's block of this name, for the loss scale. Must agree with `model_args.dtype`."
    )
    gradient_clipping: NonNegativeFloat | Literal["auto"] | None = Field(
        None, description="Must agree with `max_grad_norm` if given."
    )
    train_micro_batch_size_per_gpu: PositiveInt | Literal["auto"] | None = Field(
        None, description="Must agree with `per_device_train_batch_size` if given."
    )
    gradient_accumulation_steps: PositiveInt | Literal["auto"] | None = Field(
        None, description="Must agree with `training_args` if given."
    )
    train_batch_size: PositiveInt | Literal["auto"] | None = Field(
        None, description="Must agree with the plan's batch arithmetic if given."
    )
    steps_per_print: PositiveInt | None = Field(None, description="Steps between progress lines of DeepSpeed.")
    wall_clock_breakdown: bool = Field(False, description="Log the timers of DeepSpeed.")
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = Field(
        None, description="Data type in which gradients are reduced."
    )
    data_types: dict[str, Any] | None = Field(
        None,
        description="DeepSpeed's block of this name: `grad_accum_dtype`, the data type in which gradients accumulate.",
    )
    activation_checkpointing: dict[str, Any] | None = Field(
        None,
        description="DeepSpeed's block of this name. Its key `cpu_checkpointing` keeps the inputs of recomputed "
        "layers in host memory.",
    )
    aio: dict[str, Any] | None = Field(None, description="DeepSpeed's block for asynchronous I/O, for offload to NVMe.")
    tensor_parallel: TensorParallelConfig | None = Field(None, description="Settings of tensor parallelism (AutoTP).")
    zero_allow_untested_optimizer: Literal[True] | None = Field(
        None, description="Always `true`, because roll creates the optimizer."
    )
    sequence_parallel_size: Ranks = Field(
        1,
        description="`deepspeed_train`: number of consecutive ranks that form a replica and split the tokens and "
        "activations of each "
        "micro-batch (DeepSpeed-Ulysses). `max_tokens_per_microbatch` and `per_device_train_batch_size` then count per "
        "replica.",
    )
    zero_force_ds_cpu_optimizer: Literal[False] | None = Field(
        None, description="Always `false`, because roll creates the optimizer."
    )

    @property
    def tensor_parallel_size(self) -> int:
        """Return the number of ranks that shard the model's linear layers."""
        return max(1, self.tensor_parallel.autotp_size) if self.tensor_parallel else 1


class VllmConfig(StrictConfig):
    """Settings of vLLM.

    `engine_args` passes further settings to vLLM's `AsyncEngineArgs`.
    """

    tensor_parallel_size: Ranks = Field(1, description="Number of GPUs per engine, over which its layers are sharded.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9,
        description="Fraction of a GPU's memory that the engine may use. Lower it if other roles stay on the same GPU.",
    )
    kv_cache_gib: PositiveFloat = Field(1.0, description="Memory for the KV cache in GiB, on the CPU only.")
    max_model_len: PositiveInt | None = Field(
        None,
        description="Largest context length in tokens: prompt and response, or episode. If not given, the largest "
        "that the run can need.",
    )
    max_num_seqs: PositiveInt = Field(
        512, description="Largest number of sequences that one engine generates concurrently."
    )
    max_num_batched_tokens: PositiveInt = Field(
        8192,
        description="Largest number of tokens in one engine step. On the CPU at least `max_model_len`, because "
        "prefill is not chunked there.",
    )
    block_size: PositiveInt | None = Field(
        None, description="Number of tokens per KV-cache block; vLLM's default if not given."
    )
    enforce_eager: bool = Field(
        False, description="Do not compile the model or capture CUDA graphs: starts faster, generates more slowly."
    )
    enable_prefix_caching: bool = Field(
        True,
        description="Share the KV cache of common prefixes, such as the prompt of a group and earlier turns of an "
        "episode.",
    )
    load_format: Literal["auto", "dummy", "safetensors"] = Field(
        "auto",
        description="How the engine loads its initial weights. `dummy` skips this; the first weight sync then sets "
        "them.",
    )
    disable_custom_all_reduce: bool = Field(
        False, description="Use NCCL's all-reduce in tensor parallelism instead of vLLM's own."
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Additional arguments of vLLM's `AsyncEngineArgs`."
    )


class HfConfig(StrictConfig):
    """Settings of transformers, with one device per worker. There are no keys."""


class DeepSpeedTrainStrategyConfig(StrictConfig):
    """Training with DeepSpeed."""

    strategy_name: Literal["deepspeed_train"] = Field(description="Train with DeepSpeed, ZeRO stages 0 to 3.")
    strategy_config: DeepSpeedConfig = Field(description="DeepSpeed's configuration; usually `${deepspeed_zero3}`.")


class DeepSpeedInferStrategyConfig(StrictConfig):
    """Log-probs with a model that ZeRO-3 shards over the role's devices."""

    strategy_name: Literal["deepspeed_infer"] = Field(
        description="Compute log-probs with a model sharded by ZeRO-3, for models too large for one GPU."
    )
    strategy_config: DeepSpeedConfig = Field(
        description="DeepSpeed's configuration, with stage 3; usually `${deepspeed_zero3}`."
    )


class HfInferStrategyConfig(StrictConfig):
    """Log-probs with transformers, and generation on machines without vLLM."""

    strategy_name: Literal["hf_infer"] = Field(
        description="Compute log-probs with transformers; also generates if vLLM is not available, slowly."
    )
    strategy_config: HfConfig = Field(default_factory=HfConfig, description="Empty: this strategy has no settings.")


class VllmStrategyConfig(StrictConfig):
    """Generation with vLLM."""

    strategy_name: Literal["vllm"] = Field(description="Generate with vLLM.")
    strategy_config: VllmConfig = Field(
        default_factory=lambda: VllmConfig.model_validate({}), description="Settings of the engine."
    )


StrategyConfig = Annotated[
    DeepSpeedTrainStrategyConfig | DeepSpeedInferStrategyConfig | HfInferStrategyConfig | VllmStrategyConfig,
    Field(discriminator="strategy_name"),
]
