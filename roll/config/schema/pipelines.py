"""The pipelines, and the configuration of any one of them."""

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
