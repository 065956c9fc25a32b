"""When a response counts as passed, for `pass@k`, `maj@k` and accuracy. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll.rewards.judges.judge import AnswerPattern
from roll.rewards.verdicts import PartTraits, parts_of
from roll.types import Episode, RewardOutcome

if TYPE_CHECKING:  # reward processes do not import the schema
    from roll.config.schema.roles import RewardConfig


@dataclass(frozen=True)
class Bar:
    """A number that a value of an episode must reach."""

    at: float
    names: tuple[str, ...] = ()
    """Names of parts of the reward, or of the episode's metrics. The first that exists, else the reward."""

    def reached(self, episode: Episode) -> bool:
        """Return whether the episode's value is at least `at`."""
        values = {**episode.metrics, **episode.reward.parts}
        return next((values[name] for name in self.names if name in values), episode.reward.value) >= self.at

    def __str__(self) -> str:
        return f"{' or else '.join((*self.names, 'reward'))} >= {self.at:g}"


Bars = tuple[Bar, ...]
"""The bars of a domain: a scored response passes if it reaches all. Without bars the domain has no accuracy."""
USUAL: Bars = (Bar(1.0),)
"""The bars of a domain that declares none."""


def passed(episode: Episode, bars: Bars) -> bool:
    """Return whether an episode was scored and reaches all bars."""
    return episode.reward.outcome is RewardOutcome.SCORED and all(bar.reached(episode) for bar in bars)


def bars_of(domain: str, section: RewardConfig, traits: Sequence[PartTraits]) -> Bars:
    """Return the bars of a domain by `passes_at`, or else of each part, from their declared `traits`."""
    if section.passes_at is not None:
        return (Bar(section.passes_at),)
    bars = []
    for part, declared in zip(parts_of(domain, section), traits, strict=True):
        own = section.parts[part.name].passes_at if part.name else None
        at = declared.passes_at if own is None else own
        inner = declared.passes_by if own is None else ""
        names = [f"{part.name}/{inner}" if part.name else inner] if inner else []
        if at is not None:
            bars.append(Bar(at, (*names, *([part.name] if part.name else []))))
    return tuple(bars)


def bars_of_judge(pattern: AnswerPattern) -> Bars:
    """Return a bar at the largest verdict of a judge. None is known of a number without `judge_max_score`."""
    return USUAL if pattern.has_largest else ()


def bar_text(bars: Mapping[str, Bars]) -> str:
    """Return the bars of all domains as a text."""
    return "; ".join(
        f"{domain}: {' and '.join(map(str, own)) if own else 'no accuracy'}" for domain, own in sorted(bars.items())
    )
