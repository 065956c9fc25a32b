"""Keys of environments: worlds in which the policy acts for several turns."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from roll.config.schema.base import PositiveFloat, PositiveInt, Ranks, Seconds, StrictConfig, VariableText


class EnvironmentConfig(StrictConfig):
    """One domain's environment: a class whose objects run in processes that can be ended."""

    environment: str | None = Field(
        None,
        description="Name of the environment, or `package.module:Class`. If not given: the domain's own name, or `tool_use` where it has "
        "`tools` and no environment has that name.",
    )
    environment_args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the class.")
    tools: tuple[str, ...] = Field((), description="Further tools of the policy, each a Python function as `package.module:function`.")
    rows: PositiveInt | None = Field(
        None, le=1 << 24, description="So many rows that are a seed each, where the environment needs no data: it makes its own tasks."
    )
    tag_included: tuple[str, ...] | None = Field(
        None, description="Values of the `tag` column that this domain answers; the domain's name if not given."
    )
    max_turns: PositiveInt = Field(8, le=4096, description="Most turns of the policy in an episode.")
    world_size: Ranks = Field(1, description="Worker processes.")
    sessions_per_process: PositiveInt = Field(
        16, le=65536, description="Episodes that one process holds at a time; plain (not async) methods are called one at a time there."
    )
    step_timeout: Seconds = Field(10.0, description="Deadline of one call of the environment, in seconds.")
    episode_timeout: Seconds = Field(
        600.0, description="Deadline of an episode from its first observation on, generation included. One that is late is not trained on."
    )
    memory_gib: PositiveFloat = Field(
        8.0, le=65536, description="Memory that a process may allocate, and that it and the processes it started may hold together."
    )
    max_processes: PositiveInt = Field(256, le=65536, description="Processes that a process may be, with all that it started.")
    attempts: PositiveInt = Field(
        2, le=100, description="An episode whose environment broke is begun anew, up to so many attempts; then its group is replaced."
    )
    system_envs: dict[str, VariableText] = Field(default_factory=dict, description="Environment variables of the worker processes.")
