"""Layout, credit, weights and micro-batches of episodes with several turns and trajectories. Expected values are worked
out by hand.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roll.algorithms.advantages import Normalisation
from roll.data.packing import take_sequences, updates_of
from roll.rollout.batch import (
    Credit,
    CreditAssignment,
    Experience,
    Shaping,
    experience,
    rollout_metrics,
    sequence_weights,
    token_count,
)
from roll.training.actor_train import TrainShape, micro_batches_of
from roll.types import Episode, RewardResult, RolloutGroup, StopReason, TrainBatch
from tests.unit.rollout.build import make_episode, make_prompt, make_trajectory, observed, sampled

ASKED = observed([1, 2])


def tool_call(reward: float = 1.0, stop: StopReason = StopReason.COMPLETED) -> Episode:
    """Return an episode with one trajectory: three turns of the policy, with observations between them."""
    turns = [
        sampled([10, 11], [-0.5, -0.25], [3, 4]),
        observed([20]),
        sampled([12], [-1], [4]),
        observed([21, 22]),
        sampled([13], [-2], [5]),
    ]
    return Episode([make_trajectory(ASKED, *turns, stop=stop)], RewardResult(reward), [0.5, 0.0, 0.25])


def compacted(reward: float = 3.0) -> Episode:
    """Return an episode with two trajectories. The second has the prompt and the first turn of the first one as given
    tokens.
    """
    first = make_trajectory(ASKED, sampled([10]), observed([20]), sampled([11, 12]), stop=StopReason.CONTEXT_FULL)
    return Episode(
        [first, make_trajectory(ASKED, observed([10, 20]), sampled([14]), observed([23]))],
        RewardResult(reward),
        [1.0, 0.0, 1.0],
    )


def one_turn(reward: float, stop: StopReason = StopReason.COMPLETED) -> Episode:
    return Episode([make_trajectory(ASKED, sampled([15]), stop=stop)], RewardResult(reward))


def group_of(*episodes: Episode) -> RolloutGroup:
    return RolloutGroup(make_prompt(0), episodes)


def step_of(*episodes: Episode, shaping: Shaping | None = None) -> Experience:
    return experience([group_of(*episodes)], shaping or Shaping())


def batch_of(step: Experience, credit: Credit, ref: np.ndarray | None = None) -> TrainBatch:
    return CreditAssignment(credit)(step, ref)[0]


MASK = [0, 0, 1, 1, 0, 1, 0, 0, 1] + [0, 0, 1, 0, 1, 1] + [0, 0, 0, 0, 1, 0]


def test_segments_are_joined_and_only_sampled_ones_learnt() -> None:
    step = step_of(tool_call(), compacted())
    assert step.sequences.token_ids.tolist() == [
        1,
        2,
        10,
        11,
        20,
        12,
        21,
        22,
        13,
        1,
        2,
        10,
        20,
        11,
        12,
        1,
        2,
        10,
        20,
        14,
        23,
    ]
    assert step.sequences.offsets.tolist() == [0, 9, 15, 21]
    assert step.sequences.response_mask.astype(int).tolist() == MASK
    assert step.behaviour_log_probs is not None
    assert step.behaviour_log_probs.tolist() == [
        0,
        0,
        -0.5,
        -0.25,
        0,
        -1,
        0,
        0,
        -2,
        0,
        0,
        -1,
        0,
        -1,
        -1,
        0,
        0,
        0,
        0,
        -1,
        0,
    ]
    assert step.policy_versions.tolist() == [0, 0, 3, 4, 0, 4, 0, 0, 5] + [0] * 12
    assert step.episode_of_sequence.tolist() == [0, 1, 1]
    assert (step.rewards.tolist(), step.groups.tolist(), step.lengths.tolist()) == ([1, 3], [0, 0], [4, 4])
    assert step.difficulties.tolist() == [-1, -1]
    assert step.episodes.offsets.tolist() == [0, 9, 21]


def test_every_trajectory_gets_its_episodes_advantage() -> None:
    """Mean and standard deviation of the group are over two episodes, not over three sequences: 2 and sqrt(2)."""
    batch = batch_of(step_of(tool_call(), compacted()), Credit("grpo", Normalisation()))
    step = 1 / (2**0.5 + 1e-6)
    np.testing.assert_allclose(batch.advantages, np.array(MASK) * np.repeat([-step, step, step], [9, 6, 6]), rtol=1e-6)
    assert batch.episode_of_sequence is not None and batch.episode_of_sequence.tolist() == [0, 1, 1]


def test_returns_run_through_all_trajectories_of_an_episode() -> None:
    """Discounts and penalties skip given tokens, and continue from one trajectory to the next."""
    batch = batch_of(step_of(compacted(8.0)), Credit("reinforce", Normalisation(gamma=0.5)))
    assert batch.advantages.tolist() == [0, 0, 1, 0, 2, 4, 0, 0, 0, 0, 8, 0]
    ref = np.array([0, 0, -2, 0, -2, -2, 0, 0, 0, 0, -2, 0], np.float32)
    batch = batch_of(step_of(compacted(8.0)), Credit("rloo", Normalisation(), kl_coef=0.5), ref)
    # k1 is 1 at each of four tokens. In a group of one, the reward gives no advantage: a token only pays its own and
    # later penalties.
    assert batch.advantages.tolist() == [0, 0, -2, 0, -1.5, -1, 0, 0, 0, 0, -0.5, 0]


def test_each_sampled_segment_is_a_turn() -> None:
    """The last turn also gets the rest of the reward: 0.25 of 1, and 1 of 3. Without turn rewards, it gets the whole
    reward.
    """
    step = step_of(tool_call(), compacted(), replace(tool_call(), turn_rewards=()), one_turn(2.0))
    assert step.turns is not None
    assert step.turns.rewards.tolist() == [0.5, 0, 0.5, 1, 0, 2, 0, 0, 1, 2]
    assert step.turns.rows.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    tokens = [4, 2, 3, 3, 3, 6, 4, 2, 3, 3]
    assert step.turns.of_token.tolist() == np.repeat(np.arange(10), tokens).tolist()
    batch = batch_of(step, Credit("step_reinforce", Normalisation(gamma=0.5)))
    paid = np.repeat([0.625, 0.25, 0.5, 1.5, 1, 2, 0.25, 0.5, 1, 2], tokens)
    np.testing.assert_allclose(batch.advantages, step.sequences.response_mask * paid, rtol=1e-6)
    metrics = CreditAssignment(Credit("step_reinforce", Normalisation()))(step, None)[1]
    assert metrics["response/turns_mean"] == 2.5


def test_turns_taken_in_one_state_are_compared() -> None:
    """Rewards 1, 3 and 2. The first two episodes start in the same state. The third has unknown states, so only its
    reward is compared.
    """
    first = replace(tool_call(), turn_states=("start", "door", "start"))
    second, third = replace(compacted(), turn_states=("start", "hall", "door")), one_turn(2.0)
    step = step_of(first, second, third)
    assert step.turns is not None and step.turns.states is not None
    assert step.turns.states.tolist() == [0, 1, 0, 0, 2, 1, 3]
    own = {"step_reward_gamma": 0.5, "gigpo_std": False}
    batch = batch_of(step, Credit("gigpo", Normalisation(), estimator_args=own))
    # Returns 0.625, 0.25, 0.5 and 1.5, 1, 2. Their mean is 0.875 in state start, and 1.125 in state door. The mean
    # reward is 2.
    paid = np.repeat([-1.25, -1.875, -1.375, 1.625, 1, 1.875, 0], [4, 2, 3, 3, 3, 6, 3])
    np.testing.assert_allclose(batch.advantages, step.sequences.response_mask * paid, rtol=1e-6)
    assert step_of(one_turn(2.0), tool_call()).turns.states is None  # type: ignore[union-attr]


@pytest.mark.parametrize("stop", list(StopReason))
def test_stop_reason_decides_whether_episode_counts(stop: StopReason) -> None:
    group = group_of(tool_call(0.0, stop), one_turn(1.0), one_turn(0.5))
    kept = experience([group], Shaping()).rewards.tolist()
    masked = experience([group], Shaping(max_len_mask=True)).sequences.response_mask.sum()
    truncated = rollout_metrics([group], 5)["response/truncated_fraction"]
    if stop in ("environment_failed", "aborted", "deadline"):
        assert (kept, masked, truncated) == ([1, 0.5], 2, 0)
    elif stop in ("length", "max_turns", "context_full"):
        assert (kept, masked, truncated) == ([0, 1, 0.5], 2, pytest.approx(1 / 3))
    else:
        assert (kept, masked, truncated) == ([0, 1, 0.5], 6, 0)


def test_aborted_trajectory_drops_its_whole_episode() -> None:
    first, second = compacted().trajectories
    broken = Episode([replace(first, stop=StopReason.ABORTED), second], RewardResult(9.0))
    assert step_of(broken, one_turn(1.0)).rewards.tolist() == [1]
    # An episode does not count as truncated if its context became full and was then compacted.
    assert rollout_metrics([group_of(compacted())], 0)["response/truncated_fraction"] == 0


def test_metrics_are_per_episode() -> None:
    metrics = rollout_metrics([group_of(tool_call(), compacted(), one_turn(2.0))], policy_version=5)
    assert (metrics["reward/mean"], metrics["response/length_mean"], metrics["response/length_max"]) == (2, 3, 4)
    # Ages of the sampled tokens, by episode: 2 1 1 0 | 5 5 5 5 | 5.
    assert metrics["staleness/mean"] == pytest.approx(29 / 9)
    assert token_count([group_of(tool_call(), compacted())]) == 21


def test_weights_of_episodes_are_those_of_their_sequences() -> None:
    step = step_of(tool_call(), compacted(), one_turn(0.0))
    # The episodes have 4, 4 and 1 sampled tokens: weights 1/2, 1/2 and 3/2, with mean 5/6.
    assert sequence_weights(step, Credit("grpo", Normalisation(), weigh_length=True)) == pytest.approx(
        [0.6, 0.6, 0.6, 1.8]
    )


def test_an_update_holds_whole_episodes() -> None:
    batch = batch_of(step_of(tool_call(), compacted(), one_turn(0.0)), Credit("grpo", Normalisation()))
    assert updates_of(batch, 1) == [[0, 1, 2, 3]]
    assert updates_of(batch, 2) == [[0, 1, 2], [3]]
    assert updates_of(batch, 3) == [[0], [1, 2], [3]]
    assert updates_of(batch, 4) == [[0], [1, 2], [3], []]
    part = take_sequences(batch, [2, 3])
    assert part.episode_of_sequence is not None and part.episode_of_sequence.tolist() == [1, 2]
    pairs = replace(take_sequences(batch, [0, 1, 2, 3]), episode_of_sequence=None, sequences_per_example=2)
    assert updates_of(pairs, 2) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("budget", [1, 15, 100])
def test_episodes_weigh_equally_in_every_split(replicas: int, budget: int) -> None:
    """Each of three episodes has a third of the loss, whether or not its trajectories are in the same micro-batch."""
    batch = batch_of(step_of(tool_call(), compacted(), one_turn(0.0)), Credit("grpo", Normalisation()))
    shape = TrainShape(1, 1, budget, "seq-mean-token-mean", 1.0)
    by_sequence = np.zeros(4)
    for micro_batches in micro_batches_of(batch, range(4), replicas, shape):
        for part in micro_batches:
            sums = np.add.reduceat(part.loss_weights.astype(np.float64), part.batch.sequences.offsets[:-1])
            for sample, weight in zip(part.samples, sums, strict=False):
                by_sequence[sample] += weight
    np.testing.assert_allclose(by_sequence, [1 / 3, 1 / 4, 1 / 12, 1 / 3], rtol=1e-6)


def test_a_trajectory_begins_with_what_is_given() -> None:
    with pytest.raises(AssertionError, match="begin with given"):
        step_of(make_episode([5]))
    with pytest.raises(AssertionError, match="log-probs of some"):
        step_of(
            one_turn(1.0), Episode([make_trajectory(ASKED, replace(sampled([5]), log_probs=None))], RewardResult(0.0))
        )


def test_segments_of_no_token_change_nothing() -> None:
    """An observation or a turn of the policy may be empty. An empty turn still counts as a turn."""
    turns = [sampled([10]), observed([]), sampled([]), observed([21]), sampled([11])]
    quiet = Episode([make_trajectory(ASKED, *turns)], RewardResult(3.0), [1.0, 1.0, 1.0])
    step = step_of(quiet)
    assert step.sequences.token_ids.tolist() == [1, 2, 10, 21, 11]
    assert step.turns is not None and step.turns.of_token.tolist() == [0, 0, 0, 2, 2]
    batch = batch_of(step, Credit("step_reinforce", Normalisation(gamma=0.5)))
    assert batch.advantages.tolist() == [0, 0, 1.75, 0, 1]
