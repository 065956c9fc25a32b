"""The base classes of a backend's blocks, and the traits that the plan, the checks and the placement ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

from roll.config.schema.base import StrictConfig

BACKENDS = [
    "roll.engines.vllm.settings",
    "roll.engines.vllm_server.settings",
    "roll.engines.hf.settings",
    "roll.training.deepspeed.settings",
]
"""Modules with the blocks of the strategies, one for each backend. They are imported by name, because backends import
the configuration, but the configuration knows none of them.
"""

COMPILER = "torch._inductor.compile_fx"
"""Module of torch that compiles the layers and the output head on GPUs."""

OffloadDevice = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True)
class EngineMemory:
    """Memory of an engine that reserves memory for weights and KV cache when it starts."""

    fraction: float
    """Fraction of each device that it reserves."""
    fraction_key: str
    """Key of `strategy_config` that sets the fraction."""
    cpu_cache: int
    """Size in bytes of the KV cache of a rank on the CPU."""
    cache_key: str | None = None
    """Key of `strategy_config` that sets the KV cache in bytes, if there is one."""
    cache: int | None = None
    """Size in bytes of the KV cache on each device, if that key is set. The fraction then has no effect."""
    linear_width: int | None = None
    """Bytes of each weight of the linear layers, if the engine quantises them."""
    draft: int = 0
    """Bytes of the weights that propose tokens in speculative decoding."""
    draft_cache: int = 0
    """Numbers of the draft's KV cache for a token, over all devices of a rank."""


@dataclass(frozen=True)
class ZeroMemory:
    """How ZeRO shards the states of a model over the ranks, and where it keeps them."""

    stage: int
    """What is sharded. 0: nothing; 1: optimizer states; 2: also gradients; 3: also parameters."""
    optimizer_on: OffloadDevice = "none"
    parameters_on: OffloadDevice = "none"
    secondary_ranks: int = 1
    """Number of ranks that share a secondary copy of the weights (ZeRO++, hpZ); 1 if there is none."""
    live_parameters: int = 0
    """Stage 3: largest number of parameters that are gathered at a time."""
    bucket_numbers: int = 0
    """Number of gradients in all reduction buckets."""


@dataclass(frozen=True)
class BackendTraits:
    """What plan, checks and placement must know of a role's backend with its settings."""

    batches_by_tokens: bool
    """Whether the driver packs its sequences into micro-batches by a token budget. If not, it batches requests."""
    own_kernels: bool
    """Whether it runs its own implementation of the model, so that `model_args.attn_implementation`, `liger` and
    `compile_layers` have no effect.
    """
    devices_per_rank: int = 1
    """Number of consecutive devices of a rank, which shard the model."""
    devices_key: str = "tensor_parallel_size"
    """Key of `strategy_config` that sets `devices_per_rank`."""
    sequence_parallel: int = 1
    """Number of ranks that share the tokens of a micro-batch."""
    tensor_parallel: int = 1
    """Number of ranks, of one device each, that shard the model's linear layers."""
    expert_parallel: int = 1
    """Number of ranks that divide the experts of each layer among them. Each has micro-batches of its own."""
    pauses: bool = False
    """Whether it can leave its devices in the middle of a response and continue the response later."""
    loads_adapters: bool = False
    """Whether a weight sync may send it a LoRA adapter. If not, it takes whole weights only."""
    discards_weights: bool = False
    """Whether it frees weights that will be sent again, instead of moving them to host memory."""
    returns_routes: bool = False
    """Whether it can return the experts that it chose for each token of a mixture of experts."""
    invariance_key: str = ""
    """Key of `strategy_config` that makes a response independent of what else a rank generates at the same time, on
    GPUs. "" if it is set, or if the backend has none for its other settings.
    """
    runs_plain_kernels: bool = False
    """Whether it runs the kernels that `model_args.engine_kernels` of a trainer runs."""
    shares_device: bool = False
    """Whether several of its ranks can have the same device, because none measures the memory that is free."""
    most_requests: int | None = None
    """Largest number of sequences that a rank generates at a time. None if it answers one prompt at a time."""
    context: int | None = None
    """Largest number of tokens of prompt and response together, if its settings give one."""
    memory: EngineMemory | ZeroMemory | None = None
    """Memory model. None if a rank's devices hold the whole model, and allocate activations for each micro-batch."""
    servers: tuple[str, ...] | None = None
    """Addresses of the servers outside the run that do its work, one for each rank. None if it is done in the run."""
    swap_folders: tuple[Path, ...] = ()
    """Folders in which each rank keeps files that a killed rank leaves behind."""

    @property
    def replica_size(self) -> int:
        """Return the number of ranks of a replica. They work on the same micro-batches."""
        return self.sequence_parallel * self.tensor_parallel


class BackendConfig(StrictConfig):
    """Base class of a `strategy_config` whose keys are those of another program."""

    refused_keys: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Keys of the program that are refused. Each has the end of the message, after the value, and the remedy."""
    other_keys: ClassVar[str] = ""
    """Remedy for an unknown key, if the block can pass on keys that are not in the schema."""


class StrategyConfig(StrictConfig):
    """Base class of the block `strategy_args`: the backend of a role, and its settings.

    The roles that it can run follow from the protocols of `roll/backend_settings.py` that it implements: a block with
    the method `score_settings` runs a reference, for example.
    """

    library: ClassVar[str] = ""
    """Module of the strategy. "" if there is none."""

    strategy_name: Any
    strategy_config: Any

    def preload(self, on_cpu: bool) -> None:
        """Import the strategy's module, in a process of the role whose settings have not arrived yet.

        On a GPU also import the compiler, unless the backend has kernels of its own: the first step would do that.
        """
        if self.library:
            import_module(self.library)
            if not on_cpu and not self.traits.own_kernels:
                import_module(COMPILER)

    @property
    def traits(self) -> BackendTraits:
        """The traits of the backend with these settings. The default is transformers on one device per rank."""
        return BackendTraits(batches_by_tokens=True, own_kernels=False)
