"""The common parts of grid worlds, in which the policy writes its actions as text: keys, message templates and the
action parser.

The keys and placeholders are those of ROLL v0.2.1.
"""

from __future__ import annotations

import re
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from roll.agents.environments.base import MalformedCalls, Message, Observation, Step

ACTION_PATTERN = r"<answer>(.*?)</answer>"
SYSTEM = "You are a good game player. You are aiming to get high reward in the game."
TURN = (
    "Turn {turn_idx}:\nState:\n{observation}\nYou have {actions_left} actions left. "
    "Always output: <answer>your action</answer> with no extra text. Decide the next action:"
)
WHOLE = ".*"
"""Pattern of a message that is an action as a whole."""
UNREADABLE_ACTION = "Your action could not be read."
PLACEHOLDERS = ("turn_idx", "observation", "actions_left", "max_response_length")


@dataclass(frozen=True)
class Templates:
    """Builds the messages of a grid world from templates."""

    instruction: str
    """Text in front of the first state."""
    system: str
    """System message; empty for none."""
    turn: str
    """Template of each turn; may contain PLACEHOLDERS."""
    max_steps: int
    max_response_length: int | None

    def __post_init__(self) -> None:
        """Raise ValueError if `agent_template` or `max_steps` is invalid."""
        named = {field for _, field, _, _ in string.Formatter().parse(self.turn) if field is not None}
        if unknown := sorted(named - set(PLACEHOLDERS)):
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ValueError(
                f"agent_template has the unknown placeholder {{{unknown[0]}}}; known placeholders: {known}"
            )
        if "max_response_length" in named and self.max_response_length is None:
            raise ValueError(
                "agent_template has {max_response_length}, but environment_args has no max_response_length"
            )
        if self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}; it must be at least 1")

    def first(self, state: str) -> Observation:
        """Return the observation that begins an episode: the system message, if any, and the first state."""
        begin: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return Observation(
            [*begin, {"role": "user", "content": f"{self.instruction}\n{self._turn(state, 0)}"}], state=state
        )

    def answer(self, happened: str, state: str, steps: int) -> list[Message]:
        """Return the environment's message after `steps` steps, in a list. `happened` is the last step's effect."""
        return [{"role": "user", "content": f"{happened}\n{self._turn(state, steps)}"}]

    def _turn(self, state: str, steps: int) -> str:
        left = self.max_steps - steps
        length = self.max_response_length
        return self.turn.format(turn_idx=steps + 1, observation=state, actions_left=left, max_response_length=length)


class WrittenAction:
    """Finds the action in a text."""

    def __init__(self, pattern: str, key: str = "action_pattern") -> None:
        """
        Args:
            pattern: regular expression. The action is the last group that matched (of nested ones, the outer), or the
                whole match.
            key: name of the argument that gave it.

        Raises:
            ValueError: the pattern is not a regular expression.
        """
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"{key} '{pattern}' is not a regular expression: {error}") from error

    def __call__(self, text: str) -> str | None:
        """Return the action of the pattern's first match, without the spaces around it; None without a match."""
        found = self._pattern.search(text)
        return None if found is None else found.group(found.lastindex or 0).strip()


class ActionReader:
    """Parses the number of the action from a text."""

    def __init__(self, written: WrittenAction, actions: Sequence[str]) -> None:
        """`actions` are the names of the actions, which are matched without regard to case."""
        self._written = written
        self._actions = {action.strip().lower(): number for number, action in enumerate(actions)}

    def __call__(self, text: str) -> int | None:
        """Return the number of the action in the text. None if the text has none, or if it is no action."""
        found = self._written(text)
        return None if found is None else self._actions.get(found.lower())


class Counter:
    """Counts the steps of an episode, and builds the message and the metrics of each step."""

    def __init__(self, templates: Templates, format_penalty: float) -> None:
        self._templates, self._penalty, self._steps = templates, format_penalty, 0

    def unreadable(self, state: str) -> Step:
        """Return the step for a message without a readable action: `format_penalty`, and an unchanged state."""
        return self._step(UNREADABLE_ACTION, state, self._penalty, {"invalid_actions": 1.0})

    def moved(self, action: str, state: str, reward: float, has_effect: bool, is_over: bool, is_solved: bool) -> Step:
        """Return the step for an action that was taken."""
        happened = f"You moved {action}." if has_effect else f"You tried to move {action}, and nothing moved."
        counted = {"ineffective_actions": float(not has_effect), "success": float(is_solved)}
        return self._step(happened, state, reward, counted, is_over)

    def _step(
        self, happened: str, state: str, reward: float, counted: Mapping[str, float], is_over: bool = False
    ) -> Step:
        self._steps += 1
        is_over = is_over or self._steps >= self._templates.max_steps
        messages = () if is_over else self._templates.answer(happened, state, self._steps)
        return Step(messages, reward, is_over, counted, state)


@dataclass(kw_only=True, eq=False)
class GridWorld(ABC):
    """A world of cells that are drawn with symbols. Each message of the policy is one action. The fields are keys of
    `environment_args`.

    Raises:
        ValueError: a field has an invalid value.
    """

    malformed_calls: ClassVar[MalformedCalls] = "step"
    actions: ClassVar[Sequence[str]]
    """Names of the actions, by number."""
    usual_symbols: ClassVar[Mapping[int, str]]
    """Default symbol of each type of cell, by its number."""
    names: ClassVar[Mapping[int, str]]
    """Name of each type of cell, by its number."""

    max_steps: int
    """Number of actions after which the episode ends. Messages without a readable action count too."""
    format_penalty: float
    """Reward of a message without a readable action."""
    action_pattern: str = ACTION_PATTERN
    """Regular expression that finds the action in a message; see `WrittenAction`."""
    grid_lookup: Mapping[Any, str] | None = None
    """Symbols that replace the default ones, by the number of the type of cell."""
    grid_vocab: Mapping[str, str] | None = None
    """Meaning of each symbol, for the instruction. The default is the name of the type of cell."""
    env_instruction: str | None = None
    """Text in front of the first state. By default it is generated from the task, the symbols and the actions."""
    agent_system_template: str = SYSTEM
    """System message; empty for none."""
    agent_template: str = TURN
    """Template of each turn; may contain PLACEHOLDERS."""
    max_response_length: int | None = None
    """Value of the placeholder `max_response_length`: a turn's limit in tokens, which the policy is shown."""

    def __post_init__(self) -> None:
        self._lookup = symbols(self.grid_lookup, self.usual_symbols)
        instruction = self._instruction() if self.env_instruction is None else self.env_instruction
        self._templates = Templates(
            instruction, self.agent_system_template, self.agent_template, self.max_steps, self.max_response_length
        )
        self._read = ActionReader(WrittenAction(self.action_pattern), self.actions)
        self._counter = Counter(self._templates, self.format_penalty)

    def step(self, message: Message) -> Step:
        """Take the action in the message, if it has one."""
        action = self._read(str(message.get("content") or ""))
        return self._counter.unreadable(self.drawing()) if action is None else self._act(action)

    @abstractmethod
    def drawing(self) -> str:
        """Return the state as text, one line for each row."""

    @abstractmethod
    def _act(self, action: int) -> Step:
        """Take the action of this number."""

    @abstractmethod
    def _task(self) -> str:
        """Return the description of the task, for the instruction."""

    def _instruction(self) -> str:
        return (
            f"{self._task()} The symbols mean: {legend(self._lookup, self.grid_vocab, self.names)}. "
            f"Your available actions are: {', '.join(self.actions)}. Give one action in a turn, in the format "
            f"<answer>Right</answer>."
        )


def symbols(given: Mapping[Any, str] | None, usual: Mapping[int, str]) -> dict[int, str]:
    """Merge `grid_lookup`, whose keys may be strings, into the default symbols. Raise ValueError if it is invalid."""
    lookup = dict(usual)
    for key, symbol in (given or {}).items():
        if not str(key).isdecimal() or int(key) not in usual or not isinstance(symbol, str) or not symbol:
            allowed = f"keys must be {', '.join(map(str, usual))}, and values must be non-empty strings"
            raise ValueError(f"grid_lookup has {key!r}: {symbol!r}; {allowed}")
        lookup[int(key)] = symbol
    if len(set(lookup.values())) < len(lookup):
        raise ValueError("grid_lookup assigns one symbol to two types of cell; give each type its own symbol")
    return lookup


def legend(lookup: Mapping[int, str], vocab: Mapping[str, str] | None, names: Mapping[int, str]) -> str:
    """Return the text that lists the meaning of each symbol, from `vocab` or else from `names`."""
    meant = {symbol: (vocab or {}).get(symbol, names[number]) for number, symbol in lookup.items()}
    return ", ".join(f"{symbol}: {name}" for symbol, name in meant.items())
