"""The blocks of DeepSpeed in the configuration, and the settings of its strategies.

The driver creates settings and sends them to a worker, which calls `build`. Importing this module imports no backend.
Only `build` imports the strategy, in the process that runs it. Functions and classes in settings are pickled by name,
so they must be defined at the top level of a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from roll.backend_settings import ModelLoader, ModelWrapper, RoleModel, choose_algorithms, with_local_model
from roll.config.schema.backend import BackendConfig, BackendTraits, OffloadDevice, StrategyConfig, ZeroMemory
from roll.config.schema.base import (
    MOST_RANKS,
    Fraction,
    Large,
    NonNegativeFloat,
    NonNegativeInt,
    Passed,
    PathText,
    PositiveInt,
    Ranks,
    StrictConfig,
)
from roll.config.schema.foreign_names import DEEPSPEED_REFUSED, MEGATRON_KEYS
from roll.config.schema.model import ModelConfig, TrainingConfig

if TYPE_CHECKING:
    from roll.backend import Rank, TeachStrategy, TrainStrategy
    from roll.config.derived.model_shape import ModelShape
    from roll.config.schema.pipelines import Config
    from roll.config.schema.roles import RoleConfig
    from roll.errors import Fault


class ZeroOffloadConfig(StrictConfig):
    """DeepSpeed's offload of optimizer states or of parameters."""

    device: OffloadDevice = Field("none", description="Where the states are kept; `none` keeps them on the GPU.")
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
    __pydantic_extra__: dict[str, Passed]

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

    @property
    def offloads(self) -> dict[str, ZeroOffloadConfig]:
        """Return the blocks that move states off the GPU, by key."""
        blocks = {"offload_optimizer": self.offload_optimizer, "offload_param": self.offload_param}
        return {key: block for key, block in blocks.items() if block and block.device != "none"}

    @property
    def memory(self) -> ZeroMemory:
        """Return the numbers that determine the memory of a rank."""
        devices: dict[str, OffloadDevice] = {key: block.device for key, block in self.offloads.items()}
        return ZeroMemory(
            self.stage,
            devices.get("offload_optimizer", "none"),
            devices.get("offload_param", "none"),
            secondary_ranks=self._given("zero_hpz_partition_size", 1),
            live_parameters=self._given("stage3_max_live_parameters", 10**9),
            bucket_numbers=self._bucket_numbers(),
        )

    def _bucket_numbers(self) -> int:
        """Return the number of gradients in reduction buckets: on stages 1 and 2 with `overlap_comm`, two."""
        if self.stage == 0 or not self._given("contiguous_gradients", True):
            return 0
        buckets = 2 if self.stage < 3 and self._given("overlap_comm", False) else 1
        return self._given("reduce_bucket_size", 5 * 10**8) * buckets

    def _given(self, key: str, default: int) -> int:
        """Return the number or flag of a key that is passed on. Otherwise return `default`, that of DeepSpeed
        (`deepspeed/runtime/zero/config.py`).
        """
        given = (self.model_extra or {}).get(key, "auto")
        return int(given) if isinstance(given, int | float) else default


class TensorParallelConfig(StrictConfig):
    """DeepSpeed's block `tensor_parallel` (AutoTP).

    It shards the layers named in the model's tensor-parallel plan in transformers.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    __pydantic_extra__: dict[str, Passed]

    autotp_size: NonNegativeInt = Field(
        le=MOST_RANKS,
        description="`deepspeed_train`: number of consecutive ranks that form a replica and shard the model's linear "
        "layers; 0 and 1 shard nothing. See docs/deepspeed.md for its requirements.",
    )
    tp_overlap_comm: bool = Field(
        False, description="Overlap the all-reduce of gradients over the replica with the backward pass."
    )


class ExpertParallelConfig(StrictConfig):
    """DeepSpeed's block `expert_parallel` (AutoEP).

    It divides the routed experts of a mixture of experts among ranks.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    __pydantic_extra__: dict[str, Passed]

    autoep_size: Ranks = Field(
        1,
        description="`deepspeed_train`: number of consecutive ranks that have all experts together, each with its own "
        "micro-batches; 1 divides nothing. See docs/deepspeed.md for its requirements.",
    )
    enabled: bool = Field(True, description="DeepSpeed's key; `false` divides nothing.")


class DeepSpeedConfig(BackendConfig):
    """DeepSpeed's configuration.

    The role's other keys set precision, batch sizes and gradient clipping.
    """

    refused_keys: ClassVar[Mapping[str, tuple[str, str]]] = {
        key: (": this is a key of Megatron, but the block is for DeepSpeed", instead)
        for key, instead in MEGATRON_KEYS.items()
    } | {key: (f", but {why}", f"remove it; {instead}") for key, (why, instead) in DEEPSPEED_REFUSED.items()}

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
    expert_parallel: ExpertParallelConfig | None = Field(None, description="Settings of expert parallelism (AutoEP).")
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

    @property
    def expert_parallel_size(self) -> int:
        """Return the number of ranks that divide the experts of each layer among them."""
        return self.expert_parallel.autoep_size if self.expert_parallel and self.expert_parallel.enabled else 1

    @property
    def swap_paths(self) -> dict[str, Path]:
        """Return the `nvme_path` of each block that offloads to NVMe, by the name of the block."""
        return {
            key: Path(block.nvme_path)
            for key, block in self.zero_optimization.offloads.items()
            if block.device == "nvme" and block.nvme_path
        }


@dataclass(frozen=True)
class TrainSettings:
    """Settings of `DeepSpeedTrain`."""

    model_path: str
    model_args: ModelConfig
    training: TrainingConfig
    deepspeed: DeepSpeedConfig
    max_grad_norm: float
    total_updates: int
    """Number of optimizer updates in the whole run. The learning-rate schedule spans them."""
    token_budget: int
    """Initial token budget of a micro-batch. The memory guard may lower it."""
    seed: int
    load: ModelLoader
    deterministic: bool = False
    """Whether to use torch's deterministic algorithms."""
    takes_turns: bool = False
    """Whether other roles use the role's devices while it does not train."""
    ends: tuple[int, ...] = ()
    """Tokens that end a turn of the template, for the export's generation_config."""
    replays_routes: bool = False
    """Whether the routers choose the experts of `Sequences.routes`."""
    average_rate: float | None = None
    """See `RoleModel`."""

    def build(self, rank: Rank) -> TrainStrategy:
        """See `Settings`."""
        choose_algorithms(self.deterministic)
        from roll.training.deepspeed.strategy import DeepSpeedTrain

        return DeepSpeedTrain(with_local_model(self), rank)


@dataclass(frozen=True)
class ShardedScoreSettings:
    """Settings of `DeepSpeedScore`."""

    model_path: str
    model_args: ModelConfig
    deepspeed: DeepSpeedConfig
    wrap: ModelWrapper
    deterministic: bool = False

    def build(self, rank: Rank) -> TeachStrategy:
        """See `Settings`."""
        choose_algorithms(self.deterministic)
        from roll.training.deepspeed.score import DeepSpeedScore

        return DeepSpeedScore(with_local_model(self), rank)


class DeepSpeedInferStrategyConfig(StrategyConfig):
    """Log-probs with a model that ZeRO-3 shards over the role's devices."""

    library: ClassVar[str] = "roll.training.deepspeed.score"

    strategy_name: Literal["deepspeed_infer"] = Field(
        description="Compute log-probs with a model sharded by ZeRO-3, for models too large for one GPU."
    )
    strategy_config: DeepSpeedConfig = Field(
        description="DeepSpeed's configuration, with stage 3; usually `${deepspeed_zero3}`."
    )

    @property
    def traits(self) -> BackendTraits:
        return BackendTraits(
            batches_by_tokens=True,
            own_kernels=False,
            memory=self.strategy_config.zero_optimization.memory,
            swap_folders=tuple(self.strategy_config.swap_paths.values()),
        )

    def faults(self, name: str, role: RoleConfig, config: Config, shape: ModelShape | None) -> Iterable[Fault]:
        """See `OwnFaults`."""
        from roll.training.deepspeed.checks import infer_faults

        return infer_faults(self.strategy_config, name, role)

    def score_settings(self, model: RoleModel, wrap: ModelWrapper) -> ShardedScoreSettings:
        """See `ScoreBackend`."""
        return ShardedScoreSettings(model.path, model.arguments, self.strategy_config, wrap, model.deterministic)


class DeepSpeedTrainStrategyConfig(StrategyConfig):
    """Training with DeepSpeed."""

    library: ClassVar[str] = "roll.training.deepspeed.strategy"

    strategy_name: Literal["deepspeed_train"] = Field(description="Train with DeepSpeed, ZeRO stages 0 to 3.")
    strategy_config: DeepSpeedConfig = Field(description="DeepSpeed's configuration; usually `${deepspeed_zero3}`.")

    @property
    def traits(self) -> BackendTraits:
        return BackendTraits(
            batches_by_tokens=True,
            own_kernels=False,
            sequence_parallel=self.strategy_config.sequence_parallel_size,
            tensor_parallel=self.strategy_config.tensor_parallel_size,
            expert_parallel=self.strategy_config.expert_parallel_size,
            memory=self.strategy_config.zero_optimization.memory,
            swap_folders=tuple(self.strategy_config.swap_paths.values()),
        )

    def faults(self, name: str, role: RoleConfig, config: Config, shape: ModelShape | None) -> Iterable[Fault]:
        """See `OwnFaults`."""
        from roll.training.deepspeed.checks import train_faults

        return train_faults(self.strategy_config, name, role, config, shape)

    def train_settings(
        self,
        model: RoleModel,
        training: TrainingConfig,
        max_grad_norm: float,
        total_updates: int,
        token_budget: int,
        load: ModelLoader,
        ends: tuple[int, ...],
    ) -> TrainSettings:
        """See `TrainBackend`."""
        return TrainSettings(
            model.path,
            model.arguments,
            training,
            self.strategy_config,
            max_grad_norm,
            total_updates,
            token_budget,
            model.seed,
            load,
            model.deterministic,
            model.takes_turns,
            ends,
            model.replays_routes,
            model.average_rate,
        )
