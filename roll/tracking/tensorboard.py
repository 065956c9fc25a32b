"""Curves in TensorBoard. The samples stand in `samples.jsonl` and in the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from roll.types import Metrics, RolloutGroup


class TensorBoardTracker:
    """Writes event files below a folder."""

    name = "tensorboard"

    def __init__(self, folder: Path, resumed_from: int | None = None) -> None:
        """TensorBoard hides what earlier processes logged for steps after `resumed_from`, or all of it if that is None."""
        self._writer = SummaryWriter(str(folder), purge_step=0 if resumed_from is None else resumed_from + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        for metric, value in metrics.items():
            self._writer.add_scalar(metric, value, global_step=step)
        self._writer.flush()

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        pass

    def close(self) -> None:
        self._writer.close()
