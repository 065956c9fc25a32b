"""The folder of a run's checkpoints. A folder `step_N` is always a complete checkpoint, even after a crash at any
point.

    write:    .step_N.partial-x  --seal-->  manifest on disk  --rename-->  step_N  -->  older checkpoints are removed
    replace:  step_N --rename--> .step_N.replaced-x, the new checkpoint is renamed to step_N, the old one is removed
    remove:   step_N --rename--> .step_N.removed-x, and only then its files are deleted

`clean` finishes or undoes the work of a writer that died. If the replacement of a checkpoint was never completed, the
old one is restored.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from roll.errors import CheckpointError, ConfigError, Fault
from roll.runs.checkpoint.manifest import MANIFEST, Manifest, check_sizes, seal, sync_folder, verify_checkpoint
from roll.system.own_folder import LockHeld, holding_lock, make_way

LOG = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Name of the folder in a run folder, and of the prefix in a store."""
_CHECKPOINT = re.compile(r"step_\d+")
_LEFTOVER = re.compile(r"\.(?P<name>step_\d+)\.(?P<state>partial|replaced|removed)-[0-9a-f]{32}")
TORCH_WRITER = "inline_container.cc"
"""Part of torch.save's message if a file cannot grow because the disk is full, or a quota or limit is reached. The
message does not state the cause.
"""


class CheckpointStore:
    """Writes checkpoints atomically, finds the newest one and removes old ones."""

    def __init__(self, folder: Path, keep: int) -> None:
        """`keep` is the number of newest checkpoints to keep, at least 1."""
        assert keep > 0, "a store must keep at least one checkpoint"
        self.folder = folder
        self.keep = keep
        self._holds_lock = False
        self.after = 0
        """Largest `sequence` of a checkpoint that another folder has of the same run."""
        self._written: list[Path] = []
        """Checkpoints that this store wrote and did not remove."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep all other processes from writing into this store until the block ends, also between checkpoints.

        Raises:
            CheckpointError: another process holds the store or is writing into it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._sole_writer():
            self._holds_lock = True
            try:
                yield
            finally:
                self._holds_lock = False

    @contextmanager
    def writing(self, step: int, required: Sequence[str] = (), best: int | None = None) -> Iterator[Path]:
        """Yield a temporary folder for the files of a checkpoint. When the block ends without an exception, it becomes
        `step_N`.

        Other processes, such as the ranks, may write into this folder too. If the block raises, the folder is removed
        and the exception propagates; earlier checkpoints are not changed.

        Args:
            required: paths of files that the checkpoint must contain, relative to the folder.
            best: step of a checkpoint that is kept although newer ones fill the store.

        Raises:
            CheckpointError: the folder is empty, lacks a required file or cannot be written to the disk, or another
                process is writing into this store.
        """
        self._make_folder()
        with self._sole_writer():
            with self._partial(step) as (partial, final):
                yield partial
                whole = self._complete()
                self._report_deleted()
                sequence = 1 + max((manifest.sequence for _, manifest in whole), default=0)
                sequence = max(sequence, self.after + 1)
                seal(partial, step, sequence, required)
                check_sizes(partial)
                self._publish(partial, final)
                self._written = [*(path for path in self._written if path != final), final]
            old = [path for path, _ in whole if path != final][self.keep - 1 :]
            for path in [path for path in old if path.name != f"step_{best}"]:
                self._written = [written for written in self._written if written != path]
                self._remove(self._set_aside(path, "removed"))

    @contextmanager
    def receiving(self, step: int) -> Iterator[Path]:
        """Yield a temporary folder for the files of a complete checkpoint, with its manifest. When the block ends
        without an exception and the digests are right, it becomes `step_N`.

        Raises:
            CheckpointError: see `verify_checkpoint`; or the folder cannot be written, or another process is writing
                into this store.
        """
        self._make_folder()
        with self._sole_writer(), self._partial(step) as (partial, final):
            yield partial
            verify_checkpoint(partial)
            self._publish(partial, final)

    def complete(self) -> list[tuple[Path, Manifest]]:
        """Return the checkpoints whose files exist with the right size, newest first."""
        return self._complete()

    def latest(self) -> Path | None:
        """Return the newest checkpoint whose files exist with the right size. For their contents, see `verify`."""
        whole = self._complete()
        return whole[0][0] if whole else None

    def clean(self) -> None:
        """Remove unfinished checkpoints of writers that died, and restore a checkpoint whose replacement was never
        completed.

        Raises:
            CheckpointError: another process is writing into this store.
        """
        if self.folder.is_dir():
            with self._sole_writer():
                self._settle()

    def resolve(self, resume: str) -> Path | None:
        """Return the verified checkpoint to start from, or None for a fresh start.

        Args:
            resume: `auto` for the newest complete checkpoint of this store, if it has any; `never`; or the folder of a
                checkpoint.

        Raises:
            ConfigError: the given path is not a checkpoint.
            CheckpointError: the given checkpoint is not complete; with `auto`, the store has checkpoints, but none is
                complete; or another process is writing into this store.
        """
        self.clean()
        if resume == "never":
            return None
        if resume == "auto":
            return self.newest_verified("set resume_from_checkpoint=never to start over")
        path = Path(resume)
        if not (path / MANIFEST).is_file():
            raise ConfigError(_no_checkpoint(path, self.latest()))
        verify_checkpoint(path)
        return path

    def newest_verified(self, remedy: str) -> Path | None:
        """Return the newest checkpoint that matches its digests; None if the store has no checkpoint.

        Args:
            remedy: text that ends the error message.

        Raises:
            CheckpointError: there are checkpoints, but none of them is complete.
        """
        for path, _ in self._complete():
            try:
                verify_checkpoint(path)
            except CheckpointError as error:
                LOG.warning("skipping a checkpoint: %s", error)
            else:
                return path
        if broken := self._named():
            names = ", ".join(path.name for path in broken)
            raise CheckpointError(f"{self.folder}: none of its checkpoints ({names}) is complete; {remedy}")
        return None

    def _named(self) -> list[Path]:
        """Return the folders that are named like a checkpoint."""
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_folder(self.folder.parent)

    @contextmanager
    def _partial(self, step: int) -> Iterator[tuple[Path, Path]]:
        """Yield a temporary folder, which is removed if the block raises, and the folder `step_N` that it may become.

        Call it as the sole writer.
        """
        self._settle()
        final = self.folder / f"step_{step}"
        partial = self._hidden(final.name, "partial")
        partial.mkdir()
        try:
            with _failures_named(final):
                yield partial, final
        except BaseException:
            self._settle()
            raise

    def _complete(self) -> list[tuple[Path, Manifest]]:
        """Return the complete checkpoints, newest first. The others are reported and left in place."""
        whole = []
        for path in self._named():
            try:
                whole.append((path, check_sizes(path)))
            except CheckpointError as error:
                LOG.warning("skipping a checkpoint: %s", error)
        return sorted(whole, key=lambda found: found[1].sequence, reverse=True)

    def _report_deleted(self) -> None:
        """Warn of checkpoints that were written here and deleted by somebody else."""
        if deleted := [path for path in self._written if not path.exists()]:
            LOG.warning(
                "checkpoints were deleted while the run went on: %s; it cannot continue from them",
                ", ".join(map(str, deleted)),
            )
        self._written = [path for path in self._written if path not in deleted]

    def _publish(self, partial: Path, final: Path) -> None:
        """Rename a sealed folder to its final name, then remove the previous checkpoint of that name, if any."""
        if not (final / MANIFEST).is_file():
            make_way(final, MANIFEST)
        replaced = self._set_aside(final, "replaced") if final.exists() else None
        os.rename(partial, final)
        sync_folder(self.folder)
        if replaced is not None:
            self._remove(replaced)

    def _settle(self) -> None:
        """Finish or undo interrupted writes, replacements and removals. Only the holder of the lock may call this."""
        for leftover in sorted(self.folder.iterdir()):
            match = _LEFTOVER.fullmatch(leftover.name)
            if match is None:
                continue
            final = self.folder / match["name"]
            if match["state"] == "replaced" and not final.exists():
                os.rename(leftover, final)
                sync_folder(self.folder)
                LOG.warning("restored a checkpoint whose replacement was never completed: %s", final)
            elif match["state"] == "removed":
                self._remove(leftover)
            else:
                aside = self._hidden(match["name"], "removed")
                os.rename(leftover, aside)
                self._remove(aside)

    def _set_aside(self, path: Path, state: Literal["replaced", "removed"]) -> Path:
        aside = self._hidden(path.name, state)
        os.rename(path, aside)
        sync_folder(self.folder)
        return aside

    def _hidden(self, name: str, state: Literal["partial", "replaced", "removed"]) -> Path:
        return self.folder / f".{name}.{state}-{uuid.uuid4().hex}"

    def _remove(self, aside: Path) -> None:
        shutil.rmtree(aside, ignore_errors=True)
        if aside.exists():
            LOG.warning("%s could not be removed; the next start will try again, or remove it by hand", aside)

    @contextmanager
    def _sole_writer(self) -> Iterator[None]:
        """Hold the store's lock. The kernel releases it when the process ends."""
        if self._holds_lock:
            yield
            return
        with ExitStack() as held:
            try:
                held.enter_context(holding_lock(self.folder / ".lock"))
            except LockHeld:
                raise CheckpointError(
                    f"{self.folder}: another run writes its checkpoints here; give each run its own output_dir, or "
                    f"wait for that run"
                ) from None
            yield


@contextmanager
def _failures_named(final: Path) -> Iterator[None]:
    """Convert a failed write's exception to a CheckpointError, with the disk space before files are removed."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and TORCH_WRITER not in str(error):
            raise
        free = f"{shutil.disk_usage(final.parent).free >> 20} MiB of the disk are free"
        remedy = "free space or fix the folder, then start again"
        raise CheckpointError(f"{final}: cannot be written ({free}): {error}; {remedy}") from error


def _no_checkpoint(path: Path, newest: Path | None) -> Fault:
    problem = f"'{path}' is not a checkpoint: " + (
        f"it has no {MANIFEST}" if path.is_dir() else "there is no such folder"
    )
    remedy = (
        f"set it to the folder of a checkpoint{f', such as {newest}' if newest else ' (step_N)'}, or to `auto` "
        f"or `never`"
    )
    return Fault("resume_from_checkpoint", problem, remedy, "not_found")
