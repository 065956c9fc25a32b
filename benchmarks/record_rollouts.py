"""Runs an experiment and records the token ids and rewards of every step, for `same_numbers.py`.

    PYTHONPATH=CHECKOUT python benchmarks/record_rollouts.py FILE --config-name NAME [KEY=VALUE ...]

FILE gets one line of JSON for each batch of groups that the run concatenates: a step's, and those that a reference
scores as they arrive. A line lists [prompt id, token ids, reward] of each episode, with given and sampled tokens. The
status is that of `roll.pipeline`.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import roll

NAME = "experience"
"""The function that concatenates finished groups. Each step of an RL run calls it."""


def main() -> None:
    """Wrap the function before the driver imports it, and run the experiment."""
    target = Path(sys.argv.pop(1))
    module = import_module(module_of(NAME))
    concatenate = getattr(module, NAME)

    def recorded(groups: Sequence[Any], *rest: Any) -> Any:
        with target.open("a", encoding="utf-8") as file:
            file.write(json.dumps(list(map(episode_line, episodes_of(groups)))) + "\n")
        return concatenate(groups, *rest)

    setattr(module, NAME, recorded)
    runpy.run_module("roll.pipeline", run_name="__main__", alter_sys=True)


def module_of(name: str) -> str:
    """Return the module of the checkout that defines a function. Its place has changed between versions of roll."""
    folder = Path(roll.__path__[0])
    for path in sorted((folder / "rollout").glob("*.py")):
        if f"\ndef {name}(" in path.read_text(encoding="utf-8"):
            return f"roll.rollout.{path.stem}"
    raise LookupError(f"no module of {folder / 'rollout'} defines {name}")


def episodes_of(groups: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the episodes of `RolloutGroup`s in their order, each with the id of its prompt."""
    return [(group.prompt.prompt_id, episode) for group in groups for episode in group.episodes]


def episode_line(named: tuple[str, Any]) -> tuple[str, list[list[int]], float]:
    """Return an episode's prompt, the token ids of each of its trajectories, and its reward."""
    prompt, episode = named
    tokens = [
        [int(token) for segment in trajectory.segments for token in segment.token_ids]
        for trajectory in episode.trajectories
    ]
    return prompt, tokens, float(episode.reward.value)


if __name__ == "__main__":
    main()
