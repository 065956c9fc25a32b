"""What a loop finds set up when it begins."""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.plan import Plan
from roll.pipeline.keeper import Keeper
from roll.tracking.base import Tracker
from roll.workers.cluster import ClusterSession


@dataclass(frozen=True)
class Stage:
    """The surroundings of a run, the same for every pipeline."""

    plan: Plan
    session: ClusterSession
    keeper: Keeper
    tracker: Tracker
