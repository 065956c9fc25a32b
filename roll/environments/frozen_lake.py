"""Frozen lake: go to the goal, and into no hole. The keys are those of ROLL v0.2.1, the physics those of Gymnasium's FrozenLake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, NamedTuple

from roll.environments.base import ENVIRONMENTS, Message, Observation, Step
from roll.environments.written import ACTION_PATTERN, SYSTEM, TURN, ActionReader, Counter, Templates, legend, symbols

ACTIONS = ("Left", "Down", "Right", "Up")
"""A slippery lake carries the player also to those beside the one taken, each as often."""
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
PLAYER, ICE, HOLE, GOAL, FALLEN, ARRIVED = range(6)
LOOKUP = {PLAYER: "P", ICE: "_", HOLE: "O", GOAL: "G", FALLEN: "X", ARRIVED: "√"}
NAMES = {PLAYER: "player", ICE: "empty", HOLE: "hole", GOAL: "goal", FALLEN: "player in hole", ARRIVED: "player on goal"}
DRAWS = 2000
"""Of maps, of which one can be solved."""
Cell = tuple[int, int]
"""Row, column."""


class Lake(NamedTuple):
    """A square map."""

    size: int
    start: Cell
    goal: Cell
    holes: frozenset[Cell]

    def moved(self, cell: Cell, move: int) -> Cell:
        """Where a move leads; the player stays at an edge."""
        down, right = MOVES[move]
        return min(max(cell[0] + down, 0), self.size - 1), min(max(cell[1] + right, 0), self.size - 1)


def drawn(size: int, p: float, random: Random) -> Lake:
    """A map whose goal can be reached; start and goal are anywhere.

    Args:
        p: of ice in each other cell.

    Raises:
        ValueError: none was found.
    """
    cells = [(row, column) for row in range(size) for column in range(size)]
    for _ in range(DRAWS):
        start, goal = random.sample(cells, 2)
        holes = frozenset(cell for cell in cells if random.random() >= p and cell not in (start, goal))
        lake = Lake(size, start, goal, holes)
        if goal in reached(lake):
            return lake
    raise ValueError(f"no map of {DRAWS} can be solved; raise p, which is {p:g}")


def reached(lake: Lake) -> Iterator[Cell]:
    """Every cell to which ice leads from the start."""
    found, waiting = {lake.start}, [lake.start]
    while waiting:
        cell = waiting.pop()
        yield cell
        new = {lake.moved(cell, move) for move in range(len(MOVES))} - found - lake.holes
        found |= new
        waiting += sorted(new)


@ENVIRONMENTS.register("frozen_lake")
class FrozenLake:
    """A map for each seed. The state is the map as it is drawn. 1 at the goal, 0 in a hole and everywhere else."""

    malformed_calls = "step"

    def __init__(
        self,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = True,
        max_steps: int = 10,
        action_pattern: str = ACTION_PATTERN,
        format_penalty: float = -0.01,
        grid_lookup: Mapping[Any, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        env_instruction: str | None = None,
        agent_system_template: str = SYSTEM,
        agent_template: str = TURN,
        max_response_length: int | None = None,
    ) -> None:
        """
        Args:
            size: of the map's side, in cells.
            p: probability that a cell is ice.
            is_slippery: a move goes where it is meant to, or to either side of that, each with probability 1/3.
            max_steps: actions, unreadable ones included, after which the episode ends.
            action_pattern: regular expression whose last group is the action.
            format_penalty: reward of a message without an action that can be read.
            grid_lookup: symbols of the map: 0 player, 1 ice, 2 hole, 3 goal, 4 player in a hole, 5 player on the goal.
            grid_vocab: what the symbols mean, for the instruction.
            env_instruction: stands before the first map.
            agent_system_template: the system message; empty for none.
            agent_template: of each turn, with {turn_idx}, {observation}, {actions_left}, {max_response_length}.
            max_response_length: what the template says of it.

        Raises:
            ValueError: a value is not possible.
        """
        if not 2 <= size <= 64 or not 0 < p <= 1:
            raise ValueError(f"size has to be 2 to 64 and p above 0 and at most 1; they are {size} and {p:g}")
        self._size, self._p, self._slippery = size, p, is_slippery
        self._lookup = symbols(grid_lookup, LOOKUP)
        slips = " The ice is slippery: you may move in another direction than you intend." if is_slippery else ""
        usual = (
            f"You are solving the FrozenLake puzzle. Go to the goal, and avoid the holes.{slips} "
            f"The symbols mean: {legend(self._lookup, grid_vocab, NAMES)}. "
            f"Your available actions are: {', '.join(ACTIONS)}. Give one action in a turn, in the format <answer>Right</answer>."
        )
        instruction = usual if env_instruction is None else env_instruction
        self._templates = Templates(instruction, agent_system_template, agent_template, max_steps, max_response_length)
        self._read = ActionReader(action_pattern, ACTIONS)
        self._counter = Counter(self._templates, format_penalty)

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """The map of a seed."""
        self._random = Random(seed)
        self.lake = drawn(self._size, self._p, self._random)
        self.player = self.lake.start
        return self._templates.first(self.drawing())

    def step(self, message: Message) -> Step:
        """Move, if the message says where."""
        action = self._read(str(message.get("content") or ""))
        if action is None:
            return self._counter.unreadable(self.drawing())
        before, slip = self.player, self._random.choice((-1, 0, 1)) if self._slippery else 0
        self.player = self.lake.moved(before, (action + slip) % len(MOVES))
        is_solved = self.player == self.lake.goal
        is_over = is_solved or self.player in self.lake.holes
        return self._counter.moved(ACTIONS[action], self.drawing(), float(is_solved), self.player != before, is_over, is_solved)

    def close(self) -> None:
        """Nothing is held."""

    def drawing(self) -> str:
        """The map, a line for each row."""
        cells = range(self._size)
        return "\n".join("".join(self._lookup[self._code((row, column))] for column in cells) for row in cells)

    def _code(self, cell: Cell) -> int:
        if cell == self.player:
            return FALLEN if cell in self.lake.holes else ARRIVED if cell == self.lake.goal else PLAYER
        return HOLE if cell in self.lake.holes else GOAL if cell == self.lake.goal else ICE
