"""Shows signs of life: the stage, progress and resource use of the driver and the roles.

They are shown from the plan to the first step, and in a terminal until the end. A terminal shows a panel with one row
for each role. Elsewhere a line is printed whenever a role enters a stage, and every few seconds for a role whose
progress or resource use has changed since its last line. A role without a change gets no line, because elapsed time
alone is not a sign of life. The driver's log has the same lines.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from roll.system.signs import Activity, Usage, cpu_seconds
from roll.system.tree import resident_bytes, tree

LOG = logging.getLogger(__name__)
TICK = 1.0
"""Time between two checks of the processes, in seconds."""
LINE_EVERY = 2.0
"""Shortest time between the last line and a line about progress within a stage, in seconds."""
LINE_SHARE, LINE_MOST = 0.1, 30.0
"""That time grows with the time since the last new stage: by this share of it, up to this many seconds."""
DRIVER = "driver"
"""Name of the driver among the roles."""


class PlainActivity:
    """Chooses the lines to print. Has no clock and prints nothing itself."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, Activity]] = {}
        self._last = self._entered = float("-inf")

    def lines(self, signs: Sequence[Activity], now: float) -> list[str]:
        """Return the lines to print at the time `now`, in seconds.

        They report every role that has entered a stage since its last line. If there is none and some time has passed,
        LINE_EVERY or in a long stage more, they report the changed role whose last line is the oldest.
        """
        due = [sign for sign in signs if sign.role not in self._told or self._told[sign.role][1].stage != sign.stage]
        if due:
            self._entered = now
        elif now - self._last >= max(LINE_EVERY, min(LINE_SHARE * (now - self._entered), LINE_MOST)):
            moved = [sign for sign in signs if sign.is_busy and self._told[sign.role][1] != sign]
            due = sorted(moved, key=lambda sign: self._told[sign.role][0])[:1]
        for sign in due:
            self._told[sign.role] = (now, sign)
            self._last = now
        return [str(sign) for sign in due]


class ActivityDisplay:
    """Shows signs of life from `__enter__` until `rest`, and again after `wake`."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        """`console` gets a panel if it is a terminal, or else lines."""
        self._console, self._clock = console, clock
        self._signs: dict[str, Activity] = {}
        self._plain = PlainActivity()
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._stage, self._others, self._works = "", list[int](), False
        self._live: Live | None = None
        self._is_awake = False
        self._thread = threading.Thread(target=self._tick, name="signs of life", daemon=True)

    def __enter__(self) -> ActivityDisplay:
        self.wake()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.rest()

    def driver(self, stage: str, is_busy: bool = True) -> None:
        """Set the driver's stage, and whether the driver itself works or waits for its roles."""
        if (stage, is_busy) != (self._stage, self._works):
            self._stage, self._works = stage, is_busy
            self._read_driver()

    def show(self, signs: Sequence[Activity]) -> None:
        """Set the current signs of all roles. Roles that are missing have ended."""
        with self._lock:
            self._signs = {name: sign for name, sign in self._signs.items() if name == DRIVER} | {
                sign.role: sign for sign in signs
            }
            self._refresh()

    @property
    def is_seen(self) -> bool:
        """Whether signs are shown at present: in a terminal always, elsewhere from `wake` until `rest`."""
        return self._is_awake or self._console.is_terminal

    def own(self, pids: Sequence[int]) -> None:
        """Set the processes of the roles. Their resources are not counted as the driver's."""
        self._others = list(pids)

    def rest(self) -> None:
        """Stop showing signs, and remove the panel."""
        with self._lock:
            self._is_awake = False
            if self._live is not None:
                self._live.stop()
                self._live = None

    def wake(self) -> None:
        """Show signs from now on."""
        with self._lock:
            if self._is_awake:
                return
            self._is_awake = True
            if self._console.is_terminal:
                self._live = Live(get_renderable=self.rows, console=self._console, refresh_per_second=2, transient=True)
                self._live.start()

    def rows(self) -> RenderableType:
        """Return one row for each role that is working."""
        with self._lock:
            return Group(*(row(sign) for sign in self._signs.values() if sign.is_busy))

    def _refresh(self) -> None:
        for line in self._plain.lines(list(self._signs.values()), self._clock()) if self._is_awake else ():
            LOG.info("%s", line)
            if self._live is None:
                self._print(line)

    def _print(self, line: str) -> None:
        try:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        except OSError as error:  # the reader of the output is gone
            LOG.info("signs of life cannot be printed any more: %s", error)
            self._is_awake = False

    def _read_driver(self) -> None:
        usage = driver_usage(self._others)
        with self._lock:
            self._signs[DRIVER] = Activity(DRIVER, self._stage, usage, is_busy=self._works)
            self._refresh()

    def _tick(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signal handlers belong to the main thread
        while not self._ended.wait(TICK):
            if self._stage and self.is_seen:
                self._read_driver()


def driver_usage(others: Sequence[int]) -> Usage | None:
    """Return the resource usage of this process and its descendants, including Ray's processes.

    The processes `others` and their descendants are not counted.
    """
    foreign = {pid for other in others for pid in tree(other)}
    own = [pid for pid in tree(os.getpid()) if pid not in foreign]
    cpu = cpu_seconds(own)
    return None if cpu is None else Usage(cpu, resident_bytes(own))


def row(sign: Activity) -> Text:
    """Return a row of the panel. It is cut off at the width of the terminal."""
    text = Text(f"{sign.role}: ", style="bold", no_wrap=True, overflow="ellipsis")
    return text.append(str(sign).removeprefix(f"{sign.role}: "), style="not bold")
