"""Sokoban: push every box onto a target. The keys are those of ROLL v0.2.1, rewards and symbols those of gym-sokoban."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from roll.environments.base import ENVIRONMENTS, Message, Observation, Step
from roll.environments.sokoban_rooms import MOVES, Cell, Level, added, drawn
from roll.environments.written import ACTION_PATTERN, SYSTEM, TURN, ActionReader, Counter, Templates, legend, symbols

ACTIONS = ("Up", "Down", "Left", "Right")
"""In the order of MOVES."""
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
"""Of each move; of each box that comes onto a target, and what it costs to push one off; of the move that brings the last one."""


@ENVIRONMENTS.register("sokoban")
class Sokoban:
    """A room for each seed. The state is the room as it is drawn."""

    malformed_calls = "step"

    def __init__(
        self,
        dim_room: Sequence[int] = (6, 6),
        num_boxes: int = 1,
        search_depth: int = 300,
        max_steps: int = 20,
        action_pattern: str = ACTION_PATTERN,
        format_penalty: float = -0.15,
        grid_lookup: Mapping[Any, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        env_instruction: str | None = None,
        agent_system_template: str = SYSTEM,
        agent_template: str = TURN,
        max_response_length: int | None = None,
    ) -> None:
        """
        Args:
            dim_room: rows and columns, walls included.
            search_depth: moves backwards from the solved room, at most.
            max_steps: actions, unreadable ones included, after which the episode ends.
            action_pattern: regular expression whose last group is the action.
            format_penalty: reward of a message without an action that can be read.
            grid_lookup: symbols of the room: 0 wall, 1 floor, 2 target, 3 box on a target, 4 box, 5 player, 6 player on a target.
            grid_vocab: what the symbols mean, for the instruction.
            env_instruction: stands before the first room.
            agent_system_template: the system message; empty for none.
            agent_template: of each turn, with {turn_idx}, {observation}, {actions_left}, {max_response_length}.
            max_response_length: what the template says of it.

        Raises:
            ValueError: a value is not possible.
        """
        if len(dim_room) != 2 or not all(5 <= length <= 64 for length in dim_room) or num_boxes < 1 or search_depth < 1:
            problem = f"{list(dim_room)}, {num_boxes} and {search_depth}"
            raise ValueError(f"dim_room has to be two numbers of 5 to 64, num_boxes and search_depth at least 1; they are {problem}")
        self._rows, self._columns = dim_room
        self._boxes, self._depth = num_boxes, search_depth
        self._lookup = symbols(grid_lookup, LOOKUP)
        usual = (
            "You are solving the Sokoban puzzle. You are the player, and push all boxes onto targets. "
            "You cannot pull a box, nor push one into a wall or another box. "
            f"The symbols mean: {legend(self._lookup, grid_vocab, NAMES)}. "
            f"Your available actions are: {', '.join(ACTIONS)}. Give one action in a turn, in the format <answer>Right</answer>."
        )
        instruction = usual if env_instruction is None else env_instruction
        self._templates = Templates(instruction, agent_system_template, agent_template, max_steps, max_response_length)
        self._read = ActionReader(action_pattern, ACTIONS)
        self._counter = Counter(self._templates, format_penalty)

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """The room of a seed."""
        self.level = drawn(self._rows, self._columns, self._boxes, self._depth, Random(seed))
        return self._templates.first(self.drawing())

    def step(self, message: Message) -> Step:
        """Move, if the message says where."""
        action = self._read(str(message.get("content") or ""))
        if action is None:
            return self._counter.unreadable(self.drawing())
        before, self.level = self.level, pushed(self.level, MOVES[action])
        gained = len(self.level.boxes & self.level.targets) - len(before.boxes & before.targets)
        is_solved = self.level.boxes == self.level.targets
        reward = STEP_REWARD + BOX_REWARD * gained + SOLVED_REWARD * is_solved
        return self._counter.moved(ACTIONS[action], self.drawing(), reward, self.level != before, is_solved, is_solved)

    def close(self) -> None:
        """Nothing is held."""

    def drawing(self) -> str:
        """The room, a line for each row."""
        rows, columns = range(self._rows), range(self._columns)
        return "\n".join("".join(self._lookup[_code(self.level, (row, column))] for column in columns) for row in rows)


def pushed(level: Level, move: Cell) -> Level:
    """The level after a move, which pushes a box that is in its way; the same if something stands in the way of that."""
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
