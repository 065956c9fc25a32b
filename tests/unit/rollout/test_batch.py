"""Experience and training batches from groups, and metrics of a rollout."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import numpy as np
import pytest

from roll.algorithms.advantages import Normalisation
from roll.algorithms.shaping import Overlong
from roll.errors import RollError
from roll.rollout.batch import Credit, CreditAssignment, Experience, Shaping, experience, rollout_metrics, token_count
from roll.rollout.filters import rewards_differ
from roll.types import Episode, Floats, RewardOutcome, RewardResult, StopReason, TrainBatch
from tests.unit.rollout.build import make_episode, make_group, make_trajectory, sampled

REINFORCE = Credit("reinforce", Normalisation())


def assigned(step: Experience, ref_log_probs: Floats | None, credit: Credit) -> TrainBatch:
    """Return the training batch, with credit assigned as in the first step of a run."""
    return CreditAssignment(credit)(step, ref_log_probs)[0]


def test_responses_lie_end_to_end() -> None:
    groups = [
        make_group(
            7,
            [
                make_episode([5, 6], 1.0, log_probs=[-0.5, -0.25], versions=[3, 4]),
                make_episode([8], 2.0, log_probs=[-2]),
            ],
        ),
        make_group(9, [make_episode([4], 3.0, log_probs=[-3], versions=[1])], [3]),
    ]
    step = experience(groups, Shaping())
    assert step.sequences.token_ids.tolist() == [1, 2, 5, 6, 1, 2, 8, 3, 4]
    assert step.sequences.offsets.tolist() == [0, 4, 7, 9]
    assert step.sequences.response_mask.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 1]
    assert step.rewards.tolist() == [1, 2, 3]
    assert step.groups.tolist() == [0, 0, 1]
    assert step.behaviour_log_probs is not None and step.behaviour_log_probs.tolist() == [
        0,
        0,
        -0.5,
        -0.25,
        0,
        0,
        -2,
        0,
        -3,
    ]
    assert step.policy_versions.tolist() == [0, 0, 3, 4, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "unusable",
    [
        make_episode([5], 9.0, outcome=RewardOutcome.CRASHED),
        make_episode([5], 9.0, outcome=RewardOutcome.TIMED_OUT),
        make_episode([5], 9.0, stop=StopReason.ABORTED),
    ],
    ids=["crashed", "timed out", "aborted"],
)
def test_a_response_without_a_verdict_is_left_out(unusable: Episode) -> None:
    step = experience([make_group(0, [make_episode([5], 1.0), unusable, make_episode([7], 0.0)])], Shaping())
    assert step.rewards.tolist() == [1, 0]
    assert step.sequences.token_ids.tolist() == [1, 2, 5, 1, 2, 7]


def test_an_unparsable_answer_is_a_verdict() -> None:
    step = experience([make_group(0, [make_episode([5], 0.0, outcome=RewardOutcome.UNPARSABLE)])], Shaping())
    assert step.rewards.tolist() == [0]


def test_truncated_responses_leave_loss_but_not_group() -> None:
    groups = [make_group(0, [make_episode([5, 6], 0.0, stop=StopReason.LENGTH), make_episode([7], 2.0)])]
    step = experience(groups, Shaping(max_len_mask=True))
    assert step.rewards.tolist() == [0, 2]
    assert step.sequences.response_mask.astype(int).tolist() == [0, 0, 0, 0, 0, 0, 1]
    # The mean of the group is 1 with the truncated response. Without that response, the mean would be 2.
    batch = assigned(step, None, Credit("reinforce", Normalisation(mean="group")))
    assert batch.advantages.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert experience(groups, Shaping()).sequences.response_mask.sum() == 3


def test_a_step_without_any_verdict_says_why() -> None:
    groups = [
        make_group(0, [make_episode([5], outcome=RewardOutcome.CRASHED, note="ZeroDivisionError: division by zero")]),
        make_group(1, [make_episode([5], outcome=RewardOutcome.TIMED_OUT, note="took longer than 2 s")]),
    ]
    with pytest.raises(RollError, match="ZeroDivisionError: .*; took longer than"):
        experience(groups, Shaping())


def test_a_train_batch_carries_what_was_sampled() -> None:
    step = experience([make_group(0, [make_episode([5, 6], 3.0, log_probs=[-0.5, -1], versions=[2, 2])])], Shaping())
    batch = assigned(step, None, REINFORCE)
    assert batch.sequences is step.sequences
    assert batch.advantages.tolist() == [0, 0, 3, 3]
    assert batch.behaviour_log_probs is not None and batch.behaviour_log_probs.tolist() == [0, 0, -0.5, -1]
    assert batch.policy_versions.tolist() == [0, 0, 2, 2]
    assert batch.ref_log_probs is None


def test_kl_to_reference_is_subtracted_from_reward() -> None:
    step = experience([make_group(0, [make_episode([5, 6], 3.0, log_probs=[-1, -2])])], Shaping())
    ref = np.array([0, 0, -1.5, -1], np.float32)
    # k1 is 1/2 and -1 at the two tokens, with weight 0.1. The return is 3 + 0.1 at the last token, and 0.05 less at the
    # first.
    batch = assigned(step, ref, Credit("reinforce", Normalisation(), kl_coef=0.1, kl_estimator="k1"))
    np.testing.assert_allclose(batch.advantages, [0, 0, 3.05, 3.1], rtol=1e-6)
    assert batch.ref_log_probs is ref
    k3 = assigned(step, ref, Credit("reinforce", Normalisation(), kl_coef=1.0, kl_estimator="k3"))
    last = 3 - (exp(1) - 2)
    np.testing.assert_allclose(k3.advantages, [0, 0, last - (exp(-0.5) - 0.5), last], rtol=1e-6)
    with pytest.raises(AssertionError, match="without reference log-probs"):
        assigned(step, None, Credit("reinforce", Normalisation(), kl_coef=0.1))


def test_excluded_groups_leave_loss_but_not_statistics() -> None:
    groups = [
        make_group(0, [make_episode([5], 1.0), make_episode([6], 1.0)]),
        make_group(1, [make_episode([5], 1.0), make_episode([6], 0.0)]),
        make_group(2, [make_episode([5], 0.0), make_episode([6], 0.0)]),
        make_group(3, [make_episode([5], 0.5), make_episode([6], 0.0)]),
    ]
    step = experience(groups, Shaping(difficulty=(0.25, 1.0)))
    assert step.sequences.response_mask[2::3].tolist() == [False, False, True, True, False, False, False, False]
    assert step.rewards.tolist() == [1, 1, 1, 0, 0, 0, 0.5, 0]
    assert step.difficulties.tolist() == [0, 0, 0.5, 0.5, 1, 1, 0.75, 0.75]
    _, metrics = CreditAssignment(REINFORCE)(step, None)
    assert metrics["response/masked_fraction"] == 0.75


def test_long_wrong_responses_leave_loss_but_not_group() -> None:
    groups = [
        make_group(
            0,
            [
                make_episode([5] * 3, 0.0),
                make_episode([5] * 2, 0.0),
                make_episode([5] * 3, 0.5),
                make_episode([5] * 4, -1),
            ],
        )
    ]
    step = experience(groups, Shaping(longest_wrong=3))
    in_loss = np.logical_or.reduceat(step.sequences.response_mask, step.sequences.offsets[:-1])
    assert in_loss.tolist() == [False, True, True, False]
    assert step.rewards.tolist() == [0, 0, 0.5, -1]
    # The length penalty is applied after the verdict, so it does not make a right response wrong.
    punished = experience(groups, Shaping(longest_wrong=3, overlong=Overlong(limit=4, buffer=4, factor=2.0)))
    np.testing.assert_array_equal(punished.sequences.response_mask, step.sequences.response_mask)


def test_overlong_penalty_precedes_advantages_and_skips_difficulty() -> None:
    # With limit 4 and buffer 2, two tokens are free, three cost half of the factor 0.5, and four cost all of it.
    groups = [make_group(0, [make_episode([5] * n, 1.0) for n in (1, 2, 3, 4)])]
    step = experience(groups, Shaping(overlong=Overlong(limit=4, buffer=2, factor=0.5)))
    assert step.rewards.tolist() == [1, 1, 0.75, 0.5]
    assert step.difficulties.tolist() == [0] * 4
    assert step.lengths.tolist() == [1, 2, 3, 4]
    assert CreditAssignment(REINFORCE)(step, None)[1]["reward/shaped_mean"] == pytest.approx(3.25 / 4)


def test_greedy_baseline_is_not_trained_on() -> None:
    groups = [
        make_group(0, [make_episode([5], 1.0), make_episode([6], 0.0)], baseline=make_episode([9, 9], 0.25)),
        make_group(1, [make_episode([7], 1.0)], baseline=make_episode([9], 1.0)),
    ]
    step = experience(groups, Shaping())
    assert step.baselines is not None
    assert step.baselines.tolist() == [0.25, 0.25, 1]
    assert 9 not in step.sequences.token_ids
    assert assigned(step, None, Credit("remax", Normalisation())).advantages.tolist() == [
        0,
        0,
        0.75,
        0,
        0,
        -0.25,
        0,
        0,
        0,
    ]


def test_a_long_greedy_response_pays_for_its_length() -> None:
    # With limit 4 and buffer 2, three tokens cost half of the factor 0.5, and four cost all of it.
    group = make_group(0, [make_episode([5] * 3, 1.0)], baseline=make_episode([9] * 4, 1.0))
    step = experience([group], Shaping(overlong=Overlong(limit=4, buffer=2, factor=0.5)))
    assert step.baselines is not None and step.baselines.tolist() == [0.5]
    assert assigned(step, None, Credit("remax", Normalisation())).advantages.tolist() == [0, 0, 0.25, 0.25, 0.25]


def test_prompt_without_greedy_verdict_is_dropped() -> None:
    crashed = make_group(0, [make_episode([5], 1.0)], baseline=make_episode([9], outcome=RewardOutcome.CRASHED))
    sound = make_group(1, [make_episode([7], 1.0)], baseline=make_episode([9], 0.0))
    step = experience([crashed, sound], Shaping())
    assert step.groups.tolist() == [1]
    assert step.baselines is not None and step.baselines.tolist() == [0]


def test_rewards_differ_counts_scored_responses_only() -> None:
    assert rewards_differ(make_group(0, [make_episode([5], 1.0), make_episode([5], 0.0)]))
    assert not rewards_differ(make_group(0, [make_episode([5], 1.0), make_episode([5], 1.0)]))
    assert not rewards_differ(
        make_group(0, [make_episode([5], 1.0), make_episode([5], 0.0, outcome=RewardOutcome.CRASHED)])
    )
    assert not rewards_differ(make_group(0, [make_episode([5], 1.0)]))


def test_trainer_log_probs_replace_missing_engine_ones() -> None:
    silent = Episode([make_trajectory(replace(sampled([5, 6]), log_probs=None))], RewardResult(3.0))
    step = experience([make_group(0, [silent])], Shaping())
    assert step.behaviour_log_probs is None
    own, ref = np.array([0, 0, -1, -2], np.float32), np.array([0, 0, -1.5, -1], np.float32)
    batch = CreditAssignment(Credit("reinforce", Normalisation(), kl_coef=0.1, kl_estimator="k1"))(step, ref, own)[0]
    assert batch.behaviour_log_probs is None
    assert batch.proximal_log_probs is own
    np.testing.assert_allclose(batch.advantages, [0, 0, 3.05, 3.1], rtol=1e-6)


def test_metrics_of_reward_parts_by_hand() -> None:
    parts = [{"right": 1.0, "right/steps": 0.5}, {"right": 0.0}, {"right": 5.0}]
    outcomes = [RewardOutcome.SCORED, RewardOutcome.UNPARSABLE, RewardOutcome.UNAVAILABLE]
    results = [RewardResult(3.0, outcome, part) for outcome, part in zip(outcomes, parts, strict=True)]
    group = make_group(0, [replace(make_episode([5]), reward=result) for result in results], domain="sums")
    metrics = rollout_metrics([group], policy_version=0)
    assert metrics["reward/sums/right/mean"] == 0.5
    assert metrics["reward/sums/right/steps/mean"] == 0.5
    assert metrics["reward/unavailable_fraction"] == pytest.approx(1 / 3)
    assert len(experience([group], Shaping()).rewards) == 2


def test_metrics_by_hand() -> None:
    groups = [
        make_group(
            0,
            [make_episode([5, 6], 1.0, versions=[3, 4]), make_episode([7, 7, 7], stop=StopReason.LENGTH)],
            domain="sums",
        ),
        make_group(1, [make_episode([5], 4.0, versions=[2], outcome=RewardOutcome.UNPARSABLE)], domain="words"),
        make_group(2, [make_episode([5, 5], 9.0, versions=[5, 5], outcome=RewardOutcome.CRASHED)], domain="words"),
    ]
    metrics = rollout_metrics(groups, policy_version=5)
    assert metrics["reward/mean"] == pytest.approx(5 / 3)
    assert metrics["reward/std"] == pytest.approx((((2 / 3) ** 2 + (5 / 3) ** 2 + (7 / 3) ** 2) / 3) ** 0.5)
    assert metrics["reward/equal_groups_fraction"] == pytest.approx(2 / 3), "the second has one verdict, the third none"
    assert metrics["reward/sums/mean"] == 0.5
    assert metrics["reward/words/mean"] == 4
    assert metrics["reward/scored_fraction"] == 0.5
    assert metrics["reward/unparsable_fraction"] == 0.25
    assert metrics["reward/crashed_fraction"] == 0.25
    assert metrics["reward/timed_out_fraction"] == 0
    assert metrics["response/length_mean"] == 2
    assert metrics["response/length_max"] == 3
    assert metrics["response/truncated_fraction"] == 0.25
    # Ages of the eight tokens, by response: 2 1 | 5 5 5 | 3 | 0 0.
    assert metrics["staleness/mean"] == pytest.approx(21 / 8)
    assert metrics["staleness/max"] == 5
    assert metrics["staleness/min"] == 0
    assert token_count(groups) == 4 * 2 + 8


def test_a_domain_without_a_verdict_has_no_mean() -> None:
    groups = [
        make_group(0, [make_episode([5], 1.0)], domain="sums"),
        make_group(1, [make_episode([5], 1.0, outcome=RewardOutcome.TIMED_OUT)], domain="words"),
    ]
    metrics = rollout_metrics(groups, policy_version=0)
    assert "reward/words/mean" not in metrics
    assert metrics["reward/sums/mean"] == metrics["reward/mean"] == 1


def test_difficulty_is_measured_on_scores_without_penalties() -> None:
    """One of two responses is right, so ROLL trains on the group; the mean reward is -0.25."""
    right, wrong = make_episode([5], 0.5), make_episode([6], -1.0)
    scored = [
        replace(right, reward=replace(right.reward, score=1.0)),
        replace(wrong, reward=replace(wrong.reward, score=0.0)),
    ]
    shaping = Shaping(difficulty=(0.1, 0.95))
    kept = experience([make_group(0, scored)], shaping)
    assert kept.sequences.response_mask.sum() == 2 and kept.difficulties.tolist() == [0.5, 0.5]
    assert kept.rewards.tolist() == [0.5, -1.0]
    assert experience([make_group(0, [right, wrong])], shaping).sequences.response_mask.sum() == 0


def test_a_step_without_any_verdict_has_no_reward() -> None:
    metrics = rollout_metrics(
        [make_group(0, [make_episode([5], 3.0, outcome=RewardOutcome.CRASHED)])], policy_version=0
    )
    assert "reward/mean" not in metrics and "reward/std" not in metrics
    assert metrics["reward/crashed_fraction"] == 1


def test_a_crashed_response_leaves_the_groups_advantages() -> None:
    crashed = make_episode([9], 0.0, outcome=RewardOutcome.CRASHED)
    scored = [make_episode([5], 1.0), make_episode([6], 3.0)]
    step = experience([make_group(0, [scored[0], crashed, scored[1]]), make_group(1, [crashed, crashed])], Shaping())
    batch = assigned(step, None, Credit("reinforce", Normalisation(mean="group")))
    assert step.rewards.tolist() == [1, 3]
    assert [float(batch.advantages[batch.sequences.response_mask][index]) for index in range(2)] == [-1, 1], (
        "their mean is 2, not 4 / 3"
    )


def test_a_greedy_response_without_a_verdict_says_why() -> None:
    lost = make_episode([9], outcome=RewardOutcome.UNAVAILABLE, note="HTTP 503")
    with pytest.raises(RollError, match="HTTP 503"):
        experience([make_group(0, [make_episode([5], 1.0)], baseline=lost)], Shaping())
