from __future__ import annotations

import math

import pytest
import torch

from roll.strategies.metric_sums import MetricSums


def test_sums_over_micro_batches_by_hand() -> None:
    sums = MetricSums()
    sums.add({"policy/loss": torch.tensor([1.0, 2.0])}, 2)
    sums.add({"policy/loss": torch.tensor([4.0]), "policy/kl_ref": torch.tensor([0.5])}, 1)
    result = sums.result({"policy/lr": 0.1})
    assert result.sums == {"policy/loss": 7.0, "policy/kl_ref": 0.5}
    assert result.tokens == 3
    assert result.scalars == {"policy/lr": 0.1}
    assert result.mismatch_tokens == 0
    assert set(result.mismatch_sums.values()) == {0.0}


def test_mismatch_leaves_other_versions_out_whatever_they_hold() -> None:
    sums = MetricSums()
    sums.add_mismatch(torch.tensor([0.5, math.nan, -1.0]), torch.tensor([True, False, True]), 2)
    sums.add_mismatch(torch.tensor([0.25]), torch.tensor([True]), 1)
    result = sums.result({})
    assert result.mismatch_tokens == 3
    assert result.mismatch_sums["mismatch/logprob_abs_diff_mean"] == pytest.approx(1.75)
    kl = sum(math.exp(x) - 1 - x for x in (0.5, -1.0, 0.25))
    assert result.mismatch_sums["mismatch/kl"] == pytest.approx(kl)


def test_an_empty_step_has_no_sums() -> None:
    assert MetricSums().result({}).sums == {}
