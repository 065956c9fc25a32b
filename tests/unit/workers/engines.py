"""A fake group of engines for tests in virtual time. Its engines die on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from roll.backend import EngineActivity, GenerateStrategy
from roll.errors import WorkerDied
from roll.ray.batching import Ranks
from roll.types import Completion, FinishReason, Ints, NumberedCompletions, Sampling


class Engines(Ranks[GenerateStrategy]):
    """Fake engines. The token ids of a completion are its seed, engine and process; its policy version is the
    engine's.
    """

    role = "actor_infer"

    def __init__(self, engines: int, seconds: Callable[[int], float] = lambda seed: 0.0) -> None:
        """Create engines whose samples take `seconds(seed)`."""
        self.seconds = seconds
        self.processes = [0] * engines
        self.versions: list[int | None] = [None] * engines
        self.asked: list[tuple[int, str, tuple[Any, ...]]] = []
        self.faults: dict[int, list[Exception | None]] = {}
        """The errors that the next replacements raise, in order; None for a replacement that succeeds. Key: engine."""
        self.start_seconds: Callable[[], float] = lambda: 1.0
        self.slow: dict[str, float] = {}
        """Duration of the calls of a method, in seconds. Key: method. The other calls take no time."""
        self.refuses: dict[int, Exception] = {}
        """The error that an engine raises instead of closing an update. Key: engine."""
        self.log: dict[int, str] = {}
        """What the process of an engine printed. Key: engine."""
        self._ends = [asyncio.Event() for _ in range(engines)]

    def __len__(self) -> int:
        return len(self.processes)

    def printed(self, engine: int) -> str:
        return self.log.get(engine, "")

    def host(self, engine: int) -> str:
        return f"10.0.0.{engine}"

    def kill(self, engine: int) -> None:
        self._ends[engine].set()

    def is_alive(self, engine: int) -> bool:
        return not self._ends[engine].is_set()

    async def _alive(self, engine: int, seconds: float) -> None:
        """Wait for this many seconds; raise WorkerDied if the engine dies first."""
        end = self._ends[engine]
        if not end.is_set():
            if not seconds:
                return
            try:
                async with asyncio.timeout(seconds):
                    await end.wait()
            except TimeoutError:
                return
        raise WorkerDied(self.role, engine, f"process {self.processes[engine]} died")

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        return [await self._answer(engine, method, given) for engine, given in arguments.items()]

    async def _answer(self, engine: int, method: str, given: tuple[Any, ...]) -> Any:
        self.asked.append((engine, method, given))
        if engine in self.refuses and method == "abandon_update":
            raise self.refuses[engine]
        await self._alive(engine, self.slow.get(method, 0.0))
        if method == "resume":
            self.versions[engine] = given[0]
        return {"resume": self.versions[engine], "activity": EngineActivity(1.0, 1, 1)}.get(method)

    @property
    def callers(self) -> list[Any]:
        return [SimpleNamespace(stream=partial(self.stream, rank)) for rank in range(len(self))]

    async def stream(
        self,
        engine: int,
        method: Any,
        token_ids: Ints,
        sampling: Sampling,
        seed: int | None,
        shown: object,
        seconds: float,
    ) -> AsyncGenerator[NumberedCompletions, None]:
        self.asked.append((engine, "generate", (sampling.samples, seed)))
        process, version = self.processes[engine], self.versions[engine]
        order = sorted(range(sampling.samples), key=lambda number: self.seconds((seed or 0) + number))
        begin = asyncio.get_running_loop().time()
        for number in order:
            own = (seed or 0) + number
            await self._alive(engine, max(0.0, begin + self.seconds(own) - asyncio.get_running_loop().time()))
            ids = np.array([own, engine, process], np.int32)
            yield [(number, Completion(ids, None, np.full(3, version or 0, np.int32), FinishReason.STOP, str(own)))]

    async def kill_rank(self, engine: int) -> None:
        self.kill(engine)

    async def replace(self, engine: int, seconds: float) -> None:
        self.kill(engine)
        await asyncio.sleep(self.start_seconds())
        fault = self.faults[engine].pop(0) if self.faults.get(engine) else None
        if fault is not None:
            raise fault
        self.processes[engine] += 1
        self.versions[engine] = None
        self._ends[engine] = asyncio.Event()

    async def held_bytes(self) -> int | None:
        return None
