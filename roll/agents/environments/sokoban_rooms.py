"""Generates solvable Sokoban levels by playing backwards from the solved state. Deterministic for a given random generator."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

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


class Level(NamedTuple):
    """The cells of a room: floor, targets, boxes and the player."""

    floor: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell


def added(cell: Cell, move: Cell) -> Cell:
    """Return the sum of a cell and a move."""
    return cell[0] + move[0], cell[1] + move[1]


def drawn(rows: int, columns: int, boxes: int, depth: int, random: Random) -> Level:
    """Generate a level that can be solved and in which no box is on a target.

    Args:
        depth: number of moves of a backward game.

    Raises:
        ValueError: no level was found.
    """
    for _ in range(ROOMS):
        floor = dug(rows, columns, random)
        if len(floor) < 2 * boxes + 1:
            continue
        *targets, player = random.sample(sorted(floor), boxes + 1)
        solved = Level(floor, frozenset(targets), frozenset(targets), player)
        found = max((played_back(solved, depth, random) for _ in range(PLAYS)), key=distance, default=solved)
        if distance(found):
            return found
    raise ValueError(f"none of {ROOMS} random rooms of {rows} x {columns} suits {boxes} box(es); enlarge dim_room, or lower num_boxes")


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


def played_back(level: Level, depth: int, random: Random) -> Level:
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


def distance(level: Level) -> int:
    """Return the sum over the boxes of the distance to the nearest target, in moves, ignoring walls. 0 if any box is on a target."""
    if level.boxes & level.targets:
        return 0
    return sum(min(abs(box[0] - row) + abs(box[1] - column) for row, column in level.targets) for box in level.boxes)
