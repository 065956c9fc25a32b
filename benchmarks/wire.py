"""A slow or lossy wire between two network devices, for kernels without netem: `wire.py NAME OTHER DELAY LOSS`.

Makes two TAP devices, prints `ready`, and passes the frames of each on to the other: DELAY seconds later, except for a
random part LOSS of them. The kernel splits and checksums what it sends into a TAP device, so the frames are those of a
real wire. A line `DELAY LOSS` on stdin changes both.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from dataclasses import dataclass

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
LONGEST = 1 << 16
"""Largest frame in bytes."""


@dataclass(frozen=True)
class Wire:
    """How slow and how lossy a wire is."""

    delay: float = 0.0
    """Seconds in each direction."""
    loss: float = 0.0
    """Part of the frames that is lost, 0 to 1."""


def open_tap(name: str) -> int:
    """Make a TAP device, and return its file descriptor."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


class Relay:
    """Passes frames on between two TAP devices."""

    def __init__(self, taps: tuple[int, int], wire: Wire) -> None:
        self._other = {taps[0]: taps[1], taps[1]: taps[0]}
        self._wire = wire
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        """Pass frames on until stdin is closed."""
        while True:
            pause = max(self._waiting[0][0] - time.monotonic(), 0) if self._waiting else None
            ready, _, _ = select.select([*self._other, sys.stdin], [], [], pause)
            for source in ready:
                if isinstance(source, int):
                    self._take(source)
                elif line := sys.stdin.readline():
                    self._wire = Wire(*map(float, line.split()))
                else:
                    return
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(self._waiting)
                try:
                    os.write(target, frame)
                except OSError:
                    continue  # the device is down, or its queue is full: the frame is lost

    def _take(self, source: int) -> None:
        while True:
            try:
                frame = os.read(source, LONGEST)
            except OSError:  # no more frames, or the device is down
                return
            if random.random() >= self._wire.loss:
                self._count += 1
                due = time.monotonic() + self._wire.delay
                heapq.heappush(self._waiting, (due, self._count, self._other[source], frame))


if __name__ == "__main__":
    first, second, delay, loss = sys.argv[1:]
    relay = Relay((open_tap(first), open_tap(second)), Wire(float(delay), float(loss)))
    print("ready", flush=True)
    relay.run()
