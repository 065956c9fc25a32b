"""The record of an episode: its sampled and given segments, from the output of an engine to arrays, and its turns.

A response is split into the turns that a reward names. Each sampled segment is then a turn with its own reward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from os.path import commonprefix
from typing import Any

import numpy as np

from roll.algorithms.advantages import EpisodeTurns
from roll.types import (
    Completion,
    Episode,
    FinishReason,
    Floats,
    Ints,
    PartnerTurn,
    Prompt,
    PromptPictures,
    RewardOutcome,
    RewardResult,
    Routes,
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
    paths = [routed([asked, sampled_segment(completion)], completion.routes) for completion in completions]
    return [
        Episode([Trajectory(path, STOPPED[completion.finish_reason])], result)
        for path, completion, result in zip(paths, completions, results, strict=True)
    ]


def without_placeholder(one: Completion, placeholder: int | None) -> Completion:
    """Return a completion without the placeholder of a picture that ended it; see `Sampling.placeholder`."""
    if placeholder is None or not len(one.token_ids) or one.token_ids[-1] != placeholder:
        return one
    log_probs = None if one.log_probs is None else one.log_probs[:-1]
    routes = None if one.routes is None else one.routes[:-1]
    return replace(
        one,
        token_ids=one.token_ids[:-1],
        log_probs=log_probs,
        policy_versions=one.policy_versions[:-1],
        routes=routes,
    )


def sampled_segment(one: Completion, calls: Sequence[Mapping[str, Any]] = ()) -> Segment:
    """Return a segment that the policy sampled, with its tool calls."""
    return Segment(one.token_ids, True, one.log_probs, version_runs(one.policy_versions), one.text, calls)


def routed(path: Sequence[Segment], routes: Routes | None) -> list[Segment]:
    """Return the segments of a path with the routes of the completion that ends it, [T, layers, k].

    Tokens that have routes already keep them: those were chosen when the tokens were sampled.
    """
    if routes is None:
        return list(path)
    ends = list(accumulate(len(segment.token_ids) for segment in path))
    assert len(routes) == ends[-1], f"routes of {len(routes)} tokens for a path of {ends[-1]}"
    parts = [routes[end - len(segment.token_ids) : end] for segment, end in zip(path, ends, strict=True)]
    return [
        replace(segment, routes=part if segment.routes is None else np.where(segment.routes < 0, part, segment.routes))
        for segment, part in zip(path, parts, strict=True)
    ]


def token_routes(segments: Sequence[Segment]) -> Routes | None:
    """Return the routes [T, layers, k] of the concatenated segments; None if no segment has any."""
    shapes = {segment.routes.shape[1:] for segment in segments if segment.routes is not None}
    if not shapes:
        return None
    (shape,) = shapes
    parts = [
        np.full((len(segment.token_ids), *shape), -1, np.int16) if segment.routes is None else segment.routes
        for segment in segments
    ]
    return np.concatenate(parts)


def given(token_ids: Ints, text: str, pictures: Sequence[str] = ()) -> Segment:
    """Return a segment that the policy did not sample, with the names of its pictures."""
    return Segment(token_ids, False, None, (), text, pictures=pictures)


def observed(prompt: Prompt, episodes: Sequence[Episode]) -> Prompt:
    """Return the prompt with the tokens and the text of the environment's first observation, which shows the pictures
    that its trajectories have.

    An episode whose environment failed may lack the tokens, so the longest first segment of the episodes is taken.
    """
    first = max(
        (episode.trajectories[0].segments[0] for episode in episodes), key=lambda segment: len(segment.token_ids)
    )
    return replace(prompt, token_ids=first.token_ids, text=first.text, shown=None)


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
        routes = None if segment.routes is None else segment.routes[begin:end]
        parts.append(
            Segment(
                segment.token_ids[begin:end],
                True,
                log_probs,
                version_runs(versions[begin:end]),
                segment.text[first:last],
                routes=routes,
            )
        )
    return parts


NOTHING_SAMPLED = Completion(np.zeros(0, np.int32), None, np.zeros(0, np.int32), FinishReason.ABORT, "")


class Transcript:
    """The tokens of policy and environment in one sequence, exactly as the engine saw and sampled them.

    If new messages cannot be appended to the sampled tokens, the context forks: the whole conversation is rendered
    again and starts another trajectory.
    """

    def __init__(self) -> None:
        self._paths: list[list[Segment]] = []
        self._shown: list[PromptPictures | None] = []
        self._earned: list[float] = []
        self._states: list[str] = []
        self._partner_turns: list[PartnerTurn] = []
        self.context: Ints = np.zeros(0, np.int32)
        """The context [C] that the engine continues."""
        self.counts: defaultdict[str, float] = defaultdict(float)

    @property
    def shown(self) -> PromptPictures | None:
        """The pictures of the current trajectory."""
        return self._shown[-1]

    @shown.setter
    def shown(self, pictures: PromptPictures | None) -> None:
        self._shown[-1] = pictures

    def act(self, completion: Completion, calls: Sequence[Mapping[str, Any]], state: str) -> None:
        """Append the policy's turn and the environment's state before it. Its reward is 0 until `earn` adds to it."""
        self._paths[-1] = routed([*self._paths[-1], sampled_segment(completion, calls)], completion.routes)
        self._earned.append(0.0)
        self._states.append(state)
        self.context = np.concatenate([self.context, completion.token_ids], dtype=np.int32)

    def earn(self, reward: float) -> None:
        """Add to the reward of the last turn."""
        self._earned[-1] += reward

    def hear(self, partner: str, text: str) -> None:
        """Note a partner's turn. It is no part of the context: the environment's messages may tell it."""
        self._partner_turns.append(PartnerTurn(len(self._earned), partner, text))

    def go_on(self, token_ids: Ints, text: str, pictures: Sequence[str] = ()) -> None:
        """Append tokens that follow the policy's turn, and show pictures with these names."""
        self._paths[-1].append(given(token_ids, text, pictures))
        self.context = np.concatenate([self.context, token_ids], dtype=np.int32)

    def start(self, token_ids: Ints, text: str, pictures: Sequence[str] = ()) -> None:
        """Start a trajectory with the tokens of the whole conversation, up to those that open the policy's turn."""
        self._paths.append([given(token_ids, text, pictures)])
        self._shown.append(None)
        self.context = token_ids

    def episode(self, stop: StopReason) -> Episode:
        """Return the episode, with the sum of its turns' rewards as its reward."""
        self._check()
        if not self._earned:
            self.act(NOTHING_SAMPLED, (), "")
        stops = [StopReason.COMPLETED] * (len(self._paths) - 1) + [stop]
        value = sum(self._earned)
        paths = [
            Trajectory(segments, why, shown)
            for segments, why, shown in zip(self._paths, stops, self._shown, strict=True)
        ]
        return Episode(
            paths,
            RewardResult(value),
            tuple(self._earned),
            tuple(self._states),
            dict(self.counts),
            tuple(self._partner_turns),
        )

    def _check(self) -> None:
        laid = np.concatenate([segment.token_ids for segment in self._paths[-1]])
        assert np.array_equal(laid, self.context), "the segments of an episode are not the tokens that the engine saw"


def without_verdict(token_ids: Ints, text: str, stop: StopReason, note: str, outcome: RewardOutcome) -> Episode:
    """Return an episode without sampled tokens, with reward 0: it ended before the policy's first turn."""

    path = Trajectory([given(token_ids, text), sampled_segment(NOTHING_SAMPLED, ())], stop)
    return Episode([path], RewardResult(0.0, outcome, note=note), (0.0,), ("",))


Locate = Callable[[Segment, Sequence[int]], Ints]
"""Converts positions in a response's text to positions in its tokens. See `TurnEnds`."""
BROKEN = "\ufffd"
"""Replacement character: a decoder returns it for bytes that do not form a complete character."""


class TurnEnds:
    """Converts positions in a response's text to positions in its tokens."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """`decode` must convert token ids to text in the same way as the engine."""
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def __call__(self, response: Segment, ends: Sequence[int]) -> Ints:
        """Return [K]: for each of the K text positions in `ends`, the smallest number of leading tokens whose text
        reaches it.

        For the end of the text this is the number of all tokens, so that the end-of-sequence token, which has no text,
        belongs to the last turn.
        """
        token_ids, text = response.token_ids.tolist(), response.text
        runs = self._runs(token_ids)
        if "".join(part for _, part in runs) != text:
            runs = [(token_ids, text)]  # a token's text depends on the tokens before it
        characters = [0, *accumulate(len(part) for _, part in runs)]
        tokens = [0, *accumulate(len(ids) for ids, _ in runs)]

        def count(end: int) -> int:
            if end == len(text):
                return len(token_ids)
            run = bisect_left(characters, end) - 1
            return tokens[run] + self._within(*runs[run], end - characters[run])

        return np.array([count(end) for end in ends], np.int32)

    def _runs(self, token_ids: list[int]) -> list[tuple[list[int], str]]:
        """Return runs of tokens, each with its text. A run is one token, or several that share a character."""
        runs: list[tuple[list[int], str]] = []
        for is_broken, group in groupby(token_ids, lambda token_id: BROKEN in self._piece(token_id)):
            ids = list(group)
            runs += (
                [(ids, self._decode(ids))] if is_broken else [([token_id], self._piece(token_id)) for token_id in ids]
            )
        return runs

    def _within(self, token_ids: list[int], text: str, end: int) -> int:
        """Return the number of the run's tokens whose text reaches `end` characters of the run's text.

        The decoded text of a prefix of the run is exact, except for an incomplete character at its end.
        """
        counts = range(1, len(token_ids))
        return bisect_left(counts, end, key=lambda n: len(commonprefix([self._decode(token_ids[:n]), text]))) + 1

    def _piece(self, token_id: int) -> str:
        if token_id not in self._pieces:
            self._pieces[token_id] = self._decode([token_id])
        return self._pieces[token_id]


def by_turns(episode: Episode, locate: Locate) -> Episode:
    """Return the episode with one segment for each turn of its response. If the reward names no turns, return it
    unchanged.

    Turns that end within the same token share a segment. Tokens after the last turn form another segment.
    """
    turns = episode.reward.turns
    if not turns:
        return episode
    [trajectory] = episode.trajectories
    prompt, response = trajectory.segments
    located = locate(response, [turn.end for turn in turns])
    ends, of_turn = np.unique(np.append(located, len(response.token_ids)), return_inverse=True)
    characters = np.zeros(len(ends), np.int64)
    np.maximum.at(characters, of_turn[:-1], [turn.end for turn in turns])
    characters[-1] = len(response.text)
    earned = np.bincount(of_turn[:-1], [turn.value for turn in turns], len(ends))
    parts = cut(response, ends.tolist(), characters.tolist())
    return replace(episode, trajectories=[replace(trajectory, segments=[prompt, *parts])], turn_rewards=earned.tolist())


def joined_turns(episodes: Sequence[Episode], rewards: Floats) -> EpisodeTurns | None:
    """Return the turns of a step's episodes, one for each sampled segment; None if every episode is one turn.

    Args:
        episodes: the E episodes.
        rewards: [E], shaped rewards. The excess of an episode's reward over the sum of its turns' rewards is added to
            the last turn.
    """
    if all(not episode.turn_rewards and len(episode.sampled) == 1 for episode in episodes):
        return None
    earned, lengths = [], []
    for episode, reward in zip(episodes, rewards.tolist(), strict=True):
        values = np.array(episode.turn_rewards or np.zeros(len(episode.sampled)), np.float64)
        values[-1] += reward - values.sum()
        earned.append(values)
        lengths.append(_turn_lengths(episode))
    counts = list(map(len, earned))
    return EpisodeTurns(
        rewards=np.concatenate(earned).astype(np.float32),
        rows=np.repeat(np.arange(len(episodes), dtype=np.int32), counts),
        of_token=np.repeat(np.arange(sum(counts), dtype=np.int32), np.concatenate(lengths)),
        states=_states(episodes),
    )


def _states(episodes: Sequence[Episode]) -> Ints | None:
    """Return [K], a number for the state before each turn: equal for equal states, unique for unknown ones."""
    if not any(episode.turn_states for episode in episodes):
        return None
    numbers: dict[str | tuple[int, int], int] = {}
    seen = [
        numbers.setdefault(state, len(numbers))
        for row, episode in enumerate(episodes)
        for state in episode.turn_states or [(row, turn) for turn in range(len(episode.sampled))]
    ]
    return np.array(seen, np.int32)


def _turn_lengths(episode: Episode) -> list[int]:
    """Return the number of tokens of each turn, including the given tokens before it.

    Given tokens after the last turn count as part of it.
    """
    lengths, before = [], 0
    for segment in (segment for trajectory in episode.trajectories for segment in trajectory.segments):
        before += len(segment.token_ids)
        if segment.sampled:
            lengths.append(before)
            before = 0
    lengths[-1] += before
    return lengths
