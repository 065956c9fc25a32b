"""What a reward is: a function of a prompt, a response and the data set's row, found by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from roll.config.shipped import known_rewards
from roll.errors import ConfigError, Fault
from roll.registry import Registry, nearest
from roll.types import RewardResult

RewardFunction = Callable[..., RewardResult]
"""Called as `reward(prompt: Prompt, response: str, row: Mapping[str, Any], **reward_args)`.

It may raise, hang or crash: it runs in a process of its own (see process.py) and the outcome is recorded.
"""

REWARDS: Registry[RewardFunction] = Registry("reward")


def load_reward(name: str, place: str = "reward") -> RewardFunction:
    """The reward function called `name`: `roll/rewards/<name>.py` registers it. `package.module:function` names any other.

    Raises:
        ConfigError: there is no such function, or its module cannot be imported; `place` is the key to report.
    """
    module_name, _, function_name = name.partition(":")
    if not function_name and not name.isidentifier():
        raise ConfigError([Fault(place, f"'{name}' cannot be the name of a reward", _remedy(name))])
    try:
        module = importlib.import_module(module_name if function_name else f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError([Fault(place, f"no reward is named '{name}': {error}", _remedy(name))]) from error
    except Exception as error:
        raise ConfigError([Fault(place, f"'{name}' cannot be imported: {type(error).__name__}: {error}", "mend the module")]) from error
    reward: RewardFunction | None = getattr(module, function_name, None) if function_name else REWARDS.get(name)
    if reward is None or not callable(reward):
        raise ConfigError([Fault(place, f"no reward is named '{name}': {module.__name__} has no such function", _remedy(name))])
    return reward


def reward_that_takes(reward_args: Mapping[str, Any], name: str, domain: str) -> RewardFunction:
    """The reward function of a domain.

    Raises:
        ConfigError: it is not found, or does not take its `reward_args`.
    """
    place = f"rewards.{domain}.reward"
    reward = load_reward(name, place)
    if inspect.iscoroutinefunction(reward):
        raise ConfigError([Fault(place, f"'{name}' is asynchronous", "make it a plain function; `world_size` of them run at a time")])
    try:
        inspect.signature(reward).bind(None, "", {}, **reward_args)
    except TypeError as error:
        takes = f"the function takes {inspect.signature(reward)}"
        raise ConfigError([Fault(f"rewards.{domain}.reward_args", f"does not fit '{name}': {error}", takes)]) from error
    return reward


def _remedy(name: str) -> str:
    known = known_rewards()
    return f"name one of {', '.join(known)}{nearest(name, known)}, or a function of yours as `package.module:function`"
