"""Metrics summed over micro-batches and ranks."""

from __future__ import annotations

import math

import pytest
import torch

from roll.training.actor_train import merge
from roll.training.deepspeed.strategy import MetricSums


def test_sums_over_micro_batches_by_hand() -> None:
    sums = MetricSums()
    sums.add({"policy/loss": torch.tensor([1.0, 2.0])}, 2)
    sums.add({"policy/loss": torch.tensor([4.0]), "policy/kl_ref": torch.tensor([0.5])}, 1)
    result = sums.result({"policy/lr": 0.1})
    assert result.sums == {"policy/loss": 7.0, "policy/kl_ref": 0.5}
    assert result.tokens == 3
    assert result.scalars == {"policy/lr": 0.1}
    assert not result.counts


def test_scalars_of_micro_batches_count_by_their_tokens() -> None:
    sums, other = MetricSums(), MetricSums()
    sums.weigh({"router/aux_loss": torch.tensor(2.0)}, 30)
    sums.weigh({"router/aux_loss": torch.tensor(5.0)}, 0)  # a filler
    other.weigh({"router/aux_loss": torch.tensor(4.0)}, 10)
    assert merge([sums.result({}), other.result({})])["router/aux_loss"] == pytest.approx(2.5)


def test_mismatch_leaves_other_versions_out_whatever_they_hold() -> None:
    sums = MetricSums()
    whole = torch.tensor([False, False, False])
    sums.add_mismatch(torch.tensor([0.5, math.nan, -1.0]), torch.tensor([True, False, True]), whole)
    sums.add_mismatch(torch.tensor([0.25]), torch.tensor([True]), whole[:1])
    result = sums.result({})
    assert result.counts["mismatch/kl"] == 3
    assert result.counts["mismatch/spanning/kl"] == 0
    assert result.counted_sums["mismatch/logprob_abs_diff_mean"] == pytest.approx(1.75)
    assert result.counted_sums["mismatch/kl"] == pytest.approx(sum(map(k3, (0.5, -1.0, 0.25))))


def test_responses_that_span_an_update_are_counted_apart() -> None:
    sums = MetricSums()
    sums.add_mismatch(
        torch.tensor([0.5, 2.0, -1.0]), torch.tensor([True, True, True]), torch.tensor([False, True, False])
    )
    merged = merge([sums.result({})])
    assert merged["mismatch/logprob_abs_diff_mean"] == pytest.approx(0.75)
    assert merged["mismatch/kl"] == pytest.approx((k3(0.5) + k3(-1.0)) / 2)
    assert merged["mismatch/spanning/logprob_abs_diff_mean"] == pytest.approx(2.0)
    assert merged["mismatch/spanning/kl"] == pytest.approx(k3(2.0))


def k3(difference: float) -> float:
    return math.exp(difference) - 1 - difference


def test_an_empty_step_has_no_sums() -> None:
    assert MetricSums().result({}).sums == {}
