"""The turns of episodes: splits responses into the turns that a reward names, and assigns rewards to turns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from os.path import commonprefix

import numpy as np

from roll.algorithms.advantages import EpisodeTurns
from roll.rollout.record import cut
from roll.types import Episode, Floats, Ints, Segment

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
