"""The lease of a place in a store, which keeps a second run out: a file that its holder rewrites every few seconds.

A store has no locks that end with a process. A lease whose file stays the same for `GONE` seconds, by the clock of the
one who looks, belongs to a run that has ended; hosts whose clocks differ agree on that. On the holder's own host, the
process is looked for, and there is nothing to wait for.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from roll.errors import CheckpointError
from roll.stores.store import Store, StoreError
from roll.system.process_start import process_start

LOG = logging.getLogger(__name__)
LEASE = ".lease.json"
BEAT = 5.0
"""Seconds between two writes of the holder."""
GONE = 20.0
"""Seconds without a write after which the holder is gone."""
SETTLE = 2.0
"""Seconds in which two runs that take over the same lease overwrite each other's file. The last one has it."""


@dataclass(frozen=True)
class Holder:
    """Contents of the file."""

    run: str
    host: str
    pid: int
    born: float
    """Start of the process, in seconds since the boot."""
    machine: str
    """Boot and PID namespace in which `pid` is meant."""
    beat: int

    @staticmethod
    def of_this_process() -> Holder:
        pid = os.getpid()
        return Holder(uuid.uuid4().hex, socket.gethostname(), pid, process_start(pid), _machine(), 0)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(contents: bytes | None) -> Holder | None:
        """Return the holder; None if there is no file, or another program's."""
        try:
            return Holder(**json.loads(contents or b""))
        except (ValueError, TypeError):
            return None

    @property
    def is_dead(self) -> bool:
        """Whether the process certainly has ended: it was of this machine, and is not there."""
        if self.machine != _machine():
            return False
        try:
            return process_start(self.pid) != self.born
        except ProcessLookupError:
            return True


class Lease:
    """A context that holds the lease of a store, and renews it in a thread."""

    def __init__(self, store: Store) -> None:
        self._store, self._own = store, Holder.of_this_process()
        self._end = threading.Event()
        self._lost: Holder | None = None

    def __enter__(self) -> Lease:
        """Raises CheckpointError: another run holds the lease. StoreError: the store cannot be written."""
        if not self._store.create(LEASE, self._own.encode()):
            self._take_over()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        try:
            if self._lost is None and self._is_own(self._read()):
                self._store.remove([LEASE])
        except StoreError as error:
            LOG.warning("the lease cannot be given back, so that the next run waits for %g s: %s", GONE, error)

    def check(self) -> None:
        """Raises CheckpointError if another run has taken the lease over, as it may after `GONE` seconds."""
        if self._lost is not None:
            raise CheckpointError(self._refusal(self._lost))

    def _take_over(self) -> None:
        """Take the lease of a holder that has ended. Raises CheckpointError if it lives."""
        first = self._read()
        began = time.monotonic()
        while first is not None and not first.is_dead and time.monotonic() - began < GONE:
            time.sleep(1.0)
            now = self._read()
            if now is not None and now != first:
                raise CheckpointError(self._refusal(now))
            first = now
        self._store.write(LEASE, self._own.encode())
        time.sleep(SETTLE)
        now = self._read()
        if now is not None and not self._is_own(now):
            raise CheckpointError(self._refusal(now))

    def _renew(self) -> None:
        while not self._end.wait(BEAT):
            try:
                now = self._read()
                if now is not None and not self._is_own(now):
                    self._lost = now
                    return
                self._own = replace(self._own, beat=self._own.beat + 1)
                self._store.write(LEASE, self._own.encode())
            except StoreError as error:
                LOG.info("the lease cannot be renewed: %s", error)

    def _read(self) -> Holder | None:
        return Holder.decode(self._store.read(LEASE))

    def _is_own(self, holder: Holder | None) -> bool:
        return holder is not None and holder.run == self._own.run

    def _refusal(self, holder: Holder) -> str:
        return (
            f"{self._store.address}: another run writes its checkpoints here (process {holder.pid} on {holder.host}); "
            f"give each run its own output_dir, or wait for that run"
        )


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
