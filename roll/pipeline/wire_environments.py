"""Environments: from the configuration to what plays episodes, and to the rows of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from roll.config.derived.batch import longest_sequence
from roll.config.schema.model import DataConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.data.prompts import prepare_prompts
from roll.data.remarks import remark, remark_routes
from roll.data.renderers.base import ChatRenderer
from roll.data.renderers.families import chat_renderer
from roll.data.tasks import Joined, Prompts, Tasks
from roll.pipeline.roles import model_path
from roll.rollout.episode_groups import EpisodeGroups, SampledByDomain
from roll.rollout.episodes import EpisodeLimits, Episodes, SessionGenerator, TokenLimits
from roll.rollout.group import Generator, GroupSampler, Scorer, SingleTurns
from roll.rollout.turns import Locate
from roll.types import Sampling
from roll.workers.environments import EnvironmentWorkers


def prompts_of(
    config: RlvrConfig, tokenizer: PreTrainedTokenizerBase, rows: DataConfig | None, tasks: Mapping[str, int], first: int
) -> Prompts:
    """The rows of data files, and the tasks that environments make themselves, from a first seed on.

    Raises:
        DataError: rows cannot be used.
    """
    sets: list[Prompts] = []
    if rows is not None:
        prompts = prepare_prompts(rows, tokenizer, config.prompt_length, config.domains)
        remark(prompts.too_long, f"left out: the prompt is longer than prompt_length {config.prompt_length}")
        remark_routes(prompts)
        sets.append(prompts)
    if tasks:
        sets.append(Tasks(tuple(config.domains), tasks, first))
    return sets[0] if len(sets) == 1 else Joined(sets)


def renderer_of(config: RlvrConfig, tokenizer: PreTrainedTokenizerBase) -> ChatRenderer | None:
    """How conversations become tokens; None without environments.

    Raises:
        BadInput: the format of the model's chat cannot be used for several turns.
    """
    if not config.environments:
        return None
    rows, learner = config.actor_train.data_args, config.actor_train.model_args
    return chat_renderer(tokenizer, model_path(config, learner), rows.template if rows else "native")


@dataclass(frozen=True)
class Playing:
    """What episodes need beside the engines: the environments, and how conversations become tokens."""

    environments: EnvironmentWorkers
    renderer: ChatRenderer


def group_sampler(
    config: RlvrConfig,
    generator: Generator,
    scorer: Scorer,
    sampling: Sampling,
    engines: SessionGenerator,
    playing: Playing | None,
    stream: int,
    locate: Locate | None = None,
    greedy_baseline: bool = False,
) -> GroupSampler:
    """What answers the prompts of every domain: with single turns, and with episodes where there is an environment.

    Args:
        engines: generate the turns of episodes.
        playing: None without environments.
        stream: of the seeds of environments whose rows name none.
    """
    single = SingleTurns(generator, scorer, sampling, greedy_baseline, locate)
    if playing is None:
        return single
    limits = {name: EpisodeLimits(one.max_turns, one.episode_timeout, one.attempts) for name, one in config.environments.items()}
    tokens = TokenLimits(config.prompt_length, longest_sequence(config))
    episodes = Episodes(playing.environments, engines, playing.renderer, sampling, limits, tokens)
    judged = frozenset(config.environments) & frozenset(config.rewards)
    groups = EpisodeGroups(episodes, sampling, config.seed, stream, scorer, judged)
    return SampledByDomain(frozenset(config.environments), groups, single)
