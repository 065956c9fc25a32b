"""An episode in progress: its sampled and given segments, and the rewards of its turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from roll.rollout.record import given, sampled_segment
from roll.types import (
    Completion,
    Episode,
    FinishReason,
    Ints,
    RewardOutcome,
    RewardResult,
    Segment,
    StopReason,
    Trajectory,
)

NOTHING_SAMPLED = Completion(np.zeros(0, np.int32), None, np.zeros(0, np.int32), FinishReason.ABORT, "")


class Transcript:
    """The tokens of policy and environment in one sequence, exactly as the engine saw and sampled them.

    If new messages cannot be appended to the sampled tokens, the context forks: the whole conversation is rendered
    again and starts another trajectory.
    """

    def __init__(self, token_ids: Ints, text: str) -> None:
        """Start with the first observation and the tokens that open the policy's turn."""
        self._paths: list[list[Segment]] = [[given(token_ids, text)]]
        self._earned: list[float] = []
        self._states: list[str] = []
        self.context = token_ids
        """The context [C] that the engine continues."""
        self.counts: defaultdict[str, float] = defaultdict(float)
        """Counters of the episode."""

    def act(self, completion: Completion, calls: Sequence[Mapping[str, Any]], state: str) -> None:
        """Append the policy's turn, with the state of the environment before it. Its reward is 0 until `earn` adds to
        it.
        """
        self._paths[-1].append(sampled_segment(completion, calls))
        self._earned.append(0.0)
        self._states.append(state)
        self.context = np.concatenate([self.context, completion.token_ids], dtype=np.int32)

    def earn(self, reward: float) -> None:
        """Add to the reward of the last turn."""
        self._earned[-1] += reward

    def go_on(self, token_ids: Ints, text: str) -> None:
        """Append tokens that follow the policy's turn."""
        self._paths[-1].append(given(token_ids, text))
        self.context = np.concatenate([self.context, token_ids], dtype=np.int32)

    def fork(self, token_ids: Ints, text: str) -> None:
        """Start another trajectory with the tokens of the whole conversation."""
        self._paths.append([given(token_ids, text)])
        self.context = token_ids

    def episode(self, stop: StopReason) -> Episode:
        """Return the episode, with the sum of its turns' rewards as its reward."""
        self._check()
        if not self._earned:
            self.act(NOTHING_SAMPLED, (), "")
        stops = [StopReason.COMPLETED] * (len(self._paths) - 1) + [stop]
        value = sum(self._earned)
        paths = [Trajectory(segments, why) for segments, why in zip(self._paths, stops, strict=True)]
        return Episode(paths, RewardResult(value), tuple(self._earned), tuple(self._states), dict(self.counts))

    def _check(self) -> None:
        laid = np.concatenate([segment.token_ids for segment in self._paths[-1]])
        assert np.array_equal(laid, self.context), "the segments of an episode are not the tokens that the engine saw"


def without_verdict(token_ids: Ints, text: str, stop: StopReason, note: str, outcome: RewardOutcome) -> Episode:
    """Return an episode without sampled tokens, with reward 0: it ended before the policy's first turn."""

    path = Trajectory([given(token_ids, text), sampled_segment(NOTHING_SAMPLED, ())], stop)
    return Episode([path], RewardResult(0.0, outcome, note=note), (0.0,), ("",))
