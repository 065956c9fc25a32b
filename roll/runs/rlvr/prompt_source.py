"""The source of training prompts: epochs, or a curriculum by the share of responses that pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from roll.config.schema.rlvr import RlvrConfig
from roll.data.curriculum import Curriculum, CurriculumSampler
from roll.data.prompts import Prompts, PromptSampler
from roll.errors import BadInput, Fault
from roll.rewards.passing import Bars, passed
from roll.rollout.filters import has_verdict
from roll.rollout.scheduler import PromptSource
from roll.types import RolloutGroup


@dataclass(frozen=True)
class PassedShare:
    """The solve rate of a group: the share of its responses that passed, of those that have a verdict."""

    bars: Mapping[str, Bars]
    """When a response passes, by domain."""

    def __call__(self, group: RolloutGroup) -> float | None:
        """Return the share, from 0 to 1; None if no response has a verdict."""
        bars = self.bars[group.prompt.domain]
        judged = [passed(episode, bars) for episode in group.episodes if has_verdict(episode)]
        return fmean(judged) if judged else None


def check_curriculum(config: RlvrConfig, training: Prompts, bars: Mapping[str, Bars]) -> None:
    """Check the data of a curriculum, if there is one.

    Raises:
        BadInput: it is not known of a domain when a response passes; or there are so few prompts that all are always in
            flight, and none can be chosen.
    """
    if config.curriculum is None:
        return
    problem, remedy = (
        "missing, but curriculum measures how many responses pass",
        "set it to the smallest reward that passes",
    )
    faults = [
        Fault(f"rewards.{domain}.passes_at", problem, remedy, "missing") for domain, own in bars.items() if not own
    ]
    in_flight = config.rollout_batch_size + round(config.async_generation_ratio * config.rollout_batch_size)
    if len(training) <= in_flight:
        problem = (
            f"given, but there are only {len(training)} prompts, and {in_flight} are in flight: all are always drawn"
        )
        remedy = "lower rollout_batch_size or async_generation_ratio, add prompts, or remove curriculum"
        faults.append(Fault("curriculum", problem, remedy, "no_effect"))
    if faults:
        raise BadInput(*faults)


def source_of(
    config: RlvrConfig, training: Prompts, bars: Mapping[str, Bars]
) -> tuple[PromptSource, Curriculum | None]:
    """Return the configured source of training prompts, and the curriculum if it has one.

    Raises:
        DataError: the shares of domains do not fit the prompts.
    """
    rows = config.actor_train.data_args
    shares = rows and rows.domain_interleave_probs
    if config.curriculum is None:
        return PromptSampler(training, config.seed, shares), None
    curriculum = Curriculum(training, config.seed, config.curriculum, PassedShare(bars), shares)
    return CurriculumSampler(training, curriculum), curriculum
