"""Sokoban: push every box onto a target. The keys are those of ROLL v0.2.1, the rewards and symbols those of gym-sokoban."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from roll.agents.environments.base import ENVIRONMENTS, Observation, Step
from roll.agents.environments.sokoban_rooms import MOVES, Cell, Level, added, drawn
from roll.agents.environments.written import GridWorld
from roll.config.derived.environment_roles import MOST_STEPS

ACTIONS = ("Up", "Down", "Left", "Right")
"""Names of the actions, in the order of MOVES."""
WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
LOOKUP = {WALL: "#", FLOOR: "_", TARGET: "O", BOX_ON_TARGET: "√", BOX: "X", PLAYER: "P", PLAYER_ON_TARGET: "S"}
NAMES = {
    WALL: "wall",
    FLOOR: "empty",
    TARGET: "target",
    BOX_ON_TARGET: "box on target",
    BOX: "box",
    PLAYER: "player",
    PLAYER_ON_TARGET: "player on target",
}
STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0
"""Rewards: for each move; for each box pushed onto a target (negated for a box pushed off); and for the move that solves the puzzle."""


@ENVIRONMENTS.register("sokoban")
@dataclass(kw_only=True, eq=False)
class Sokoban(GridWorld):
    """A room drawn from the seed. The drawn room is the state.

    Raises:
        ValueError: a field has an invalid value.
    """

    actions: ClassVar[Sequence[str]] = ACTIONS
    usual_symbols: ClassVar[Mapping[int, str]] = LOOKUP
    names: ClassVar[Mapping[int, str]] = NAMES

    dim_room: Sequence[int] = (6, 6)
    """Rows and columns, including walls."""
    num_boxes: int = 1
    search_depth: int = 300
    """Largest number of moves that the generator plays backwards from the solved room."""
    max_steps: int = MOST_STEPS["sokoban"]
    format_penalty: float = -0.15

    def __post_init__(self) -> None:
        sizes = self.dim_room
        if len(sizes) != 2 or not all(5 <= length <= 64 for length in sizes) or self.num_boxes < 1 or self.search_depth < 1:
            problem = f"{list(sizes)}, {self.num_boxes} and {self.search_depth}"
            raise ValueError(f"dim_room must be two numbers from 5 to 64, and num_boxes and search_depth at least 1; they are {problem}")
        super().__post_init__()

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Return the room of a seed."""
        rows, columns = self.dim_room
        self.level = drawn(rows, columns, self.num_boxes, self.search_depth, Random(seed))
        return self._templates.first(self.drawing())

    def _act(self, action: int) -> Step:
        before, self.level = self.level, pushed(self.level, MOVES[action])
        gained = len(self.level.boxes & self.level.targets) - len(before.boxes & before.targets)
        is_solved = self.level.boxes == self.level.targets
        reward = STEP_REWARD + BOX_REWARD * gained + SOLVED_REWARD * is_solved
        return self._counter.moved(ACTIONS[action], self.drawing(), reward, self.level != before, is_solved, is_solved)

    def _task(self) -> str:
        return (
            "You are solving the Sokoban puzzle. You are the player, and push all boxes onto targets. "
            "You cannot pull a box, nor push one into a wall or another box."
        )

    def close(self) -> None:
        """Do nothing."""

    def drawing(self) -> str:
        """Return the room as text, one line for each row."""
        rows, columns = (range(length) for length in self.dim_room)
        return "\n".join("".join(self._lookup[_code(self.level, (row, column))] for column in columns) for row in rows)


def pushed(level: Level, move: Cell) -> Level:
    """Return the level after a move. The player pushes a box that is in the way. A blocked move has no effect."""
    player = added(level.player, move)
    beyond = added(player, move)
    if player not in level.floor or (player in level.boxes and (beyond not in level.floor or beyond in level.boxes)):
        return level
    boxes = level.boxes - {player} | {beyond} if player in level.boxes else level.boxes
    return level._replace(player=player, boxes=boxes)


def _code(level: Level, cell: Cell) -> int:
    is_target = cell in level.targets
    if cell == level.player:
        return PLAYER_ON_TARGET if is_target else PLAYER
    if cell in level.boxes:
        return BOX_ON_TARGET if is_target else BOX
    return WALL if cell not in level.floor else TARGET if is_target else FLOOR
