"""Credit assignment: its state from step to step, and the weights of responses."""

from __future__ import annotations

import json
from math import sqrt

import numpy as np
import pytest

from roll.algorithms.advantages import Normalisation
from roll.rollout.batch import Credit, CreditAssignment, Experience, Shaping, experience, sequence_weights
from roll.types import Episode, RewardResult, RolloutGroup, StopReason
from tests.unit.rollout.build import make_episode, make_group, make_prompt, make_trajectory, observed, sampled


def step_of(*rewards: float) -> Experience:
    """Return the experience of one group, with responses of one token that has a log-prob of -1."""
    return experience([make_group(0, [make_episode([5], reward) for reward in rewards])], Shaping())


def advantages_of(assignment: CreditAssignment, step: Experience, ref: np.ndarray | None = None) -> list[float]:
    return assignment(step, ref)[0].advantages[2::3].tolist()


RUNNING = Credit("reinforce", Normalisation(mean="running", std="running"))


def test_running_moments_know_all_rewards_so_far() -> None:
    assignment = CreditAssignment(RUNNING)
    # Rewards 0, 2: mean 1, sample variance 2. Rewards 0, 2, 4, 6: mean 3, squared deviations 9 + 1 + 1 + 9 = 20,
    # variance 20 / 3.
    assert advantages_of(assignment, step_of(0, 2)) == pytest.approx([-1 / sqrt(2), 1 / sqrt(2)], rel=1e-5)
    std = sqrt(20 / 3)
    assert advantages_of(assignment, step_of(4, 6)) == pytest.approx([1 / std, 3 / std], rel=1e-5)


def test_domain_normalisation_compares_prompts_of_one_domain() -> None:
    drawn = [("math", [0, 4]), ("code", [1, 1, 7]), ("math", [2])]
    groups = [
        make_group(number, [make_episode([5], r) for r in rewards], domain=domain)
        for number, (domain, rewards) in enumerate(drawn)
    ]
    assignment = CreditAssignment(Credit("reinforce", Normalisation(mean="domain")))
    assert advantages_of(assignment, experience(groups, Shaping())) == [-2, 2, -2, -2, 4, 0]


def test_a_saved_state_goes_on_exactly() -> None:
    credit = Credit(
        "reinforce", Normalisation(mean="running", std="running"), kl_coef=0.1, target_kl=0.01, kl_horizon=20
    )
    whole, first = CreditAssignment(credit), CreditAssignment(credit)
    ref = np.array([0, 0, -1.5, 0, 0, -1.25], np.float32)
    for assignment in (whole, first):
        assignment(step_of(0, 3), ref)
    resumed = CreditAssignment(credit)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for rewards in ((1, 1), (5, -2)):
        expected, found = whole(step_of(*rewards), ref), resumed(step_of(*rewards), ref)
        assert found[0].advantages.tolist() == expected[0].advantages.tolist()
        assert found[1] == expected[1]
    assert resumed.state_dict() == whole.state_dict()


def test_adaptive_kl_weight_changes_after_the_step() -> None:
    assignment = CreditAssignment(Credit("reinforce", Normalisation(), kl_coef=0.1, target_kl=0.1, kl_horizon=4))
    # k1 is 1/2 on both tokens, five times the target. The error is clipped to 0.2. Two responses and horizon 4: factor
    # 1 + 0.2 * 2 / 4.
    ref = np.array([0, 0, -1.5, 0, 0, -1.5], np.float32)
    batch, metrics = assignment(step_of(0, 0), ref)
    assert batch.advantages[2] == pytest.approx(-0.05)
    assert (metrics["reward/kl_coef"], metrics["reward/kl_mean"]) == (pytest.approx(0.1), pytest.approx(0.5))
    batch, metrics = assignment(step_of(0, 0), ref)
    assert metrics["reward/kl_coef"] == pytest.approx(0.11)
    assert batch.advantages[2] == pytest.approx(-0.055)


def test_constant_kl_weight_follows_configuration_after_resume() -> None:
    before = CreditAssignment(Credit("reinforce", Normalisation(), kl_coef=0.1))
    after = CreditAssignment(Credit("reinforce", Normalisation(), kl_coef=0.3))
    after.load_state_dict(before.state_dict())
    ref = np.array([0, 0, -2], np.float32)
    assert after(step_of(0), ref)[1]["reward/kl_coef"] == 0.3


def test_no_kl_metrics_without_kl() -> None:
    assert set(CreditAssignment(RUNNING)(step_of(1, 2), None)[1]) == {
        "reward/shaped_mean",
        "response/masked_fraction",
        "advantage/zero_fraction",
    }


def test_weights_of_responses_by_hand() -> None:
    groups = [
        make_group(0, [make_episode([5], 1.0), make_episode([5] * 3, 1.0)]),
        make_group(1, [make_episode([5] * 5, 0.0), make_episode([5] * 3, 0.0, stop=StopReason.LENGTH)]),
    ]
    step = experience(groups, Shaping(max_len_mask=True))
    credit = Credit("grpo", Normalisation(), weigh_difficulty=True)
    # Difficulties 0, 0, 1, 1: weights 1/2, 1/2, 2, 2. The last response is not in the loss. The mean of the other three
    # weights is 1.
    assert sequence_weights(step, credit) == pytest.approx([0.5, 0.5, 2, 2])
    # Lengths 1, 3, 5, 3: weights 3/2, 1, 1/2, 1.
    assert sequence_weights(step, Credit("grpo", Normalisation(), weigh_length=True)) == pytest.approx([1.5, 1, 0.5, 1])
    both = np.array([0.75, 0.5, 1, 2])
    credit = Credit("grpo", Normalisation(), weigh_difficulty=True, weigh_length=True)
    assert sequence_weights(step, credit) == pytest.approx(both / 0.75)
    assert sequence_weights(step, Credit("grpo", Normalisation())) is None


def test_distillation_reward_is_teacher_minus_policy_log_prob() -> None:
    """With `gamma` 0 and a KL of weight 1 as the only reward, each token is rewarded only for itself."""
    step = experience([make_group(0, [make_episode([5, 6, 7], 0.0), make_episode([8, 9], 0.0)])], Shaping())
    mask = step.sequences.response_mask
    own = np.where(mask, -1.0 - np.arange(len(mask)) / 10, 0).astype(np.float32)
    teacher = np.where(mask, -2.0 + np.arange(len(mask)) / 4, 0).astype(np.float32)
    assignment = CreditAssignment(Credit("reinforce", Normalisation(gamma=0.0), kl_coef=1.0, kl_estimator="k1"))
    batch, metrics = assignment(step, teacher, own)
    assert batch.advantages == pytest.approx(np.where(mask, teacher - own, 0))
    assert metrics["reward/kl_mean"] == pytest.approx(float((own - teacher)[mask].mean()))


def test_the_kl_weight_adapts_by_episodes_not_trajectories() -> None:
    path = make_trajectory(observed([1, 2]), sampled([5]))
    group = RolloutGroup(
        make_prompt(0), [Episode([path, path, path], RewardResult(0.0)), Episode([path], RewardResult(0.0))]
    )
    assignment = CreditAssignment(Credit("reinforce", Normalisation(), kl_coef=0.1, target_kl=0.1, kl_horizon=4))
    # k1 is 1/2, five times the target. The error is clipped to 0.2. Two episodes and horizon 4: factor 1 + 0.2 * 2 / 4.
    assignment(experience([group], Shaping()), np.array([0, 0, -1.5] * 4, np.float32))
    assert assignment.state_dict()["kl_coef"] == pytest.approx(0.11)


def test_running_moments_are_of_clipped_rewards() -> None:
    assignment = CreditAssignment(Credit("reinforce", Normalisation(mean="running", reward_clip=2.0)))
    # Clipped: 2, 0, -2 with mean 0. The mean of the unclipped rewards would be 2.
    assert advantages_of(assignment, step_of(10, 0, -4)) == [2, 0, -2]
    # Clipped: 2, so the mean of all four is 1/2.
    assert advantages_of(assignment, step_of(100)) == [1.5]
