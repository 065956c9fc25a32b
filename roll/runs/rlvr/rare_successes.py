"""Which groups of a run are rare successes, and the buffer from which they are replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from roll.config.derived.batch import most_replayed
from roll.config.schema.rlvr import RlvrConfig
from roll.data.curriculum import SolveRate
from roll.rewards.passing import Bars
from roll.rollout.batch import Shaping, teaches
from roll.rollout.replay import GroupReplay
from roll.runs.rlvr.prompt_source import PassedShare
from roll.types import RolloutGroup


@dataclass(frozen=True)
class RareSuccess:
    """Whether some of a group's responses passed, but few."""

    solve_rate: SolveRate
    at_most: float
    """Largest solve rate of the group."""

    def __call__(self, group: RolloutGroup) -> bool:
        """Return whether the group is a rare success."""
        rate = self.solve_rate(group)
        return rate is not None and 0 < rate <= self.at_most


def replay_of(config: RlvrConfig, bars: Mapping[str, Bars], shaped: Shaping) -> GroupReplay | None:
    """Return the configured replay of rare successes, or None. `bars` says when a response passes, by domain."""
    own = config.curriculum and config.curriculum.replay
    if not own:
        return None
    is_rare = RareSuccess(PassedShare(bars), own.solve_rate_at_most)
    most = most_replayed(own.share, config.rollout_batch_size)
    return GroupReplay(is_rare, partial(teaches, shaping=shaped), most, own.buffer_size, own.staleness_at_most)
