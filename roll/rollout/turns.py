"""The turns of responses: where they end in tokens, and what each of them earned."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from os.path import commonprefix

import numpy as np

from roll.algorithms.returns import Turns
from roll.types import Completion, Floats, Ints, Rollout


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
        pieces = [self._piece(token_id) for token_id in token_ids]
        if "".join(pieces) == text:
            counts = np.searchsorted(np.cumsum([len(piece) for piece in pieces]), ends) + 1
        else:
            # A character of several tokens, or blanks that depend on what stands before: only a prefix's own text is exact.
            counts = [bisect_left(range(1, len(token_ids) + 1), end, key=lambda n: self._held(token_ids[:n], text)) + 1 for end in ends]
        whole = np.asarray(ends) == len(text)
        return np.where(whole, len(token_ids), np.minimum(counts, len(token_ids))).astype(np.int32)

    def _piece(self, token_id: int) -> str:
        if token_id not in self._pieces:
            self._pieces[token_id] = self._decode([token_id])
        return self._pieces[token_id]

    def _held(self, token_ids: list[int], text: str) -> int:
        """Characters of the text that these first tokens of it make up, without those that are not whole yet."""
        return len(commonprefix([self._decode(token_ids), text]))


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
