"""Measures a step: seconds by part, tokens per second, memory by role, and the engines' activity."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import mean
from typing import ParamSpec, TypeVar

from roll.backend import EngineActivity
from roll.ray.device_sharing import DeviceSharing, together
from roll.ray.group import WorkerGroup
from roll.runs.roles import Roles
from roll.runs.run_context import RunContext
from roll.tracking.stopwatch import Stopwatch
from roll.types import Metrics

P = ParamSpec("P")
T = TypeVar("T")


class Meter:
    """Times the functions that it wraps, and computes the metrics of each step."""

    def __init__(self, groups: Mapping[str, WorkerGroup], devices: int, resident: Mapping[str, int], restarts: int = 0) -> None:
        """
        Args:
            groups: groups whose memory is measured, by role.
            devices: number of GPUs of the run, or of its worker processes on the CPU, for the throughput per device.
            resident: bytes that stayed on a device when the role was last offloaded, by role. The mapping is read at every step.
            restarts: number of earlier restarts of the trainer's side in this run; see `Restarts`.
        """
        self._groups, self._devices, self._resident, self._restarts = groups, devices, resident, restarts
        self._watch = Stopwatch()
        self._step_began = time.perf_counter()

    def timed(self, part: str, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        """Wrap a coroutine function so that its seconds are added to `time/<part>`."""

        async def wrapped(*arguments: P.args, **keywords: P.kwargs) -> T:
            with self._watch(part):
                return await function(*arguments, **keywords)

        return wrapped

    async def step(self, tokens: int, samples: int) -> Metrics:
        """Return the metrics of the step that ends now. Throughput is left out if `tokens` is 0.

        Args:
            tokens: number of prompt and response tokens in the step.
            samples: number of responses, episodes or rows in the step.
        """
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        metrics = self._watch.take() | {"time/step": seconds, "run/restarts": float(self._restarts)}
        if tokens:
            metrics["throughput/tokens_per_second"] = tokens / seconds
            metrics["throughput/tokens_per_second_per_device"] = tokens / seconds / self._devices
            metrics["throughput/samples_per_second"] = samples / seconds
        peaks = await together(group.peak_bytes() for group in self._groups.values())
        for role, peak in zip(self._groups, peaks, strict=True):
            if peak is not None:
                metrics[f"memory/{role}/peak_bytes"] = float(peak)
        for role, stayed in self._resident.items():
            metrics[f"memory/{role}/resident_bytes"] = float(stayed)
        return metrics


def meter_of(roles: Roles, context: RunContext, sharing: DeviceSharing) -> Meter:
    """Return the meter of a run. Throughput is per device, or per worker process if all roles run on the CPU."""
    devices = len(context.plan.devices) or sum(map(len, roles.groups.values()))
    return Meter(roles.groups, devices, sharing.resident, context.restarts)


def engine_metrics(engines: Sequence[EngineActivity], seconds: float) -> Metrics:
    """Return the metrics of the engines' activity in a step of this duration. Values that no engine reports are left out."""
    metrics = {
        # Engines report slightly after the step's time was measured, so busy_seconds may exceed it.
        "engine/idle_fraction": mean(max(0.0, 1 - engine.busy_seconds / seconds) for engine in engines),
        "engine/generated_tokens": float(sum(engine.generated_tokens for engine in engines)),
        "engine/prefilled_tokens": float(sum(engine.prefilled_tokens for engine in engines)),
    }
    counted: Sequence[tuple[str, list[float | None], Callable[[Sequence[float]], float]]] = (
        ("engine/preemptions", [engine.preemptions for engine in engines], sum),
        ("engine/running", [engine.running for engine in engines], mean),
        ("engine/waiting", [engine.waiting for engine in engines], mean),
        ("engine/kv_cache_use", [engine.kv_cache_use for engine in engines], max),
        ("engine/tokens_in_flight", [engine.tokens_in_flight for engine in engines], sum),
    )
    for name, values, joined in counted:
        if known := [value for value in values if value is not None]:
            metrics[name] = float(joined(known))
    return metrics
