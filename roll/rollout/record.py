"""From what an engine returns to the record of an episode, and from its segments to arrays. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from roll.types import Completion, Episode, FinishReason, Floats, Ints, Prompt, RewardResult, Segment, StopReason, Trajectory, VersionRun

STOPPED = {
    FinishReason.STOP: StopReason.COMPLETED,
    FinishReason.LENGTH: StopReason.LENGTH,
    FinishReason.ABORT: StopReason.ABORTED,
}


def single_turn(prompt: Prompt, completion: Completion, result: RewardResult) -> Episode:
    """The episode of one prompt and one response."""
    runs = version_runs(completion.policy_versions)
    response = Segment(completion.token_ids, True, completion.log_probs, runs, completion.text)
    return Episode([Trajectory([given(prompt.token_ids, prompt.text), response], STOPPED[completion.finish_reason])], result)


def given(token_ids: Ints, text: str) -> Segment:
    """A segment that the policy did not sample."""
    return Segment(token_ids, False, None, (), text)


def version_runs(versions: Ints) -> tuple[VersionRun, ...]:
    """Runs of equal versions, from the version of each token [L]."""
    return tuple(VersionRun(version, len(list(run))) for version, run in groupby(versions.tolist()))


def token_versions(segment: Segment) -> Ints:
    """[L], the version that sampled each token; 0 for given tokens."""
    if not segment.sampled:
        return np.zeros(len(segment.token_ids), np.int32)
    return np.repeat([run.version for run in segment.versions], [run.tokens for run in segment.versions]).astype(np.int32)


def token_log_probs(segment: Segment) -> Floats:
    """[L], of the sampled tokens; 0 for given tokens."""
    return np.zeros(len(segment.token_ids), np.float32) if segment.log_probs is None else segment.log_probs.astype(np.float32)


def cut(segment: Segment, tokens: Sequence[int], characters: Sequence[int]) -> list[Segment]:
    """A sampled segment in parts.

    Args:
        tokens: where each part ends; not falling, and the last is the segment's length.
        characters: the same in its text.
    """
    versions = token_versions(segment)
    parts = []
    for begin, end, first, last in zip([0, *tokens[:-1]], tokens, [0, *characters[:-1]], characters, strict=True):
        log_probs = None if segment.log_probs is None else segment.log_probs[begin:end]
        parts.append(Segment(segment.token_ids[begin:end], True, log_probs, version_runs(versions[begin:end]), segment.text[first:last]))
    return parts
