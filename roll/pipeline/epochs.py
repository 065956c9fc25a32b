"""Passes over given rows, counted by steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Epochs:
    """Counts passes of steps that draw rows in sequence, without a gap between two passes."""

    rows: int
    batch_size: int
    """Rows of a step."""

    def passed(self, step: int) -> float:
        """Return the number of passes over the rows after this number of steps."""
        return step * self.batch_size / self.rows

    def end_in(self, step: int) -> bool:
        """Whether a pass ends during the step or with it."""
        return step * self.batch_size // self.rows > (step - 1) * self.batch_size // self.rows

    def steps(self, epochs: int, most: int | None) -> int:
        """Return the step that completes this number of passes, at most `most`."""
        last = -(-self.rows * epochs // self.batch_size)
        return last if most is None else min(most, last)
