"""Wires environments: the prompts of a run, and the samplers of episodes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from roll.agents.environment_workers import EnvironmentWorkers
from roll.agents.episode_groups import EpisodeGroups, SampledByDomain
from roll.agents.episodes import EpisodeLimits, Episodes, SessionGenerator, TokenLimits
from roll.agents.gateway.agent import command_for
from roll.agents.gateway.episodes import Agent, AgentEpisodes
from roll.agents.gateway.server import Gateway, GatewayBounds
from roll.config.derived.batch import longest_sequence
from roll.config.derived.placement import judging_roles, model_roles
from roll.config.schema.model import DataConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.data.native import ASKED
from roll.data.prompts import prepare_prompts, warn_of_routes, warn_of_rows
from roll.data.renderers.base import ChatRenderer
from roll.data.renderers.families import chat_renderer
from roll.data.sampler import Joined, Prompts, Tasks
from roll.data.tables import EMBEDDING_REMEDY
from roll.errors import DataError, Fault
from roll.rollout.group import Generator, GroupSampler, Scorer, SingleTurns
from roll.rollout.turns import Locate
from roll.runs.role_models import embedding_rows, model_path
from roll.system.sizes import GIB
from roll.system.tree import TreeBounds
from roll.types import Sampling


def prompts_of(
    config: RlvrConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: DataConfig | None,
    tasks: Mapping[str, int],
    first: int,
) -> Prompts:
    """Return the prompts from data files, and the tasks that environments generate from the seeds `first`, `first` + 1,
    ...

    Raises:
        DataError: rows cannot be used.
    """
    sets: list[Prompts] = []
    if rows is not None:
        embedded = _embedding_rows(config, tokenizer)
        prompts = prepare_prompts(rows, tokenizer, config.prompt_length, config.domains, embedded=embedded)
        warn_of_rows(prompts.too_long, f"were left out: the prompt is longer than prompt_length {config.prompt_length}")
        for what, counts in prompts.remarks.items():
            warn_of_rows(counts, what)
        warn_of_routes(prompts)
        sets.append(prompts)
    if tasks:
        sets.append(Tasks(tuple(config.domains), tasks, first))
    return sets[0] if len(sets) == 1 else Joined(sets)


def renderer_of(config: RlvrConfig, tokenizer: PreTrainedTokenizerBase) -> ChatRenderer | None:
    """Return the renderer of conversations, or None without environments.

    Raises:
        BadInput: the model's chat format does not support conversations of several turns, or has a token that a model
            has no embedding for.
    """
    if not config.environments:
        return None
    rows, learner = config.actor_train.data_args, config.actor_train.model_args
    further = (rows.chat_template_kwargs if rows else None) or {}
    found = chat_renderer(tokenizer, model_path(config, learner), rows.template if rows else "native", further)
    embedded, largest = _embedding_rows(config, tokenizer), int(found.render([ASKED], ()).max())
    if embedded is not None and largest >= embedded:
        problem = (
            f"its chat template writes the token {largest}, but a model has embeddings only for the tokens 0 to "
            f"{embedded - 1}"
        )
        raise DataError(
            [Fault(f"the tokenizer of '{tokenizer.name_or_path}'", problem, EMBEDDING_REMEDY, "out_of_range")]
        )
    return found


def _embedding_rows(config: RlvrConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the rows of the smallest embedding of models that read the policy's tokens; see `embedding_rows`."""
    roles = model_roles(config)
    return embedding_rows(config, tokenizer, [role for name, role in roles.items() if name not in judging_roles(roles)])


@dataclass(frozen=True)
class EpisodeParts:
    """The parts that episodes need besides the engines: environments, renderer, and the gateway for external agents."""

    environments: EnvironmentWorkers
    renderer: ChatRenderer
    gateway: Gateway


def group_sampler(
    config: RlvrConfig,
    generator: Generator,
    scorer: Scorer,
    sampling: Sampling,
    engines: SessionGenerator,
    playing: EpisodeParts | None,
    stream: int,
    locate: Locate | None = None,
    greedy_baseline: bool = False,
) -> GroupSampler:
    """Return the sampler for all domains: episodes for domains with an environment, single turns for the others.

    Args:
        engines: engines that generate the turns of episodes.
        playing: None without environments.
        stream: seed stream for environments whose rows do not specify a seed.
    """
    single = SingleTurns(generator, scorer, sampling, greedy_baseline, locate)
    if playing is None:
        return single
    limits = {
        name: EpisodeLimits(one.max_turns, one.episode_timeout, one.attempts)
        for name, one in config.environments.items()
    }
    environments, renderer, longest = playing.environments, playing.renderer, longest_sequence(config)
    own = Episodes(environments, engines, renderer, sampling, limits, TokenLimits(config.prompt_length, longest))
    bounds = {
        name: TreeBounds(int(one.memory_gib * GIB), one.max_processes) for name, one in config.environments.items()
    }
    agents = {
        name: Agent(command_for(one.agent), {**config.system_envs, **one.system_envs}, limits[name], bounds[name])
        for name, one in config.environments.items()
        if one.agent is not None
    }
    others = AgentEpisodes(environments, playing.gateway, engines, renderer, sampling, agents, longest)
    judged = frozenset(config.environments) & frozenset(config.rewards)
    players = {name: others if name in agents else own for name in config.environments}
    groups = {name: EpisodeGroups(one, sampling, config.seed, stream, scorer, judged) for name, one in players.items()}
    return SampledByDomain(groups, single)


def gateway_of(config: RlvrConfig) -> Gateway:
    """Return the configured gateway. It does not listen yet."""
    return Gateway(GatewayBounds(config.gateway.body_mib << 20, config.gateway.sessions))


@asynccontextmanager
async def listening(config: RlvrConfig, playing: EpisodeParts | None) -> AsyncGenerator[None, None]:
    """A context in which the gateway listens, if there are external agents.

    Raises:
        ConfigError: the gateway cannot listen at the configured address.
    """
    if playing is None or all(one.agent is None for one in config.environments.values()):
        yield
        return
    async with playing.gateway.listening(config.gateway.host, config.gateway.port):
        yield
