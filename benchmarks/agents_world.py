"""The environment of `agents.py`, which answers every turn with random letters and ends after a given number of
turns.
"""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Mapping
from typing import Any

from roll.agents.environments.base import Message, Observation, Step


class Letters:
    """An environment that gives the row's prompt, and then random letters after each turn of the policy."""

    def __init__(self, turns: int, letters: int, seconds: float = 0.0) -> None:
        """
        Args:
            turns: number of turns of the policy in an episode.
            letters: number of letters in an answer.
            seconds: delay of each answer.
        """
        self._turns, self._letters, self._seconds = turns, letters, seconds
        self._taken, self._drawn = 0, random.Random()

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Return the row's prompt as the user's message."""
        self._taken, self._drawn = 0, random.Random(seed)
        return Observation([{"role": "user", "content": row["prompt"]}])

    async def step(self, message: Message) -> Step:
        """Return the next letters. The reward is the share of `a` in the policy's message, so that episodes differ."""
        if self._seconds:
            await asyncio.sleep(self._seconds)
        self._taken += 1
        said = str(message["content"])
        letters = "".join(self._drawn.choices(string.ascii_lowercase, k=self._letters))
        return Step(
            [{"role": "user", "content": letters}], said.count("a") / max(len(said), 1), done=self._taken == self._turns
        )

    def close(self) -> None:
        """Do nothing."""
