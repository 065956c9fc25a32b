"""The pipelines by name, and the union of their configurations."""

from __future__ import annotations

from roll.config.schema.offline import DistillConfig, DpoConfig, RewardModelConfig, SftConfig
from roll.config.schema.rlvr import RlvrConfig

Config = RlvrConfig | SftConfig | DpoConfig | RewardModelConfig | DistillConfig
PIPELINES: dict[str, type[Config]] = {
    "rlvr": RlvrConfig,
    "sft": SftConfig,
    "dpo": DpoConfig,
    "reward_model": RewardModelConfig,
    "distill": DistillConfig,
}
