"""Chooses the engine for the next samples, and limits its samples. Only counts: no clock, no tasks.

    samples that wait, in order ──▶ the engine with the most room ──▶ one leaves, and another may come

Samples of a prompt go to one engine together if it has room for all of them, and share its prefill. A turn of an episode goes to the engine
that answered the turn before, if it has room, and shares its prefix. What does not fit waits here, where
any engine can take it, and not at an engine that has enough to do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from roll.strategies.base import EngineActivity

FULL = 0.9
"""Share of the KV cache in use above which a preemption is for lack of room. An update may also preempt."""
SPARE = 0.6
"""Share of the KV cache in use below which the limit is raised."""
LOWERED, RAISED = 0.8, 1.25
"""Factors that lower and raise a limit. It is lowered further than raised, so that it settles below the preempting load."""


@dataclass
class RunningLimit:
    """Limits the concurrent samples of an engine: first to its own limit, then to what its KV cache held without a preemption."""

    most: int
    """Never more than these."""
    adapts: bool
    """Whether the limit follows the engine's KV cache. Otherwise it is constant."""

    def __post_init__(self) -> None:
        self.samples = self.most

    def heed(self, activity: EngineActivity, most_running: int) -> None:
        """Adapt to the engine's activity in a step with at most so many concurrent samples."""
        if not self.adapts or activity.preemptions is None:
            return
        use = activity.kv_cache_use or 0.0
        if activity.preemptions and use >= FULL:
            self.samples = max(1, int(LOWERED * min(self.samples, most_running)))
        elif use < SPARE and most_running >= self.samples:
            self.samples = min(self.most, int(RAISED * self.samples) + 1)


def running_limits(engines: int, most: int | None, engine_takes: int | None) -> list[RunningLimit] | None:
    """Return the limit of each engine.

    Args:
        most: samples that all engines together may run, at least one for each; None adapts to the KV caches.
        engine_takes: samples that an engine takes at most; None if it takes any number.
    """
    if most is not None:
        return [RunningLimit(most // engines + (engine < most % engines), adapts=False) for engine in range(engines)]
    return None if engine_takes is None else [RunningLimit(engine_takes, adapts=True) for _ in range(engines)]


class Running:
    """The samples that each engine runs, and the room that is left."""

    def __init__(self, limits: list[RunningLimit] | None, engines: int) -> None:
        """Without limits an engine takes any number of samples."""
        assert limits is None or len(limits) == engines
        self._limits = limits
        self._serving, self._suspect = list(range(engines)), frozenset[int]()
        self._running = [0] * engines
        self._most = [0] * engines

    def serve(self, engines: Sequence[int], suspect: Collection[int]) -> None:
        """Let only these engines take samples from now on; `suspect` ones only if others have less room."""
        self._serving, self._suspect = list(engines), frozenset(suspect)

    def place(self, samples: int, home: int | None = None) -> tuple[int, int]:
        """Return the engine for samples of one prompt, and how many of them it takes: 0 if no engine may take one.

        Args:
            home: takes them if it may, since it holds what they begin with.
        """
        if not self._serving:
            return 0, 0
        engine = self._roomiest(samples)
        if home is not None and home in self._serving and home not in self._suspect and self._room(home, samples) == samples:
            engine = home
        taken = self._room(engine, samples)
        self._running[engine] += taken
        self._most[engine] = max(self._most[engine], self._running[engine])
        return engine, taken

    def _roomiest(self, samples: int) -> int:
        return max(self._serving, key=lambda one: (self._room(one, samples), one not in self._suspect, -self._running[one]))

    def leave(self, engine: int, samples: int) -> None:
        """Note that so many samples have ended."""
        self._running[engine] -= samples

    def heed(self, activities: Mapping[int, EngineActivity]) -> None:
        """Adapt the limits to the engines' activity since the last call."""
        limits = self._limits or ()
        for engine, limit in enumerate(limits):
            if engine in activities:
                limit.heed(activities[engine], self._most[engine])
        self._most = list(self._running)

    @property
    def limit(self) -> int | None:
        """Return the largest number of concurrent samples of all engines together."""
        return None if self._limits is None else sum(self._limits[engine].samples for engine in self._serving)

    def _room(self, engine: int, samples: int) -> int:
        """Return how many of the samples an engine has room for."""
        if self._limits is None:
            return samples
        return max(0, min(samples, self._limits[engine].samples - self._running[engine]))
