"""The interface of reward functions, and their lookup by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from roll.algorithms.methods import declared
from roll.config.derived.domains import is_async, only_side_by_side
from roll.config.shipped import known_rewards
from roll.errors import ConfigError, Fault
from roll.registry import Registry, imported_module, nearest, split_path
from roll.rewards.verdicts import RewardPart
from roll.types import FP32_MAX, RewardOutcome, RewardResult

RewardFunction = Callable[..., Any]
"""Called as `reward(prompt: Prompt, response: str, row: Mapping[str, Any], **reward_args)`; returns a `RewardResult` or
a number.

If `rewards.<domain>.group` is true, the function receives all responses to a prompt instead of one, and returns a
sequence with one result for each response. It may be a `def` or an `async def`. It may raise, hang or crash without
harm to the run: it runs in a separate process (see reward_workers.py), and the outcome is recorded.
"""

REWARDS: Registry[RewardFunction] = Registry("reward")


def load_reward(name: str, place: str = "reward") -> RewardFunction:
    """Return the reward function called `name`.

    A plain name refers to a function that `roll/rewards/functions/<name>.py` registers. `package.module:function`
    or `FILE.py:function` refers to any other function.

    Args:
        place: the configuration key that errors report.

    Raises:
        ConfigError: there is no such function, or its module cannot be imported.
    """
    module_name, function_name = split_path(name)
    if not function_name and not name.isidentifier():
        raise ConfigError(Fault(place, f"'{name}' cannot be the name of a reward", _remedy(name), "malformed"))
    try:
        module = imported_module(module_name if function_name else f"{__package__}.functions.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError(Fault(place, f"no reward is named '{name}': {error}", _remedy(name), "not_found")) from error
    except Exception as error:
        raise ConfigError(
            Fault(place, f"'{name}' cannot be imported: {type(error).__name__}: {error}", "fix the module", "failed")
        ) from error
    reward: RewardFunction | None = getattr(module, function_name, None) if function_name else REWARDS.get(name)
    if reward is None or not callable(reward):
        raise ConfigError(
            Fault(
                place,
                f"no reward is named '{name}': {module.__name__} has no such function",
                _remedy(name),
                "not_found",
            )
        )
    return reward


@dataclass(frozen=True)
class RewardTraits:
    """Traits of a reward function, set by `declares` of `roll.algorithms.methods`."""

    needs_service: bool = False
    """Whether it calls a model or a server. The check before the run skips it: the service may not run yet."""
    check_row: Callable[[Mapping[str, Any]], object] | None = None
    """Raises ValueError if the reward cannot use a row, for example for want of a reference answer. It is called with
    every row before the run, so it must be fast and must not call a service.
    """
    passes_at: float | None = 1.0
    """Smallest reward of a response that passes. None for a reward that says nothing of right and wrong."""
    passes_by: str = ""
    """Name of the part that `passes_at` is compared with. Empty, or absent from a result: the reward itself."""


def traits_of(reward: RewardFunction) -> RewardTraits:
    """Return the declared traits of a reward function, or the defaults if it declares none."""
    traits = declared(reward)
    return traits if isinstance(traits, RewardTraits) else RewardTraits()


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number that fp32 holds."""
    # Also false for nan.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= FP32_MAX


def row_check(reward: RewardFunction) -> RewardFunction:
    """Return a reward function that only calls the `check_row` of `reward`. A row that it refuses is UNPARSABLE."""
    check = traits_of(reward).check_row

    def checked(prompt: Any, responses: Any, row: Mapping[str, Any], **reward_args: Any) -> Any:
        result = RewardResult(0.0)
        try:
            if check is not None:
                check(row)
        except ValueError as error:
            result = RewardResult(0.0, RewardOutcome.UNPARSABLE, note=str(error))
        return result if isinstance(responses, str) else [result] * len(responses)

    return checked


def reward_of(part: RewardPart) -> RewardFunction:
    """Return a part's reward function. Raises ConfigError if it is missing or does not accept `reward_args`."""
    reward = load_reward(part.reward, f"{part.place}.reward")
    traits = traits_of(reward)
    if not (traits.passes_at is None or is_finite(traits.passes_at)) or not isinstance(traits.passes_by, str):
        problem = f"'{part.reward}' declares passes_at={traits.passes_at!r} and passes_by={traits.passes_by!r}"
        raise ConfigError(
            Fault(
                f"{part.place}.reward",
                problem,
                "declare a finite number or None, and the name of a part",
                "not_allowed",
            )
        )
    try:
        inspect.signature(reward).bind(None, [] if part.group else "", {}, **part.reward_args)
    except TypeError as error:
        takes = f"the function accepts {inspect.signature(reward)}"
        raise ConfigError(
            Fault(f"{part.place}.reward_args", f"does not fit '{part.reward}': {error}", takes, "unfit")
        ) from error
    return reward


def rewards_of(domain: str, parts: tuple[RewardPart, ...], concurrency: int) -> list[RewardFunction]:
    """Return a domain's reward functions. Raises ConfigError if one cannot be used, or none suits `concurrency`."""
    rewards = [reward_of(part) for part in parts]
    if concurrency > 1 and not any(map(is_async, rewards)):
        raise ConfigError(only_side_by_side(domain, concurrency, [part.reward for part in parts]))
    return rewards


def _remedy(name: str) -> str:
    known = known_rewards()
    return f"name one of {', '.join(known)}{nearest(name, known)}, or your own function as `package.module:function`"
