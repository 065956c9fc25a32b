"""Keys of environments, in which the policy acts for several turns."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from roll.config.schema.base import (
    Name,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Ranks,
    Seconds,
    StrictConfig,
    VariableText,
)
from roll.config.schema.partners import PartnerConfig

LAST_PORT = 65535


class VerifiersConfig(StrictConfig):
    """An environment of the package verifiers, in a Python environment of its own."""

    env_id: str = Field(description="Name of the environment, as `verifiers.load_environment` reads it.")
    env_args: dict[str, Any] = Field(default_factory=dict, description="Its arguments.")
    python: str = Field(
        description="The Python interpreter that has the packages verifiers and that of the environment, such as "
        "`.venv-verifiers/bin/python`."
    )


class AgentConfig(StrictConfig):
    """An external agent: a command, a function or an environment of verifiers.

    It runs once per episode and reaches the policy through the gateway.
    """

    command: tuple[str, ...] | None = Field(
        None,
        description="The command and its arguments. It gets `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` "
        "and `ANTHROPIC_API_KEY` as environment variables, and the row as JSON on stdin.",
    )
    function: str | None = Field(
        None,
        description="`package.module:function`, called as `function(row=..., base_url=..., api_key=...)` in a "
        "separate process.",
    )
    verifiers: VerifiersConfig | None = Field(
        None, description="An environment of the package verifiers, which plays the episode and gives its reward."
    )
    reports_reward: bool = Field(
        False,
        description="Whether the agent itself gives the reward of its episode: it sends "
        '`POST $OPENAI_BASE_URL/reward` with `{"reward": 1.0, "metrics": {}}`. Always so with `verifiers`.',
    )

    @property
    def gives_reward(self) -> bool:
        """Whether the reward of the episode comes from the agent."""
        return self.reports_reward or self.verifiers is not None


class McpServerConfig(StrictConfig):
    """An MCP server (Model Context Protocol): a command or a URL.

    The policy may call its tools.
    """

    command: tuple[str, ...] | None = Field(
        None, description="Command of a server that uses stdin and stdout. It is started for each episode."
    )
    url: str | None = Field(None, description="URL of a server that uses streamable HTTP.")
    call_timeout: Seconds = Field(
        5.0, description="Timeout of one tool call, in seconds. The model then gets an error as the result."
    )


class GatewayConfig(StrictConfig):
    """The gateway.

    It is an HTTP server through which external agents reach the policy, with OpenAI's chat completions and responses,
    and Anthropic's messages.
    """

    host: str = Field("127.0.0.1", description="Address to listen on. The default is reachable from this machine only.")
    port: int = Field(0, ge=0, le=LAST_PORT, description="Port to listen on; 0 chooses a free one.")
    body_mib: PositiveInt = Field(4, le=4096, description="Largest request body, in MiB.")
    sessions: PositiveInt = Field(
        4096, le=1 << 20, description="Largest number of concurrent agent episodes; further ones wait."
    )


class ContainerConfig(StrictConfig):
    """The containers in which an environment runs commands."""

    engine: Literal["auto", "bubblewrap", "podman", "docker"] = Field(
        "auto",
        description="What holds the containers. `auto`: bubblewrap for an image that is a path; for a name podman, or "
        "docker if podman is not installed.",
    )
    cpus: PositiveInt = Field(1, le=4096, description="CPU cores of a container.")
    memory_gib: PositiveFloat = Field(1.0, le=65536, description="Memory limit of a container in GiB.")
    disk_gib: PositiveFloat = Field(
        0.5,
        le=65536,
        description="What a container may write over its image, in GiB. With bubblewrap these files are in memory, in "
        "addition to `memory_gib`; with podman and docker it limits each file.",
    )
    max_processes: PositiveInt = Field(
        128, le=65536, description="Largest number of processes and threads of a container."
    )
    network: bool = Field(False, description="Whether containers may use the network.")
    warm: NonNegativeInt = Field(
        1, le=4096, description="Number of containers that each process keeps ready, beside those in use."
    )
    cache: str = Field("~/.cache/roll/images", description="Folder of unpacked images, on each host.")


class EnvironmentConfig(StrictConfig):
    """The environment of one domain.

    It is a class whose instances run in worker processes.
    """

    environment: str | None = Field(
        None,
        description="Name of the environment, or `package.module:Class`. If not given: the name of the domain, or "
        "`tool_use` if no environment has that name and the domain has `tools`, `mcp` or an `agent`.",
    )
    environment_args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the environment class."
    )
    tools: tuple[str, ...] = Field(
        (), description="Additional tools for the policy, each a Python function given as `package.module:function`."
    )
    mcp: tuple[McpServerConfig, ...] = Field(
        (), description="MCP servers (Model Context Protocol) whose tools the policy may call."
    )
    agent: AgentConfig | None = Field(
        None,
        description="An external agent that runs the episode instead of the built-in loop over turns; see "
        "docs/agents.md.",
    )
    image: str | None = Field(
        None,
        description="Image of the containers in which the environment runs commands: the path of an OCI layout (a "
        "folder or a tar file), or a name for podman and docker. A row may name its own in the column `image`.",
    )
    container: ContainerConfig = Field(
        default_factory=lambda: ContainerConfig.model_validate({}), description="Containers of the environment."
    )
    partners: dict[Name, PartnerConfig] = Field(
        default_factory=dict,
        description="Other policies by name, whose turns the environment may ask for; see docs/agents.md.",
    )
    scored: Literal["all_turns", "last_turn"] | None = Field(
        None,
        description="Text that `rewards.<domain>` scores: that of all of the policy's turns, each on lines of its own, "
        "or of the last one. If not given: `last_turn` for `critique` and `tool_use`, otherwise `all_turns`. With "
        "`last_turn`, an episode of `tool_use` that is cut after a tool call has an empty answer.",
    )
    rows: PositiveInt | None = Field(
        None,
        le=1 << 24,
        description="Number of tasks that the environment generates, each from a seed. No data file is then needed.",
    )
    tag_included: tuple[str, ...] | None = Field(
        None,
        description="Values of the `tag` column whose rows belong to this domain; the name of the domain if not given.",
    )
    max_turns: PositiveInt = Field(8, le=4096, description="Largest number of turns of the policy in an episode.")
    world_size: Ranks = Field(1, description="Number of worker processes.")
    sessions_per_process: PositiveInt = Field(
        16,
        le=65536,
        description="Number of concurrent episodes per process. Methods that are not `async` are called one at a time.",
    )
    step_timeout: Seconds = Field(10.0, description="Timeout of one call of the environment, in seconds.")
    episode_timeout: Seconds = Field(
        600.0,
        description="Timeout of an episode from its first observation, generation included, in seconds. A late "
        "episode is not trained on.",
    )
    memory_gib: PositiveFloat = Field(
        8.0,
        le=65536,
        description="Memory limit in GiB of an environment process, alone and together with its child processes.",
    )
    max_processes: PositiveInt = Field(
        256,
        le=65536,
        description="Largest number of processes of an environment process: itself and all its descendants.",
    )
    attempts: PositiveInt = Field(
        2,
        le=100,
        description="Number of attempts at an episode if its environment fails. After the last one, its group is "
        "replaced.",
    )
    passes_at: Number | None = Field(
        None,
        description="Reward of an episode from which it passes, for `pass@k`. If not given: the environment's metric "
        "`success` is 1, or without this metric, the reward is at least 1.",
    )
    system_envs: dict[str, VariableText] = Field(
        default_factory=dict, description="Environment variables of the worker processes."
    )
