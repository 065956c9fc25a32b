"""Environments of the package Gymnasium (https://gymnasium.farama.org) in which text can be an action.

The package is an extra of roll. This module is imported in environment processes only, and imports the package when an
episode begins, so that a domain's keys can be checked without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from roll.agents.environments.base import ENVIRONMENTS, MalformedCalls, Message, Observation, Step
from roll.agents.environments.shown import as_state, as_text, first_messages, picked
from roll.agents.environments.written import UNREADABLE_ACTION, WHOLE, ActionReader, WrittenAction
from roll.registry import imported

OBSERVATION, RENDER = "observation", "render"
"""Values of `observe`. Any other one is `package.module:function`."""
Reader = Callable[[str], Any]
"""Returns the action in a text, or None if it has none."""


@ENVIRONMENTS.register("gymnasium")
@dataclass(kw_only=True, eq=False)
class Gymnasium:
    """An environment that `gymnasium.make` returns. The fields are keys of `environment_args`.

    A message without a readable action does not reach the environment; it is a turn all the same.

    Raises:
        ValueError: a field has an invalid value.
    """

    malformed_calls: ClassVar[MalformedCalls] = "step"

    env_id: str
    """Name of the environment, as `FrozenLake-v1`, or `package.module:Name-v0` to import the module that registers
    it.
    """
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `gymnasium.make`."""
    actions: Sequence[str] | None = None
    """Names of the actions of a `Discrete` space, in their order. Without them, the policy writes the number."""
    action_pattern: str = WHOLE
    """Regular expression that finds the action in a message; see `WrittenAction`. By default the whole message is it,
    without the spaces around it.
    """
    observe: str = OBSERVATION
    """What the policy sees. `observation`: a text as it is, anything else as JSON. `render`: the text that `render`
    returns (`render_mode: ansi`). `package.module:function`: what the function returns for (observation, info).
    """
    reset_columns: Sequence[str] = ()
    """Columns of the row that `reset` receives as its `options`."""
    info_metrics: Sequence[str] = ()
    """Numbers of `info` that become metrics of the episode. Each must be there by the end of the episode."""
    format_penalty: float = 0.0
    """Reward of a message without a readable action."""
    env_instruction: str | None = None
    """Text in front of the first observation; empty for none. By default it lists the actions of a `Discrete` space."""
    agent_system_template: str = ""
    """System message; empty for none."""

    def __post_init__(self) -> None:
        self._written = WrittenAction(self.action_pattern)
        if self.observe not in (OBSERVATION, RENDER) and ":" not in self.observe:
            raise ValueError(
                f"observe is '{self.observe}'; give {OBSERVATION}, {RENDER} or a package.module:function of yours"
            )
        self._shown = None if self.observe in (OBSERVATION, RENDER) else imported(self.observe)
        self._env: Any = None
        self._met: set[str] = set()

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Make the environment, and reset it with the seed.

        Raises:
            ValueError: the row lacks a column of `reset_columns`, or the policy cannot act in the environment by text.
        """
        options = picked(row, self.reset_columns)
        gymnasium = import_module("gymnasium")
        self._env = gymnasium.make(self.env_id, **self.env_kwargs)
        check_flags(type(self._env.unwrapped), self.env_kwargs)
        self._read, listed = reader(self._env.action_space, gymnasium.spaces, self.actions, self._written)
        self._see(*self._env.reset(seed=seed, options=options or None))
        instruction = listed if self.env_instruction is None else self.env_instruction
        return Observation(
            first_messages(self.agent_system_template, instruction, self._text), state=as_state(self._text)
        )

    def step(self, message: Message) -> Step:
        """Take the action in the message, if it has one.

        Raises:
            ValueError: the episode is over, and `info` never had one of `info_metrics`.
        """
        action = self._read(str(message.get("content") or ""))
        if action is None:
            return self._answer(f"{UNREADABLE_ACTION}\n{self._text}", self.format_penalty, {"invalid_actions": 1.0})
        observation, reward, terminated, truncated, info = self._env.step(action)
        self._see(observation, info)
        counted = {name: float(info[name]) for name in self.info_metrics if name in info}
        self._met |= counted.keys()
        is_over = bool(terminated or truncated)
        if is_over and (absent := set(self.info_metrics) - self._met):
            raise ValueError(
                f"info has no '{min(absent)}', which info_metrics names; it has {', '.join(info) or 'none'}"
            )
        ends = {"terminated": float(terminated), "truncated": float(truncated)}
        return self._answer(self._text, float(reward), {**counted, **ends}, is_over)

    def close(self) -> None:
        """Close the environment, if one was made."""
        if self._env is not None:
            self._env.close()

    def _see(self, observation: Any, info: Mapping[str, Any]) -> None:
        """Keep the text of what the policy sees now."""
        if self.observe == RENDER:
            self._text = self._env.render()
            if not isinstance(self._text, str):
                kind = type(self._text).__name__
                raise ValueError(f"render returned {kind}, not a text; set env_kwargs.render_mode to ansi")
        else:
            self._text = as_text(observation) if self._shown is None else self._shown(observation, info)

    def _answer(self, text: str, reward: float, counted: Mapping[str, float], is_over: bool = False) -> Step:
        messages = () if is_over else ({"role": "user", "content": text},)
        return Step(messages, reward, is_over, counted, as_state(self._text))


def check_flags(made: type[Any], env_kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError if an argument that is true or false is a text: any text but the empty one would be true.

    Other types are the package's to check: its own annotations leave out values that it takes.
    """
    parameters = inspect.signature(made).parameters
    for name, value in env_kwargs.items():
        if isinstance(value, str) and name in parameters and parameters[name].annotation in (bool, "bool"):
            raise ValueError(f"env_kwargs.{name} is the text '{value}'; give true or false")


def reader(space: Any, spaces: Any, names: Sequence[str] | None, written: WrittenAction) -> tuple[Reader, str]:
    """Return the reader of a space's actions, and the sentence that lists them for the policy; "" for `Text`.

    Args:
        space: the action space of an environment.
        spaces: the module `gymnasium.spaces`.

    Raises:
        ValueError: actions of the space are not texts or numbers, or `names` does not fit it.
    """
    if isinstance(space, spaces.Text):
        if names is not None:
            raise ValueError(f"actions is given, but the action space is {space}, whose actions are texts")
        return lambda text: action if (action := written(text)) is not None and space.contains(action) else None, ""
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"the action space is {space}; the policy can act in Text and Discrete spaces only")
    count, start = int(space.n), int(space.start)
    named = [str(start + number) for number in range(count)] if names is None else list(names)
    if len(named) != count or len({name.strip().lower() for name in named}) < count:
        raise ValueError(f"actions has {len(named)} names; the action space, {space}, needs {count} different ones")
    number_of = ActionReader(written, named)
    listed = f"Your available actions are: {', '.join(named)}."
    return lambda text: None if (number := number_of(text)) is None else start + number, listed
