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


def token_versions(segments: Sequence[Segment]) -> Ints:
    """[T], the version that sampled each token of segments laid end to end; 0 for given tokens."""
    runs = [run for segment in segments for run in (segment.versions if segment.sampled else (VersionRun(0, len(segment.token_ids)),))]
    return np.repeat(np.array([run.version for run in runs], np.int32), [run.tokens for run in runs])


def token_log_probs(segments: Sequence[Segment]) -> Floats:
    """[T], of the sampled tokens of segments laid end to end; 0 for given tokens."""
    known = [segment.log_probs is not None for segment in segments]
    out = np.zeros(sum(len(segment.token_ids) for segment in segments), np.float32)
    if any(known):
        where = np.repeat(known, [len(segment.token_ids) for segment in segments])
        out[where] = np.concatenate([segment.log_probs for segment in segments if segment.log_probs is not None])
    return out


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
