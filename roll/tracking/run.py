"""Opens the trackers of a run by name. A tracker that cannot be opened is reported and left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll.tracking.base import RunFacts, Tracker
from roll.tracking.fanout import FAILURES, report_failure
from roll.tracking.mlflow import MlflowTracker
from roll.tracking.swanlab import SwanLabTracker
from roll.tracking.tensorboard import TensorBoardTracker
from roll.tracking.trackio import TrackioTracker
from roll.tracking.wandb import WandbTracker

Settings = Mapping[str, Any]
OPENERS: Mapping[str, Callable[[RunFacts, Settings], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "swanlab": SwanLabTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}


def open_named(names: Sequence[str], facts: RunFacts, settings: Mapping[str, Settings]) -> list[Tracker]:
    """Open the trackers `names` and return them. The name `none` is skipped. `settings` are further arguments, by
    tracker.
    """
    opened: list[Tracker] = []
    for name in names:
        if name == "none":
            continue
        try:
            opened.append(OPENERS[name](facts, settings.get(name, {})))
        except FAILURES as error:
            report_failure(name, error)
    return opened
