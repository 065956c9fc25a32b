"""Measures a step: seconds by part, tokens per second, memory by role, and the engines' activity."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from roll.ray.device_sharing import DeviceSharing, run_together
from roll.ray.group import WorkerGroup
from roll.runs.roles import Roles
from roll.runs.run_context import RunContext
from roll.types import Metrics


class Stopwatch:
    """Adds up wall-clock seconds by part: `with watch("rollout"): ...`. For use from one thread.

    The seconds of a nested part are not counted in the part around it.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = 0.0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start, outer, self._inner = time.perf_counter(), self._inner, 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[part] += seconds - self._inner
            self._inner = outer + seconds

    def reset(self) -> Metrics:
        """Return the seconds of each part since the last call, as metrics `time/<part>`, and start again at 0."""
        metrics = {f"time/{part}": seconds for part, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics


class Meter:
    """Times the parts of a step, and computes its metrics."""

    def __init__(
        self, groups: Mapping[str, WorkerGroup], devices: int, resident: Mapping[str, int], restarts: int = 0
    ) -> None:
        """
        Args:
            groups: groups whose memory is measured, by role.
            devices: number of GPUs of the run, or of its worker processes on the CPU, for the throughput per device.
            resident: bytes that stayed on a device when the role was last offloaded, by role. The mapping is read at
                every step.
            restarts: number of earlier restarts of the trainer's side in this run; see `Restarts`.
        """
        self._groups, self._devices, self._resident, self._restarts = groups, devices, resident, restarts
        self._watch = Stopwatch()
        self._step_began = time.perf_counter()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose seconds are added to `time/<name>`, without those of a part within it."""
        return self._watch(name)

    async def step(self, tokens: int, samples: int) -> Metrics:
        """Return the metrics of the step that ends now. Throughput is left out if `tokens` is 0.

        Args:
            tokens: number of prompt and response tokens in the step.
            samples: number of responses, episodes or rows in the step.
        """
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        metrics = self._watch.reset() | {"time/step": seconds, "run/restarts": float(self._restarts)}
        if tokens:
            metrics["throughput/tokens_per_second"] = tokens / seconds
            metrics["throughput/tokens_per_second_per_device"] = tokens / seconds / self._devices
            metrics["throughput/samples_per_second"] = samples / seconds
        peaks = await run_together(group.peak_bytes() for group in self._groups.values())
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
