"""The busy seconds of an engine, compared with a count of the busy tenths of a second of a virtual clock."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack

import pytest

from roll.engines.request_gate import RequestGate


class Clock:
    def __init__(self) -> None:
        self.tenths = 100

    def __call__(self) -> float:
        return self.tenths / 10


@pytest.mark.parametrize("seed", range(20))
def test_busy_is_open_with_a_request_in_flight(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    gate, requests, is_open = RequestGate(clock), [], True
    busy = 0
    for _ in range(300):
        event = rng.choice(["begin", "end", "open", "close", "ask", "nothing"])
        if event == "begin":
            requests.append(ExitStack())
            requests[-1].enter_context(gate)
        elif event == "end" and requests:
            requests.pop(rng.randrange(len(requests))).close()
        elif event == "open":
            gate.set()
            is_open = True
        elif event == "close":
            gate.clear()
            is_open = False
        elif event == "ask":
            assert gate.reset_busy_seconds() == pytest.approx(busy / 10)
            busy = 0
        assert gate.in_flight == len(requests) and gate.is_set() == is_open
        for _ in range(rng.randrange(4)):
            clock.tenths += 1
            busy += bool(requests) and is_open
    assert gate.reset_busy_seconds() == pytest.approx(busy / 10)


def test_requests_wait_for_gate_and_failures_leave_it() -> None:
    gate = RequestGate()

    async def request() -> None:
        await gate.wait()
        with gate:
            raise ValueError("refused")

    async def run() -> None:
        gate.clear()
        waiting = asyncio.create_task(request())
        await asyncio.sleep(0)
        assert not waiting.done() and gate.in_flight == 0
        gate.set()
        with pytest.raises(ValueError, match="refused"):
            await waiting
        assert gate.in_flight == 0

    asyncio.run(run())
