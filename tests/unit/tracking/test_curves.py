"""Reduction of long series to curves with few points, compared with brute force."""

from __future__ import annotations

import json
import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.tracking.report.charts import (
    BARS,
    BUCKETS,
    SHORTEST_LINE,
    SMOOTHED_POINTS,
    add_curve,
    blank,
    bucket_means,
    chart_sections,
    extremes,
    half_width,
    smoothed,
    spread_indices,
)

VALUES = st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=400)


@given(VALUES, st.integers(1, 20))
def test_extremes_are_few_and_keep_bucket_ranges(values: list[float], buckets: int) -> None:
    found = extremes(values, buckets)
    assert found == sorted(set(found)) and len(found) <= 2 * buckets + 2
    assert (found[0], found[-1]) == (0, len(values) - 1)
    kept = {values[index] for index in found}
    assert {min(values), max(values)} <= kept
    if len(values) > 2 * buckets + 2:
        edges = [len(values) * bucket // buckets for bucket in range(buckets + 1)]
        for start, end in zip(edges[:-1], edges[1:], strict=True):
            assert {min(values[start:end]), max(values[start:end])} <= kept
    else:
        assert found == list(range(len(values)))


def test_end_points_are_kept_without_being_extremes() -> None:
    values = [0.5, 0.0, 1.0] * 10 + [0.5]
    assert extremes(values, 2) == [0, 1, 2, 16, 17, 30], "in each half, the first minimum and the first maximum"


@given(st.integers(1, 500), st.integers(2, 60))
def test_spread_points_keep_ends_and_small_gaps(count: int, most: int) -> None:
    found = spread_indices(count, most)
    assert found == sorted(set(found)) and len(found) == min(count, most)
    assert (found[0], found[-1]) == (0, count - 1)
    assert all(
        later - earlier <= math.ceil((count - 1) / (len(found) - 1))
        for earlier, later in zip(found[:-1], found[1:], strict=True)
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=120), st.integers(0, 30))
def test_smoothed_point_is_mean_of_neighbours(values: list[float], half: int) -> None:
    expected = [
        fmean(value for place, value in enumerate(values) if abs(place - index) <= half) for index in range(len(values))
    ]  # fmt: skip
    assert smoothed(values, range(len(values)), half) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_spike_does_not_blur_beyond_its_reach() -> None:
    """In a running sum, small values after a large one would be lost to rounding."""
    assert smoothed([1e20] + [0.125] * 100, [50, 100], 10) == [0.125, 0.125]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.integers(1, 40))
def test_bars_keep_the_sum_of_equal_buckets(values: list[float], most: int) -> None:
    steps = list(range(1, len(values) + 1))
    centres, widths, means = bucket_means(steps, values, most)
    assert len(centres) == len(means) == min(len(values), most)
    borders = [centre + width / 2 for centre, width in zip(centres, widths, strict=True)]
    assert [0.5, *borders[:-1]] == [centre - width / 2 for centre, width in zip(centres, widths, strict=True)], (
        "no gap between bars"
    )
    assert borders[-1] == len(values) + 0.5
    edges = [len(values) * bucket // len(means) for bucket in range(len(means) + 1)]
    pairs = list(zip(edges[:-1], edges[1:], strict=True))
    assert means == pytest.approx([fmean(values[start:end]) for start, end in pairs], rel=1e-9, abs=1e-9)
    assert centres == [fmean([steps[start], steps[end - 1]]) for start, end in pairs]


@pytest.mark.parametrize("count", [80, 5_000, 100_000])
def test_figure_size_does_not_grow_with_run(count: int) -> None:
    rng = random.Random(count)
    values = [rng.random() for _ in range(count)]
    values[count // 3] = 50.0
    figure = blank()
    add_curve(figure, "policy/grad_norm", range(1, count + 1), values, "norm", 2)
    raw, curve = (json.loads(figure.to_json() or "")["data"][place] for place in range(2))
    assert raw["hoverinfo"] == "skip" and raw["opacity"] < 1 and raw["line"]["color"] == curve["line"]["color"]
    assert max(raw["y"]) == 50.0 and min(raw["y"]) == pytest.approx(min(values), rel=1e-5), "no extreme is lost"
    assert len(raw["x"]) <= 2 * BUCKETS + 2 and len(curve["x"]) <= SMOOTHED_POINTS
    half = half_width(count)
    middle = curve["x"][len(curve["x"]) // 2]
    mean = fmean(values[max(0, middle - 1 - half) : middle + half])
    assert curve["y"][len(curve["x"]) // 2] == pytest.approx(mean, rel=1e-5)


def test_what_has_no_noise_is_not_smoothed() -> None:
    steps = range(100)
    for name, values, markers in (
        ("policy/lr", [min(1.0, step / 10) for step in steps], False),
        ("memory/a/peak_bytes", [7.0] * 100, False),
        ("val/a/pass@1", [step / 100 for step in steps], True),
    ):
        figure = blank()
        add_curve(figure, name, steps, values, "a", 0, markers)
        [line] = json.loads(figure.to_json() or "")["data"]
        assert line["y"] == values and line["mode"] == ("lines+markers" if markers else "lines")
    figure = blank()
    add_curve(figure, "sft/loss", range(SHORTEST_LINE - 1), [1.0] * (SHORTEST_LINE - 1), "a", 0)
    assert json.loads(figure.to_json() or "")["data"][0]["mode"] == "lines+markers"


def test_the_bars_of_a_long_run_are_means() -> None:
    rows = [{"step": step, "time/step": 3.0, "time/train": 1.0 + step % 2} for step in range(1, 10 * BARS + 1)]
    [chart] = [
        chart for section in chart_sections(rows) for chart in section.charts if chart.title == "Who worked when"
    ]
    train, other = chart.figure.to_plotly_json()["data"]
    assert len(train["x"]) == BARS and train["y"] == [1.5] * BARS and other["y"] == [1.5] * BARS
    assert chart.note.endswith("; means of 10 steps")
