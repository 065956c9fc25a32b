"""Metrics of a step: times, throughput and the activity of the engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from roll.backend import EngineActivity
from roll.engines.actor_infer import ActorInfer
from roll.rollout.scheduler import RolloutScheduler
from roll.runs.meter import Meter
from roll.runs.rlvr.loop import StepMeter, engine_metrics
from roll.types import Metrics
from tests.unit.rollout.build import make_episode, make_group

ENGINES = (EngineActivity(7.5, 100, 40, 2, 3.0, 1.0, 0.25, 60), EngineActivity(2.5, 50, 10, 1, 5.0, 0.0, 0.75, 0))


def test_metrics_of_engines_by_hand() -> None:
    assert engine_metrics(ENGINES, 10.0) == {
        "engine/idle_fraction": 0.5,
        "engine/generated_tokens": 150,
        "engine/prefilled_tokens": 50,
        "engine/preemptions": 3,
        "engine/running": 4,
        "engine/waiting": 0.5,
        "engine/kv_cache_use": 0.75,
        "engine/tokens_in_flight": 60,
    }


def test_metrics_omit_counts_that_engine_lacks() -> None:
    silent = EngineActivity(3.0, 7, 5)
    assert engine_metrics([silent], 4.0) == {
        "engine/idle_fraction": 0.25,
        "engine/generated_tokens": 7,
        "engine/prefilled_tokens": 5,
    }
    slept = replace(ENGINES[0], running=None, waiting=None)
    assert engine_metrics([slept, ENGINES[1]], 10.0)["engine/running"] == 5, (
        "an engine without counts is left out of the mean"
    )


def test_idle_fraction_is_never_negative() -> None:
    assert engine_metrics([EngineActivity(4.002, 7, 5)], 4.0)["engine/idle_fraction"] == 0


class FacadeOfEngines:
    """Stands in for `ActorInfer`."""

    async def activity(self) -> list[EngineActivity]:
        return list(ENGINES)

    def metrics(self) -> Metrics:
        return {"engine/queued_samples": 2.0}


def test_step_metrics_include_those_of_engines() -> None:
    class Sampler:
        def metrics(self) -> Metrics:
            return {"sampling/dropped_groups": 1.0}

    async def scenario() -> tuple[Metrics, Metrics]:
        meter = Meter({}, devices=1, resident={})
        measure = StepMeter(
            meter, cast(RolloutScheduler, Sampler()), cast(ActorInfer, FacadeOfEngines()), {}, None, rows=8
        )
        groups = [make_group(number, [make_episode([3], 0.0)]) for number in (9, 11, 10)]
        return await measure.step([]), await measure.step(groups)

    metrics, of_groups = asyncio.run(scenario())
    assert of_groups["epoch"] == 12 / 8, "prompts are numbered from 0"
    assert metrics.keys() == {
        "time/step",
        "run/restarts",
        "sampling/dropped_groups",
        "engine/queued_samples",
        *engine_metrics(ENGINES, 1.0),
    }


def test_the_meter_times_parts_and_counts_tokens() -> None:
    async def scenario() -> tuple[Metrics, Metrics]:
        meter = Meter({}, devices=4, resident={"reference": 7})
        with meter.part("nap"):
            await asyncio.sleep(0.05)
        return await meter.step(1000, 8), await meter.step(0, 0)

    first, second = asyncio.run(scenario())
    assert 0.05 <= first["time/nap"] <= first["time/step"]
    assert first["throughput/tokens_per_second"] == pytest.approx(1000 / first["time/step"])
    assert first["throughput/tokens_per_second_per_device"] == pytest.approx(first["throughput/tokens_per_second"] / 4)
    assert first["throughput/samples_per_second"] == pytest.approx(8 / first["time/step"])
    assert "time/nap" not in second
    assert not [name for name in second if name.startswith("throughput/")], "a step without tokens has no throughput"
    assert first["memory/reference/resident_bytes"] == second["memory/reference/resident_bytes"] == 7
