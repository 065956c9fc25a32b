"""Turns the finished groups of a step into the batch for the trainer: concatenates them into the step's experience,
computes their metrics, and assigns credit.

All of it is pure functions of the step, apart from a small state of the credit assignment: the adaptive KL coefficient
and the running moments of the rewards. It is saved in checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from roll.algorithms.advantages import EpisodeTurns, Normalisation, Scores, advantages, value_targets
from roll.algorithms.kl import adapted_coefficient, token_kl
from roll.algorithms.moments import EPSILON, RunningMoments
from roll.algorithms.self_distillation import TokenGains, blended
from roll.algorithms.shaping import (
    Overlong,
    balanced,
    difficulty_weights,
    is_long_and_wrong,
    length_weights,
    overlong_penalty,
)
from roll.data.packing import concatenate_pictures
from roll.errors import RollError
from roll.rollout.filters import has_verdict, usable
from roll.rollout.record import joined_turns, token_log_probs, token_routes, token_versions
from roll.types import (
    Bools,
    Episode,
    Floats,
    Ints,
    Metrics,
    Pictures,
    RewardOutcome,
    RolloutGroup,
    Routes,
    Segment,
    Sequences,
    StopReason,
    TrainBatch,
    Trajectory,
)

TRUNCATED = (StopReason.LENGTH, StopReason.MAX_TURNS, StopReason.CONTEXT_FULL)
"""Stop reasons of episodes that a limit cut off."""


@dataclass(frozen=True)
class Shaping:
    """Settings that change rewards and the loss mask before credit is assigned."""

    max_len_mask: bool = False
    """Whether to leave truncated responses out of the loss. They still count in their group's statistics."""
    longest_wrong: int | None = None
    """Wrong responses (score at most 0) of at least this many tokens are left out of the loss."""
    difficulty: tuple[float, float] | None = None
    """Exclusive bounds of a group's mean score (`RewardResult.graded`). Groups outside are left out of the loss."""
    overlong: Overlong | None = None


@dataclass(frozen=True)
class Experience:
    """All episodes of a step that have a verdict. The trajectories of one episode are adjacent."""

    sequences: Sequences
    """N sequences, one for each trajectory."""
    episode_of_sequence: Ints
    """[N], index of each sequence's episode, not decreasing. Every episode has at least one sequence."""
    rewards: Floats
    """[E], shaped rewards."""
    groups: Ints
    """[E], index of each episode's group."""
    domains: Ints
    """[E], index of the prompt's domain among the domains of the step."""
    behaviour_log_probs: Floats | None
    """[T], log-probs from the engine; None if it did not return them."""
    policy_versions: Ints
    """[T], policy version that sampled each token; 0 for given tokens."""
    lengths: Ints
    """[E], number of sampled tokens, whether or not they are in the loss."""
    difficulties: Floats
    """[E], 1 minus the mean score of the group."""
    baselines: Floats | None
    """[E], shaped reward of the greedy response to the same prompt; None without greedy responses."""
    turns: EpisodeTurns | None = None
    """Rewards of the episodes' turns; None if every episode is one turn."""

    @property
    def episodes(self) -> Sequences:
        """Return one sequence per episode, [E]: its trajectories joined. Advantage estimators sum over these."""
        firsts = np.searchsorted(self.episode_of_sequence, np.arange(len(self.rewards) + 1))
        return replace(self.sequences, offsets=self.sequences.offsets[firsts])


def experience(groups: Sequence[RolloutGroup], shaping: Shaping) -> Experience:
    """Return the experience of a step.

    Episodes without a verdict are left out, and so are all responses to a prompt if its greedy response has no verdict.

    Raises:
        RollError: no response has a verdict.
    """
    compared = [usable(group) for group in groups]
    kept = [(index, episode) for index, episodes in enumerate(compared) for episode in episodes]
    if not kept:
        tried = [
            episode for group in groups for episode in (*group.episodes, *([group.baseline] if group.baseline else ()))
        ]
        notes = {episode.reward.note for episode in tried if not has_verdict(episode)}
        raise RollError(
            f"no response of this step could be scored; the rewards reported: {'; '.join(sorted(notes)[:3])}"
        )
    episodes = [episode for _, episode in kept]
    counts = np.array([len(episodes) for episodes in compared])
    means = _means([episode.reward.graded for episode in episodes], counts)
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    for trajectory in trajectories:
        first = trajectory.segments[0]
        assert len(first.token_ids) and not first.sampled, (
            "a trajectory must begin with given tokens: nothing predicts its first one"
        )
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    episode_of_sequence = np.repeat(
        np.arange(len(episodes), dtype=np.int32), [len(episode.trajectories) for episode in episodes]
    )
    learns = [_learns(episode, means[index], shaping) for index, episode in kept]
    rewards = _shaped(episodes, shaping)
    baselines = [baseline for index, _ in kept if (baseline := groups[index].baseline) is not None]
    return Experience(
        sequences=_laid_end_to_end(trajectories, segments, np.array(learns)[episode_of_sequence], _shown(groups, kept)),
        episode_of_sequence=episode_of_sequence,
        rewards=rewards,
        groups=np.repeat(np.arange(len(groups), dtype=np.int32), counts),
        domains=np.unique([groups[index].prompt.domain for index, _ in kept], return_inverse=True)[1].astype(np.int32),
        behaviour_log_probs=token_log_probs(segments) if _has_log_probs(segments) else None,
        policy_versions=token_versions(segments),
        lengths=_lengths(episodes),
        difficulties=np.repeat(1.0 - np.array(means), counts).astype(np.float32),
        baselines=_shaped(baselines, shaping) if baselines else None,
        turns=joined_turns(episodes, rewards),
    )


def _means(scores: Sequence[float], counts: np.ndarray) -> list[float]:
    """Return the mean score of each group, NaN for an empty one. `counts` holds each group's number of scores."""
    values, ends = np.array(scores, np.float64), np.cumsum(counts)
    bounds = zip((ends - counts).tolist(), ends.tolist(), strict=True)
    return [float(values[begin:end].sum()) / (end - begin) if end > begin else np.nan for begin, end in bounds]


def _has_log_probs(segments: Sequence[Segment]) -> bool:
    has = {segment.log_probs is not None for segment in segments if segment.sampled}
    assert len(has) == 1, "the engine returned log-probs of some responses but not of others"
    return has.pop()


def _shaped(episodes: Sequence[Episode], shaping: Shaping) -> Floats:
    rewards = np.array([episode.reward.value for episode in episodes], np.float32)
    return rewards if shaping.overlong is None else rewards + overlong_penalty(_lengths(episodes), shaping.overlong)


def _lengths(episodes: Sequence[Episode]) -> Ints:
    return np.array([episode.length for episode in episodes], np.int32)


def _learns(episode: Episode, mean_score: float, shaping: Shaping) -> bool:
    """Whether the episode's sampled tokens enter the loss."""
    learns = not (shaping.max_len_mask and episode.stop in TRUNCATED)
    if shaping.longest_wrong is not None:
        learns = learns and not is_long_and_wrong(episode.reward.graded, episode.length, shaping.longest_wrong)
    if shaping.difficulty is not None:
        low, high = shaping.difficulty
        learns = learns and low < mean_score < high
    return learns


def teaches(group: RolloutGroup, shaping: Shaping) -> bool:
    """Whether a comparison within the group has a gradient: shaped rewards differ, and a response is in the loss."""
    episodes = usable(group)
    if len(set(_shaped(episodes, shaping).tolist())) < 2:
        return False
    mean_score = fmean(episode.reward.graded for episode in episodes)
    return any(_learns(episode, mean_score, shaping) for episode in episodes)


def _shown(groups: Sequence[RolloutGroup], kept: Sequence[tuple[int, Episode]]) -> Pictures | None:
    """Return the pictures of all trajectories of the episodes; None if nothing shows any.

    The responses to a prompt that shows pictures share one copy of the pixels.

    Args:
        kept: the episodes, each with the index of its group.
    """
    prompts = {index: groups[index].prompt.shown for index, _ in kept}
    of_prompt = {index: shown and shown.pixels() for index, shown in prompts.items()}
    pictures = [
        path.shown.pixels() if path.shown is not None else of_prompt[index]
        for index, episode in kept
        for path in episode.trajectories
    ]
    return concatenate_pictures(pictures) if any(one is not None for one in pictures) else None


def _laid_end_to_end(
    trajectories: Sequence[Trajectory], segments: Sequence[Segment], learns: np.ndarray, shown: Pictures | None
) -> Sequences:
    """Return one sequence for each trajectory.

    Args:
        segments: the segments of all trajectories, in order.
        learns: for each trajectory, whether its sampled tokens enter the loss.
        shown: the pictures of the trajectories.
    """
    assert shown is None or len(shown.counts) == len(trajectories), "some trajectories lack their pictures"
    lengths = np.array([len(segment.token_ids) for segment in segments])
    counts = np.array([len(trajectory.segments) for trajectory in trajectories])
    offsets = np.concatenate([[0], np.cumsum(lengths)[np.cumsum(counts) - 1]]).astype(np.int64)
    in_loss = np.array([segment.sampled for segment in segments]) & np.repeat(learns, counts)
    token_ids = np.concatenate([segment.token_ids for segment in segments], dtype=np.int32)
    return Sequences(token_ids, offsets, np.repeat(in_loss, lengths), token_routes(segments), shown)


def rollout_metrics(groups: Sequence[RolloutGroup], policy_version: int) -> Metrics:
    """Return metrics of a step's episodes: rewards by domain, outcomes, lengths, staleness. Only verdicts count."""
    episodes = [episode for group in groups for episode in group.episodes]
    scored = [episode for episode in episodes if has_verdict(episode)]
    rewards = np.array([episode.reward.value for episode in scored])
    lengths = np.array([episode.length for episode in episodes])
    runs = [run for episode in episodes for segment in episode.sampled for run in segment.versions if run.tokens]
    ages, tokens = policy_version - np.array([run.version for run in runs]), np.array([run.tokens for run in runs])
    outcomes = Counter(episode.reward.outcome for episode in episodes)
    metrics = {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())} if scored else {}
    metrics |= {
        "reward/equal_groups_fraction": equal_groups_fraction(groups),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/at_limit_fraction": at_limit_fraction(episodes),
        "response/truncated_fraction": sum(episode.stop in TRUNCATED for episode in episodes) / len(episodes),
        "staleness/mean": float(ages @ tokens / tokens.sum()),
        "staleness/min": float(ages.min()),
        "staleness/max": float(ages.max()),
    }
    for outcome in RewardOutcome:
        metrics[f"reward/{outcome.value}_fraction"] = outcomes[outcome] / len(episodes)
    for domain in sorted({group.prompt.domain for group in groups}):
        results = [
            e.reward for group in groups if group.prompt.domain == domain for e in group.episodes if has_verdict(e)
        ]
        if results:
            metrics[f"reward/{domain}/mean"] = float(np.mean([result.value for result in results]))
        for part in sorted({name for result in results for name in result.parts}):
            values = [result.parts[part] for result in results if part in result.parts]
            metrics[f"reward/{domain}/{part}/mean"] = float(np.mean(values))
    return metrics


def equal_groups_fraction(groups: Sequence[RolloutGroup]) -> float:
    """Return the share of groups whose rewards with a verdict are all equal.

    Estimators that compare the responses of a group learn nothing from such a group.
    """
    return sum(len({e.reward.value for e in group.episodes if has_verdict(e)}) <= 1 for group in groups) / len(groups)


def at_limit_fraction(episodes: Sequence[Episode]) -> float:
    """Return the share of episodes whose last response reached the length limit."""
    return sum(episode.stop is StopReason.LENGTH for episode in episodes) / len(episodes)


def token_count(groups: Sequence[RolloutGroup]) -> int:
    """Return the number of given and sampled tokens of all trajectories. Greedy responses do not count."""
    paths = [trajectory for group in groups for episode in group.episodes for trajectory in episode.trajectories]
    return sum(len(segment.token_ids) for trajectory in paths for segment in trajectory.segments)


@dataclass(frozen=True)
class Credit:
    """Settings of credit assignment: how rewards become advantages."""

    estimator: str
    """Name in `ADVANTAGES`, or `package.module:Name`."""
    normalisation: Normalisation
    kl_coef: float = 0.0
    """Weight of the per-token KL to the reference that rewards lose. If it adapts, this is the initial weight."""
    kl_estimator: str = "k1"
    target_kl: float | None = None
    """Target KL, in nats per token, that `kl_coef` is adapted to reach. None keeps the weight constant."""
    kl_horizon: int = 10000
    """Number of responses over which the weight adapts."""
    weigh_difficulty: bool = False
    """Whether hard prompts get a larger weight in the loss."""
    weigh_length: bool = False
    """Whether long responses get a smaller weight in the loss."""
    estimator_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the estimator, other than the normalisation."""
    teacher_weight: float = 0.0
    """Weight of a self-teacher's gains; the estimator's advantages get the rest."""


@dataclass(frozen=True)
class CreditState:
    """State that one step passes to the next."""

    kl_coef: float
    """KL coefficient of the next step."""
    rewards: RunningMoments = field(default_factory=RunningMoments)
    """Moments of the rewards of all steps so far."""


_STATE = TypeAdapter(CreditState)


class CreditAssignment:
    """Assigns credit to each step in turn and keeps the state between steps."""

    def __init__(self, credit: Credit) -> None:
        self._credit = credit
        self._state = CreditState(credit.kl_coef)

    def __call__(
        self,
        step: Experience,
        ref_log_probs: Floats | None,
        proximal_log_probs: Floats | None = None,
        values: Floats | None = None,
        taught: TokenGains | None = None,
    ) -> tuple[TrainBatch, Metrics]:
        """Return the step's batch and its metrics.

        Args:
            ref_log_probs: [T], log-probs of the reference; None if no term uses them.
            proximal_log_probs: [T], log-probs of the trainer's policy before the step's first update; None if they were
                not computed.
            values: [T], values of the critic before its first update of the step; None without a critic.
            taught: what the self-teacher says about the tokens. None without one.
        """
        batch, self._state, metrics = train_batch(
            step, ref_log_probs, proximal_log_probs, self._credit, self._state, values, taught
        )
        return batch, metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values."""
        return _STATE.dump_python(self._state, mode="json")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. Without `target_kl`, the KL coefficient is taken from the configuration instead."""
        saved = _STATE.validate_python(state)
        self._state = saved if self._credit.target_kl else replace(saved, kl_coef=self._credit.kl_coef)


def train_batch(
    step: Experience,
    ref_log_probs: Floats | None,
    proximal_log_probs: Floats | None,
    credit: Credit,
    state: CreditState,
    values: Floats | None = None,
    taught: TokenGains | None = None,
) -> tuple[TrainBatch, CreditState, Metrics]:
    """Return the step's batch with advantages, the state for the next step, and metrics.

    Estimators see each episode as one sequence, so that a reward at its end reaches the tokens of all its trajectories.
    For the arguments see `CreditAssignment`.
    """
    penalties, kl_coef = None, state.kl_coef
    mask = step.sequences.response_mask
    metrics = {
        "reward/shaped_mean": float(step.rewards.mean()),
        "response/masked_fraction": 1.0 - float(_with_any(step, mask).mean()),
    }
    if step.sequences.routes is not None:
        metrics["router/unknown_fraction"] = unknown_fraction(step.sequences, step.sequences.routes)
    if credit.kl_coef:
        assert ref_log_probs is not None, "a KL term in the reward without reference log-probs"
        log_probs = step.behaviour_log_probs if proximal_log_probs is None else proximal_log_probs
        assert log_probs is not None, "a KL term in the reward without log-probs of the policy"
        kl = token_kl(torch.from_numpy(log_probs), torch.from_numpy(ref_log_probs), credit.kl_estimator).numpy()
        penalties = (state.kl_coef * kl).astype(np.float32)
        mean = float(kl[mask].mean()) if mask.any() else 0.0
        metrics |= {"reward/kl_coef": state.kl_coef, "reward/kl_mean": mean}
        if credit.target_kl:
            kl_coef = adapted_coefficient(state.kl_coef, mean, credit.target_kl, len(step.rewards), credit.kl_horizon)
    running = state.rewards.joined(_clipped(step.rewards, credit.normalisation))
    sums = step.rewards, step.groups, penalties, step.lengths, step.baselines
    scores = Scores(step.episodes, *sums, running, step.turns, values, step.domains)
    if step.turns is not None:
        metrics["response/turns_mean"] = len(step.turns.rewards) / len(step.rewards)
    estimated = advantages(credit.estimator, scores, credit.normalisation, credit.estimator_args)
    if taught is not None:
        estimated = blended(estimated, taught, credit.teacher_weight)
        metrics |= taught.metrics
    metrics["advantage/zero_fraction"] = 1.0 - float(_with_any(step, mask & (np.abs(estimated) > EPSILON)).mean())
    returns = None if values is None else value_targets(scores, credit.normalisation)
    if values is not None and returns is not None:
        metrics |= value_metrics(values[mask], returns[mask])
    batch = TrainBatch(
        step.sequences,
        estimated,
        step.behaviour_log_probs,
        step.policy_versions,
        ref_log_probs,
        proximal_log_probs,
        sequence_weights=sequence_weights(step, credit),
        episode_of_sequence=step.episode_of_sequence,
        values=values,
        returns=returns,
    )
    return batch, CreditState(kl_coef, running), metrics


def unknown_fraction(sequences: Sequences, routes: Routes) -> float:
    """Return the share of tokens without routes, for which the trainer's routers choose by themselves.

    The last token of a sequence does not count: nothing is predicted from it, and the engine never reads it.
    """
    counted = np.ones(len(sequences.token_ids), np.bool_)
    counted[sequences.offsets[1:] - 1] = False
    return float((routes[counted] < 0).any(axis=(1, 2)).mean()) if counted.any() else 0.0


def value_metrics(values: Floats, returns: Floats) -> Metrics:
    """Return metrics of a critic's values before its update. Both arrays hold the S response tokens, [S].

    The explained variance, 1 - Var(returns - values) / Var(returns), is 1 for a perfect critic, 0 for a constant one,
    and negative for a critic worse than a constant. It is left out if all returns of the step are equal.
    """
    if not len(values):
        return {}
    metrics = {"critic/value_mean": float(values.mean()), "critic/return_mean": float(returns.mean())}
    if spread := float(returns.var(dtype=np.float64)):
        metrics["critic/explained_variance"] = 1.0 - float((returns - values).var(dtype=np.float64)) / spread
    return metrics


def sequence_weights(step: Experience, credit: Credit) -> Floats | None:
    """Return loss weights [N] with a mean of 1 over the episodes in the loss; None without any weighting."""
    if not (credit.weigh_difficulty or credit.weigh_length):
        return None
    weights = np.ones(len(step.rewards), np.float32)
    if credit.weigh_difficulty:
        weights = weights * difficulty_weights(step.difficulties)
    if credit.weigh_length:
        weights = weights * length_weights(step.lengths)
    return balanced(weights, _with_any(step, step.sequences.response_mask))[step.episode_of_sequence]


def _with_any(step: Experience, tokens: Bools) -> Bools:
    """Return which episodes have any of these `tokens` [T], as [E]."""
    return np.logical_or.reduceat(tokens, step.episodes.offsets[:-1])


def _clipped(rewards: Floats, norm: Normalisation) -> Floats:
    bound = None if norm.clips_normalised else norm.reward_clip
    return rewards if bound is None else np.clip(rewards, -bound, bound)
