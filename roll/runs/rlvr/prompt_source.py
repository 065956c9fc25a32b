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


def check_measurable(config: RlvrConfig, bars: Mapping[str, Bars]) -> None:
    """Raise BadInput if a curriculum should measure a domain of which it is not known when a response passes."""
    missing = [domain for domain, own in bars.items() if not own] if config.curriculum else []
    problem = "missing, but curriculum measures how many responses pass"
    if faults := [
        Fault(f"rewards.{domain}.passes_at", problem, "set it to the smallest reward that passes", "missing")
        for domain in missing
    ]:
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
