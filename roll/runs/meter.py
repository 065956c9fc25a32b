"""Measures a step: seconds by part, tokens per second, memory by role, and the engines' activity."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, count

from roll.ray.device_sharing import DeviceSharing, run_together
from roll.ray.group import WorkerGroup
from roll.runs.roles import Roles
from roll.runs.run_context import RunContext
from roll.tracking.life import DRIVER
from roll.tracking.trace import Trace
from roll.types import Metrics

OF_DEVICES = ("onload", "pause")
"""Parts of `DevicePhases`, which may begin while another part is measured that ends before them."""


class Stopwatch:
    """Adds up wall-clock seconds by part: `with watch("rollout"): ...`. For use from one thread.

    The seconds of a nested part are not counted in the part around it.
    """

    def __init__(self, heard: Callable[[str, float, float], None] | None = None) -> None:
        """`heard` is called with each part that has ended, its begin and its end, by `time.perf_counter` in seconds."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._inner, self._heard = 0.0, heard

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start, outer, self._inner = time.perf_counter(), self._inner, 0.0
        try:
            yield
        finally:
            end = time.perf_counter()
            seconds = end - start
            self._seconds[part] += seconds - self._inner
            self._inner = outer + seconds
            if self._heard:
                self._heard(part, start, end)

    def reset(self) -> Metrics:
        """Return the seconds of each part since the last call, as metrics `time/<part>`, and start again at 0."""
        metrics = {f"time/{part}": seconds for part, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics


class Meter:
    """Times the parts of a step, and computes its metrics."""

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        devices: int,
        resident: Mapping[str, int],
        restarts: int = 0,
        trace: Trace | None = None,
        step: int = 0,
    ) -> None:
        """
        Args:
            groups: groups whose memory is measured, by role.
            devices: number of GPUs of the run, or of its worker processes on the CPU, for the throughput per device.
            resident: bytes that stayed on a device when the role was last offloaded, by role. The mapping is read at
                every step.
            restarts: number of earlier restarts of the trainer's side in this run; see `Restarts`.
            trace: records the parts and the steps.
            step: number of steps that were completed before.
        """
        self._groups, self._devices, self._resident, self._restarts = groups, devices, resident, restarts
        self._trace = trace or Trace()
        self._names = iter(chain(["start"], (f"step {number}" for number in count(step + 1))))
        self._watch = Stopwatch(self._trace_part)
        self._step_began = time.perf_counter()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose seconds are added to `time/<name>`, without those of a part within it."""
        return self._watch(name)

    def _trace_part(self, part: str, begin: float, end: float) -> None:
        self._trace.add(DRIVER, "devices" if part in OF_DEVICES else "loop", part, begin, end)

    async def step(self, tokens: int, samples: int) -> Metrics:
        """Return the metrics of the step that ends now. Throughput is left out if `tokens` is 0.

        Args:
            tokens: number of prompt and response tokens in the step.
            samples: number of responses, episodes or rows in the step.
        """
        now = time.perf_counter()
        seconds = now - self._step_began
        self._trace.add(DRIVER, "loop", next(self._names), self._step_began, now)
        self._trace.end_step()
        self._step_began = now
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
    done = context.checkpointer.resumed_step or 0
    return Meter(roles.groups, devices, sharing.resident, context.restarts, context.trace, done)
