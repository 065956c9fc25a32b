"""A reward that is always 0, for runs that learn only from a reference model: on-policy distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.algorithms.methods import declares
from roll.rewards.base import REWARDS, RewardTraits
from roll.types import Prompt, RewardResult


@REWARDS.register("no_reward")
@declares(RewardTraits(passes_at=None))
def no_reward(prompt: Prompt, response: str, row: Mapping[str, Any]) -> RewardResult:
    """Return 0 for every response."""
    return RewardResult(0.0)
