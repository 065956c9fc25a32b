"""The position of a run, for all pipelines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """How far a run has come."""

    step: int
    """Steps completed."""
    policy_version: int
    """Number of optimizer updates that the policy's weights have had."""
