"""The position of a run, for all pipelines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """Progress of a run."""

    step: int
    """Number of completed steps."""
    policy_version: int
    """Number of optimizer updates that were applied to the policy's weights."""
