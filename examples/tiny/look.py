"""An environment with pictures for tiny models: a hidden colour, which the agent sees when it calls the tool `look`.

    environments:
      look: {environment: 'examples.tiny.look:Look', max_turns: 3, rows: 1024}

A wrong answer shows the picture, too. Write the model of `make_seeing_model.py` with `--tools`, so that its template
writes calls.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from PIL import Image

from roll.agents.environments.base import TOOL_ERRORS, Message, Observation, Step
from roll.agents.tools import Tools

COLOURS = ("red", "green", "blue", "white")
SIDES = (32, 40, 48)
"""Sides of the pictures in pixels."""


class Look:
    """A colour to name. The reward is 1 for the right name."""

    shows_pictures = True

    def __init__(self) -> None:
        self._tools = Tools([self.look])

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Draw the colour."""
        draw = random.Random(row.get("seed", seed))
        self._answer = draw.choice(COLOURS)
        self._picture = Image.new("RGB", (draw.choice(SIDES), draw.choice(SIDES)), self._answer)
        return Observation([{"role": "user", "content": "What?"}], self._tools.schemas)

    def step(self, message: Message) -> Step:
        """Answer calls, or compare the answer."""
        if calls := message.get("tool_calls"):
            answers = [self._tools.answer(call) for call in calls]
            failed = float(sum(answer.failed for answer in answers))
            return Step([answer.message for answer in answers], metrics={TOOL_ERRORS: failed, "looks": 1.0})
        if str(message.get("content") or "").strip() == self._answer:
            return Step(reward=1.0, done=True)
        shown = [{"type": "image", "image": self._picture}, {"type": "text", "text": "No. What?"}]
        return Step([{"role": "user", "content": shown}])

    def look(self) -> Image.Image:
        """Look at the colour."""
        return self._picture

    def close(self) -> None:
        """Do nothing."""
