"""From what an engine returns to the record of an episode, and from its segments to arrays. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from roll.types import Completion, Episode, FinishReason, Floats, Ints, Prompt, RewardResult, Segment, StopReason, Trajectory, VersionRun

STOPPED = {
    FinishReason.STOP: StopReason.COMPLETED,
    FinishReason.LENGTH: StopReason.LENGTH,
    FinishReason.ABORT: StopReason.ABORTED,
}


def single_turn(prompt: Prompt, completion: Completion, result: RewardResult) -> Episode:
    """The episode of one prompt and one response."""
    return single_turns(prompt, [completion], [result])[0]


def single_turns(prompt: Prompt, completions: Sequence[Completion], results: Sequence[RewardResult]) -> list[Episode]:
    """The episodes of one prompt and each of its responses. They share the segment that gives the prompt."""
    asked = given(prompt.token_ids, prompt.text)
    return [
        Episode([Trajectory([asked, sampled(completion)], STOPPED[completion.finish_reason])], result)
        for completion, result in zip(completions, results, strict=True)
    ]


def sampled(one: Completion, calls: Sequence[Mapping[str, Any]] = ()) -> Segment:
    """A segment that the policy sampled, and the tools that it calls in it."""
    return Segment(one.token_ids, True, one.log_probs, version_runs(one.policy_versions), one.text, calls)


def given(token_ids: Ints, text: str) -> Segment:
    """A segment that the policy did not sample."""
    return Segment(token_ids, False, None, (), text)


def observed(prompt: Prompt, episodes: Sequence[Episode]) -> Prompt:
    """The prompt with the tokens and the text of the first observation, which an environment makes of its row."""
    first = max((episode.trajectories[0].segments[0] for episode in episodes), key=lambda segment: len(segment.token_ids))
    return replace(prompt, token_ids=first.token_ids, text=first.text)


def version_runs(versions: Ints) -> tuple[VersionRun, ...]:
    """Runs of equal versions, from the version of each token [L]."""
    changes = versions[1:] != versions[:-1]
    if len(versions) and not np.count_nonzero(changes):
        return (VersionRun(int(versions[0]), len(versions)),)
    ends = [*(np.flatnonzero(changes) + 1).tolist(), len(versions)]
    return tuple(VersionRun(int(versions[begin]), end - begin) for begin, end in pairwise([0, *ends]) if end)


def token_versions(segments: Sequence[Segment]) -> Ints:
    """[T], the version that sampled each token of segments laid end to end; 0 for given tokens."""
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
    """[T], of the sampled tokens of segments laid end to end; 0 for given tokens."""
    unknown = np.zeros(max((len(segment.token_ids) for segment in segments if segment.log_probs is None), default=0), np.float32)
    parts = [unknown[: len(segment.token_ids)] if segment.log_probs is None else segment.log_probs for segment in segments]
    return np.concatenate([unknown[:0], *parts], dtype=np.float32)


def cut(segment: Segment, tokens: Sequence[int], characters: Sequence[int]) -> list[Segment]:
    """A sampled segment in parts.

    Args:
        tokens: where each part ends; not falling, and the last is the segment's length.
        characters: the same in its text.
    """
    versions = token_versions([segment])
    parts = []
    for begin, end, first, last in zip([0, *tokens[:-1]], tokens, [0, *characters[:-1]], characters, strict=True):
        log_probs = None if segment.log_probs is None else segment.log_probs[begin:end]
        parts.append(Segment(segment.token_ids[begin:end], True, log_probs, version_runs(versions[begin:end]), segment.text[first:last]))
    return parts
