"""A trace is complete JSON after each step, its spans nest, and they have the seconds of the metrics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from roll.runs.meter import Meter
from roll.tracking.trace import Trace


def spans_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def assert_spans_nest(path: Path) -> None:
    """Check that the spans of a lane are apart or within each other, in the order of the file."""
    events = json.loads(path.read_text())["traceEvents"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    lanes: dict[tuple[int, int], list[int]] = {}
    for span in sorted(spans_of(path), key=lambda one: (one["ts"], -one["dur"])):
        assert (span["pid"], span["tid"]) in named
        open_ends = lanes.setdefault((span["pid"], span["tid"]), [])
        while open_ends and open_ends[-1] <= span["ts"]:
            open_ends.pop()
        assert not open_ends or span["ts"] + span["dur"] <= open_ends[-1], span
        open_ends.append(span["ts"] + span["dur"])


async def work(trace: Trace, steps: int, done: int = 0) -> list[dict[str, float]]:
    """Return the metrics of some steps, beside requests that overlap each other and the steps."""
    meter = Meter({}, devices=1, resident={}, trace=trace, step=done)
    metrics = [await meter.step(0, 0)]

    async def request(number: int) -> None:
        with trace.span("actor_infer rank 0", "generate", request=number):
            for _ in range(number + 1):
                await asyncio.sleep(0)

    requests = [asyncio.create_task(request(number)) for number in range(12)]
    for _ in range(steps):
        with meter.part("rollout"):
            await asyncio.sleep(0)
            with meter.part("onload"):
                await asyncio.sleep(0.001)
        with meter.part("train"):
            await asyncio.sleep(0.002)
        metrics.append(await meter.step(0, 0))
    await asyncio.gather(*requests)
    return metrics


def test_spans_have_the_seconds_of_metrics(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    metrics = asyncio.run(work(Trace(path, 3), 3))
    assert_spans_nest(path)
    spans = spans_of(path)
    steps = [one for one in spans if one["name"].startswith("step")]
    assert [one["name"] for one in steps] == ["step 1", "step 2", "step 3"]
    for span, line in zip(steps, metrics[1:], strict=True):
        end = span["ts"] + span["dur"]
        own = {one["name"]: one["dur"] for one in spans if one is not span and span["ts"] <= one["ts"] < end}
        assert span["dur"] == pytest.approx(line["time/step"] * 1e6, abs=2)
        assert own["train"] == pytest.approx(line["time/train"] * 1e6, abs=2)
        # The metric leaves out the part within it.
        assert own["rollout"] - own["onload"] == pytest.approx(line["time/rollout"] * 1e6, abs=4)
    assert all(one["ts"] + one["dur"] == other["ts"] for one, other in zip(steps, steps[1:], strict=False))


def test_trace_ends_and_goes_on_after_resume(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    asyncio.run(work(Trace(path, 2), 5))
    assert [one["name"] for one in spans_of(path) if one["name"].startswith("step")] == ["step 1", "step 2"]
    asyncio.run(work(Trace(path, 1, resumed_from=4), 2, done=4))
    assert [one["name"] for one in spans_of(path) if one["name"].startswith("st")] == [
        *("start", "step 1", "step 2"),
        *("start", "step 5"),
    ]
    assert_spans_nest(path)
    asyncio.run(work(Trace(path, 1), 1))
    assert [one["name"] for one in spans_of(path) if one["name"].startswith("st")] == ["start", "step 1"]
    assert len(spans_of(tmp_path / "trace.json.previous")) > 5


def test_without_steps_nothing_is_written(tmp_path: Path) -> None:
    asyncio.run(work(Trace(tmp_path / "trace.json"), 2))
    asyncio.run(work(Trace(), 2))
    assert not list(tmp_path.iterdir())


def test_unwritable_trace_ends_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "none" / "trace.json"
    asyncio.run(work(Trace(path, 3), 3))
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]
