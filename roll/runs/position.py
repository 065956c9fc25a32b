"""The position of a run, for all pipelines.

Converts between steps and epochs of an offline pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Epochs:
    """Epochs over a data set. Steps draw rows in sequence, and one step may contain rows of two epochs."""

    rows: int
    batch_size: int
    """Number of rows per step."""

    def passed(self, step: int) -> float:
        """Return the number of epochs completed after `step` steps, including the fraction of the current one."""
        return step * self.batch_size / self.rows

    def end_in(self, step: int) -> bool:
        """Return whether an epoch ends during this step or exactly at its end."""
        return step * self.batch_size // self.rows > (step - 1) * self.batch_size // self.rows

    def steps(self, epochs: int, most: int | None) -> int:
        """Return the step that completes this number of epochs, or `most` if that is smaller."""
        last = -(-self.rows * epochs // self.batch_size)
        return last if most is None else min(most, last)


@dataclass(frozen=True)
class Position:
    """Progress of a run."""

    step: int
    """Number of completed steps."""
    policy_version: int
    """Number of optimizer updates that were applied to the policy's weights."""
