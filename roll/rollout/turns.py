"""The turns of responses: where they end in tokens, and what each of them earned."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from os.path import commonprefix

import numpy as np

from roll.algorithms.returns import Turns
from roll.types import Completion, Floats, Ints, Rollout

BROKEN = "\ufffd"
"""What a decoder writes for bytes that are no character."""


class TurnEnds:
    """From characters of a response's text to its tokens."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """`decode` makes text of token ids as the engine did."""
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def __call__(self, completion: Completion, ends: Sequence[int]) -> Ints:
        """[K]: for each number of characters the least number of tokens whose text has them.

        At the text's end these are all tokens: the end-of-sequence token, which has no text, belongs to the last turn.
        """
        token_ids, text = completion.token_ids.tolist(), completion.text
        runs = self._runs(token_ids)
        if "".join(part for _, part in runs) != text:
            runs = [(token_ids, text)]  # a token's text depends on what stands before it
        characters = [0, *accumulate(len(part) for _, part in runs)]
        tokens = [0, *accumulate(len(ids) for ids, _ in runs)]

        def count(end: int) -> int:
            if end == len(text):
                return len(token_ids)
            run = bisect_left(characters, end) - 1
            return tokens[run] + self._within(*runs[run], end - characters[run])

        return np.array([count(end) for end in ends], np.int32)

    def _runs(self, token_ids: list[int]) -> list[tuple[list[int], str]]:
        """Tokens with their text, one by one; those that hold parts of characters stay together."""
        runs: list[tuple[list[int], str]] = []
        for is_broken, group in groupby(token_ids, lambda token_id: BROKEN in self._piece(token_id)):
            ids = list(group)
            runs += [(ids, self._decode(ids))] if is_broken else [([token_id], self._piece(token_id)) for token_id in ids]
        return runs

    def _within(self, token_ids: list[int], text: str, end: int) -> int:
        """The same in one run. A prefix's own text is exact but for a character that is not whole yet."""
        counts = range(1, len(token_ids))
        return bisect_left(counts, end, key=lambda n: len(commonprefix([self._decode(token_ids[:n]), text]))) + 1

    def _piece(self, token_id: int) -> str:
        if token_id not in self._pieces:
            self._pieces[token_id] = self._decode([token_id])
        return self._pieces[token_id]


def joined_turns(rollouts: Sequence[Rollout], prompt_lengths: Sequence[int], rewards: Floats) -> Turns | None:
    """The turns of a step's responses; None if none of them is divided.

    Args:
        rewards: [N], shaped.
    """
    if all(rollout.turn_ends is None for rollout in rollouts):
        return None
    parts = [_turns(rollout, reward) for rollout, reward in zip(rollouts, rewards.tolist(), strict=True)]
    lengths = [np.append(tokens[0] + before, tokens[1:]) for (tokens, _), before in zip(parts, prompt_lengths, strict=True)]
    count = sum(map(len, lengths))
    return Turns(
        rewards=np.concatenate([earned for _, earned in parts]).astype(np.float32),
        rows=np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in lengths]),
        of_token=np.repeat(np.arange(count, dtype=np.int32), np.concatenate(lengths)),
    )


def _turns(rollout: Rollout, reward: float) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and rewards, [K] each. Turns that end in one token are one; what is left of the reward is the last one's."""
    length = len(rollout.completion.token_ids)
    values = [] if rollout.turn_ends is None else [turn.value for turn in rollout.reward.turns]
    ends, turn = np.unique(np.append([] if rollout.turn_ends is None else rollout.turn_ends, length), return_inverse=True)
    return np.diff(ends, prepend=0).astype(np.int64), np.bincount(turn, [*values, reward - sum(values)])
