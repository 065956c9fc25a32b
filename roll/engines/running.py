"""Chooses the engine for the next samples, and limits the running samples of each engine. It only counts, without a
clock or tasks.

    waiting samples, in order ──▶ the engine with the most room ──▶ when a sample ends, the next one may start

The samples of a prompt go to one engine if it has room for all of them, so that they share a prefill. A turn of an
episode goes to the engine that answered the previous turn, if that has room, and reuses its prefix. Samples that do not
fit wait in the driver, where any engine can take them, and not in the queue of a busy engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from roll.backend import EngineActivity

FULL = 0.9
"""Smallest KV-cache use, from 0 to 1, at which a preemption counts as a lack of room. At a lower use, a weight update
may be its cause.
"""
SPARE = 0.6
"""KV-cache use, from 0 to 1, below which a limit that was reached is raised."""
LOWERED, RAISED = 0.8, 1.25
"""Factors by which a limit is lowered after a lack of room, and raised. In all other cases it stays the same."""


@dataclass
class RunningLimit:
    """Limits the concurrent samples of an engine: first to the engine's own limit, then to the load that avoids
    preemptions.
    """

    most: int
    """Largest value of the limit."""
    adapts: bool
    """Whether the limit follows the engine's KV cache. Otherwise it is constant."""

    def __post_init__(self) -> None:
        self.samples = self.most

    def adapt(self, activity: EngineActivity, most_running: int) -> None:
        """Adapt the limit to the engine's activity in a step. `most_running` is the largest number of concurrent
        samples in it.
        """
        if not self.adapts or activity.preemptions is None:
            return
        use = activity.kv_cache_use or 0.0
        if activity.preemptions and use >= FULL:
            self.samples = max(1, int(LOWERED * min(self.samples, most_running)))
        elif use < SPARE and most_running >= self.samples:
            self.samples = min(self.most, int(RAISED * self.samples) + 1)


def running_limits(engines: int, most: int | None, engine_takes: int | None) -> list[RunningLimit] | None:
    """Return the limit of each engine, or None if the engines are unlimited.

    Args:
        most: constant limit for all engines together, at least one sample for each; None adapts the limits to the KV
            caches.
        engine_takes: largest number of concurrent samples of an engine; None if unlimited.
    """
    if most is not None:
        return [RunningLimit(most // engines + (engine < most % engines), adapts=False) for engine in range(engines)]
    return None if engine_takes is None else [RunningLimit(engine_takes, adapts=True) for _ in range(engines)]


class Running:
    """Tracks the samples that each engine runs, and its remaining room."""

    def __init__(self, limits: list[RunningLimit] | None, engines: int) -> None:
        """If `limits` is None, an engine takes any number of samples."""
        assert limits is None or len(limits) == engines
        self._limits = limits
        self._serving, self._suspect = list(range(engines)), frozenset[int]()
        self._running = [0] * engines
        self._most = [0] * engines

    def serve(self, engines: Sequence[int], suspect: Collection[int]) -> None:
        """Allow only these engines from now on. A `suspect` engine is chosen only if it has more room than all
        others.
        """
        self._serving, self._suspect = list(engines), frozenset(suspect)

    def place(self, samples: int, home: int | None = None) -> tuple[int, int]:
        """Choose an engine for samples of one prompt. Return it and the number of samples that it takes, 0 if no engine
        has room.

        Args:
            home: engine whose cache has the prefix of the samples. It is preferred if it is not suspect and has room
                for all of them.
        """
        if not self._serving:
            return 0, 0
        engine = self._roomiest(samples)
        if (
            home is not None
            and home in self._serving
            and home not in self._suspect
            and self._room(home, samples) == samples
        ):
            engine = home
        taken = self._room(engine, samples)
        self._running[engine] += taken
        self._most[engine] = max(self._most[engine], self._running[engine])
        return engine, taken

    def _roomiest(self, samples: int) -> int:
        return max(
            self._serving, key=lambda one: (self._room(one, samples), one not in self._suspect, -self._running[one])
        )

    def leave(self, engine: int, samples: int) -> None:
        """Record that `samples` samples of an engine have ended."""
        self._running[engine] -= samples

    def adapt(self, activities: Mapping[int, EngineActivity]) -> None:
        """Adapt the limits to the engines' activity since the last call."""
        limits = self._limits or ()
        for engine, limit in enumerate(limits):
            if engine in activities:
                limit.adapt(activities[engine], self._most[engine])
        self._most = list(self._running)

    @property
    def limit(self) -> int | None:
        """Largest number of concurrent samples of all serving engines together; None without limits."""
        return None if self._limits is None else sum(self._limits[engine].samples for engine in self._serving)

    def _room(self, engine: int, samples: int) -> int:
        """Return how many more samples an engine can take, at most `samples`."""
        if self._limits is None:
            return samples
        return max(0, min(samples, self._limits[engine].samples - self._running[engine]))
