"""Metrics of a step's episodes in environments. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from roll.agents.episodes import ENVIRONMENT
from roll.types import Episode, Metrics, RolloutGroup, StopReason


def episode_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """Return metrics of the episodes played in environments, and the environments' own metrics by domain. Empty without
    environments.

    They cover turns, tokens, stop reasons, tool calls, forks, retries and the time spent in the environment.
    """
    played = [
        (group.prompt.domain, episode) for group in groups for episode in group.episodes if in_environment(episode)
    ]
    if not played:
        return {}
    episodes = [episode for _, episode in played]
    stops = Counter(episode.stop for episode in episodes)
    metrics = {
        "episode/turns_mean": fmean(len(episode.sampled) for episode in episodes),
        "episode/turns_max": float(max(len(episode.sampled) for episode in episodes)),
        "episode/tokens_mean": fmean(given_and_sampled(episode) for episode in episodes),
        "episode/forks": float(sum(len(episode.trajectories) - 1 for episode in episodes)),
        "episode/tool_calls": _mean(episodes, "tool_calls"),
        "episode/tool_errors": _mean(episodes, "tool_errors"),
        "episode/environment_seconds": _mean(episodes, "environment_seconds"),
        "episode/retried": sum(episode.metrics.get("retried", 0.0) for episode in episodes),
    }
    for stop in StopReason:
        metrics[f"episode/{stop.value}_fraction"] = stops[stop] / len(episodes)
    for domain in sorted({domain for domain, _ in played}):
        own = [episode for its, episode in played if its == domain]
        named = {name for episode in own for name in episode.metrics if name.startswith(ENVIRONMENT)}
        for part in sorted(name.removeprefix(ENVIRONMENT) for name in named):
            metrics[f"environment/{domain}/{part}"] = _mean(own, f"{ENVIRONMENT}{part}")
    return metrics


def in_environment(episode: Episode) -> bool:
    """Whether the episode was played in an environment. Single-turn episodes have no `turn_states`."""
    return bool(episode.turn_states)


def given_and_sampled(episode: Episode) -> int:
    """Return the number of given and sampled tokens of the longest trajectory."""
    return max(sum(len(segment.token_ids) for segment in path.segments) for path in episode.trajectories)


def _mean(episodes: Sequence[Episode], name: str) -> float:
    return fmean(episode.metrics.get(name, 0.0) for episode in episodes)
