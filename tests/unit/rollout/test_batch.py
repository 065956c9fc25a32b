from __future__ import annotations

from dataclasses import replace
from math import exp

import numpy as np
import pytest

from roll.algorithms.advantages import Normalisation
from roll.errors import RollError
from roll.rollout.batch import Credit, experience, rollout_metrics, token_count, train_batch
from roll.types import FinishReason, RewardOutcome, Rollout
from tests.unit.rollout.build import make_group, make_rollout

REINFORCE = Credit("reinforce", Normalisation())


def test_rollouts_lie_end_to_end() -> None:
    groups = [
        make_group(7, [make_rollout([5, 6], 1.0, log_probs=[-0.5, -0.25], versions=[3, 4]), make_rollout([8], 2.0, log_probs=[-2])]),
        make_group(9, [make_rollout([4], 3.0, log_probs=[-3], versions=[1])], [3]),
    ]
    step = experience(groups, max_len_mask=False)
    assert step.sequences.token_ids.tolist() == [1, 2, 5, 6, 1, 2, 8, 3, 4]
    assert step.sequences.offsets.tolist() == [0, 4, 7, 9]
    assert step.sequences.response_mask.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 1]
    assert step.rewards.tolist() == [1, 2, 3]
    assert step.groups.tolist() == [0, 0, 1]
    assert step.behaviour_log_probs is not None and step.behaviour_log_probs.tolist() == [0, 0, -0.5, -0.25, 0, 0, -2, 0, -3]
    assert step.policy_versions.tolist() == [0, 0, 3, 4, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "unusable",
    [
        make_rollout([5], 9.0, outcome=RewardOutcome.CRASHED),
        make_rollout([5], 9.0, outcome=RewardOutcome.TIMED_OUT),
        make_rollout([5], 9.0, finish=FinishReason.ABORT),
    ],
    ids=["crashed", "timed out", "aborted"],
)
def test_a_response_without_a_verdict_is_left_out(unusable: Rollout) -> None:
    step = experience([make_group(0, [make_rollout([5], 1.0), unusable, make_rollout([7], 0.0)])], max_len_mask=False)
    assert step.rewards.tolist() == [1, 0]
    assert step.sequences.token_ids.tolist() == [1, 2, 5, 1, 2, 7]


def test_an_unparsable_answer_is_a_verdict() -> None:
    step = experience([make_group(0, [make_rollout([5], 0.0, outcome=RewardOutcome.UNPARSABLE)])], max_len_mask=False)
    assert step.rewards.tolist() == [0]


def test_truncated_responses_leave_the_loss_and_not_the_group() -> None:
    groups = [make_group(0, [make_rollout([5, 6], 0.0, finish=FinishReason.LENGTH), make_rollout([7], 2.0)])]
    step = experience(groups, max_len_mask=True)
    assert step.rewards.tolist() == [0, 2]
    assert step.sequences.response_mask.astype(int).tolist() == [0, 0, 0, 0, 0, 0, 1]
    # The mean of the group is 1 with the truncated response and would be 2 without.
    batch = train_batch(step, None, Credit("reinforce", Normalisation(mean="group")))
    assert batch.advantages.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert experience(groups, max_len_mask=False).sequences.response_mask.sum() == 3


def test_a_step_without_any_verdict_says_why() -> None:
    groups = [
        make_group(0, [make_rollout([5], outcome=RewardOutcome.CRASHED, note="ZeroDivisionError: division by zero")]),
        make_group(1, [make_rollout([5], outcome=RewardOutcome.TIMED_OUT, note="took longer than 2 s")]),
    ]
    with pytest.raises(RollError, match="ZeroDivisionError: division by zero; took longer than 2 s"):
        experience(groups, max_len_mask=False)


def test_a_train_batch_carries_what_was_sampled() -> None:
    step = experience([make_group(0, [make_rollout([5, 6], 3.0, log_probs=[-0.5, -1], versions=[2, 2])])], max_len_mask=False)
    batch = train_batch(step, None, REINFORCE)
    assert batch.sequences is step.sequences
    assert batch.advantages.tolist() == [0, 0, 3, 3]
    assert batch.behaviour_log_probs is not None and batch.behaviour_log_probs.tolist() == [0, 0, -0.5, -1]
    assert batch.policy_versions.tolist() == [0, 0, 2, 2]
    assert batch.ref_log_probs is None


def test_the_kl_to_the_reference_is_paid_from_the_reward() -> None:
    step = experience([make_group(0, [make_rollout([5, 6], 3.0, log_probs=[-1, -2])])], max_len_mask=False)
    ref = np.array([0, 0, -1.5, -1], np.float32)
    # k1 at the tokens: 1/2 and -1; times 0.1. From the end: 3 + 0.1, then - 0.05.
    batch = train_batch(step, ref, Credit("reinforce", Normalisation(), kl_coef=0.1, kl_estimator="k1"))
    np.testing.assert_allclose(batch.advantages, [0, 0, 3.05, 3.1], rtol=1e-6)
    assert batch.ref_log_probs is ref
    k3 = train_batch(step, ref, Credit("reinforce", Normalisation(), kl_coef=1.0, kl_estimator="k3"))
    last = 3 - (exp(1) - 2)
    np.testing.assert_allclose(k3.advantages, [0, 0, last - (exp(-0.5) - 0.5), last], rtol=1e-6)
    with pytest.raises(AssertionError, match="without reference log-probs"):
        train_batch(step, None, Credit("reinforce", Normalisation(), kl_coef=0.1))


def test_without_the_engines_log_probs_the_trainers_are_the_policys() -> None:
    rollout = make_rollout([5, 6], 3.0)
    silent = replace(rollout, completion=replace(rollout.completion, log_probs=None))
    step = experience([make_group(0, [silent])], max_len_mask=False)
    assert step.behaviour_log_probs is None
    own, ref = np.array([0, 0, -1, -2], np.float32), np.array([0, 0, -1.5, -1], np.float32)
    batch = train_batch(step, ref, Credit("reinforce", Normalisation(), kl_coef=0.1, kl_estimator="k1"), own)
    assert batch.behaviour_log_probs is None
    assert batch.proximal_log_probs is own
    np.testing.assert_allclose(batch.advantages, [0, 0, 3.05, 3.1], rtol=1e-6)


def test_metrics_by_hand() -> None:
    groups = [
        make_group(0, [make_rollout([5, 6], 1.0, versions=[3, 4]), make_rollout([7, 7, 7], finish=FinishReason.LENGTH)], domain="sums"),
        make_group(1, [make_rollout([5], 4.0, versions=[2], outcome=RewardOutcome.UNPARSABLE)], domain="words"),
        make_group(2, [make_rollout([5, 5], 9.0, versions=[5, 5], outcome=RewardOutcome.CRASHED)], domain="words"),
    ]
    metrics = rollout_metrics(groups, policy_version=5)
    assert metrics["reward/mean"] == pytest.approx(5 / 3)
    assert metrics["reward/std"] == pytest.approx((((2 / 3) ** 2 + (5 / 3) ** 2 + (7 / 3) ** 2) / 3) ** 0.5)
    assert metrics["reward/sums/mean"] == 0.5
    assert metrics["reward/words/mean"] == 4
    assert metrics["reward/scored_fraction"] == 0.5
    assert metrics["reward/unparsable_fraction"] == 0.25
    assert metrics["reward/crashed_fraction"] == 0.25
    assert metrics["reward/timed_out_fraction"] == 0
    assert metrics["response/length_mean"] == 2
    assert metrics["response/length_max"] == 3
    assert metrics["response/truncated_fraction"] == 0.25
    # Ages of the eight tokens: 2 1 | 5 5 5 | 3 | 0 0.
    assert metrics["staleness/mean"] == pytest.approx(21 / 8)
    assert metrics["staleness/max"] == 5
    assert token_count(groups) == 4 * 2 + 8


def test_a_domain_without_a_verdict_has_no_mean() -> None:
    groups = [
        make_group(0, [make_rollout([5], 1.0)], domain="sums"),
        make_group(1, [make_rollout([5], 1.0, outcome=RewardOutcome.TIMED_OUT)], domain="words"),
    ]
    metrics = rollout_metrics(groups, policy_version=0)
    assert "reward/words/mean" not in metrics
    assert metrics["reward/sums/mean"] == metrics["reward/mean"] == 1
