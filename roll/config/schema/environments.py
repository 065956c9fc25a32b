"""Keys of environments: worlds in which the policy acts for several turns."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from roll.config.schema.base import PositiveFloat, PositiveInt, Ranks, Seconds, StrictConfig, VariableText

LAST_PORT = 65535


class AgentConfig(StrictConfig):
    """An agent that is not ours, run once an episode against the gateway: a command or a function."""

    command: tuple[str, ...] | None = Field(
        None,
        description="The command and its arguments. It has `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its environment, and the row as JSON "
        "on its stdin.",
    )
    function: str | None = Field(
        None, description="`package.module:function`, called as `function(row=..., base_url=..., api_key=...)` in a process of its own."
    )


class McpServerConfig(StrictConfig):
    """One server of the Model Context Protocol, whose tools the policy may call: a command or a URL."""

    command: tuple[str, ...] | None = Field(None, description="Command of a server that speaks over stdin and stdout; started an episode.")
    url: str | None = Field(None, description="Address of a server that speaks streamable HTTP.")
    call_timeout: Seconds = Field(5.0, description="Seconds of one call of a tool; a late call is reported to the model as an error.")


class GatewayConfig(StrictConfig):
    """Where agents that are not ours find the policy: HTTP, OpenAI's chat completions and responses."""

    host: str = Field("127.0.0.1", description="Address to listen on. The default can be reached only from this machine.")
    port: int = Field(0, ge=0, le=LAST_PORT, description="Port to listen on; 0 takes a free one.")
    body_mib: PositiveInt = Field(64, le=4096, description="Largest body of a request, in MiB.")
    sessions: PositiveInt = Field(4096, le=1 << 20, description="Most episodes of agents at a time; further ones wait.")


class EnvironmentConfig(StrictConfig):
    """One domain's environment: a class whose objects run in processes that can be ended."""

    environment: str | None = Field(
        None,
        description="Name of the environment, or `package.module:Class`. If not given: the domain's own name, or `tool_use` where it has "
        "`tools` and no environment has that name.",
    )
    environment_args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the class.")
    tools: tuple[str, ...] = Field((), description="Further tools of the policy, each a Python function as `package.module:function`.")
    mcp: tuple[McpServerConfig, ...] = Field((), description="Servers of the Model Context Protocol, whose tools the policy may call.")
    agent: AgentConfig | None = Field(
        None, description="An external agent, which acts in place of the loop over turns; see docs/agents.md."
    )
    rows: PositiveInt | None = Field(
        None, le=1 << 24, description="Number of tasks that the environment makes itself, each from a seed; no data file is needed."
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
        600.0, description="Deadline of an episode from its first observation on, generation included. A late episode is not trained on."
    )
    memory_gib: PositiveFloat = Field(
        8.0, le=65536, description="Memory that a process may allocate, and that it and the processes it started may hold together."
    )
    max_processes: PositiveInt = Field(
        256, le=65536, description="Most processes that an environment's process may have: itself and all that it started."
    )
    attempts: PositiveInt = Field(
        2, le=100, description="Attempts at an episode whose environment breaks; after the last its group is replaced."
    )
    system_envs: dict[str, VariableText] = Field(default_factory=dict, description="Environment variables of the worker processes.")
