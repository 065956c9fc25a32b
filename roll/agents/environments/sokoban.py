"""Sokoban: push every box onto a target. The keys are those of ROLL v0.2.1, the rewards and symbols those of
gym-sokoban.

Generates solvable Sokoban levels by playing backwards from the solved state. Deterministic for a given random
generator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, NamedTuple

from roll.agents.environments.base import ENVIRONMENTS, Observation, Step
from roll.agents.environments.written import GridWorld
from roll.config.derived.domains import MOST_STEPS

Cell = tuple[int, int]
"""Row, column."""
MOVES: tuple[Cell, ...] = ((-1, 0), (1, 0), (0, -1), (0, 1))
BLOCKS: tuple[tuple[Cell, ...], ...] = (
    ((0, 0), (0, 1), (0, -1)),
    ((0, 0), (1, 0), (-1, 0)),
    ((0, 0), (0, 1), (1, 0), (1, 1)),
    ((0, 0), (0, 1), (-1, 0)),
    ((0, 0), (0, -1), (1, 0)),
)
"""Shapes of floor, as offsets from the current cell of the random walk. Each step digs out one of them."""
TURNS = 0.35
"""Probability that a step of the random walk chooses a new direction."""
LENGTH = 1.7
"""Number of steps of the random walk, as a multiple of rows + columns."""
PULL = 0.7
"""Probability that a backward move pulls a box, if it can."""
ROOMS, PLAYS = 200, 10
"""Largest number of rooms to try, and number of backward games in each room."""


class SokobanLevel(NamedTuple):
    """The cells of a room: floor, targets, boxes and the player."""

    floor: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell


def added(cell: Cell, move: Cell) -> Cell:
    """Return the sum of a cell and a move."""
    return cell[0] + move[0], cell[1] + move[1]


def random_level(rows: int, columns: int, boxes: int, depth: int, random: Random) -> SokobanLevel:
    """Generate a solvable level with no box on a target, by `depth` backward moves. Raises ValueError for none."""
    for _ in range(ROOMS):
        floor = dug(rows, columns, random)
        if len(floor) < 2 * boxes + 1:
            continue
        *targets, player = random.sample(sorted(floor), boxes + 1)
        solved = SokobanLevel(floor, frozenset(targets), frozenset(targets), player)
        found = max((play_backwards(solved, depth, random) for _ in range(PLAYS)), key=distance, default=solved)
        if distance(found):
            return found
    raise ValueError(
        f"none of {ROOMS} random rooms of {rows} x {columns} suits {boxes} box(es); enlarge dim_room, or lower "
        f"num_boxes"
    )


def dug(rows: int, columns: int, random: Random) -> frozenset[Cell]:
    """Dig a connected floor within the walls by a random walk."""
    cell, move = (random.randrange(1, rows - 1), random.randrange(1, columns - 1)), random.choice(MOVES)
    floor = {cell}
    for _ in range(int(LENGTH * (rows + columns))):
        if random.random() < TURNS:
            move = random.choice(MOVES)
        row, column = added(cell, move)
        cell = min(max(row, 1), rows - 2), min(max(column, 1), columns - 2)
        block = (added(cell, offset) for offset in random.choice(BLOCKS))
        floor |= {(row, column) for row, column in block if 1 <= row <= rows - 2 and 1 <= column <= columns - 2}
    return frozenset(floor)


def play_backwards(level: SokobanLevel, depth: int, random: Random) -> SokobanLevel:
    """Play a random game backwards. Return the level on the way whose boxes are farthest from the targets."""
    best = level
    for _ in range(depth):
        move = random.choice(MOVES)
        behind, player = added(level.player, (-move[0], -move[1])), added(level.player, move)
        if player not in level.floor or player in level.boxes:
            continue
        boxes = level.boxes
        if behind in boxes and random.random() < PULL:
            boxes = boxes - {behind} | {level.player}
        level = level._replace(boxes=boxes, player=player)
        best = max(best, level, key=distance)
    return best


def distance(level: SokobanLevel) -> int:
    """Return the sum over the boxes of the moves to the nearest target, ignoring walls. 0 if a box is on a target."""
    if level.boxes & level.targets:
        return 0
    return sum(min(abs(box[0] - row) + abs(box[1] - column) for row, column in level.targets) for box in level.boxes)


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
"""Rewards: for each move; for each box pushed onto a target (negated: off a target); for the solving move."""


@ENVIRONMENTS.register("sokoban")
@dataclass(kw_only=True, eq=False)
class Sokoban(GridWorld):
    """A room drawn from the seed. The drawn room is the state. Raises ValueError for an invalid field."""

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
        if (
            len(sizes) != 2
            or not all(5 <= length <= 64 for length in sizes)
            or self.num_boxes < 1
            or self.search_depth < 1
        ):
            problem = f"{list(sizes)}, {self.num_boxes} and {self.search_depth}"
            raise ValueError(
                f"dim_room must be two numbers from 5 to 64, and num_boxes and search_depth at least 1; they are "
                f"{problem}"
            )
        super().__post_init__()

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Return the room of a seed."""
        rows, columns = self.dim_room
        self.level = random_level(rows, columns, self.num_boxes, self.search_depth, Random(seed))
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


def pushed(level: SokobanLevel, move: Cell) -> SokobanLevel:
    """Return the level after a move. The player pushes a box that is in the way. A blocked move has no effect."""
    player = added(level.player, move)
    beyond = added(player, move)
    if player not in level.floor or (player in level.boxes and (beyond not in level.floor or beyond in level.boxes)):
        return level
    boxes = level.boxes - {player} | {beyond} if player in level.boxes else level.boxes
    return level._replace(player=player, boxes=boxes)


def _code(level: SokobanLevel, cell: Cell) -> int:
    is_target = cell in level.targets
    if cell == level.player:
        return PLAYER_ON_TARGET if is_target else PLAYER
    if cell in level.boxes:
        return BOX_ON_TARGET if is_target else BOX
    return WALL if cell not in level.floor else TARGET if is_target else FLOOR
