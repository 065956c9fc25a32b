"""FrozenLake: reach the goal without falling into a hole. Keys of ROLL v0.2.1, dynamics of Gymnasium."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, NamedTuple

from roll.agents.environments.base import ENVIRONMENTS, Observation, Step
from roll.agents.environments.written import GridWorld
from roll.config.derived.domains import MOST_STEPS

ACTIONS = ("Left", "Down", "Right", "Up")
"""Actions in the order of MOVES. On slippery ice, an action and its two cyclic neighbours are equally likely."""
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
PLAYER, ICE, HOLE, GOAL, FALLEN, ARRIVED = range(6)
LOOKUP = {PLAYER: "P", ICE: "_", HOLE: "O", GOAL: "G", FALLEN: "X", ARRIVED: "√"}
NAMES = {
    PLAYER: "player",
    ICE: "empty",
    HOLE: "hole",
    GOAL: "goal",
    FALLEN: "player in hole",
    ARRIVED: "player on goal",
}
DRAWS = 2000
"""Largest number of maps to draw until one can be solved."""
Cell = tuple[int, int]
"""Row, column."""


class Lake(NamedTuple):
    """A square map."""

    size: int
    start: Cell
    goal: Cell
    holes: frozenset[Cell]

    def moved(self, cell: Cell, move: int) -> Cell:
        """Return the cell after a move. A move over the edge of the map has no effect."""
        down, right = MOVES[move]
        return min(max(cell[0] + down, 0), self.size - 1), min(max(cell[1] + right, 0), self.size - 1)


def random_lake(size: int, p: float, random: Random) -> Lake:
    """Draw a map with random start and goal, other cells being ice with probability p. Raises ValueError for none."""
    cells = [(row, column) for row in range(size) for column in range(size)]
    for _ in range(DRAWS):
        start, goal = random.sample(cells, 2)
        holes = frozenset(cell for cell in cells if random.random() >= p and cell not in (start, goal))
        lake = Lake(size, start, goal, holes)
        if goal in reached(lake):
            return lake
    raise ValueError(f"none of {DRAWS} random maps can be solved; raise p, which is {p:g}")


def reached(lake: Lake) -> Iterator[Cell]:
    """Yield every cell that can be reached from the start without falling into a hole."""
    found, waiting = {lake.start}, [lake.start]
    while waiting:
        cell = waiting.pop()
        yield cell
        new = {lake.moved(cell, move) for move in range(len(MOVES))} - found - lake.holes
        found |= new
        waiting += sorted(new)


@ENVIRONMENTS.register("frozen_lake")
@dataclass(kw_only=True, eq=False)
class FrozenLake(GridWorld):
    """A map drawn from the seed. The reward is 1 at the goal, and 0 in a hole and everywhere else. The drawn map is the
    state.

    Raises:
        ValueError: a field has an invalid value.
    """

    actions: ClassVar[Sequence[str]] = ACTIONS
    usual_symbols: ClassVar[Mapping[int, str]] = LOOKUP
    names: ClassVar[Mapping[int, str]] = NAMES

    size: int = 4
    """Number of cells along one side of the map."""
    p: float = 0.8
    """Probability that a cell is ice."""
    is_slippery: bool = True
    """Whether ice is slippery: a move goes in the chosen direction or to either side, each with probability 1/3."""
    max_steps: int = MOST_STEPS["frozen_lake"]
    format_penalty: float = -0.01

    def __post_init__(self) -> None:
        if not 2 <= self.size <= 64 or not 0 < self.p <= 1:
            raise ValueError(
                f"size must be from 2 to 64, and p above 0 and at most 1; they are {self.size} and {self.p:g}"
            )
        super().__post_init__()

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Return the map of a seed."""
        self._random = Random(seed)
        self.lake = random_lake(self.size, self.p, self._random)
        self.player = self.lake.start
        return self._templates.first(self.drawing())

    def _act(self, action: int) -> Step:
        before, slip = self.player, self._random.choice((-1, 0, 1)) if self.is_slippery else 0
        self.player = self.lake.moved(before, (action + slip) % len(MOVES))
        is_solved = self.player == self.lake.goal
        is_over = is_solved or self.player in self.lake.holes
        return self._counter.moved(
            ACTIONS[action], self.drawing(), float(is_solved), self.player != before, is_over, is_solved
        )

    def _task(self) -> str:
        slips = " The ice is slippery: you may move in another direction than you intend." if self.is_slippery else ""
        return f"You are solving the FrozenLake puzzle. Go to the goal, and avoid the holes.{slips}"

    def close(self) -> None:
        """Do nothing."""

    def drawing(self) -> str:
        """Return the map as text, one line for each row."""
        cells = range(self.size)
        return "\n".join("".join(self._lookup[self._code((row, column))] for column in cells) for row in cells)

    def _code(self, cell: Cell) -> int:
        if cell == self.player:
            return FALLEN if cell in self.lake.holes else ARRIVED if cell == self.lake.goal else PLAYER
        return HOLE if cell in self.lake.holes else GOAL if cell == self.lake.goal else ICE
