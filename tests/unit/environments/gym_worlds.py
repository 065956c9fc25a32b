"""Environments of Gymnasium for tests, which register under `GymWorlds/`."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Text


class Words(gymnasium.Env):
    """Repeat the word that is drawn from the seed. The action is a text."""

    def __init__(self, fail: str = "", mark: str = "", spoken: bool = True) -> None:
        """`fail` is the method that raises, `mark` a file that `close` writes."""
        self._fail, self._mark = fail, mark
        self.action_space = Text(max_length=6) if spoken else Box(0.0, 1.0)
        self.observation_space = Text(max_length=40, charset=string.printable)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        if self._fail == "reset":
            raise KeyError("no word")
        self._word = str((options or {}).get("word") or self.np_random.integers(1000, 9999))
        return f"Say {self._word}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._fail == "step":
            raise KeyError("no voice")
        return f"You said {action}", float(action == self._word), action == self._word, False, {"letters": len(action)}

    def close(self) -> None:
        if self._mark:
            Path(self._mark).write_text("closed")


class Doors(gymnasium.Env):
    """Doors 5, 6 and 7, of which the first alone opens. The observation is a mapping with numbers of NumPy."""

    def __init__(self) -> None:
        self.action_space = Discrete(3, start=5)
        self.observation_space = Dict({"tries": Discrete(100), "word": Text(max_length=9)})
        self._tries = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action: int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self._tries += 1
        return self._seen(), 0.5, action == 5, False, {"success": action == 5}

    def _seen(self) -> dict[str, Any]:
        return {"tries": np.int64(self._tries), "word": "closed"}


gymnasium.register("GymWorlds/Words-v0", entry_point=lambda **keys: Words(**keys))
gymnasium.register("GymWorlds/Doors-v0", entry_point=lambda **keys: Doors(**keys))


def shown(observation: Any, info: Any) -> str:
    return f"After {observation['tries']} tries, with {sorted(info)}"
