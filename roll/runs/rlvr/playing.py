"""Wires episodes in environments: those that roll plays, with partners, and those of external agents."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from roll.agents.environment_workers import EnvironmentWorkers, ToolFailed
from roll.agents.episode_groups import EpisodeGroups
from roll.agents.episodes import EpisodeLimits, Episodes, SessionGenerator, TokenLimits
from roll.agents.gateway.agent import command_for
from roll.agents.gateway.episodes import Agent, AgentEpisodes
from roll.agents.gateway.server import Gateway, GatewayBounds
from roll.agents.live_partner import LivePartner
from roll.agents.partners import Partners
from roll.agents.sight import EpisodeSight
from roll.config.derived.batch import longest_sequence
from roll.config.derived.domains import answers_after_tools, scores_last_turn
from roll.config.derived.fixed_roles import all_partners
from roll.config.schema.rlvr import RlvrConfig
from roll.data.renderers.base import ChatRenderer
from roll.engines.actor_infer import Span, unrecorded
from roll.rollout.group import GroupSampler, Scorer
from roll.runs.rlvr.partners import FixedPartners
from roll.runs.roles import Roles
from roll.system.sizes import GIB
from roll.system.tree import TreeBounds
from roll.types import Sampling


@dataclass(frozen=True)
class Chat:
    """How conversations with the policy are rendered."""

    renderer: ChatRenderer
    sight: EpisodeSight | None
    """How the policy sees the pictures of environments. None if it sees none."""


@dataclass(frozen=True)
class EpisodeParts:
    """The parts that episodes need besides the engines."""

    environments: EnvironmentWorkers
    chat: Chat
    gateway: Gateway
    """For external agents. It does not listen yet."""
    partners: Partners
    """The partners with constant weights."""


def episode_parts(
    config: RlvrConfig,
    roles: Roles,
    chat: Chat | None,
    partners_of: Callable[[Roles], FixedPartners],
    tool_failed: ToolFailed,
    span: Span = unrecorded,
) -> EpisodeParts | None:
    """Request what episodes need from the roles. Return None without environments, for which there is no `chat`."""
    if chat is None:
        return None
    gateway = Gateway(GatewayBounds(config.gateway.body_mib << 20, config.gateway.sessions))
    environments = roles.environments(config, tool_failed, sees=chat.sight is not None)
    return EpisodeParts(environments, chat, gateway, Partners(partners_of(roles), span))


@asynccontextmanager
async def listening(config: RlvrConfig, playing: EpisodeParts | None) -> AsyncGenerator[None, None]:
    """A context in which the gateway listens, if there are external agents. Raises ConfigError if it cannot."""
    if playing is None or all(one.agent is None for one in config.environments.values()):
        yield
        return
    async with playing.gateway.listening(config.gateway.host, config.gateway.port):
        yield


def episode_samplers(
    config: RlvrConfig,
    scorer: Scorer,
    sampling: Sampling,
    engines: SessionGenerator,
    playing: EpisodeParts,
    stream: int,
) -> dict[str, GroupSampler]:
    """Return the sampler of each domain with an environment. For the parameters, see `group_sampler`."""
    limits = {
        name: EpisodeLimits(one.max_turns, one.episode_timeout, one.attempts)
        for name, one in config.environments.items()
    }
    environments, renderer, longest = playing.environments, playing.chat.renderer, longest_sequence(config)
    live = LivePartner(engines, renderer, sampling, longest)
    partners = playing.partners.beside(
        {(domain, name): live for domain, name, one in all_partners(config).values() if one.type == "live"}
    )
    tokens = TokenLimits(config.prompt_length, longest)
    own = Episodes(
        environments, engines, renderer, sampling, limits, tokens, partners=partners, sight=playing.chat.sight
    )
    agents = {
        name: Agent(
            command_for(one.agent),
            {**config.system_envs, **one.system_envs},
            limits[name],
            TreeBounds(int(one.memory_gib * GIB), one.max_processes),
            one.agent.gives_reward,
        )
        for name, one in config.environments.items()
        if one.agent is not None
    }
    others = AgentEpisodes(environments, playing.gateway, engines, renderer, sampling, agents, longest)
    judged = frozenset(config.environments) & frozenset(config.rewards)
    last_turn = frozenset(name for name, one in config.environments.items() if scores_last_turn(name, one))
    after_tools = frozenset(name for name, one in config.environments.items() if answers_after_tools(name, one))
    return {
        name: EpisodeGroups(
            others if name in agents else own, sampling, config.seed, stream, scorer, judged, last_turn, after_tools
        )
        for name in config.environments
    }
