"""Settings of the strategies of vLLM.

The driver creates settings and sends them to a worker, which calls `build`. Importing this module imports no backend.
Only `build` imports the strategy, in the process that runs it. Functions and classes in settings are pickled by name,
so they must be defined at the top level of a module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll.config.schema.engine import VllmConfig
from roll.config.schema.model import ModelConfig

if TYPE_CHECKING:
    from roll.backend import GenerateStrategy, Rank, RewardStrategy


@dataclass(frozen=True)
class VllmSettings:
    """Settings of `VllmGenerate`."""

    model_path: str
    model_args: ModelConfig
    engine: VllmConfig
    max_model_len: int
    adapter_rank: int | None
    """LoRA rank of the adapters that the engine will load. None if it loads whole models."""
    seed: int
    takes_turns: bool
    """Whether other roles use the role's devices while it does not generate."""
    keeps_kv_cache: bool
    """Whether a response that spans a weight update keeps its KV cache. Otherwise, the cache is recomputed."""

    def build(self, rank: Rank) -> GenerateStrategy:
        """See `Settings`."""
        from roll.engines.vllm.strategy import VllmGenerate

        return VllmGenerate(self, rank)


@dataclass(frozen=True)
class VllmRewardSettings:
    """Settings of `VllmReward`."""

    model_path: str
    model_args: ModelConfig
    engine: VllmConfig
    max_model_len: int
    seed: int
    takes_turns: bool
    """Whether other roles use the role's devices while it does not score."""

    def build(self, rank: Rank) -> RewardStrategy:
        """See `Settings`."""
        from roll.engines.vllm.reward import VllmReward

        return VllmReward(self, rank)
