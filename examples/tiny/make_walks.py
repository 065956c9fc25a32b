"""Writes walks over frozen lakes, which teach the tiny agent to read a map, but hardly to reach the goal.

    python examples/tiny/make_walks.py FOLDER [--seed 0]

writes FOLDER/walks.jsonl. In each turn the policy describes what it sees, then moves, for example `02>31 LD Right`: it
is in row 0, column 2; the goal is in row 3, column 1, which is to the left and down; it moves to the right. The
descriptions are always right. One move in five is towards the goal, the others are random. Reinforcement learning
teaches the agent to move towards the goal and around holes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from roll.agents.environments.frozen_lake import ACTIONS, Cell, FrozenLake
from roll.data.prompts import FIRST_HELD_OUT

WALKS = 8000
SENSIBLE = 0.2
"""Share of deliberate moves towards the goal. Some of the random moves lead towards it too."""
FIRST_SEED = 1 << 20
"""First seed of the maps. It is chosen so that the seeds differ from those of training and validation."""
HELD_OUT = 128
"""Number of held-out seeds: `validation.rows` in tiny_frozen_lake.yaml. Small maps repeat, so walks on held-out maps
are left out.
"""
LAKE = {
    "size": 4,
    "p": 0.8,
    "is_slippery": False,
    "max_steps": 4,
    "format_penalty": 0.0,
    "action_pattern": "Left|Down|Right|Up",
    "env_instruction": "",
    "agent_system_template": "",
    "agent_template": "{observation}",
}
"""Settings of the environment, the same as `environment_args` in tiny_frozen_lake.yaml."""


def seen(player: Cell, goal: Cell) -> str:
    """Return the positions of player and goal, and the first letters of all moves towards the goal, ignoring holes."""
    down, right = goal[0] - player[0], goal[1] - player[1]
    letters = "L" * (right < 0) + "D" * (down > 0) + "R" * (right > 0) + "U" * (down < 0)
    return f"{player[0]}{player[1]}>{goal[0]}{goal[1]} {letters}"


def walk(seed: int, draw: random.Random) -> list[dict[str, Any]]:
    """Return the messages of one episode. The last message is the policy's."""
    world = FrozenLake(**LAKE)
    said = [dict(message) for message in world.reset({}, seed).messages]
    while True:
        sight = seen(world.player, world.lake.goal)
        towards = [action for action in ACTIONS if action[0] in sight]
        action = draw.choice(towards if draw.random() < SENSIBLE else ACTIONS)
        turn = {"role": "assistant", "content": f"{sight} {action}"}
        step = world.step(turn)
        said += [turn, *(dict(message) for message in step.messages)]
        if step.done:
            return said


def drawing(seed: int) -> str:
    """Return the drawing of a seed's map at the start of an episode."""
    world = FrozenLake(**LAKE)
    world.reset({}, seed)
    return world.drawing()


def write_walks(folder: Path, seed: int) -> None:
    """Write the file into a new folder, which replaces `folder` once it is complete."""
    draw = random.Random(seed)
    held_out = {drawing(FIRST_HELD_OUT + number) for number in range(HELD_OUT)}
    seeds = (seed for seed in itertools.count(FIRST_SEED) if drawing(seed) not in held_out)
    rows = [{"messages": walk(seed, draw)} for seed in itertools.islice(seeds, WALKS)]
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "walks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_walks(given.folder, given.seed)
