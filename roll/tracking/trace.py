"""Records who did what when, in Chrome's trace-event format, which Perfetto (ui.perfetto.dev) shows.

    driver        loop       | step 1                                  | step 2
                             | rollout      | train    | weight_sync |
                  devices        | onload
    actor_infer rank 0    1    | generate | | generate   |
                          2    | generate     |
    rewards.<domain>      1            | score |

A process of the trace is a part of the run, and a thread is one of its lanes: spans of one lane never overlap, unless
one is within the other.
"""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

LOG = logging.getLogger(__name__)
TRACE_FILE = "trace.json"
BEGIN, END = b'{"displayTimeUnit": "ms", "traceEvents": [\n', b"\n]}\n"
NAMED_LANES = ("loop", "devices")
"""Lanes of the driver, which are the threads 1 and 2."""


class Trace:
    """Writes the spans of a run's first steps. The file is complete JSON after each step. Without a path, do nothing.

    For use from one thread.
    """

    def __init__(self, path: Path | None = None, steps: int = 0, resumed_from: int | None = None) -> None:
        """
        Args:
            steps: number of steps to record from this start on, besides the time before the first.
            resumed_from: step of the checkpoint that the run resumes from. The spans of earlier starts stay in the
                file. None begins a new file, and keeps another as `trace.json.previous`.
        """
        self._path = path if steps else None
        self._left = steps + 1 if steps else 0
        # Unix time at which the clock of the spans was 0, so that the starts of a run follow each other.
        self._zero = time.time() - time.perf_counter()
        self._events: list[tuple[int, int, bytes]] = []
        self._named: set[tuple[str, str | int]] = set()
        self._busy: defaultdict[str, set[int]] = defaultdict(set)
        if self._path is not None and resumed_from is None and self._path.exists():
            os.replace(self._path, self._path.with_name(f"{TRACE_FILE}.previous"))

    @contextmanager
    def span(self, process: str, name: str, **facts: Any) -> Iterator[None]:
        """A context that is recorded in the first free lane of a process. Any number of them may be open."""
        if not self._left:
            yield
            return
        lanes = self._busy[process]
        lane = next(number for number in count(1) if number not in lanes)
        lanes.add(lane)
        begin = time.perf_counter()
        try:
            yield
        finally:
            lanes.discard(lane)
            self.add(process, lane, name, begin, time.perf_counter(), **facts)

    def add(self, process: str, lane: str | int, name: str, begin: float, end: float, **facts: Any) -> None:
        """Record a span that was measured elsewhere, with `time.perf_counter`, in seconds.

        Args:
            lane: a number, or one of `NAMED_LANES`. The caller sees to it that spans of a lane nest.
        """
        if not self._left:
            return
        thread = NAMED_LANES.index(lane) + 1 if isinstance(lane, str) else lane
        place = {"pid": zlib.crc32(process.encode()) >> 1, "tid": thread}
        for key, named in (("process_name", process), ("thread_name", lane)):
            if (seen := (process, key if key == "process_name" else lane)) not in self._named:
                self._named.add(seen)
                self._event(0, 0, {"ph": "M", "name": key, **place, "args": {"name": str(named)}})
        # Both ends are rounded down, so that spans still nest.
        first, last = (int((self._zero + moment) * 1e6) for moment in (begin, end))
        self._event(first, last, {"ph": "X", "name": name, **place, "ts": first, "dur": last - first, "args": facts})

    def _event(self, begin: int, end: int, event: dict[str, Any]) -> None:
        self._events.append((begin, -end, json.dumps(event).encode()))

    def end_step(self) -> None:
        """Write the spans that have ended, and stop once all steps are recorded. A failure stops it with a warning."""
        if self._path is None or not self._left:
            return
        self._left -= 1
        lines = b",\n".join(line for *_, line in sorted(self._events, key=lambda event: event[:2]))
        self._events.clear()
        try:
            self._append(self._path, lines)
        except OSError as error:
            self._left = 0
            LOG.warning("%s: cannot be written, so the trace ends here: %s", self._path, error)

    def _append(self, path: Path, lines: bytes) -> None:
        if not path.exists() or not path.stat().st_size:
            path.write_bytes(BEGIN + lines + END)
            return
        with path.open("r+b") as file:
            file.seek(-len(END), os.SEEK_END)
            file.write(b",\n" + lines + END)
