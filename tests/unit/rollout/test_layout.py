"""Experience compared with a simple loop over all tokens, for random episodes with several trajectories and
segments.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from math import fsum

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from roll.rollout import record
from roll.rollout.batch import TRUNCATED, Shaping, experience
from roll.rollout.record import version_runs
from roll.types import NO_VERDICT, Episode, RewardOutcome, RewardResult, RolloutGroup, Segment, StopReason
from tests.unit.rollout.build import make_prompt, make_trajectory, observed, sampled

IDS = st.lists(st.integers(0, 99), max_size=4)
SHAPING = Shaping(max_len_mask=True, longest_wrong=6, difficulty=(-10.0, 10.0))


@st.composite
def policy_segments(draw: st.DrawFn, log_probs: bool) -> Segment:
    """Draw a sampled segment, possibly empty, with tokens of several versions."""
    ids = draw(IDS)
    versions = [draw(st.integers(0, 2)) for _ in ids]
    segment = sampled(ids, [-0.25 * number for number in range(len(ids))], versions)
    return segment if log_probs else replace(segment, log_probs=None)


@st.composite
def episodes(draw: st.DrawFn, log_probs: bool) -> Episode:
    """Draw an episode. Each trajectory begins with given tokens and has at least one turn."""
    trajectories = []
    for _ in range(draw(st.integers(1, 2))):
        segments = [observed([7, *draw(IDS)]), draw(policy_segments(log_probs))]
        for _ in range(draw(st.integers(0, 2))):
            segments += [observed(draw(IDS)), draw(policy_segments(log_probs))]
        stop = draw(st.sampled_from([StopReason.COMPLETED, StopReason.LENGTH, StopReason.ABORTED]))
        trajectories.append(make_trajectory(*segments, stop=stop))
    outcome = draw(st.sampled_from([RewardOutcome.SCORED, RewardOutcome.SCORED, RewardOutcome.CRASHED]))
    return Episode(trajectories, RewardResult(draw(st.integers(-3, 3)) / 3, outcome))


@st.composite
def groups(draw: st.DrawFn) -> list[RolloutGroup]:
    log_probs = draw(st.booleans())
    drawn = draw(st.lists(st.lists(episodes(log_probs), min_size=1, max_size=3), min_size=1, max_size=4))
    return [RolloutGroup(make_prompt(number), group) for number, group in enumerate(drawn)]


def has_verdict(episode: Episode) -> bool:
    aborted = any(trajectory.stop is StopReason.ABORTED for trajectory in episode.trajectories)
    return episode.reward.outcome not in NO_VERDICT and not aborted


@given(groups())
def test_every_token_has_its_place(drawn: list[RolloutGroup]) -> None:
    kept = [
        (number, episode) for number, group in enumerate(drawn) for episode in group.episodes if has_verdict(episode)
    ]
    assume(kept)
    tokens: list[tuple[int, bool, float, int]] = []
    ends, of_sequence, lengths, difficulties = [0], [], [], []
    for place, (number, episode) in enumerate(kept):
        segments = [segment for trajectory in episode.trajectories for segment in trajectory.segments]
        lengths.append(sum(len(segment.token_ids) for segment in segments if segment.sampled))
        long_and_wrong = episode.reward.value <= 0 and lengths[-1] >= 6
        learns = episode.trajectories[-1].stop not in TRUNCATED and not long_and_wrong
        for trajectory in episode.trajectories:
            for segment in trajectory.segments:
                versions = [run.version for run in segment.versions for _ in range(run.tokens)]
                for token, token_id in enumerate(segment.token_ids.tolist()):
                    log_prob = 0.0 if segment.log_probs is None else float(segment.log_probs[token])
                    tokens.append(
                        (token_id, segment.sampled and learns, log_prob, versions[token] if segment.sampled else 0)
                    )
            ends.append(len(tokens))
            of_sequence.append(place)
        rewards = [episode.reward.value for own, episode in kept if own == number]
        difficulties.append(1.0 - fsum(rewards) / len(rewards))
    step = experience(drawn, SHAPING)
    ids, mask, log_probs, versions = zip(*tokens, strict=True)
    assert step.sequences.token_ids.tolist() == list(ids) and step.sequences.token_ids.dtype == np.int32
    assert step.sequences.response_mask.tolist() == list(mask) and step.sequences.response_mask.dtype == np.bool_
    assert step.sequences.offsets.tolist() == ends and step.sequences.offsets.dtype == np.int64
    assert step.policy_versions.tolist() == list(versions) and step.policy_versions.dtype == np.int32
    if kept[0][1].sampled[0].log_probs is None:
        assert step.behaviour_log_probs is None
    else:
        assert step.behaviour_log_probs is not None and step.behaviour_log_probs.dtype == np.float32
        assert step.behaviour_log_probs.tolist() == list(log_probs)
    assert step.episode_of_sequence.tolist() == of_sequence and step.groups.tolist() == [number for number, _ in kept]
    assert step.lengths.tolist() == lengths
    assert step.difficulties.tolist() == pytest.approx(difficulties)


@given(st.lists(st.integers(0, 3)))
def test_version_runs_match_a_scan_of_tokens(versions: list[int]) -> None:
    expected = [(version, len(list(run))) for version, run in groupby(versions)]
    assert [(run.version, run.tokens) for run in version_runs(np.array(versions, np.int32))] == expected


def test_an_observed_prompt_is_the_longest_first_segment() -> None:
    """The environment of the other episodes failed before its first observation."""
    failed, played = (
        Episode([make_trajectory(observed(ids, text))], RewardResult(0.0)) for ids, text in (([], ""), ([3, 4], "seen"))
    )
    for episodes in ([failed, played, failed], [played, failed], [failed, played]):
        prompt = record.observed(make_prompt(0), episodes)
        assert (prompt.token_ids.tolist(), prompt.text) == ([3, 4], "seen")
