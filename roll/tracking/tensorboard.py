"""Tracker for TensorBoard. It writes metrics only; samples are in `samples.jsonl` and in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from roll.tracking.base import RunFacts
from roll.types import Metrics, RolloutGroup


class TensorBoardTracker:
    """Writes event files into `tensorboard/` of the run folder."""

    name = "tensorboard"

    def __init__(self, run: RunFacts, settings: Mapping[str, Any]) -> None:
        """`settings` are further arguments of `SummaryWriter` (`log_dir`, `flush_secs`, ...).

        TensorBoard hides the metrics that earlier processes logged for steps after the checkpoint; in a fresh start it
        hides all of them.
        """
        purge = 0 if run.resumed_step is None else run.resumed_step + 1
        self._writer = SummaryWriter(
            **({"log_dir": str(run.folder / "tensorboard"), "purge_step": purge} | dict(settings))
        )

    def log(self, step: int, metrics: Metrics) -> None:
        for metric, value in metrics.items():
            self._writer.add_scalar(metric, value, global_step=step)
        self._writer.flush()

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        pass

    def close(self) -> None:
        self._writer.close()
