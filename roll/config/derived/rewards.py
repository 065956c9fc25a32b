"""The reward functions that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from roll.errors import Fault

if TYPE_CHECKING:  # the processes of rewards do without the schema
    from roll.config.schema.roles import RewardConfig


def named_rewards(rewards: Mapping[str, RewardConfig]) -> dict[str, str]:
    """Name of each reward function by the key, or else the block, that names it."""
    named: dict[str, str] = {}
    for domain, section in rewards.items():
        parts = {f"rewards.{domain}.parts.{name}": (name, part.reward) for name, part in section.parts.items()}
        for place, (name, reward) in (parts or {f"rewards.{domain}": (domain, section.reward)}).items():
            named[f"{place}.reward" if reward else place] = reward or name
    return named


def only_side_by_side(domain: str, concurrency: int, rewards: Sequence[str]) -> Fault:
    """The fault of plain functions that are to run side by side."""
    problem = f"{concurrency}, but {', '.join(rewards)} is a plain function: one process makes one call of it at a time"
    return Fault(f"rewards.{domain}.concurrency", problem, f"remove it and give world_size: {concurrency}; or write it as async def")
