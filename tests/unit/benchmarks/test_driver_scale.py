"""What a step costs the driver does not grow faster than its samples and actors: counts of messages, bytes and calls in
the scene of the benchmark, whose seconds are not tested.
"""

from __future__ import annotations

import asyncio
import cProfile
import pstats
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.driver_scale import GPUS_PER_NODE, Scene, Size, measure, no_ray, rows

SMALL, LARGE = 8, 64
SAMPLES_PER_GPU = 8
MOST_GROWTH = 1.1
"""Largest ratio of a count per sample, or per actor, at `LARGE` and at `SMALL` GPUs. Squares would give 8."""


@cache
def step(gpus: int, layout: str = "shared") -> dict[str, Any]:
    return measure(Size(gpus, SAMPLES_PER_GPU * gpus, 8, layout, buckets=3), profile=True)


def growth(small: float, large: float) -> float:
    """Return the ratio of two counts, each divided by the size of its run."""
    return large / LARGE / (small / SMALL)


def test_calls_per_sample_do_not_grow() -> None:
    assert growth(step(SMALL)["calls"], step(LARGE)["calls"]) < MOST_GROWTH


def test_messages_per_sample_are_constant() -> None:
    assert growth(sum(step(SMALL)["messages"].values()), sum(step(LARGE)["messages"].values())) < MOST_GROWTH


@pytest.mark.parametrize("layout", ["shared", "apart"])
def test_bytes_per_actor_do_not_grow(layout: str) -> None:
    """If each engine were sent the handles of all ranks, they would grow with the square of the run."""
    assert growth(step(SMALL, layout)["bytes"], step(LARGE, layout)["bytes"]) < MOST_GROWTH


def test_watch_sends_each_node_one_message(tmp_path: Path) -> None:
    calls = []
    for gpus in (SMALL, LARGE):
        with no_ray():
            scene = Scene(Size(gpus, gpus, 8, "shared", buckets=1), tmp_path)
            with cProfile.Profile() as profiler:
                found = asyncio.run(scene.watch(times=1))
        assert found["check, messages"] == gpus // GPUS_PER_NODE
        assert found["signs of life, messages"] == 4 * gpus // GPUS_PER_NODE, "one for each of four roles"
        calls.append(cast(Any, pstats.Stats(profiler)).total_calls)
    assert growth(*calls) < MOST_GROWTH


def test_every_figure_has_a_row() -> None:
    shown = dict(rows([{"samples": SAMPLES_PER_GPU * SMALL, **step(SMALL)}]))
    assert shown["samples"] == ["64"]
    parts = {"rollout", "reference", "train", "weight_sync"}
    assert {f"CPU seconds: {part}" for part in parts} <= shown.keys()
