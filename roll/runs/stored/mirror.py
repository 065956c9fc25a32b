"""Uploads a run's checkpoints and records in a thread, while the run goes on."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from roll.errors import CheckpointError, RollError
from roll.runs.checkpoint.manifest import read_manifest
from roll.runs.checkpoint.stored import Stored, StoredCheckpoints, stored_name
from roll.runs.stored.records import RECORD, UPLOADS, Records

LOG = logging.getLogger(__name__)
RECORDS_SECONDS = 30.0
"""Seconds between two uploads of the records, or ten times what the last one took."""
BACK_OFF = (2.0, 10.0, 30.0)
"""Seconds before the first, the second and each later attempt after a failure."""
PATIENCE = 120.0
"""Seconds that the end of a run waits for a store that fails. For one that is only slow it waits `deadline`."""
SAY_EVERY = 600.0
"""Seconds between two warnings about the same failure."""


@dataclass(frozen=True)
class Waiting:
    """A checkpoint that is to be uploaded."""

    folder: Path
    """Hard links of its files, which stay if the run removes or replaces the checkpoint."""
    step: int
    best: int | None
    """Step of the best checkpoint, which is kept."""


class Mirror:
    """A context with the thread that uploads.

    One checkpoint is uploaded at a time, and the newest waits. If the store is slower than the run, those between them
    are left out, with a warning. After a failure the thread tries again for as long as the run goes on.
    """

    def __init__(
        self, folder: Path, checkpoints: StoredCheckpoints, records: Records, newest: Stored | None, deadline: float
    ) -> None:
        """
        Args:
            newest: the newest checkpoint of the store.
            deadline: seconds that the end of a run waits for a slow store.
        """
        self._folder, self._checkpoints, self._records = folder, checkpoints, records
        self._changes = threading.Condition()
        self._waiting: list[Waiting] = []
        self._stored, self._deadline = newest, deadline
        self._failure: Exception | None = None
        self._failing_since = self._said = 0.0
        self._asked, self._done = 0, -1
        """Number of requests to upload the records, and of the last one that was fulfilled."""
        self._is_at_end = False
        self.has_given_up = False
        """Whether `settle` has raised RollError."""

    def __enter__(self) -> Mirror:
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changes:
            self._is_at_end = True
            self._changes.notify_all()

    def submit(self, checkpoint: Path, best: int | None = None) -> None:
        """Upload a complete checkpoint soon. Only links its files: it takes no longer for large ones.

        Args:
            best: step of the best checkpoint so far, which is kept in the store.

        Raises:
            CheckpointError: the local folder cannot be written.
        """
        manifest = read_manifest(checkpoint)
        linked = self._folder / UPLOADS / stored_name(manifest)
        shutil.rmtree(linked, ignore_errors=True)
        try:
            shutil.copytree(checkpoint, linked, copy_function=_link)
        except OSError as error:
            remedy = "free space or fix the folder, then start again"
            raise CheckpointError(f"{linked}: cannot be written for the upload: {error}; {remedy}") from error
        with self._changes:
            passed = [one for one in self._waiting[1:] if one.step != best]
            self._waiting = [one for one in self._waiting if one not in passed]
            self._waiting.append(Waiting(linked, manifest.step, best))
            self._changes.notify_all()
        for one in passed:
            shutil.rmtree(one.folder, ignore_errors=True)
            self._say(
                f"the checkpoint of step {one.step} is not uploaded to {self._checkpoints.address}, because the one of "
                f"step {manifest.step} is newer: the store is slower than save_steps"
            )

    @property
    def state(self) -> str:
        """What the store has and what it lacks, in one line."""
        newest = f"step {self._stored.manifest.step}" if self._stored else "none"
        text = f"{self._checkpoints.address}: the newest checkpoint in the store is {newest}"
        with self._changes:
            lacking = [str(one.step) for one in self._waiting]
        if lacking:
            text += f"; not in the store: that of step {' and '.join(lacking)}"
        return f"{text}; {self._failure}" if self._failure else text

    def settle(self) -> None:
        """Wait until the store has everything that the run folder has now.

        Raises:
            RollError: the store has failed for `PATIENCE` seconds, or is too slow. What it lacks is in the run folder
                alone.
        """
        with self._changes:
            self._asked += 1
            self._changes.notify_all()
            began = time.monotonic()
            while not self._is_settled:
                self._changes.wait(0.5)
                now = time.monotonic()
                if self._failure is not None and now - max(began, self._failing_since) > PATIENCE:
                    break
                if not self._thread.is_alive() or now - began > self._deadline:
                    break
            if self._is_settled:
                return
        self.has_given_up, waited = True, time.monotonic() - began
        raise RollError(
            f"{self.state}; the run waited {waited:.0f} s for it (deadlines.upload: {self._deadline:g}); the local "
            f"copy is complete: {self._folder}; start the same command again on this machine, and it uploads the rest"
        )

    @property
    def _is_settled(self) -> bool:
        return self._done >= self._asked and not self._waiting

    def _work(self) -> None:
        due, failures = 0.0, 0
        while True:
            with self._changes:
                self._changes.wait_for(self._has_work, max(0.0, due - time.monotonic()))
                if self._is_at_end:
                    return
                waiting = self._waiting[0] if self._waiting else None
                asked = self._asked
            began = time.monotonic()
            try:
                self._checkpoints.check()
                self._records.push()
                if waiting is not None:
                    self._upload(waiting)
            except Exception as error:  # of the store or of this folder; the run itself goes on
                self._failed(error)
                pause = BACK_OFF[min(failures, len(BACK_OFF) - 1)]
                failures += 1
                due = 0.0
                if self._wait_for_end(pause):
                    return
                continue
            failures = 0
            self._recovered(asked)
            due = time.monotonic() + max(RECORDS_SECONDS, 10 * (time.monotonic() - began))

    def _has_work(self) -> bool:
        return self._is_at_end or bool(self._waiting) or self._done < self._asked

    def _wait_for_end(self, seconds: float) -> bool:
        with self._changes:
            return self._changes.wait_for(lambda: self._is_at_end, seconds)

    def _upload(self, waiting: Waiting) -> None:
        began = time.monotonic()
        stored = self._checkpoints.upload(waiting.folder, waiting.best)
        write_record(self._folder, stored)
        size = sum(entry.bytes for entry in stored.manifest.files.values())
        seconds = time.monotonic() - began
        LOG.info(
            "uploaded the checkpoint of step %d: %s/%s, %.1f MB in %.1f s",
            *(waiting.step, self._checkpoints.address, stored.name, size / 1e6, seconds),
        )
        with self._changes:
            self._stored = stored
            self._waiting.remove(waiting)
            self._changes.notify_all()
        shutil.rmtree(waiting.folder, ignore_errors=True)

    def _failed(self, error: Exception) -> None:
        now = time.monotonic()
        with self._changes:
            is_new = self._failure is None
            self._failing_since = now if is_new else self._failing_since
            self._failure = error
            self._changes.notify_all()
        LOG.info("an upload failed", exc_info=error)
        if is_new or now - self._said > SAY_EVERY:
            self._said = now
            self._say(f"{self.state}; the run goes on with its local copy, and tries again")

    def _recovered(self, asked: int) -> None:
        """Take note of a success that covers the requests up to `asked`."""
        with self._changes:
            was_failing, self._failure, self._done = self._failure is not None, None, asked
            self._changes.notify_all()
        if was_failing:
            self._say(f"{self._checkpoints.address}: the store can be used again")

    def _say(self, text: str) -> None:
        LOG.warning("%s", text)


def write_record(folder: Path, stored: Stored) -> None:
    """Note in the run folder which checkpoint it was the last to upload, and where."""
    partial = folder / f"{RECORD}.new"
    partial.write_text(json.dumps({"newest": stored.text.decode()}), encoding="utf-8")
    os.replace(partial, folder / RECORD)


def read_record(folder: Path) -> bytes | None:
    """Return the manifest of the checkpoint that this folder was the last to upload; None without one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))["newest"].encode()
    return None


def _link(source: str, target: str) -> None:
    """Link a file, or copy it on a file system without hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
