"""A cheap reward that differs between the responses of a random model, so that the weights change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.types import Prompt, RewardResult


def letter_share(prompt: Prompt, response: str, row: Mapping[str, Any], *, letter: str = "a") -> RewardResult:
    """Return the share of `letter` in the response's characters."""
    return RewardResult(response.count(letter) / max(len(response), 1))
