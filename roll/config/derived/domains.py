"""The rewards and environments of domains. The processes that run them import this module, but not the schema."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roll.config.shipped import known_environments
from roll.errors import Fault

if TYPE_CHECKING:
    from roll.config.schema.environments import EnvironmentConfig
    from roll.config.schema.rlvr import RlvrConfig
    from roll.config.schema.roles import RewardConfig


ENVIRONMENTS = "environments."
"""Prefix of the names of worker groups that run environments."""
TOOL_USE = "tool_use"
"""Environment of a domain that has only tools or an agent."""
MOST_STEPS: Mapping[str, int] = {"frozen_lake": 10, "sokoban": 20, "code_repl": 4, "shell": 30}
"""Default of `max_steps`, by environment. Only the built-in environments with this key are listed."""

CRITIQUE, CRITIC = "critique", "critic"
"""Environment in which the critique of a partner is a turn, and the name of this partner."""
CRITIQUES = 1
"""Default of its `critiques`, the number of critiques in an episode."""
PATHS = ("/", "./", "../", "~")
"""Beginnings of images that are paths, even if there is nothing there. Others are names if they do not exist."""
SHELL = "shell"
COMMAND_SECONDS, VERIFY_SECONDS = 10.0, 60.0
"""Defaults of the environment `SHELL`: the deadlines of a command and of the one that judges, in seconds."""
READ_TASK = (TOOL_USE, CRITIQUE, SHELL, "code_repl")
"""Built-in environments that read their task from the row, so that they have none of their own for a seed."""
STEP_MARGIN = 5.0
"""Seconds of a step for the rest: to start a container for the verdict, and to copy files."""
JUDGED_IN = ("fresh", "same")
"""Values of its `judged_in`; the first is the default."""
PACKAGES_OF_ENVIRONMENTS: Mapping[str, tuple[str, str]] = {"gymnasium": ("gymnasium", "gymnasium>=1.0,<2")}
"""By built-in environment: the module that it imports, and what pip installs for it. Others need no further package."""


def own_tasks(config: RlvrConfig) -> dict[str, int]:
    """Return the number of training tasks of each domain whose environment makes its own tasks."""
    return {domain: section.rows for domain, section in config.environments.items() if section.rows is not None}


def environment_of(domain: str, section: EnvironmentConfig) -> str:
    """Return a domain's environment: the given one, its own name, or `TOOL_USE` with only tools or an agent."""
    if section.environment is not None:
        return section.environment
    has_tools = section.tools or section.mcp or section.agent
    return TOOL_USE if has_tools and domain not in known_environments() else domain


def answers_after_tools(domain: str, section: EnvironmentConfig) -> bool:
    """Return whether an episode's answer is its first turn without a tool call."""
    return environment_of(domain, section) == TOOL_USE and section.agent is None


def scores_last_turn(domain: str, section: EnvironmentConfig) -> bool:
    """Return whether the reward function of a domain scores the policy's last turn alone, and not all turns joined."""
    ends_with_answer = environment_of(domain, section) == CRITIQUE or answers_after_tools(domain, section)
    return (section.scored or ("last_turn" if ends_with_answer else "all_turns")) == "last_turn"


SANDBOX = "code_sandbox"
SANDBOX_WALL_SECONDS = 60.0
"""Default of `wall_seconds`, the time limit in seconds for all test cases of a program together."""
SANDBOX_TIMEOUT = 90.0
"""Suggested timeout of a call in seconds."""


def named_rewards(rewards: Mapping[str, RewardConfig]) -> dict[str, str]:
    """Return the name of each reward function, by the path of the key or block that names it."""
    named: dict[str, str] = {}
    for domain, section in rewards.items():
        parts = {f"rewards.{domain}.parts.{name}": (name, part.reward) for name, part in section.parts.items()}
        for place, (name, reward) in (parts or {f"rewards.{domain}": (domain, section.reward)}).items():
            named[f"{place}.reward" if reward else place] = reward or name
    return named


def sandbox_faults(rewards: Mapping[str, RewardConfig]) -> Iterator[Fault]:
    """Yield faults of domains whose timeout is not above their sandbox's time limit: a sleeper would get no verdict."""
    for domain, section in rewards.items():
        whole = {f"rewards.{domain}": (section.reward or domain, section.reward_args)}
        parts = {
            f"rewards.{domain}.parts.{name}": (part.reward or name, part.reward_args)
            for name, part in section.parts.items()
        }
        for place, (name, arguments) in (parts or whole).items():
            seconds = arguments.get("wall_seconds", SANDBOX_WALL_SECONDS)
            if name == SANDBOX and isinstance(seconds, int | float) and section.timeout <= seconds:
                problem = (
                    f"{section.timeout:g} s, but programs may run for {seconds:g} s (wall_seconds): a sleeping "
                    f"program gets no verdict"
                )
                remedy = (
                    f"raise it above that, for example to {seconds + 30:g}, or lower {place}.reward_args.wall_seconds"
                )
                yield Fault(f"rewards.{domain}.timeout", problem, remedy, "too_small")


def is_async(reward: Callable[..., Any]) -> bool:
    """Whether a function is an `async def`, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None))  # noqa: B004


def only_side_by_side(domain: str, concurrency: int, rewards: Sequence[str]) -> Fault:
    """Return the fault of functions that are not `async` in a domain with a `concurrency` above 1."""
    problem = f"{concurrency}, but {', '.join(rewards)} is a plain function: one process makes one call of it at a time"
    return Fault(
        f"rewards.{domain}.concurrency",
        problem,
        f"remove it and set world_size: {concurrency}, or make the function async def",
        "not_supported",
    )
