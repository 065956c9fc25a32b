"""Student's and Welch's intervals against published quantiles and worked examples."""

from __future__ import annotations

from math import sqrt

import pytest

from benchmarks.intervals import Sample, difference_with_interval, mean_with_interval, quantile, welch


@pytest.mark.parametrize(
    ("freedom", "confidence", "published"),
    [
        (1, 0.95, 12.7062),
        (2, 0.95, 4.3027),
        (3, 0.95, 3.1824),
        (4, 0.95, 2.7764),
        (10, 0.95, 2.2281),
        (30, 0.95, 2.0423),
    ]
    + [(120, 0.95, 1.9799), (1, 0.5, 1.0), (2, 0.99, 9.9248), (5, 0.9, 2.0150)],
)
def test_quantiles_are_those_of_printed_tables(freedom: float, confidence: float, published: float) -> None:
    assert quantile(freedom, confidence) == pytest.approx(published, abs=5e-5)


def test_a_quantile_between_whole_degrees_lies_between() -> None:
    """With 2 degrees of freedom, P(|T| < t) is t / sqrt(2 + t^2), so the quantile of p is p sqrt(2 / (1 - p^2))."""
    assert quantile(2, 0.9) == pytest.approx(0.9 * sqrt(2 / (1 - 0.81)), rel=1e-9)
    assert quantile(2) > quantile(2.5) > quantile(3)


def test_a_mean_has_students_interval() -> None:
    # Standard deviation 1, so the half width is 4.3027 / sqrt(3) = 2.48.
    assert mean_with_interval(Sample.of([1.0, 2.0, 3.0])) == "2.0 [-0.5, 4.5]"
    assert str(Sample.of([1.0, 2.0, 3.0])) == "2.0 ± 1.0"


def test_welch_by_hand() -> None:
    # Equal sizes and variances: 2 (n - 1) = 4 degrees of freedom. sqrt(2 / 3) 2.7764 = 2.267.
    assert welch(Sample(0.0, 1.0, 3), Sample(0.0, 1.0, 3)) == pytest.approx(2.7764 * sqrt(2 / 3), abs=1e-4)
    # One sample without variance: the degrees of freedom are those of the other.
    assert welch(Sample(0.0, 1.0, 3), Sample(0.0, 0.0, 3)) == pytest.approx(4.3027 / sqrt(3), abs=1e-4)
    # Variances 4 / 4 and 9 / 6 of the means: freedom 2.5^2 / (1 / 3 + 2.25 / 5) = 7.98.
    assert welch(Sample(0.0, 2.0, 4), Sample(0.0, 3.0, 6)) == pytest.approx(
        quantile(6.25 / (1 / 3 + 0.45)) * sqrt(2.5), rel=1e-9
    )
    assert welch(Sample(1.0, 0.0, 3), Sample(0.0, 0.0, 3)) == 0


def test_a_difference_has_welchs_interval() -> None:
    assert difference_with_interval(Sample(65.9, 1.6, 3), Sample(68.9, 0.9, 3)) == "-3.0 [-6.3, +0.3]"
    assert difference_with_interval(Sample(65.9, 1.6, 3), Sample(69.9, 1.5, 3)) == "-4.0 [-7.5, -0.5]"


def test_one_run_has_no_interval() -> None:
    one, three = Sample.of([5.0]), Sample.of([1.0, 2.0, 3.0])
    assert str(one) == "5.0" and mean_with_interval(one) == "5.0, no interval"
    assert (
        difference_with_interval(one, three) == "+3.0, no interval"
        and difference_with_interval(three, one) == "-3.0, no interval"
    )
