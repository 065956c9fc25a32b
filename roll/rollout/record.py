"""Builds the record of an episode from the output of an engine, and arrays from the record's segments. Pure
functions.

An episode in progress: its sampled and given segments, and the rewards of its turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from roll.types import (
    Completion,
    Episode,
    FinishReason,
    Floats,
    Ints,
    Prompt,
    RewardOutcome,
    RewardResult,
    Segment,
    StopReason,
    Trajectory,
    VersionRun,
)

STOPPED = {
    FinishReason.STOP: StopReason.COMPLETED,
    FinishReason.LENGTH: StopReason.LENGTH,
    FinishReason.ABORT: StopReason.ABORTED,
}


def single_turn(prompt: Prompt, completion: Completion, result: RewardResult) -> Episode:
    """Return the episode of one prompt and one response."""
    return single_turns(prompt, [completion], [result])[0]


def single_turns(prompt: Prompt, completions: Sequence[Completion], results: Sequence[RewardResult]) -> list[Episode]:
    """Return one episode for each response to a prompt. The episodes share the segment that holds the prompt."""
    asked = given(prompt.token_ids, prompt.text)
    return [
        Episode([Trajectory([asked, sampled_segment(completion)], STOPPED[completion.finish_reason])], result)
        for completion, result in zip(completions, results, strict=True)
    ]


def sampled_segment(one: Completion, calls: Sequence[Mapping[str, Any]] = ()) -> Segment:
    """Return a segment that the policy sampled, with its tool calls."""
    return Segment(one.token_ids, True, one.log_probs, version_runs(one.policy_versions), one.text, calls)


def given(token_ids: Ints, text: str) -> Segment:
    """Return a segment that the policy did not sample."""
    return Segment(token_ids, False, None, (), text)


def observed(prompt: Prompt, episodes: Sequence[Episode]) -> Prompt:
    """Return the prompt with the tokens and the text of the environment's first observation.

    An episode whose environment failed may lack the tokens, so the longest first segment of the episodes is taken.
    """
    first = max(
        (episode.trajectories[0].segments[0] for episode in episodes), key=lambda segment: len(segment.token_ids)
    )
    return replace(prompt, token_ids=first.token_ids, text=first.text)


def version_runs(versions: Ints) -> tuple[VersionRun, ...]:
    """Encode the version of each token [L] as runs of equal versions."""
    changes = versions[1:] != versions[:-1]
    if len(versions) and not np.count_nonzero(changes):
        return (VersionRun(int(versions[0]), len(versions)),)
    ends = [*(np.flatnonzero(changes) + 1).tolist(), len(versions)]
    return tuple(VersionRun(int(versions[begin]), end - begin) for begin, end in pairwise([0, *ends]) if end)


def token_versions(segments: Sequence[Segment]) -> Ints:
    """Return [T], the policy version that sampled each token of the concatenated segments; 0 for given tokens."""
    versions, tokens = [], []
    for segment in segments:
        if segment.sampled:
            versions += [run.version for run in segment.versions]
            tokens += [run.tokens for run in segment.versions]
        else:
            versions.append(0)
            tokens.append(len(segment.token_ids))
    return np.repeat(np.array(versions, np.int32), tokens)


def token_log_probs(segments: Sequence[Segment]) -> Floats:
    """Return [T], the log-probs of the sampled tokens of the concatenated segments; 0 for given tokens."""
    unknown = np.zeros(
        max((len(segment.token_ids) for segment in segments if segment.log_probs is None), default=0), np.float32
    )
    parts = [
        unknown[: len(segment.token_ids)] if segment.log_probs is None else segment.log_probs for segment in segments
    ]
    return np.concatenate([unknown[:0], *parts], dtype=np.float32)


def cut(segment: Segment, tokens: Sequence[int], characters: Sequence[int]) -> list[Segment]:
    """Divide a sampled segment into parts.

    Args:
        tokens: position in the tokens at which each part ends, not decreasing. The last is the segment's length.
        characters: position in the text at which each part ends.
    """
    versions = token_versions([segment])
    parts = []
    for begin, end, first, last in zip([0, *tokens[:-1]], tokens, [0, *characters[:-1]], characters, strict=True):
        log_probs = None if segment.log_probs is None else segment.log_probs[begin:end]
        parts.append(
            Segment(
                segment.token_ids[begin:end],
                True,
                log_probs,
                version_runs(versions[begin:end]),
                segment.text[first:last],
            )
        )
    return parts


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
        """Append the policy's turn and the environment's state before it. Its reward is 0 until `earn` adds to it."""
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
